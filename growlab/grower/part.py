"""Interface of parts: methods that do nothing by default."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.errors import UserError
from growlab.base.settings import Described
from growlab.grower.triggers import GrowingNetwork, Trigger, Widths
from growlab.growth import GrowthContext, GrowthEvent, GrowthMethod, GrowthState
from growlab.growth.constants import as_applied, as_stored, unchanged
from growlab.growth.multipliers import carried_multipliers, multiply
from growlab.widths import Carry, WidthGraph, grid, replace_tensors, tensors_of

#: Old and new tensor by name.
Replaced = Mapping[str, tuple[Tensor, Tensor]]


class Part(Described):
    """A feature that accompanies growth, such as averaged weights.

    Attributes:
        name: key of the part's state and receipt entries; by default its key in the configuration, else the class's
            name in snake case.
        groups: width groups that the part itself widens, see `WidthPart`; the growth method keeps their widths.
        grows: the part enlarges the network, even without width groups.
        method: growth method of events that the part itself requests, see `WidthPart.decide`; None: no events.
        follows_norms: as in `GrowthMethod`, for the part's groups.
        num_copies: number of copies of the network that the part keeps, for estimates of memory.
        one_group: the part adds parameters, so optimizers must have a single group.
        shards: the part supports sharded networks, although it changes tensors.
        saved: attributes saved in `state_dict`, by key.
    """

    name: str = ""
    groups: Sequence[str] = ()
    grows: bool = False
    method: GrowthMethod | None = None
    follows_norms: bool = False
    num_copies: int = 0
    one_group: bool = False
    shards: bool = False
    saved: ClassVar[Mapping[str, str]] = {}

    # Before training ---------------------------------------------------------------------------------------

    def applies(self, trigger: Trigger) -> bool:
        """Return False to leave the part out of runs with this trigger."""
        return True

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]) -> WidthGraph:
        """Change the structure of the full-width network, in place.

        Returns:
            The width graph to continue with.
        """
        return graph

    def shrink_to(self, network: nn.Module, graph: WidthGraph, fraction_grown: float) -> WidthGraph:
        """Remove modules from a prepared network that it does not have yet at a fraction of growth, in place.

        Called for the seed, and for copies whose cost and memory are measured.

        Returns:
            The width graph of the remaining network.
        """
        return graph

    def inputs_at(self, inputs: tuple[Any, ...], fraction_grown: float) -> tuple[Any, ...]:
        """Training inputs at a fraction of growth, e.g. smaller images."""
        return inputs

    def check(self, grower: GrowingNetwork) -> None:
        """Check that the part supports the grower; called before the seed is made, and again by `Grower.provide`.

        Raises:
            UserError: it does not.
        """

    def attach(self, network: nn.Module) -> None:
        """Add hooks to the network, or to a copy of it; called again if training continues after `finish`."""

    def detach(self, network: nn.Module) -> None:
        """Remove the hooks that `attach` added."""

    def begin(self, grower: GrowingNetwork) -> None:
        """Start, once the network is a seed. Add averages of the network to `grower.averages` here."""

    # While the network trains ------------------------------------------------------------------------------

    def targets(self, y: Tensor) -> Tensor:
        """Map targets to the network's current outputs (e.g. permuted classes)."""
        return y

    def before_growth(self, grower: GrowingNetwork, widths: Widths) -> Mapping[str, Any]:
        """Act before a growth event to given widths; return plain entries for its receipt.

        The entries `auxiliary_flops` (of forward passes, each with a backward pass) and `auxiliary_samples` count as
        cost.
        """
        return {}

    def after_growth(self, grower: GrowingNetwork, event: GrowthEvent) -> Mapping[str, Any]:
        """Act after a growth event, once optimizers and averages have followed; return entries for its receipt."""
        return {}

    def before_step(self, grower: GrowingNetwork) -> None:
        """Act before each step of the network's optimizer: of the last one attached if there are several."""

    def after_step(self, grower: GrowingNetwork) -> None:
        """Act after each step of the network's optimizer."""

    def before_update(self, grower: GrowingNetwork, optimizer: Optimizer) -> None:
        """Act before each step of any attached optimizer, with the gradients that it will use."""

    def after_update(self, grower: GrowingNetwork, optimizer: Optimizer) -> None:
        """Act after each step of any attached optimizer; for a wrapper, after the step of the optimizer inside."""

    def finish(self, grower: GrowingNetwork) -> None:
        """Act at the end of growth, before the network becomes an ordinary one."""

    # Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in plain containers of tensors and numbers: by default the `saved` attributes."""
        return {key: getattr(self, attribute) for key, attribute in self.saved.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; averages have the checkpoint's widths already."""
        for key, attribute in self.saved.items():
            setattr(self, attribute, state.get(key, getattr(self, attribute)))


class WidthPart(Part):
    """A part that widens the width groups named in `groups` itself."""

    def stage_widths(self, num_stages: int) -> Mapping[str, Sequence[int]]:
        """Return the width of each of the part's groups at every stage, for schedules."""
        return {}

    def decide(self, grower: GrowingNetwork) -> Widths | None:
        """Return new widths of the part's groups, for an event with its `method`; None to keep the current ones.

        Called at every step or epoch, before the trigger, and again after each event. The decision must depend only on
        the grower, since a resumed run calls this again.
        """
        return None

    def widen(self, grower: GrowingNetwork, network: nn.Module, state: GrowthState, widths: Widths) -> Replaced:
        """Widen the part's groups in the network, or in an average of it, after the growth method's event.

        Update the network's growth `state`. `widths` are the new widths of all groups. Return old and new tensors by
        name.
        """
        return {}

    def load_for_inference(self, state: Mapping[str, Any]) -> None:
        """Load only the state that inference needs, such as the class order."""


class BlockPart(Part):
    """A part that leaves modules out of the network and inserts them during training, recorded in `state.blocks`."""

    def births(self, state: GrowthState) -> Mapping[str, int]:
        """Stage at which tensors were inserted, by name, without those present from the start."""
        return {}

    def graph_at(self, graph: WidthGraph, state: GrowthState) -> WidthGraph:
        """Width graph of the network in a state, given that of the network as prepared."""
        return graph

    def state_from_keys(self, names: Collection[str], state: GrowthState) -> GrowthState:
        """Infer the network's state from the names of its tensors, if it was saved without one."""
        return state

    def restore(self, network: nn.Module, state: GrowthState) -> None:
        """Change the structure of the network, or of an average of it, to that of a state, before it loads tensors."""


def remove_pre_hooks(network: nn.Module, kind: type) -> None:
    """Remove a network's forward pre-hooks of a class."""
    for key, hook in list(network._forward_pre_hooks.items()):
        if isinstance(hook, kind):
            del network._forward_pre_hooks[key]
            network._forward_pre_hooks_with_kwargs.pop(key, None)


def numbers_of_stages(counts: Any, num_stages: int, most: int, what: str) -> Sequence[int]:
    """Return the number of channels at each stage; raise a UserError unless they ascend, from 1 to `most`."""
    numbers = list(counts) if isinstance(counts, Iterable) else []
    valid = all(isinstance(n, Integral) and not isinstance(n, bool) and 1 <= int(n) <= most for n in numbers)
    if len(numbers) != num_stages or not valid or sorted(numbers) != numbers:
        raise UserError(
            f"counts must give {num_stages} ascending numbers of {what} from 1 to {most}, one for each stage, not "
            f"{numbers or counts!r}."
        )
    return numbers


_Value = TypeVar("_Value")


def value_at(values: Sequence[_Value], fraction_grown: float) -> _Value:
    """Return the value at a fraction of growth, of values that follow at equal steps of it."""
    # Rounding may have left the fraction slightly below its exact value.
    return values[int(fraction_grown * (len(values) - 1) + 1e-9)]


def check_fraction_known(grower: GrowingNetwork, what: str) -> None:
    """Raise a UserError if the trigger does not know the fraction of growth at each stage, which `what` need."""
    if grower.trigger.fraction_grown(0, grower.seed_widths) is None:
        raise UserError(
            f"{what} need a trigger that knows the fraction of growth at each stage: use a schedule of stages or a "
            "demand, and a growth method that follows it."
        )


def checked_parts(parts: Any) -> tuple[Part, ...]:
    """Check the type of parts and give each a name; raise a UserError for other objects or equal names."""
    if not isinstance(parts, Sequence):
        raise UserError(f"parts={parts!r} must be a list of parts: [{parts!r}].")
    if kind := next((part for part in parts if isinstance(part, type)), None):
        raise UserError(f"parts contain the class {kind.__name__}, not a part: write {kind.__name__}(...).")
    if (other := next((part for part in parts if not isinstance(part, Part)), None)) is not None:
        raise UserError(f"parts contain {other!r}, which is not a growlab.Part.")
    for part in parts:
        part.name = part.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(part).__name__).lower()
    names = [part.name for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two parts have the name {twice}, which is the key of their state: rename one.")
    return tuple(parts)


def widen_parts(
    grower: GrowingNetwork,
    parts: Sequence[Part],
    network: nn.Module,
    state: GrowthState,
    widths: Widths,
    event: GrowthEvent,
) -> tuple[dict[str, tuple[Tensor, Tensor]], Carry]:
    """Let parts widen their own groups in a grower's network or an average, after the growth method's event.

    Return old and new tensors, and the rule for gradients, of both changes together, for optimizers.
    """
    own: dict[str, tuple[Tensor, Tensor]] = {}
    for part in parts:
        if isinstance(part, WidthPart) and any(widths[g] != state.widths[g] for g in part.groups):
            own |= part.widen(grower, network, state, widths)
    # The method's event may have replaced the same tensors before.
    own = {name: (event.replaced.get(name, pair)[0], pair[1]) for name, pair in own.items()}
    return {**event.replaced, **own}, event.carry.extended(dict(widths)) if own else event.carry


def open_channels(
    network: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    state: GrowthState,
    group: str,
    count: int,
    seed: int,
    zero: bool = False,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Widen a group that methods do not change, such as classes, in place; return old and new tensors by name.

    New entries are drawn by the method's `new_weights`; with `zero`, new columns of the layers that read the channels
    are zero. New biases are zero, and constants get the full network's values. New channels are born at the state's
    stage.
    """
    before = dict(state.widths)
    widths, stored = {**before, group: count}, tensors_of(network, graph)
    constants, old = unchanged(graph, state.constants, stored, before), as_applied(graph, stored)
    context = GrowthContext(graph, old, before, widths, seed, state.stage, constants=constants)
    new = dict[str, Tensor]()
    for name, axes in graph.axes.items():
        roles = {axis.role for axis in axes if group in axis.groups}
        if roles:
            entries = method.new_weights.draw(context, name).to(old[name])
            if zero and "in" in roles:
                entries.zero_()
            entries[grid(context.kept(name), entries.device)] = old[name]
            new[name] = context.constant(name, entries) if name in constants else entries
    state.multipliers = carried_multipliers(graph, state.multipliers, {}, Carry(), before, widths)
    state.widths = widths
    state.births[group] = state.births[group] + [state.stage] * (count - before[group])
    # A normalised weight's lengths change with it.
    lengths = [length for direction, (length, _) in graph.weight_norms.items() if direction in new]
    all_stored = as_stored(graph, {**old, **new})
    replaced = replace_tensors(network, graph, {name: all_stored[name] for name in dict.fromkeys((*new, *lengths))})
    multiply(network, graph, state.multipliers)
    return replaced
