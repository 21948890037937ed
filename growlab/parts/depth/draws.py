"""Random draws that do not depend on how many came before."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Alike(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def alike_draws() -> Iterator[None]:
    """Let every random operation draw the same numbers for the same shape.

    Else a block that has come in moves the draws of those behind it, such as which layers of a network with stochastic
    depth are dropped in train mode, and outputs before and after could not be compared. Generators are put back.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), _Alike():
        yield
