"""What a network does in train mode and not in eval mode, such as auxiliary heads and terms of the loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from growlab.widths.inputs import call_with
from growlab.widths.meta import Shapes
from growlab.widths.trials import light_copy, tensors_in


@dataclass(frozen=True)
class Modes:
    """How a network's forward in train mode differs from that in eval mode.

    Attributes:
        apart: it reads parameters that the other does not, or returns more or fewer tensors.
        several: in one of them it returns something else than a tensor.
    """

    apart: bool
    several: bool


def modes_of(model: nn.Module, inputs: tuple[Any, ...]) -> Modes:
    """Compare both on a copy, without memory (device meta) where it runs there.

    Args:
        model: left as it is.
        inputs: positional inputs of the forward.

    Raises:
        UnsupportedOperation: it does not run in both modes.
    """
    light, light_inputs, kept = light_copy(model, inputs)
    seen, several = [], False
    for training in (False, True):
        light.train(training)
        with torch.no_grad(), Shapes(), _Readers() as readers:
            output = call_with(light, light_inputs)
        kept.restore()
        several |= not isinstance(output, Tensor)
        seen.append((len(tensors_in(output)), readers.functions))
    return Modes(seen[0] != seen[1], several)


class _Readers(TorchFunctionMode):
    """Notes the functions that read parameters, and which."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        if read := [id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)]:
            self.functions.append((func, *read))
        return func(*args, **(kwargs or {}))
