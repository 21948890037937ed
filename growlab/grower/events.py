"""One growth event of a grower: parts, network, optimizers and averages, in this order."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from growlab import ranks
from growlab.errors import UserError
from growlab.grower.preparing import with_parts
from growlab.growth import GrowthEvent, GrowthState, ParityError, grow
from growlab.parts.part import Replaced
from growlab.triggers import Widths
from growlab.widths import Carry, tensors_of

if TYPE_CHECKING:
    from growlab.grower.grower import Grower

# Entries of receipts that add up.
_SUMMED = ("auxiliary_flops", "auxiliary_samples")


def carry_out(run: "Grower", widths: Widths) -> GrowthEvent:
    """Grow a grower's network, and all that follows it, to given widths, and note the receipt.

    Raises:
        UserError: the method or an optimizer cannot, or processes differ.
        ParityError: the network would compute something else than the method promises.
    """
    began, seconds = time.perf_counter(), dict[str, float]()
    widths = with_parts(run, widths, run.state.stage + 1)

    def note(name: str) -> None:
        seconds[name] = time.perf_counter() - began - sum(seconds.values())

    before, num_params = dict(run.state.widths), _num_params(run.network)
    gradients = run.gradients() if run.method.wants_gradients else {}
    copies = run.copies()
    for network in (run.network, *copies.values()):
        ranks.broadcast_buffers(network)
    told = _merged(*(part.before_growth(run, widths) for part in run.parts))
    data = run.measurement(run.method.batches, run.method.name) if run.method.batches else None
    note("before")
    own = {group: before[group] for part in run.parts for group in part.groups if group in before}
    enlarge = partial(
        grow,
        new_widths={**widths, **own},
        seed=run.seed,
        probe=run.probe(),
        agree=ranks.agreed,
        gradients=gradients,
    )
    past, leader = GrowthState.from_dict(run.state.as_dict()), tensors_of(run.network, run.graph)
    try:
        event = enlarge(run.network, run.graph, run.method, run.state, data=data)
        replaced, carry = _widen(run, run.network, run.state, widths, event.replaced, event.carry)
        note("grow")
        run.forget_regions()
        run.followers.carry(replaced, before, widths, carry)
        note("optimizer")
    except ValueError as error:
        raise UserError(str(error)) from error
    for name, copy in copies.items():
        state = GrowthState.from_dict(past.as_dict())
        try:
            along = enlarge(copy, run.graph, run.method, state, leader=leader, leading=event)
        except ParityError as error:
            raise ParityError(f"{name}, an average of the network: {error}") from error
        _widen(run, copy, state, widths, along.replaced, along.carry)
        for mode in ("eval", "train"):
            told[f"{name}_parity_error_{mode}"] = getattr(along, f"parity_error_{mode}")
    event = replace(event, widths_after=dict(widths), replaced=replaced, carry=carry)
    told = _merged(told, *(part.after_growth(run, event) for part in run.parts))
    note("followers")
    _compare(run, f"after growth to stage {run.state.stage}")
    note("rank_check")
    # Else the ninth width exceeds the compiler's recompile limit and it silently stops compiling.
    torch.compiler.reset()
    looked = 0.0 if data is None else data.cost.seconds
    parts = {"data": seconds["before"] + looked, **seconds, "parity": event.parity_sec}
    parts["grow"] -= event.parity_sec + looked
    del parts["before"]
    receipt = {
        **asdict(run.clock),
        **event.receipt(),
        "num_params_before": num_params,
        "num_params": _num_params(run.network),
        **_merged(told, {} if data is None else data.told()),
        **run.trigger.told(),
        "seconds": time.perf_counter() - began,
        "seconds_by_part": parts,
    }
    run.events.append(receipt)
    if run.state.norm_weights and run.anneal_steps < 1:
        run.anneal(1.0)
    return event


def _widen(
    run: "Grower", network: nn.Module, state: GrowthState, widths: Widths, replaced: Replaced, carry: Carry
) -> tuple[dict[str, tuple[Tensor, Tensor]], Carry]:
    """Let parts widen groups of their own; an event and this are one event to those that follow."""
    own: dict[str, tuple[Tensor, Tensor]] = {}
    for part in run.parts:
        own |= part.widen(run, network, state, widths)
    # The method's event may have replaced a tensor already.
    own = {name: (replaced.get(name, pair)[0], pair[1]) for name, pair in own.items()}
    return {**replaced, **own}, carry.extended(dict(widths)) if own else carry


def _num_params(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _compare(run: "Grower", when: str) -> None:
    if run.check_ranks and ranks.several():
        ranks.compare(run.held(), when)


def _merged(*entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries for one receipt; costs add up."""
    found: dict[str, Any] = {}
    for entry in entries:
        summed = {key: found[key] + entry[key] for key in _SUMMED if key in found and key in entry}
        found |= {**entry, **summed}
    return found
