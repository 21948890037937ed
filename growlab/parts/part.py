"""The interface of parts: hooks that do nothing by default."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from growlab.growth import GrowthEvent
from growlab.triggers import Run, Widths
from growlab.widths import WidthGraph


class Part:
    """A feature beside growing, such as averaged weights.

    Attributes:
        name: its key in states and in receipts.
    """

    name: str

    def check(self, run: Run) -> None:
        """Called once, before the seed is planted.

        Raises:
            UserError: it does not go with the run, and why.
        """

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int) -> WidthGraph:
        """Change how the full-width network is built; returns the width graph to go on with."""
        return graph

    def begin(self, run: Run) -> None:
        """Called once, when the seed is planted."""

    def followers(self) -> Mapping[str, nn.Module]:
        """Averages of the network, by name: modules with its tensors that go through every growth event with it."""
        return {}

    def before_growth(self, run: Run, widths: Widths) -> Mapping[str, Any]:
        """Called before each growth event with the widths to come; returns plain entries for its receipt."""
        return {}

    def after_growth(self, run: Run, event: GrowthEvent) -> Mapping[str, Any]:
        """Called after each growth event, once optimizers and followers have followed; returns receipt entries."""
        return {}

    def before_step(self, run: Run) -> None:
        """Called before each step of the optimizer that holds the network's parameters (the last of several)."""

    def after_step(self, run: Run) -> None:
        """Called after each of those steps."""

    def finish(self, run: Run) -> None:
        """Called when growth has ended."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, in plain containers of tensors and numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; followers have the widths of the run by then."""
