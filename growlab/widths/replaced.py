"""Detect optimizers that still step parameters which growing has replaced: the network would not train.

While replaced parameters are alive, each optimizer is checked once, at its first step. When every new parameter has
been seen in an optimizer, or no longer exists, the hook on steps is removed.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from growlab.base.errors import UserError

_Named = dict[int, tuple["weakref.ref[Tensor]", str]]

# Parameters that are no longer in their network; those that replace them, until an optimizer steps them.
_replaced: _Named = {}
_awaited: _Named = {}
_seen: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_hook: Any = None


def note_replaced(tensors: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Watch for optimizers that step the old tensors of replaced parameters.

    Args:
        tensors: name, old and new tensor. Buffers and frozen parameters are left out.
    """
    trained = [entry for entry in tensors if isinstance(entry[1], nn.Parameter) and entry[1].requires_grad]
    for name, old, new in trained:
        # A parameter that was put back and is replaced again, or whose place another one has taken at once.
        _awaited.pop(id(old), None)
        _remember(_replaced, name, old)
        _remember(_awaited, name, new)
    if trained:
        _seen.clear()
        _listen()


def note_restored(tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Stop watching pairs (old and new tensor) whose old tensor is in the network again."""
    for old, new in tensors:
        _replaced.pop(id(old), None)
        _awaited.pop(id(new), None)
    if not _awaited:
        _stop_listening()


def _check(optimizer: Optimizer, arguments: Any, named: Any) -> None:
    if optimizer in _seen:
        return
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    _refuse(
        optimizer,
        stepped,
        "steps",
        "the network does not train: call Grower.follow(optimizer) once; without a Grower make the optimizer after "
        "make_seed() and call growlab.optim.follow(optimizer, event.replaced, graph, event.widths_before, "
        "event.widths_after, carry=event.carry) after each growth event",
    )
    regions = getattr(optimizer, "_regions", {})
    _refuse(
        optimizer,
        regions,
        "has regions of",
        "their rates are lost: call optimizer.set_regions with weight_regions(graph, state.births) after follow()",
    )
    _seen.add(optimizer)
    for param in stepped:
        _awaited.pop(id(param), None)
    if not _awaited:
        _stop_listening()


def _refuse(optimizer: Optimizer, params: Iterable[Tensor], does: str, so: str) -> None:
    names = list(_names(params))
    if names:
        what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other parameters"
        raise UserError(f"{type(optimizer).__name__} {does} {what} that growing has replaced, so {so}.")


def _names(params: Iterable[Tensor]) -> Iterator[str]:
    for param in params:
        known, name = _replaced.get(id(param), (None, ""))
        if known is not None and known() is param:
            yield name


def _remember(where: _Named, name: str, tensor: Tensor) -> None:
    key = id(tensor)

    def forget(reference: "weakref.ref[Tensor]") -> None:
        # Another tensor may have been given the same id.
        if where.get(key, (None,))[0] is reference:
            del where[key]

    where[key] = weakref.ref(tensor, forget), name


def _listen() -> None:
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_check)


def _stop_listening() -> None:
    global _hook
    if _hook is not None:
        _hook.remove()
        _hook = None
