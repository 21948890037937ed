"""The interface of parts: hooks that do nothing by default."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from growlab.grower.triggers import Run, Trigger, Widths
from growlab.growth import GrowthEvent, GrowthMethod, GrowthState
from growlab.widths import WidthGraph

#: Old and new tensor by name.
Replaced = Mapping[str, tuple[Tensor, Tensor]]


class Part:
    """A feature beside growing, such as averaged weights.

    Attributes:
        name: its key in states and in receipts; a part of a configuration whose class does not say it has its key
            there, any other its class's name in snake case.
        groups: width groups that it widens itself (`widen`); the growth method leaves their widths alone.
        grows: it enlarges the network, also one without width groups.
        method: of the events that it asks for by itself (`decide`), which change its own groups alone; None: it asks
            for none.
        follows_norms: as a growth method's, of its own groups.
        num_copies: how many copies of the network it keeps, for estimates of memory.
        one_group: optimizers have to hold all parameters in one group, since it adds some.
    """

    _name: str = ""
    groups: Sequence[str] = ()
    grows: bool = False
    method: GrowthMethod | None = None
    follows_norms: bool = False
    num_copies: int = 0
    one_group: bool = False

    @property
    def name(self) -> str:
        """Its key in states and in receipts; a class may say it as an attribute."""
        return self._name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    @classmethod
    def examine(cls, network: nn.Module, example: tuple[Any, ...]) -> list[str]:
        """What it would find in a network, in lines for a person; the network stays as it is."""
        return []

    def name_by_key(self, key: str) -> None:
        """Take a configuration's key as name, unless the part has one of its own."""
        self._name = self._name or key

    def applies(self, trigger: Trigger) -> bool:
        """Whether it has anything to do in a run with such a trigger; else it is left out."""
        return True

    def stage_widths(self, num_stages: int) -> Mapping[str, Sequence[int]]:
        """Width of each of its own groups at every one of so many stages, for schedules."""
        return {}

    # Before training ---------------------------------------------------------------------------------------

    def prepare(
        self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]
    ) -> WidthGraph:
        """Change how the network is built, at full width; returns the width graph to go on with."""
        return graph

    def at_share(self, network: nn.Module, graph: WidthGraph, share: float) -> WidthGraph:
        """Take out of a network as prepared what it does not have yet when a share of all growth is done.

        Called for the seed, and for copies whose cost and memory are measured.

        Returns:
            The width graph of what is left.
        """
        return graph

    def inputs_at(self, inputs: tuple[Any, ...], share: float) -> tuple[Any, ...]:
        """Positional inputs of the network as training steps have them when a share of all growth is done."""
        return inputs

    def check(self, run: Run) -> None:
        """Called before the seed is planted, and again when the run knows its training.

        Raises:
            UserError: it does not go with the run, and why.
        """

    def begin(self, run: Run) -> None:
        """Called once, when the seed is planted."""

    # While the network trains ------------------------------------------------------------------------------

    def followers(self) -> Mapping[str, nn.Module]:
        """Averages of the network, by name: modules with its tensors that go through every growth event with it."""
        return {}

    def targets(self, y: Tensor) -> Tensor:
        """Targets of a batch as the network's outputs stand for them."""
        return y

    def births(self, state: GrowthState) -> Mapping[str, int]:
        """Stage that tensors came with which were not there from the start, by name."""
        return {}

    def decide(self, run: Run) -> Widths | None:
        """Widths of its own groups to change to now, by an event of their own; None: none.

        Asked at every boundary that the training loop announces, before the trigger, and again after each event, of
        parts with a `method`. What it says must be a function of the run: a resumed run asks again.
        """
        return None

    def before_growth(self, run: Run, widths: Widths) -> Mapping[str, Any]:
        """Called before each growth event with the widths to come; returns plain entries for its receipt.

        Entries `auxiliary_flops` (of forward passes, each with a backward pass) and `auxiliary_samples` are cost.
        """
        return {}

    def widen(self, run: Run, network: nn.Module, state: GrowthState, widths: Widths) -> Replaced:
        """Widen the part's own groups in the network, or in an average of it, behind the method's event.

        Args:
            run: the run.
            network: changed in place.
            state: of that network; brought up to date.
            widths: to come.
        """
        return {}

    def after_growth(self, run: Run, event: GrowthEvent) -> Mapping[str, Any]:
        """Called after each growth event, once optimizers and followers have followed; returns receipt entries."""
        return {}

    def before_step(self, run: Run) -> None:
        """Called before each step of the optimizer that holds the network's parameters (the last of several)."""

    def after_step(self, run: Run) -> None:
        """Called after each of those steps."""

    def finish(self, run: Run) -> None:
        """Called at the end, before the network is made an ordinary one."""

    # Checkpoints -------------------------------------------------------------------------------------------

    def graph_at(self, graph: WidthGraph, state: GrowthState) -> WidthGraph:
        """The width graph of the network in a state.

        Args:
            graph: of the network as prepared.
            state: which may be a checkpoint's.
        """
        return graph

    def recognise(self, names: Collection[str], state: GrowthState) -> GrowthState:
        """A state as the names of a state_dict's tensors tell that it is, where nothing else does."""
        return state

    def restore(self, network: nn.Module, state: GrowthState) -> None:
        """Bring a network, or an average of it, to the structure of a state, before it loads tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, in plain containers of tensors and numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; followers have the widths of the run by then."""

    def load_meaning(self, state: Mapping[str, Any]) -> None:
        """Take from what `state_dict` returned only what the network's tensors stand for, where that changes."""
