"""State dicts of plain networks that compute what a growing one computes."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from growlab.growth.hooks import METADATA
from growlab.growth.multipliers import is_multipliers
from growlab.growth.rescale import folded
from growlab.widths import WidthGraph


def plain_tensors(
    network: nn.Module, graph: WidthGraph, output_factor: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State dict as `Grower.finish` would leave it, and the original value of every entry that differs.

    Args:
        network: that grows, or a copy of it; left as it is.
        graph: its width graph.
        output_factor: of its growth state.
    """
    new = folded(network, graph, output_factor)
    names = {id(t): name for name, t in (*network.named_parameters(), *network.named_buffers())}
    # The same names stand for shared tensors, which have several keys.
    keys = {key: names.get(id(t)) for key, t in network.state_dict(keep_vars=True).items()}
    tensors, kept = network.state_dict(), dict[str, Tensor]()
    for key in list(tensors):
        if is_multipliers(key):
            del tensors[key]
        elif (name := keys[key]) in new:
            kept[key], tensors[key] = tensors[key], new[name]
    make_plain(vars(tensors)["_metadata"].get("", {}))
    return tensors, kept


def make_plain(metadata: dict[str, Any]) -> None:
    """Let the metadata of a network in a state_dict say that nothing is left to multiply."""
    if METADATA in metadata:
        metadata[METADATA] = {**metadata[METADATA], "output_factor": 1.0, "multipliers": {}}


def put_back(network: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Restore the original values in a growing network, or a module around it, that has loaded plain ones."""
    own = dict(chain(network.named_parameters(remove_duplicate=False), network.named_buffers()))
    with torch.no_grad():
        for key, tensor in kept.items():
            own[key].copy_(tensor)
