"""The end of a growing network's training: everything that growing has begun is finished, or refused."""

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


# Training may go on with what it makes, wherever it is called.
@torch.inference_mode(False)
@in_own_precision
def finish(
    model: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    state: GrowthState,
    averages: Sequence[nn.Module] = (),
) -> dict[str, Folded]:
    """Make the ordinary network of a grown one, in place: its plain copy computes what training has seen.

    The factor on the output is folded into the last layers, what the forward multiplies rows of weights by into the
    weights, and what the method prepared is undone. Weighted
    normalisations have no plain equal with the same shapes, so they have to be annealed while the network still
    trains (`anneal_norms`). A second call does nothing.

    Args:
        model: the network; its parameters stay the same objects, unless the method held its weights differently.
        graph: its width graph.
        method: the growth method.
        state: of the network; `output_factor` is 1 afterwards, and there are no `multipliers`.
        averages: averages of the network's weights, which are finished alike.

    Returns:
        Parameters of the network that what was folded into them has multiplied, by name, and what multiplies their
        gradients: what an optimizer that goes on needs, see `growlab.optim.rescale_state`.

    Raises:
        UserError: statistics over channels are still weighted, or the output's factor cannot be folded. Network and
            averages are then as before.
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
