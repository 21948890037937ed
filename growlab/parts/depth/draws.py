"""Random draws that do not depend on previous draws."""

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
    """Make every random operation draw the same numbers for the same shape.

    Otherwise an inserted block would shift the draws of the blocks behind it, such as those of stochastic depth in
    train mode, and outputs before and after could not be compared. Generators are restored.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), _Alike():
        yield
