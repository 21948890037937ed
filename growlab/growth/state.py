"""Growth state of a network (stage, widths, birth stages, factors), and the record of a growth event."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from growlab.widths import Carry

_NOT_IN_RECEIPT = ("parity_sec", "replaced", "carry", "observed", "notes")


class ParityError(RuntimeError):
    """Raised if a growth event changes the network's outputs by more than its method allows; it is undone."""


@dataclass
class GrowthState:
    """State of a growing network other than its tensors; stored in checkpoints.

    Attributes:
        stage: the current stage.
        widths: width of each group.
        births: birth stage of each channel, by group.
        output_factor: factor on the network's output.
        asked: last boundary at which a demand trigger or a `WidthDecision` was evaluated; -1 for none.
        norm_weights: weights of channels in statistics of normalisations after the last event, by group, where they are
            not all 1: see `weighted_norms`.
        norm_progress: progress of annealing these weights to 1, from 0 to 1; set by `anneal_norms`.
        blocks: birth stage of each inserted block, by name.
        multipliers: factors by which the forward multiplies the rows of a weight, by its name, where they are not all
            1: see `growlab.growth.multipliers`.
        unscheduled: number of stages so far that a part or a loop requested instead of the trigger.
        tokens: birth stage of each token, if the vocabulary was resized.
        constants: untrained tensors along growing channels, at full width, by name: see `growlab.growth.constants`.
    """

    stage: int
    widths: dict[str, int]
    births: dict[str, list[int]]
    output_factor: float = 1.0
    asked: int = -1
    norm_weights: dict[str, list[float]] = field(default_factory=dict)
    norm_progress: float = 0.0
    blocks: dict[str, int] = field(default_factory=dict)
    multipliers: dict[str, list[float]] = field(default_factory=dict)
    unscheduled: int = 0
    tokens: list[int] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def scheduled_stage(self) -> int:
        """Stage as triggers count it: without the `unscheduled` ones."""
        return self.stage - self.unscheduled

    def as_dict(self) -> dict[str, Any]:
        """Return the state as plain containers, for a checkpoint; its tensors are not copied."""
        return {name: _copied(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "GrowthState":
        """Restore a state from the result of `as_dict`."""
        return cls(**{each.name: _copied(content[each.name]) for each in fields(cls) if each.name in content})


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return list(value) if isinstance(value, list) else value


@dataclass
class GrowthEvent:
    """Record of a growth event, with its parity receipt.

    Attributes:
        stage: the stage that began.
        method: name of the growth method.
        widths_before: width of each group before the event.
        widths_after: width of each group after it.
        num_params_before: number of parameters before the event.
        num_params: number of parameters after it.
        parity_error_eval: relative output error on the probe batch in eval mode, before noise.
        parity_error_train: the same in train mode, with batch normalisation's eps rescaled with its input.
        parity_tolerance_eval: error that the method allows in eval mode; None if it promises nothing, or if rounding
            alone changes these outputs by as much as they are.
        parity_tolerance_train: the same in train mode.
        eps_error_train: relative output error in train mode with eps unchanged; not checked.
        noise_error_eval: relative change of the output by symmetry-breaking noise.
        output_factor: factor by which this event multiplied `GrowthState.output_factor`.
        weighted_norms: modules whose statistics over channels are weighted until `anneal_norms` has annealed the
            weights to 1.
        report: further details that the method reports.
        seconds: wall time of the event, checks included.
        parity_sec: part of `seconds` spent on checks (not in `as_dict`).
        replaced: old and new tensors by name, as returned by `grow` and for parts; later empty (not in `as_dict`).
        carry: map from gradients before to gradients after, for optimizer state (not in `as_dict`).
        observed: result of the method's `observe` before the event (not in `as_dict`).
        epoch: epoch of the training.
        step: optimizer steps done.
        cost: cost so far, in the unit of `Grower.step`.
        seconds_by_part: wall time of each phase of the event.
        notes: further entries of triggers, parts and loops, by name.
    """

    stage: int
    method: str
    widths_before: dict[str, int]
    widths_after: dict[str, int]
    num_params_before: int
    num_params: int
    parity_error_eval: float
    parity_error_train: float
    parity_tolerance_eval: float | None
    parity_tolerance_train: float | None
    eps_error_train: float = 0.0
    noise_error_eval: float = 0.0
    output_factor: float = 1.0
    weighted_norms: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    parity_sec: float = field(default=0.0, compare=False)
    replaced: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)
    carry: Carry = field(default_factory=Carry, repr=False, compare=False)
    observed: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    epoch: int = 0
    step: int = 0
    cost: float = 0.0
    seconds_by_part: dict[str, float] = field(default_factory=dict, compare=False)
    notes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        before, after = (sorted(each.values()) or [0] for each in (self.widths_before, self.widths_after))
        return (
            f"growth to stage {self.stage}: widths {before[0]}..{before[-1]} -> {after[0]}..{after[-1]}, parameters "
            f"{self.num_params_before:,} -> {self.num_params:,}, relative output error {self.parity_error_eval:.0e}"
        )

    def __getitem__(self, name: str) -> Any:
        """Entry of `as_dict`, notes included, by its name."""
        return self.as_dict()[name]

    def as_dict(self) -> dict[str, Any]:
        """Return everything except tensors and `parity_sec`, in plain containers, merged with the notes."""
        own = {name: value for name, value in vars(self).items() if name not in _NOT_IN_RECEIPT}
        return {**own, **self.notes}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "GrowthEvent":
        """Restore an event from the result of `as_dict`."""
        names = {each.name for each in fields(cls)}
        own = {name: value for name, value in content.items() if name in names}
        return cls(**own, notes={name: value for name, value in content.items() if name not in names})


class OutputScale:
    """Forward hook that multiplies a module's output by `GrowthState.output_factor`."""

    def __init__(self, state: GrowthState) -> None:
        self.state = state

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Multiply the output, unless the factor is 1."""
        factor = self.state.output_factor
        return output if factor == 1.0 else output * factor
