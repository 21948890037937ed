"""A grower's network about to load tensors of another stage: its structure and widths follow them."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower.preparing import forecast
from growlab.grower.triggers import Widths
from growlab.growth import GrowthState, caches, restore
from growlab.growth.attached import state_of
from growlab.growth.constants import at_widths, unchanged
from growlab.growth.multipliers import saved_multipliers
from growlab.widths import replace_tensors, resized, tensors_of
from growlab.widths.trials import FAILURES

if TYPE_CHECKING:
    from growlab.grower.grower import Grower

_PARTS_OF_STATE = ("full_widths", "growth", "clock", "events", "trigger", "parts")


def check_state(run: "Grower", state: Mapping[str, Any]) -> None:
    """Refuse what `Grower.state_dict` of another run returned.

    Raises:
        UserError: it is no grower's state, another network's, or of a run of other parts or other widths at its stage.
    """
    kinds = {name: list if name == "events" else Mapping for name in _PARTS_OF_STATE}
    if not isinstance(state, Mapping) or not all(
        isinstance(state.get(name), kind) for name, kind in kinds.items()
    ):
        raise UserError("this is no state of a Grower: give what its own state_dict() returned.")
    if state["full_widths"] != run.full_graph.full_widths:
        raise UserError("the state is of another network: its width groups or their full widths differ.")
    names = {part.name for part in run.parts}
    if names != set(state["parts"]):
        saved, own = (", ".join(sorted(each)) or "none" for each in (state["parts"], names))
        raise UserError(f"the state is of a run with other parts: {saved}; this one has {own}.")
    _check_stage(run, GrowthState.from_dict(state["growth"]))


def _check_stage(run: "Grower", state: GrowthState) -> None:
    """Refuse a state whose widths are not those of its stage here: the next stage would be another run's.

    Raises:
        UserError: the trigger has other widths at that stage.
    """
    stages = forecast(run.trigger, run.full_graph, run.parts)
    if stages is None or len(stages) == 1:
        # With one stage, as where checkpoints are evaluated, there is no next one.
        return
    decided = {group for part in run.parts if part.method is not None for group in part.groups}
    here = stages[min(state.scheduled_stage, len(stages) - 1)]
    for group, width in state.widths.items():
        if group not in decided and here.get(group, width) != width:
            raise UserError(
                f"the state is of stage {state.scheduled_stage} with {width} channels of {group!r}, where this trigger "
                f"has {here[group]}: give the trigger that the run began with; only later stages may differ."
            )


def arrive(
    run: "Grower", network: nn.Module, tensors: Mapping[str, Tensor], state: Mapping[str, Any] | None
) -> None:
    """Bring the network, or a copy of it, to the structure and widths of tensors that it is about to load.

    Tensors that are not the network's are left to `load_state_dict` to complain about.
    """
    needed = run.graph.axes.keys() - run.graph.constants.keys()
    if run.method.holds_otherwise and not needed <= network.state_dict().keys():
        raise UserError(
            f"growth has ended, and {run.method.name} held weights in another way before: load what was saved while it "
            "trained into a network made anew, with a Grower (or callback) of its own."
        )
    known = None if state is None else GrowthState.from_dict(state)
    graph = run.graph_at(known or recognised(run, tensors, run.state))
    # Constants that are not saved follow the others.
    if not graph.axes.keys() - graph.constants.keys() <= tensors.keys():
        return
    shapes = {name: tuple(tensors[name].shape) for name in graph.axes if name in tensors}
    # Groups whose tensors are yet to come have the widths that they are to come with.
    widths = {**(run.state if known is None else known).widths, **graph.widths_of(shapes)}
    if any(graph.shape(name, widths) != shape for name, shape in shapes.items()):
        return
    known = known if known is not None and known.widths == widths else None
    own = run.state if network is run.network else state_of(network)
    if known is None and own is not None:
        guess = recognised(run, tensors, state_at(run, widths))
        alike, saved = (
            (own.widths, set(own.blocks)) == (widths, set(guess.blocks)),
            saved_multipliers(tensors),
        )
        if alike and saved.keys() - own.multipliers.keys():
            # Such as those of a network that has been finished since.
            known = replace(own, multipliers=saved)
        else:
            known = own if alike else replace(guess, multipliers=saved)
    if known is None or known is own:
        return
    if network is run.network:
        adopt(run, known)
    else:
        bring(run, network, known)
        if own is not run.state:
            vars(own).update(vars(known))
        restore(network, run.graph_at(known), known)


# New parameters are to be trained, wherever they are loaded.
@torch.inference_mode(False)
def adopt(run: "Grower", state: GrowthState) -> None:
    """Go on in another state of growth: structure and widths of all that follows, factors, regions."""
    past, graph = dict(run.network.named_parameters()), run.graph_at(state)
    state = replace(state, constants={**run.state.constants, **state.constants})
    for network in (run.network, *run.copies().values()):
        bring(run, network, state)
        restore(network, graph, state)
        caches.forget(network, run.probe(), FAILURES)
    run.graph = graph
    # The same object: hooks look at it.
    vars(run.state).update(vars(state))
    run.forget_regions()
    run.followers.exchange(past)


@torch.inference_mode(False)
def bring(run: "Grower", network: nn.Module, state: GrowthState) -> None:
    """Bring the network, or a copy of it, to the widths and the structure of a state."""
    tensors = tensors_of(network, run.graph)
    now = {**run.state.widths, **run.graph.widths_of({name: t.shape for name, t in tensors.items()})}
    changed = {
        name: resized(tensor, run.graph.axes[name], now, state.widths)
        for name, tensor in tensors.items()
        if run.graph.changes(name, now, state.widths)
    }
    constants = {**run.state.constants, **state.constants}
    for name in changed.keys() & unchanged(run.graph, run.state.constants, tensors, now).keys():
        changed[name] = at_widths(run.graph, name, constants[name], state.widths, changed[name])
    replace_tensors(network, run.graph, changed)
    for part in run.parts:
        part.restore(network, state)


def recognised(run: "Grower", names: Collection[str], state: GrowthState) -> GrowthState:
    """A state as the names of tensors tell that it is."""
    for part in run.parts:
        state = part.recognise(names, state)
    return state


def state_at(run: "Grower", widths: Widths) -> GrowthState:
    """State of a network of which only the widths are known: stage and births as the trigger foresees them."""
    stages = forecast(run.trigger, run.graph, run.parts) or []
    stage = stages.index(dict(widths)) if dict(widths) in stages else run.state.stage
    births = {
        group: [
            next((s for s, known in enumerate(stages[:stage]) if known[group] > channel), stage)
            for channel in range(width)
        ]
        for group, width in widths.items()
    }
    return GrowthState(stage, dict(widths), births, asked=run.state.asked)
