"""Detect differences between train and eval mode, such as auxiliary heads and terms of the loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from growlab.widths.apart import called_apart
from growlab.widths.inputs import call_with
from growlab.widths.meta import Shapes
from growlab.widths.places import plain_tensors
from growlab.widths.trials import lightened, tensors_in


@dataclass(frozen=True)
class Modes:
    """Differences between a network's forward in train mode and in eval mode.

    Attributes:
        apart: True if the modes read different parameters or return different numbers of tensors.
        several: True if the output in either mode is not a single tensor.
        own_backward: module path -> code with a custom backward pass that the module's operations run in.
        recomputed: parameter name -> code with a custom backward pass that reads the parameter.
        updated: names of buffers, and of plain tensors of modules, that the forward writes to, such as running
            statistics.
    """

    apart: bool
    several: bool
    own_backward: Mapping[str, str]
    recomputed: Mapping[str, str]
    updated: frozenset[str]


def modes_of(model: nn.Module, inputs: tuple[Any, ...]) -> Modes:
    """Compare a network's train and eval modes, on device meta if it runs there.

    Args:
        model: restored at the end.
        inputs: positional inputs of the forward.

    Raises:
        UnsupportedOperation: the network does not run in both modes.
    """
    seen, several, own_backward, recomputed = [], False, dict[Any, str](), dict[int, str]()
    updated = set[str]()
    with lightened(model, inputs) as (light, kept):
        for training in (False, True):
            model.train(training)
            before = {name: (tensor, tensor._version) for name, tensor in _unlearned(model).items()}
            with torch.no_grad(), Shapes(), _Readers() as readers:
                output = call_with(model, light)
            after = _unlearned(model)
            updated |= {n for n, (old, at) in before.items() if after.get(n) is not old or old._version != at}
            kept.restore()
            several |= not isinstance(output, Tensor)
            seen.append((len(tensors_in(output)), readers.functions))
            own_backward |= readers.own_backward
            recomputed |= readers.recomputed
        return Modes(
            seen[0] != seen[1],
            several,
            {path: own_backward[module] for path, module in model.named_modules() if module in own_backward},
            {name: recomputed[id(p)] for name, p in model.named_parameters() if id(p) in recomputed},
            frozenset(updated),
        )


def _unlearned(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_buffers()), **plain_tensors(model)}


class _Readers(TorchFunctionMode):
    """Record functions that read parameters, and code with a custom backward pass that they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []
        self.own_backward: dict[Any, str] = {}
        self.recomputed: dict[int, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        if read := [id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)]:
            self.functions.append((func, *read))
        module, apart = called_apart()
        if apart:
            self.own_backward[module] = apart
            self.recomputed |= dict.fromkeys(read, apart)
        return func(*args, **(kwargs or {}))
