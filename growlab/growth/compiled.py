"""Hooks of networks that are compiled in place."""

from typing import Any

import torch
from torch import nn

from growlab.growth.state import OutputScale


class EagerOutputScale(OutputScale):
    """`OutputScale` for networks compiled with `Module.compile`, where the compiler does not inline hooks."""

    @torch.compiler.disable
    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return the output times the factor, computed outside of compiled code."""
        return super().__call__(module, inputs, output)
