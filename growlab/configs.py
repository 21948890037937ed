"""Structured configs: keys and types that Hydra checks before anything runs.

One dataclass for each choice of `growth` and `lr_adapt`, one for the schedule and one for what stands at the top
level. Defaults live in `conf/`; here a value that must come from there is MISSING.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class FixedSizeConfig:
    """growth=none."""

    _target_: str = "growlab.growth.FixedSize"
    width_multiple: float = MISSING


@dataclass
class RandomConfig:
    """growth=random."""

    _target_: str = "growlab.growth.RandomGrowth"
    noise_std: float = MISSING
    gain: float = MISSING


@dataclass
class PairsConfig:
    """growth=pairs."""

    _target_: str = "growlab.growth.PairGrowth"
    noise_std: float = MISSING
    gain: float = MISSING


@dataclass
class Net2NetConfig:
    """growth=net2net."""

    _target_: str = "growlab.growth.Net2Net"
    noise_std: float = MISSING
    gain: float = MISSING


@dataclass
class OursConfig:
    """growth=ours."""

    _target_: str = "growlab.growth.VarianceTransfer"
    rule: str = MISSING
    output_multiplier: bool = MISSING
    noise_std: float = MISSING
    gain: float = MISSING


@dataclass
class RateAdaptationConfig:
    """lr_adapt: the rule and what goes with it."""

    _target_: str = "growlab.training.RateAdaptation"
    rule: Any = None
    output_fan_in: bool = MISSING


@dataclass
class LearningRateConfig:
    """schedule.learning_rate."""

    _target_: str = "growlab.training.LearningRate"
    shape: str = MISSING
    warmup_epochs: float = MISSING
    restarts: str = MISSING
    batch_rule: str = MISSING


@dataclass
class ScheduleConfig:
    """schedule: stages, widths, batch sizes and the learning rate."""

    total_epochs: int = MISSING
    num_stages: int = MISSING
    initial_epochs: float | None = MISSING
    initial_fraction: float = MISSING
    epoch_growth_rate: float = MISSING
    initial_width: float = MISSING
    width_growth_rate: float | None = MISSING
    batch_growth_rate: float = MISSING
    max_batch_size: int | None = MISSING
    epochs: list[int] | None = MISSING
    widths: list[float] | None = MISSING
    batch_sizes: list[int] | None = MISSING
    equal_flops: bool = MISSING
    learning_rate: LearningRateConfig = field(default_factory=LearningRateConfig)


def register() -> None:
    """Put the schemas into Hydra's store, under the groups that the files of `conf/` name."""
    store = ConfigStore.instance()
    for name, node in {
        "none": FixedSizeConfig,
        "random": RandomConfig,
        "pairs": PairsConfig,
        "net2net": Net2NetConfig,
        "ours": OursConfig,
    }.items():
        store.store(group="schema/growth", name=name, node=node)
    store.store(group="schema", name="lr_adapt", node=RateAdaptationConfig)
    store.store(group="schema", name="schedule", node=ScheduleConfig)
