"""Sweeps: skip finished runs, validate a search's selection criterion, print the final table."""

import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override

from growlab.base.errors import UserError
from growlab.base.files import CHECKPOINT_FOLDER, write_text
from growlab.lab.training.processes import is_first

_ACCURACY_AND_COST = ["maximize", "minimize"]
# Launchers of concurrent jobs on this machine, in processes that all see all GPUs.
_CONCURRENT = ("JoblibLauncher", "submitit_launcher.LocalLauncher")


def check_selection(cfg: DictConfig) -> None:
    """Raise UserError if a search would select on training or test data, or by values that runs do not return."""
    job = HydraConfig.get()
    searches = "BasicSweeper" not in str(job.sweeper.get("_target_"))
    if job.mode != RunMode.MULTIRUN or not searches:
        return
    if not _has_validation(cfg):
        raise UserError(
            "a sweeper that selects needs samples that are neither for training nor for testing: set "
            "data.validation=split."
        )
    directions = _directions()
    if directions not in (["maximize"], _ACCURACY_AND_COST):
        raise UserError(
            f"hydra.sweeper.direction={','.join(directions)} does not fit: a run returns its accuracy (maximize) or, "
            "with [maximize,minimize], its accuracy and its cost; metrics where lower is better are negated."
        )


def objective(cfg: DictConfig, run_dir: Path) -> float | tuple[float, float] | None:
    """Return the values that a search selects on; None without validation data or before the run's end.

    They are the task's metric on validation data, negated if lower is better, and for a search in two directions also
    `train_cost_percent`.
    """
    path = run_dir / "results.json"
    if not _has_validation(cfg) or not path.exists():
        return None
    results = json.loads(path.read_text())
    metric = results.get("metric") or {"name": "accuracy", "higher_is_better": True}
    held_out = results.get(f"val_{metric['name']}")
    if held_out is None:
        return None
    value = float(held_out if metric["higher_is_better"] else -held_out)
    return (value, float(results["train_cost_percent"])) if len(_directions()) == 2 else value


def _directions() -> list[str]:
    directions = HydraConfig.get().sweeper.get("direction", "maximize")
    directions = [directions] if isinstance(directions, (str, Enum)) else directions
    return [getattr(direction, "name", str(direction)) for direction in directions]


def _has_validation(cfg: DictConfig) -> bool:
    data = cfg.get("data") or {}
    # Text always has a validation split and no setting for it.
    always = "validation_fraction" in data and "validation" not in data
    return always or data.get("validation") == "split" or bool((data.get("split") or {}).get("validation"))


def has_finished(cfg: DictConfig, run_dir: Path) -> bool:
    """True if a job of a sweep has already finished in this folder."""
    if HydraConfig.get().mode != RunMode.MULTIRUN or not (run_dir / "results.json").exists():
        return False
    if other := _other_settings(cfg, run_dir):
        raise UserError(
            f"{run_dir} has a result with other settings ({other[0]}): choose another hydra.sweep.dir, or remove that "
            "folder."
        )
    return (run_dir / "config.yaml").exists()


def resumes(cfg: DictConfig, run_dir: Path) -> bool:
    """Set up an interrupted job of a sweep to resume from its checkpoint; return False if it starts from scratch.

    A job with other settings or damaged checkpoints starts from scratch.
    """
    checkpoints = any((run_dir / CHECKPOINT_FOLDER).glob("*.ckpt")) and (run_dir / "config.yaml").exists()
    if HydraConfig.get().mode != RunMode.MULTIRUN or cfg.get("ckpt_path") or not checkpoints:
        return False
    from growlab.lab.training.checkpoints import usable_checkpoint

    if other := _other_settings(cfg, run_dir):
        print(f"starting from the beginning: {run_dir} was interrupted with {other[0]}", file=sys.stderr)
        return False
    try:
        checkpoint, message = usable_checkpoint(run_dir)
    except UserError as error:
        print(f"starting from the beginning: {error}", file=sys.stderr)
        return False
    if checkpoint is not None:
        print(message or f"resuming from {checkpoint}")
        cfg.ckpt_path = "last"
    return checkpoint is not None


def _other_settings(cfg: DictConfig, run_dir: Path) -> list[str]:
    from growlab.lab.analysis.identity import other_settings

    config: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return other_settings(config, run_dir)


def gpus_in_turn(cfg: DictConfig) -> list[int] | None:
    """Return the GPUs for a job of a concurrent launcher, as all jobs would otherwise use the first ones; else None.

    Jobs with k of n GPUs get them round robin, by their number in the sweep. With `hydra.launcher.n_jobs` = n / k, they
    do not share GPUs as long as they take equally long.
    """
    job, trainer = HydraConfig.get(), cfg.get("trainer") or {}
    launcher = str(job.launcher.get("_target_"))
    if job.mode != RunMode.MULTIRUN or not launcher.endswith(_CONCURRENT):
        return None
    devices = str(trainer.get("devices", "auto"))
    if trainer.get("accelerator", "auto") not in ("auto", "gpu", "cuda") or not devices.isdigit():
        return None
    import torch

    num_gpus, num_available = int(devices), torch.cuda.device_count()
    if not 0 < num_gpus < num_available:
        return None
    turn = job.job.num % (num_available // num_gpus)
    return list(range(turn * num_gpus, (turn + 1) * num_gpus))


def name_group(cfg: DictConfig) -> None:
    """Group the runs of a sweep in Weights & Biases through its environment variable."""
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        folder = Path(job.sweep.dir)
        # Jobs over several networks or data sets differ in name, but the default folder's parent has the sweep's name.
        name = folder.parent.name if folder.name.startswith("sweep_") else cfg.name
        group = folder.name if folder.name == name else f"{name} {folder.name}"
        os.environ.setdefault("WANDB_RUN_GROUP", group)


class SweepTable(Callback):
    """Prints a table of all runs at the end of a sweep."""

    unfinished: ClassVar[Path | None] = None
    """Folder of the running sweep in this process, until its table is printed."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember the folder, because Hydra calls no hook at the end of a sweep with a failed job."""
        # Needed to resolve interpolations such as the experiment's name before the first job starts.
        HydraConfig.instance().set_config(config)
        SweepTable.unfinished = Path(config.hydra.sweep.dir)
        sweeper = str(config.hydra.sweeper.get("_target_"))
        if "BasicSweeper" not in sweeper:
            # Only Hydra's own sweeper writes this file, which `growlab resume` reads.
            write_text(SweepTable.unfinished / "multirun.yaml", OmegaConf.to_yaml(config))
        if "optuna" in sweeper and config.hydra.sweeper.storage:
            _continue_search(config.hydra.sweeper)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table."""
        conclude()


def _continue_search(sweeper: DictConfig) -> None:
    """Continue an earlier search in the folder: queue its interrupted trials, and count finished ones in `n_trials`."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if sweeper.study_name not in [study.study_name for study in optuna.get_all_study_summaries(sweeper.storage)]:
        return
    study = optuna.load_study(study_name=sweeper.study_name, storage=sweeper.storage)
    state = optuna.trial.TrialState
    for trial in study.get_trials(states=[state.RUNNING]):
        study.tell(trial.number, state=state.FAIL)
        study.enqueue_trial(trial.params)
    done = len(study.get_trials(states=[state.COMPLETE]))
    print(f"continuing the search in {SweepTable.unfinished}: {done} trials are done", file=sys.stderr)
    with flag_override(sweeper, "readonly", False):
        sweeper.n_trials = max(0, sweeper.n_trials - done)


def conclude() -> None:
    """Print the table of the sweep that has ended, if any, even if jobs failed."""
    folder, SweepTable.unfinished = SweepTable.unfinished, None
    if folder is None or not is_first() or not any(folder.rglob("results.json")):
        return
    from growlab.lab.analysis.__main__ import warn
    from growlab.lab.analysis.results import load_runs
    from growlab.lab.analysis.tables import summarise, table

    sys.stdout.write("\n" + table(summarise(load_runs([str(folder)], warn), warn)).shown())
    print(f"everything about these runs: {folder}")
