"""The weights of a plain network that computes what a growing one computes at this moment."""

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower.part import Part
from growlab.growth.attached import METADATA
from growlab.growth.multipliers import is_multipliers
from growlab.growth.rescale import folded

if TYPE_CHECKING:
    from growlab.grower.grower import Grower


def plain_state_dict(run: "Grower", network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A plain network's state_dict, and the entries of the growing network's that it has others in place of.

    Args:
        run: whose network is growing.
        network: it, or a copy of it.
    """
    if run.state.norm_weights:
        raise UserError("normalisations over channels that grew are not plain yet; train on first.")
    late = [part.name for part in run.parts if type(part).finish is not Part.finish]
    if run.method.holds_otherwise:
        late.append(run.method.name)
    if late:
        raise UserError(f"with {late[0]} there is a plain network only once growth is finished.")
    new = folded(network, run.graph, run.state.output_factor)
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
    """Undo what plain weights have done to a growing network, or a module around it, that loaded them."""
    own = dict(chain(network.named_parameters(remove_duplicate=False), network.named_buffers()))
    with torch.no_grad():
        for key, tensor in kept.items():
            own[key].copy_(tensor)
