"""Structured configs: keys and types that Hydra checks before anything runs.

One dataclass for each choice of `growth` and `lr_adapt`, one for the schedule and one for what stands at the top
level. Defaults live in `conf/`; here a value that must come from there is MISSING.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import MISSING, OmegaConf

from growlab import naming

# On import: a process that a sweep's launcher starts imports this for the schemas, and then resolves its folder's name.
naming.register()

# Members are strings: classes take them as the plain words that they are.
Rule = StrEnum("Rule", ["ratio", "constraint"])
FullWidth = StrEnum("FullWidth", ["constructor", "standard", "mup"])
NewWeights = StrEnum("NewWeights", ["fan_in", "hyperfan_in", "hyperfan_out"])
Sharing = StrEnum("Sharing", ["layer", "chunk"])
Embedding = StrEnum("Embedding", ["fixed", "trained"])
Distribution = StrEnum("Distribution", ["uniform", "normal"])
GrowthMode = StrEnum("GrowthMode", ["scaffold", "scheduled"])
Importance = StrEnum("Importance", ["singular_value", "gradient"])
Columns = StrEnum("Columns", ["orthogonal", "zero", "copy", "random"])
Correction = StrEnum("Correction", ["bias", "batch", "none"])
ZeroSide = StrEnum("ZeroSide", ["auto", "fan_in", "fan_out"])
Fallback = StrEnum("Fallback", ["pairs"])
Shape = StrEnum("Shape", ["cosine", "constant", "steps", "inverse_sqrt"])
Restarts = StrEnum("Restarts", ["none", "stage"])
BatchRule = StrEnum("BatchRule", ["none", "linear", "sqrt"])
BatchSizeOf = StrEnum("BatchSizeOf", ["last", "first"])
Anneal = StrEnum("Anneal", ["stage", "run"])
BlockStart = StrEnum("BlockStart", ["zero", "identity", "stack"])
BatchSize = StrEnum("BatchSize", ["auto"])
OptimizerState = StrEnum("OptimizerState", ["auto", "inherit", "reset", "zero_new"])


@dataclass
class FixedSizeConfig:
    """growth=none."""

    _target_: str = "growlab.growth.FixedSize"
    width_multiple: float = MISSING
    initialisation: FullWidth = MISSING
    gain: float = MISSING


@dataclass
class DrawnConfig:
    """What every method that draws new weights has; the file in `conf/growth` names the class."""

    _target_: str = MISSING
    noise_std: float = MISSING
    gain: float = MISSING
    new_weights: NewWeights = MISSING


@dataclass
class GradMaxConfig:
    """growth=gradmax."""

    _target_: str = "growlab.growth.GradMax"
    batches: int = MISSING
    zero: ZeroSide = MISSING
    scale: float = MISSING
    steps: int = MISSING
    rate: float = MISSING
    fallback: Fallback | None = MISSING
    gain: float = MISSING
    new_weights: NewWeights = MISSING


@dataclass
class TinyConfig:
    """growth=tiny."""

    _target_: str = "growlab.growth.Tiny"
    batches: int = MISSING
    update_old: bool = MISSING
    amplitudes: list[float] = MISSING
    fallback: Fallback | None = MISSING
    gain: float = MISSING
    new_weights: NewWeights = MISSING


@dataclass
class SplittingConfig:
    """growth=splitting."""

    _target_: str = "growlab.growth.Splitting"
    batches: int = MISSING
    iterations: int | None = MISSING
    epsilon: float = MISSING
    softplus_beta: float = MISSING
    fallback: Fallback | None = MISSING
    gain: float = MISSING
    new_weights: NewWeights = MISSING


@dataclass
class FireFlyConfig:
    """growth=firefly and growth=firefly_split."""

    _target_: str = "growlab.growth.FireFly"
    batches: int = MISSING
    new_candidates: float = MISSING
    steps: int = MISSING
    rate: float = MISSING
    epsilon: float = MISSING
    fallback: Fallback | None = MISSING
    gain: float = MISSING
    new_weights: NewWeights = MISSING


@dataclass
class OursConfig:
    """growth=ours."""

    _target_: str = "growlab.growth.VarianceTransfer"
    rule: Rule = MISSING
    output_multiplier: bool = MISSING
    layer_multipliers: bool = MISSING
    rescale_unnormalised: bool = MISSING
    literal: bool = MISSING
    noise_std: float = MISSING
    gain: float = MISSING
    new_weights: NewWeights = MISSING


@dataclass
class HyperfanConfig:
    """growth=hyperfan."""

    _target_: str = "growlab.hypernets.Hyperfan"
    new_weights: NewWeights = MISSING
    sharing: Sharing = MISSING
    embedding_features: int = MISSING
    hidden_features: list[int] = MISSING
    embedding: Embedding = MISSING
    distribution: Distribution = MISSING
    chunk_channels: int = MISSING
    output_multiplier: bool = MISSING
    rescale_unnormalised: bool = MISSING
    noise_std: float = MISSING
    gain: float = MISSING


@dataclass
class RateAdaptationConfig:
    """lr_adapt: the rule and what goes with it."""

    _target_: str = "growlab.training.RateAdaptation"
    rule: Any = None
    output_fan_in: bool = MISSING
    optimizers: list[str] = field(default_factory=list)


@dataclass
class LearningRateConfig:
    """schedule.learning_rate."""

    _target_: str = "growlab.training.LearningRate"
    shape: Shape = MISSING
    warmup_epochs: float = MISSING
    warmup_steps: int | None = MISSING
    restarts: Restarts = MISSING
    batch_rule: BatchRule = MISSING
    milestones: list[float] = MISSING
    decay: float = MISSING
    batch_size: int | None = MISSING


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
    batch_size: BatchSize | None = MISSING
    max_memory_gib_per_device: float | None = MISSING
    batch_growth_rate: float = MISSING
    max_batch_size: int | None = MISSING
    max_batch_size_per_device: int | None = MISSING
    batch_size_of: BatchSizeOf = MISSING
    epochs: list[int] | None = MISSING
    widths: list[float] | None = MISSING
    batch_sizes: list[int] | None = MISSING
    equal_flops: bool = MISSING
    demand: Any = MISSING
    learning_rate: LearningRateConfig = field(default_factory=LearningRateConfig)


@dataclass
class CheckpointConfig:
    """checkpoint: when a run saves itself."""

    _target_: str = "growlab.training.SavePolicy"
    every_n_steps: int | None = MISSING
    every_minutes: float | None = MISSING
    signals: list[str] = MISSING


@dataclass
class AverageConfig:
    """ema: an average of the weights."""

    decay: float | None = MISSING


@dataclass
class OrthogonalConfig:
    """osgd: dynamic orthogonalised SGD."""

    anneal: Anneal | None = MISSING


@dataclass
class DepthConfig:
    """depth: blocks that come in while the network trains."""

    blocks: Any = MISSING
    start: BlockStart = MISSING


@dataclass
class MainConfig:
    """The top level: the groups, and values that belong to none."""

    model: Any = MISSING
    data: Any = MISSING
    growth: Any = MISSING
    lr_adapt: Any = MISSING
    optimizer: Any = MISSING
    objective: Any = MISSING
    schedule: Any = MISSING
    trainer: Any = MISSING
    logger: Any = MISSING
    checkpoint: CheckpointConfig = MISSING
    ema: AverageConfig = MISSING
    osgd: OrthogonalConfig = MISSING
    depth: DepthConfig = MISSING
    study: Any = MISSING
    name: str = MISSING
    seed: int = MISSING
    ckpt_path: str | None = MISSING
    compile: bool = MISSING
    num_threads: int | None = MISSING
    opaque: list[str] = MISSING
    optimizer_state: OptimizerState = MISSING
    gain: float = MISSING
    probe_size: int = MISSING
    norm_anneal: float = MISSING
    check_ranks: bool = MISSING
    log_rates_every_n_steps: int = MISSING
    log_layers_every_n_steps: int | None = MISSING


@dataclass
class IsotropicConfig:
    """growth=isotropic."""

    _target_: str = "growlab.growth.Isotropic"
    mode: GrowthMode = MISSING
    every_n_epochs: int = MISSING
    every_n_steps: int | None = MISSING
    first: int | None = MISSING
    last: int | None = MISSING
    scaffold: int = MISSING
    threshold: float = MISSING
    relative: bool = MISSING
    target_width: int | None = MISSING
    neurons_per_event: int | None = MISSING
    min_width: int = MISSING
    max_width: int | None = MISSING
    importance: Importance = MISSING
    columns: Columns = MISSING
    bias: float = MISSING
    correction: Correction = MISSING
    least_squares: bool = MISSING
    rotate: bool = MISSING
    max_pruning_error: float | None = MISSING


# What growlab wants of plugins that run the jobs of a sweep side by side or search, where they are installed. Files in
# `conf/` cannot say it: Hydra takes a file of a plugin's name in place of the plugin's own configuration.
_PLUGINS: dict[str, dict[str, Any]] = {
    # Jobs are long: a few at a time, and each goes to the next process that is free.
    "hydra/launcher/joblib": {"n_jobs": 2, "batch_size": "1", "pre_dispatch": "all"},
    # Not an hour. One task, whatever the number of devices: growlab starts the other processes itself.
    "hydra/launcher/submitit_local": {"timeout_min": 7 * 24 * 60, "name": "${name}"},
    "hydra/launcher/submitit_slurm": {"timeout_min": 24 * 60, "name": "${name}", "gpus_per_node": 1},
    # The objective is an accuracy; [maximize,minimize] for accuracy and cost.
    "hydra/sweeper/optuna": {"direction": "maximize", "n_jobs": 1},
}


def register() -> None:
    """Put the schemas into Hydra's store, under the names that the files of `conf/` use.

    They stand below `hydra/`, whose groups `growlab --help` does not list: nobody chooses among them.
    """
    store = ConfigStore.instance()
    for name, node in {
        "none": FixedSizeConfig,
        "random": DrawnConfig,
        "pairs": DrawnConfig,
        "net2net": DrawnConfig,
        "ours": OursConfig,
        "gradmax": GradMaxConfig,
        "tiny": TinyConfig,
        "splitting": SplittingConfig,
        "firefly": FireFlyConfig,
        "hyperfan": HyperfanConfig,
        "isotropic": IsotropicConfig,
    }.items():
        store.store(group="hydra/schema/growth", name=name, node=node)
    store.store(group="hydra/schema", name="lr_adapt", node=RateAdaptationConfig)
    store.store(group="hydra/schema", name="schedule", node=ScheduleConfig)
    store.store(group="hydra/schema", name="main", node=MainConfig)
    # Plugins store their configurations when Hydra looks for them first, and their word would be the last.
    Plugins.instance()
    for path, values in _PLUGINS.items():
        group, _, name = path.rpartition("/")
        if f"{name}.yaml" in store.list(group):
            known = store.load(f"{path}.yaml")
            node = OmegaConf.merge(known.node, values)
            store.store(group=group, name=name, node=node, package=known.package, provider=known.provider)
