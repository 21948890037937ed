"""Caches that a forward fills and whose sizes depend on widths: emptied when a growth event changes those."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from growlab.growth.outputs import quietly
from growlab.widths.inputs import call_with
from growlab.widths.unchanged import Kept, Snapshot

_Shapes = list[list[torch.Size]]
# Places, and shapes of the tensors there; None: they depend on widths.
_known: "WeakKeyDictionary[nn.Module, tuple[list[Kept], _Shapes | None]]" = WeakKeyDictionary()


def find(network: nn.Module, probe: tuple[Any, ...]) -> list[Any]:
    """Run a network in eval and in train mode and remember which caches that fills, to `forget` them at an event.

    A cache is a tensor, where nothing was before. With it go other attributes of its module that the first run has
    changed and a second one does not change again, such as how far a table is filled.

    Args:
        network: left as it is.
        probe: positional inputs.

    Returns:
        What it returns in each of the modes.
    """
    with quietly(network):
        before = Snapshot(network, "nothing")
        outputs = _run(network, probe)
        if kept := before.kept():
            values = [each.contents() for each in kept]
            _run(network, probe)
            for each, once in zip(kept, values, strict=True):
                each.leave_out_what_changes_from(once)
        _known[network] = kept, [each.shapes() for each in kept]
    return outputs


def forget(network: nn.Module, probe: tuple[Any, ...], failures: tuple[type[Exception], ...]) -> None:
    """Empty the caches that `find` has found, if a forward fills any of them with tensors of other shapes now.

    Args:
        network: at its new widths.
        probe: positional inputs that `find` had.
        failures: that a forward ends in may have to do with the widths.
    """
    kept, shapes = _known.get(network, ([], []))
    restore = [each.forget() for each in kept]
    if not kept or shapes is None:
        return
    try:
        with quietly(network):
            _run(network, probe)
            now = [each.shapes() for each in kept]
    except failures:
        # What is checked next says so.
        return
    if now == shapes:
        for undo in restore:
            undo()
    else:
        _known[network] = kept, None


def _run(network: nn.Module, probe: tuple[Any, ...]) -> list[Any]:
    return [call_with(network.train(training), probe) for training in (False, True)]
