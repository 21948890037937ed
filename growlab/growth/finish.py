"""Turn a grown network into an ordinary one: fold factors, undo method changes."""

from collections.abc import Sequence

import torch
from torch import nn

from growlab.base.errors import UserError
from growlab.growth.method import GrowthMethod
from growlab.growth.outputs import in_own_precision
from growlab.growth.rescale import Folded, fold_output_factor
from growlab.growth.state import GrowthState
from growlab.growth.weighted_norms import weighted_modules
from growlab.widths import WidthGraph


# Its tensors must be trainable even if it is called under inference mode.
@torch.inference_mode(False)
@in_own_precision
def finish(
    model: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    state: GrowthState,
    averages: Sequence[nn.Module] = (),
) -> dict[str, Folded]:
    """Turn a grown network into an ordinary one, in place; it computes the same function without growlab's hooks.

    The output factor is folded into the last layers, row multipliers into the weights, and the changes of the method's
    `prepare` are undone. Weighted normalisations have no plain equivalent of the same shapes, so they have to be
    annealed while the network still trains (`anneal_norms`). A second call does nothing.

    Args:
        model: the network; its parameters stay the same objects, unless the method stores its weights differently.
        graph: its width graph.
        method: the growth method.
        state: its growth state; `output_factor` is 1 afterwards, and `multipliers` is empty.
        averages: averages of the network's weights, which are finished in the same way.

    Returns:
        Factors on each parameter that folding multiplied and on its gradient, by name, for optimizers that continue
        training: see `growlab.optim.rescale_state`.

    Raises:
        UserError: statistics over channels are still weighted, or the output factor cannot be folded. Network and
            averages are then unchanged.
    """
    networks = (model, *averages)
    weighted = [name for network in networks for name in weighted_modules(network)]
    if weighted:
        more = f" and {len(weighted) - 1} more" if len(weighted) > 1 else ""
        raise UserError(
            f"the growing network cannot be finished: the statistics of {weighted[0]}{more} still weight channels "
            f"by their age (annealed to {state.norm_progress:.3g} of 1), so a plain network would compute something "
            "else; call anneal_norms(network, graph, state, progress) before each training step after a growth "
            "event, with progress rising to 1, and train on."
        )
    folded, *_ = [fold_output_factor(network, graph, state.output_factor) for network in networks]
    for network in networks:
        method.finish(network)
    state.output_factor, state.multipliers = 1.0, {}
    return folded
