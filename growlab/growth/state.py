"""State of a growing network beside its tensors, and the receipt of a growth event."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from growlab.widths import Carry

_NOT_IN_RECEIPT = ("parity_sec", "replaced", "carry", "observed")


class ParityError(RuntimeError):
    """A growth event changed what the network computes by more than its method allows; it was undone."""


@dataclass
class GrowthState:
    """What of a growing network its tensors do not tell.

    Attributes:
        stage: the stage it is in.
        widths: width of each group.
        births: for each group, the stage that each channel came with.
        output_factor: what the network's output has to be multiplied by.
        asked: the last boundary at which a trigger asked a demand, or a method that decides widths; -1 for none.
        norm_weights: weights of channels in the statistics of normalisations, as the last event left them, of groups
            where they are not all 1: see `weighted_norms`.
        norm_progress: how far they have gone from there to 1; `anneal_norms` moves it.
        blocks: the stage that each block came with which was left out at first.
        multipliers: what the forward multiplies the rows of weights by, by the weight's name, where they are not all 1:
            see `growlab.growth.multipliers`.
        unscheduled: stages so far that began because a part asked for them, and not the trigger.
        constants: what stands beside growing channels and training leaves as it is, at full width, by name: see
            `growlab.growth.constants`.
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
    constants: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def scheduled_stage(self) -> int:
        """The stage as triggers count it."""
        return self.stage - self.unscheduled

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, for a checkpoint."""
        return {
            "stage": self.stage,
            "widths": dict(self.widths),
            "births": {group: list(births) for group, births in self.births.items()},
            "output_factor": self.output_factor,
            "asked": self.asked,
            "norm_weights": {group: list(weights) for group, weights in self.norm_weights.items()},
            "norm_progress": self.norm_progress,
            "blocks": dict(self.blocks),
            "multipliers": {name: list(rows) for name, rows in self.multipliers.items()},
            "unscheduled": self.unscheduled,
            "constants": dict(self.constants),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "GrowthState":
        """Read what `as_dict` wrote."""
        return cls(
            int(content["stage"]),
            dict(content["widths"]),
            {group: list(births) for group, births in content["births"].items()},
            float(content["output_factor"]),
            int(content["asked"]),
            {group: list(weights) for group, weights in content["norm_weights"].items()},
            float(content["norm_progress"]),
            dict(content.get("blocks", {})),
            {name: list(rows) for name, rows in content.get("multipliers", {}).items()},
            int(content.get("unscheduled", 0)),
            dict(content.get("constants", {})),
        )


@dataclass(frozen=True)
class GrowthEvent:
    """What happened, with its parity receipt.

    Attributes:
        stage: the stage that began.
        method: name of the growth method.
        widths_before: width of each group before the event.
        widths_after: and after it.
        num_params_before: number of parameters before the event.
        num_params: and after it.
        parity_error_eval: relative output error on the probe batch in eval mode, before noise.
        parity_error_train: and in train mode, with batch normalisation's eps rescaled as its input was.
        parity_tolerance_eval: error that the method allows in eval mode; None if it promises nothing.
        parity_tolerance_train: and in train mode.
        eps_error_train: relative output error in train mode with eps as it is, which is not checked.
        noise_error_eval: relative change of the output that symmetry-breaking noise then made.
        output_factor: what this event multiplied the output's multiplier by.
        weighted_norms: modules whose statistics over channels are weighted until `anneal_norms` has brought the
            weights to 1.
        report: what else the method has to say.
        seconds: wall time of the event, checks included.
        parity_sec: of that, the checks (not part of the receipt).
        replaced: old and new tensor by name (not part of the receipt).
        carry: how gradients follow, for optimizer state (not part of the receipt).
        observed: what the method saw of the network before the event (not part of the receipt).
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
    eps_error_train: float
    noise_error_eval: float
    output_factor: float
    weighted_norms: list[str]
    report: dict[str, Any]
    seconds: float
    parity_sec: float = field(compare=False)
    replaced: dict[str, tuple[Tensor, Tensor]] = field(repr=False, compare=False)
    carry: Carry = field(repr=False, compare=False)
    observed: Mapping[str, Any] = field(repr=False, compare=False)

    def receipt(self) -> dict[str, Any]:
        """Everything but the tensors, in plain containers."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_IN_RECEIPT}
