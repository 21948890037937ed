"""One growth event of a grower: parts, network, optimizers and averages, in this order."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from growlab.base import ranks
from growlab.base.errors import UserError, as_user_errors
from growlab.grower.part import Part, Replaced
from growlab.grower.preparing import with_parts
from growlab.grower.transaction import decision, transaction
from growlab.grower.triggers import Widths
from growlab.growth import GrowthEvent, GrowthState, ParityError, grow
from growlab.growth.outputs import own_precision
from growlab.widths import Carry, tensors_of

if TYPE_CHECKING:
    from growlab.grower.grower import Grower

# Entries of receipts that add up.
_SUMMED = ("auxiliary_flops", "auxiliary_samples")


def due(run: "Grower") -> tuple[Widths | None, Part | None]:
    """Widths to grow to now, and the part that asks for them; None: the trigger does."""
    # Parts first: the trigger's event may forget the optimizer's state, which they may look at.
    for part in run.parts:
        if (widths := part.decide(run)) is not None:
            return widths, part
    return run.trigger.next(run), None


def grow_as_due(run: "Grower", then: Callable[[], Any] | None) -> list[GrowthEvent]:
    """Carry out all events that are due, and what comes behind them, or leave everything as it is.

    Args:
        run: the grower.
        then: called once, if there were events.
    """
    events: list[GrowthEvent] = []
    with decision(run):
        widths, part = due(run)
        if widths is None:
            return events
        with transaction(run):
            while widths is not None:
                events.append(carry_out(run, widths, part))
                widths, part = due(run)
            if then is not None:
                then()
    return events


def held(run: "Grower") -> Iterator[tuple[str, Any]]:
    """Names and values of all that processes must hold alike."""
    yield "the growth state", run.state.as_dict()
    yield from ranks.held(run.network, run.optimizers)
    for name, copy in run.copies().items():
        yield from ((f"{key} of {name}", tensor) for key, tensor in copy.state_dict().items())


# New parameters are to be trained, wherever the event happens.
@torch.inference_mode(False)
def carry_out(run: "Grower", widths: Widths, asker: Part | None = None) -> GrowthEvent:
    """Grow a grower's network, and all that follows it, to given widths, and note the receipt.

    Args:
        run: the grower.
        widths: of its groups; those of parts follow.
        asker: the part that asks for the event, of its own groups alone, by its own method; None: the trigger does.

    Raises:
        UserError: the method or an optimizer cannot, or processes differ.
        ParityError: the network would compute something else than the method promises.
    """
    seconds = Seconds()
    method = run.method if asker is None else asker.method
    assert method is not None
    before, num_params = dict(run.state.widths), _num_params(run.network)
    if asker is None:
        widths = with_parts(run, _whole(run, widths), run.state.scheduled_stage + 1)
        given = {**widths, **{g: before[g] for part in run.parts for g in part.groups if g in before}}
    else:
        widths = given = {**before, **widths}
    with as_user_errors():
        run.followers.check(before, widths)
    gradients = run.gradients() if method.wants_gradients else {}
    copies = run.copies()
    for network in (run.network, *copies.values()):
        ranks.broadcast_buffers(network)
    told = _merged(*(part.before_growth(run, widths) for part in (run.parts if asker is None else (asker,))))
    data = run.measurement(method.batches, method.name) if method.batches else None
    seconds.note("data")
    enlarge = partial(
        grow,
        new_widths=given,
        seed=run.seed,
        probe=run.probe(),
        gradients=gradients,
        agree=ranks.agreed,
        average=ranks.averaged,
        normalised=run.followers.normalised(),
    )
    past, leader = GrowthState.from_dict(run.state.as_dict()), tensors_of(run.network, run.graph)
    with as_user_errors():
        event = enlarge(run.network, run.graph, method, run.state, data=data)
        run.state.unscheduled += asker is not None
        replaced, carry = _widen(run, run.network, run.state, widths, event.replaced, event.carry)
        seconds.note("grow")
        run.forget_regions()
        with own_precision(run.network):
            run.followers.carry(replaced, before, widths, carry)
        seconds.note("optimizer")
    for name, copy in copies.items():
        state = GrowthState.from_dict(past.as_dict())
        along = partial(enlarge, copy, run.graph, method, state, leader=leader, leading=event)
        told |= _average_along(run, name, copy, state, widths, along)
    event = replace(event, widths_after=dict(widths), replaced=replaced, carry=carry)
    told = _merged(told, *(part.after_growth(run, event) for part in run.parts))
    seconds.note("followers")
    if run.check_ranks and ranks.several():
        ranks.compare(held(run), f"after growth to stage {run.state.stage}")
    seconds.note("rank_check")
    # Else the ninth width exceeds the compiler's recompile limit and it silently stops compiling.
    torch.compiler.reset()
    seconds.move("grow", "data", 0.0 if data is None else data.cost.seconds)
    seconds.move("grow", "parity", event.parity_sec)
    receipt = {
        **asdict(run.clock),
        **event.receipt(),
        "num_params_before": num_params,
        "num_params": _num_params(run.network),
        **_merged(told, {} if data is None else data.told()),
        **(run.trigger.told() if asker is None else {"asked_by": asker.name}),
        "seconds": seconds.total,
        "seconds_by_part": seconds.parts,
    }
    run.events.append(receipt)
    if run.state.norm_weights and run.anneal_steps < 1:
        run.anneal(1.0)
    return event


def _whole(run: "Grower", widths: Widths) -> Widths:
    """Widths that a trigger asks for, with those of the groups that it leaves out as they are.

    Raises:
        UserError: there is no such group, or a width is no number of channels.
    """
    for group, width in widths.items():
        known = group in run.state.widths
        if not known or not isinstance(width, Integral) or width < 1:
            what = f"{width!r} channels" if known else "a width"
            raise UserError(
                f"{type(run.trigger).__name__} asks for {what} of {group!r}: give whole numbers from 1 on for groups "
                f"of this network ({', '.join(run.state.widths)})."
            )
    return {**run.state.widths, **{group: int(width) for group, width in widths.items()}}


def _average_along(
    run: "Grower",
    name: str,
    copy: nn.Module,
    state: GrowthState,
    widths: Widths,
    along: Callable[[], GrowthEvent],
) -> dict[str, float]:
    """Grow an average of the network as the network was, from the same state; its entries of the receipt."""
    try:
        event = along()
    except ParityError as error:
        raise ParityError(f"{name}, an average of the network: {error}") from error
    _widen(run, copy, state, widths, event.replaced, event.carry)
    return {
        f"{name}_parity_error_eval": event.parity_error_eval,
        f"{name}_parity_error_train": event.parity_error_train,
    }


class Seconds:
    """What an event has taken, by its parts."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.parts: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Since the event began."""
        return time.perf_counter() - self._began

    def note(self, name: str) -> None:
        """The part that ends here began where the one before ended."""
        self.parts[name] = self.total - sum(self.parts.values())

    def move(self, part: str, to: str, seconds: float) -> None:
        """Count so many seconds of one part as another's."""
        self.parts[part] -= seconds
        self.parts[to] = self.parts.get(to, 0.0) + seconds


def _widen(
    run: "Grower", network: nn.Module, state: GrowthState, widths: Widths, replaced: Replaced, carry: Carry
) -> tuple[dict[str, tuple[Tensor, Tensor]], Carry]:
    """Let parts widen groups of their own; an event and this are one event to those that follow."""
    own: dict[str, tuple[Tensor, Tensor]] = {}
    for part in run.parts:
        if any(widths[group] != state.widths[group] for group in part.groups):
            own |= part.widen(run, network, state, widths)
    # The method's event may have replaced a tensor already.
    own = {name: (replaced.get(name, pair)[0], pair[1]) for name, pair in own.items()}
    return {**replaced, **own}, carry.extended(dict(widths)) if own else carry


def _num_params(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _merged(*entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries for one receipt; costs add up."""
    found: dict[str, Any] = {}
    for entry in entries:
        summed = {key: found[key] + entry[key] for key in _SUMMED if key in found and key in entry}
        found |= {**entry, **summed}
    return found
