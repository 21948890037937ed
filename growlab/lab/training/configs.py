"""Structured configs: keys and types that Hydra checks before anything runs.

Those of classes come from their signatures (`growlab.lab.training.signatures`): one for each file of `conf/growth`, by
its name, and one each for `lr_adapt`, `schedule` and `checkpoint`. Defaults live in `conf/`; here a value that must
come from there is MISSING.
"""

import re
from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import MISSING, OmegaConf

from growlab.lab.training import naming
from growlab.lab.training.signatures import schema

# On import: a process that a sweep's launcher starts imports this for the schemas, and then resolves its folder's name.
naming.register()

BatchSize = StrEnum("BatchSize", ["auto"])
OptimizerState = StrEnum("OptimizerState", ["auto", "inherit", "reset", "zero_new"])


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
    callbacks: Any = MISSING
    checkpoint: schema("growlab.lab.training.SavePolicy") = MISSING  # type: ignore[valid-type]
    parts: Any = MISSING
    study: Any = MISSING
    plan: Any = MISSING
    name: str = MISSING
    seed: int = MISSING
    ckpt_path: str | None = MISSING
    start_from: str | None = MISSING
    compile: bool = MISSING
    num_threads: int | None = MISSING
    opaque: list[str] = MISSING
    optimizer_state: OptimizerState = MISSING
    gain: float = MISSING
    probe_size: int | None = MISSING
    norm_anneal: float = MISSING
    statistics_images: int = MISSING
    check_ranks: bool = MISSING
    log_rates_every_n_steps: int = MISSING
    log_layers_every_n_steps: int | None = MISSING


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


def _schedule() -> type:
    """The arguments of `make_schedule` and the other settings of `schedule`."""
    return schema(
        "growlab.growth.make_schedule",
        leave_out=("batch_size", "num_processes"),
        batch_size=Optional[BatchSize],  # noqa: UP045 - the type is a value here
        max_memory_gib_per_device=Optional[float],  # noqa: UP045
        equal_flops=bool,
        budget=Optional[float],  # noqa: UP045
        demand=Any,
        learning_rate=schema("growlab.lab.training.LearningRate"),
    )


def _main(conf: Path) -> type:
    """The top level, with the settings of each file of `conf/parts` under the file's name; null leaves a part out."""
    parts: list[Any] = []
    for path in sorted((conf / "parts").glob("*.yaml")):
        target = re.search(r"_target_: (growlab\.[\w.]+)", path.read_text())
        if target:
            # Of a part whose node stands at the top level as a whole, with its `_target_`.
            whole = f"{path.stem}: ${{{path.stem}}}" in path.read_text()
            settings = [one for one in fields(schema(target[1])) if whole or one.name != "_target_"]
            own = [(one.name, Optional[one.type], field(default=MISSING)) for one in settings]  # noqa: UP045
            parts.append((path.stem, make_dataclass(path.stem, own), field(default=MISSING)))
    return make_dataclass("Main", parts, bases=(MainConfig,))


def register(conf: Path) -> None:
    """Put the schemas into Hydra's store, under the names that the files of `conf/` use.

    They stand below `hydra/`, whose groups `growlab --help` does not list: nobody chooses among them.

    Args:
        conf: the folder of configurations.
    """
    store = ConfigStore.instance()
    for path in sorted((conf / "growth").glob("*.yaml")):
        target = re.search(r"^_target_: (growlab\.\S+)$", path.read_text(), re.MULTILINE)
        if target:
            store.store(group="hydra/schema/growth", name=path.stem, node=schema(target[1]))
    store.store(group="hydra/schema", name="lr_adapt", node=schema("growlab.lab.training.RateAdaptation"))
    store.store(group="hydra/schema", name="schedule", node=_schedule())
    store.store(group="hydra/schema", name="main", node=_main(conf))
    # Plugins store their configurations when Hydra looks for them first, and their word would be the last.
    Plugins.instance()
    for path, values in _PLUGINS.items():
        group, _, name = path.rpartition("/")
        if f"{name}.yaml" in store.list(group):
            known = store.load(f"{path}.yaml")
            node = OmegaConf.merge(known.node, values)
            store.store(group=group, name=name, node=node, package=known.package, provider=known.provider)
