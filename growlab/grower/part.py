"""The interface of parts: hooks that do nothing by default."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from growlab.base.described import Described
from growlab.base.errors import UserError
from growlab.grower.triggers import GrowingNetwork, Trigger, Widths
from growlab.growth import GrowthEvent, GrowthMethod, GrowthState
from growlab.widths import WidthGraph

#: Old and new tensor by name.
Replaced = Mapping[str, tuple[Tensor, Tensor]]


class Part(Described):
    """A feature that accompanies growth, such as averaged weights.

    Attributes:
        name: key of its state and its receipt entries; where the class says none, its key in the configuration, else
            the class's name in snake case.
        groups: width groups that it widens itself, see `WidthPart`; the growth method leaves their widths as they are.
        grows: it enlarges the network, also one without width groups.
        method: of the events that it asks for by itself, see `WidthPart.decide`; None: it asks for none.
        follows_norms: as a growth method's, of its own groups.
        num_copies: copies of the network that it keeps, for estimates of memory.
        one_group: optimizers have to keep all parameters in one group, since it adds some.
    """

    name: str = ""
    groups: Sequence[str] = ()
    grows: bool = False
    method: GrowthMethod | None = None
    follows_norms: bool = False
    num_copies: int = 0
    one_group: bool = False

    # Before training ---------------------------------------------------------------------------------------

    def applies(self, trigger: Trigger) -> bool:
        """Return False to be left out of runs with such a trigger, in which it has nothing to do."""
        return True

    def prepare(
        self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]
    ) -> WidthGraph:
        """Change how the full-width network is built, in place.

        Returns:
            The width graph to continue with.
        """
        return graph

    def shrink_to(self, network: nn.Module, graph: WidthGraph, fraction_grown: float) -> WidthGraph:
        """Remove what a prepared network does not have yet at a fraction of growth, in place.

        Called for the seed, and for copies whose cost and memory are measured.

        Returns:
            The width graph of what is left.
        """
        return graph

    def inputs_at(self, inputs: tuple[Any, ...], fraction_grown: float) -> tuple[Any, ...]:
        """Training inputs at a fraction of growth, e.g. smaller images."""
        return inputs

    def check(self, grower: GrowingNetwork) -> None:
        """Refuse a grower that it cannot accompany; called before the seed is made, and once training is known.

        Raises:
            UserError: the reason.
        """

    def begin(self, grower: GrowingNetwork) -> None:
        """Start; called once, when the network is a seed. Averages of the network are put into `grower.averages`."""

    # While the network trains ------------------------------------------------------------------------------

    def targets(self, y: Tensor) -> Tensor:
        """Map targets to the network's current outputs (e.g. permuted classes)."""
        return y

    def before_growth(self, grower: GrowingNetwork, widths: Widths) -> Mapping[str, Any]:
        """Act before a growth event to given widths; return plain entries for its receipt.

        Entries `auxiliary_flops` (of forward passes, each with a backward pass) and `auxiliary_samples` count as cost.
        """
        return {}

    def after_growth(self, grower: GrowingNetwork, event: GrowthEvent) -> Mapping[str, Any]:
        """Act after a growth event that optimizers and averages have followed; return entries for its receipt."""
        return {}

    def before_step(self, grower: GrowingNetwork) -> None:
        """Act before each step of the optimizer that has the network's parameters (the last of several)."""

    def after_step(self, grower: GrowingNetwork) -> None:
        """Act after each of those steps."""

    def finish(self, grower: GrowingNetwork) -> None:
        """Act at the end, before the network is made an ordinary one."""

    # Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Its state, in plain containers of tensors and numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; averages have the widths of the checkpoint by then."""


class WidthPart(Part):
    """A part with width groups of its own, which it names in `groups`."""

    def stage_widths(self, num_stages: int) -> Mapping[str, Sequence[int]]:
        """Width of each of its groups at every one of so many stages, for schedules."""
        return {}

    def decide(self, grower: GrowingNetwork) -> Widths | None:
        """Widths of its groups to change to now, by an event of its own `method`; None to keep the present ones.

        Called at every boundary that the training loop announces, before the trigger, and again after each event. The
        decision must be a function of the grower: a resumed run asks again.
        """
        return None

    def widen(
        self, grower: GrowingNetwork, network: nn.Module, state: GrowthState, widths: Widths
    ) -> Replaced:
        """Widen its groups in the network, or in an average of it, after the growth method's event.

        Args:
            grower: of the network.
            network: changed in place.
            state: of that network; brought up to date.
            widths: of all groups, to come.

        Returns:
            Old and new tensor by name.
        """
        return {}

    def load_for_inference(self, state: Mapping[str, Any]) -> None:
        """Load only the state that inference needs, such as the class order."""


class BlockPart(Part):
    """A part that leaves modules out of the network and brings them in while it trains; `state.blocks` says which."""

    def births(self, state: GrowthState) -> Mapping[str, int]:
        """Stage at which tensors came in that were not there from the start, by name."""
        return {}

    def graph_at(self, graph: WidthGraph, state: GrowthState) -> WidthGraph:
        """Width graph of the network in a state.

        Args:
            graph: of the network as prepared.
            state: of the network, or of a checkpoint.
        """
        return graph

    def state_from_keys(self, names: Collection[str], state: GrowthState) -> GrowthState:
        """State of the network whose tensors have these names, where nothing else says it."""
        return state

    def restore(self, network: nn.Module, state: GrowthState) -> None:
        """Bring a network, or an average of it, to the structure of a state, before it loads tensors."""


def checked_parts(parts: Any) -> tuple[Part, ...]:
    """Parts as they were given, each with a name of its own.

    Raises:
        UserError: they are no list of parts, or two have one name.
    """
    if not isinstance(parts, Sequence):
        raise UserError(f"parts={parts!r} must be a list of parts: [{parts!r}].")
    if kind := next((part for part in parts if isinstance(part, type)), None):
        raise UserError(f"parts hold the class {kind.__name__}, not a part: write {kind.__name__}(...).")
    if (other := next((part for part in parts if not isinstance(part, Part)), None)) is not None:
        raise UserError(f"parts hold {other!r}, which is no growlab.Part.")
    for part in parts:
        part.name = part.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(part).__name__).lower()
    names = [part.name for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two parts are called {twice}, the key of their states: give one another name.")
    return tuple(parts)
