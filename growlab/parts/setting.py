"""Growth in computation without new weights: a setting of modules with a value for each stage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import nn

from growlab.base import ranks
from growlab.base.errors import UserError, first_line
from growlab.grower.part import Part, check_fraction_known, value_at
from growlab.grower.triggers import GrowingNetwork, Trigger
from growlab.grower.triggers.at import Never
from growlab.growth import GrowthEvent
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.widths import WidthGraph


class Setting(Part):
    """Sets an attribute of modules, or of a model's `config`, to a value for each stage, in training and evaluation.

    For settings that change computation but no weights: the window of attention, the number of times that a shared
    block is applied, the number of active experts per token. The last value must be the network's own. FLOPs are
    counted at each value; kernels that mask positions outside of a window cost the same with any window.

    Outputs change with the value. The event's receipt has the new value under the part's name, and the largest change
    of an output on the probe batch, relative to the largest output, under `NAME_output_change`.

    Args:
        names: path of an attribute, in which `*` matches any characters, such as "layers.*.attention.window", or
            "*.sliding_window" for all attributes of that name, including those of a `config`, which models of
            transformers read; or a list of paths, all of which get the value.
        values: one per stage if there are as many as stages, else reached evenly as growth proceeds.
        name: key of the part's state; must be unique among the settings of a network.

    Raises:
        UserError: `values` is not a list of at least two.
    """

    grows = True
    shards = True
    saved: ClassVar[Mapping[str, str]] = {"value": "value"}

    def __init__(self, names: str | Sequence[str], values: Sequence[Any], name: str = "setting") -> None:
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) < 2:
            raise UserError(f"values must be a list of one value a stage, such as [1,2], not {values!r}.")
        self._names = [names] if isinstance(names, str) else list(names)
        self._values, self.name = tuple(values), name
        self.value = self._values[-1]
        self._network: nn.Module | None = None
        self._copies: Callable[[], Mapping[str, nn.Module]] = dict

    def applies(self, trigger: Trigger) -> bool:
        """Return True if the network grows: others keep their own value."""
        return not isinstance(trigger, Never)

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]) -> WidthGraph:
        """Find the attributes, and run the network at every value.

        Raises:
            UserError: a name matches nothing, the network's own value is not the last one, or it fails at a value.
        """
        for pattern in self._names:
            originals = [getattr(holder, attribute) for holder, attribute in _holders(network, pattern)]
            if not originals:
                raise UserError(f"names={pattern!r} is no attribute of a module or of its config in this network.")
            if any(original != self._values[-1] for original in originals):
                raise UserError(
                    f"values={list(self._values)} must end with the network's own {pattern}, {originals[0]!r}: it "
                    "would end as another network."
                )
        for value in self._values:
            self._set(network, value)
            try:
                evaluate(network, example)
            except Exception as error:
                self._set(network, self._values[-1])
                reason = first_line(error).rstrip(".")
                raise UserError(f"the network does not run with {self._names[0]}={value!r} ({reason}).") from error
        return graph

    def shrink_to(self, network: nn.Module, graph: WidthGraph, fraction_grown: float) -> WidthGraph:
        """Set the value for a fraction of growth."""
        self._set(network, value_at(self._values, fraction_grown))
        return graph

    def check(self, grower: GrowingNetwork) -> None:
        """Check that the trigger knows the fraction of growth."""
        check_fraction_known(grower, "settings with a value for each stage")

    def begin(self, grower: GrowingNetwork) -> None:
        """Start at the seed's value."""
        self._network, self._copies = grower.network, grower.copies
        self._advance(grower.trigger.fraction_grown(0, grower.seed_widths))

    def after_growth(self, grower: GrowingNetwork, event: GrowthEvent) -> Mapping[str, Any]:
        """Set the new stage's value."""
        before = evaluate(grower.network, grower.probe())
        self._advance(grower.trigger.fraction_grown(grower.state.scheduled_stage, event.widths_after))
        change = relative_error(before, evaluate(grower.network, grower.probe()))
        return {self.name: self.value, f"{self.name}_output_change": ranks.agreed([change])[0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the current value."""
        super().load_state_dict(state)
        self._set_all()

    def _advance(self, fraction_grown: float | None) -> None:
        if fraction_grown is not None:
            self.value = value_at(self._values, fraction_grown)
        self._set_all()

    def _set_all(self) -> None:
        for network in (self._network, *self._copies().values()):
            if network is not None:
                self._set(network, self.value)

    def _set(self, network: nn.Module, value: Any) -> None:
        for pattern in self._names:
            for holder, attribute in _holders(network, pattern):
                setattr(holder, attribute, value)


def _holders(network: nn.Module, pattern: str) -> Iterator[tuple[Any, str]]:
    """Modules, and configs of modules, with the attribute that a pattern names."""
    path, _, attribute = pattern.rpartition(".")
    for name, module in network.named_modules():
        config_name = f"{name}.config".removeprefix(".")
        for holder_name, holder in ((name, module), (config_name, getattr(module, "config", None))):
            if fnmatchcase(holder_name, path) and hasattr(holder, attribute):
                yield holder, attribute
