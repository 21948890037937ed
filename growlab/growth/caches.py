"""Find tensors that a network's forward caches, and empty them at a growth event if their sizes depend on widths."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from growlab.growth.outputs import quietly
from growlab.widths.inputs import call_with
from growlab.widths.unchanged import Kept, Snapshot

_Shapes = list[list[torch.Size]]
# Cached attributes, and the shapes of the tensors in them; None if the shapes depend on widths.
_known: "WeakKeyDictionary[nn.Module, tuple[list[Kept], _Shapes | None]]" = WeakKeyDictionary()


def find(network: nn.Module, probe: tuple[Any, ...]) -> list[Any]:
    """Run a network in eval and train mode and record which caches this fills, for `forget` to empty.

    A cache is an attribute that was empty before the run and is a tensor after it. Other attributes of its module that
    the first run changes and a second one does not, such as the filled length of a table, belong to it.

    Args:
        network: the network; left unchanged.
        probe: positional inputs.

    Returns:
        The network's outputs, in eval mode and in train mode.
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
    """Empty the caches that `find` recorded if a forward pass now fills any of them with tensors of other shapes.

    Args:
        network: the network at its new widths.
        probe: the positional inputs given to `find`.
        failures: exceptions of a forward pass that the new widths may cause; the caches then stay empty.
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
        # The next check reports it.
        return
    if now == shapes:
        for undo in restore:
            undo()
    else:
        _known[network] = kept, None


def _run(network: nn.Module, probe: tuple[Any, ...]) -> list[Any]:
    return [call_with(network.train(training), probe) for training in (False, True)]
