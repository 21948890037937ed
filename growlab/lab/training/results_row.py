"""What came out of a run: the row that tables are made of."""

import shlex
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from growlab.lab.analysis.identity import row_settings
from growlab.lab.training import RunRecorder, Task
from growlab.lab.training.configuration import search_options
from growlab.lab.training.plan import Plan
from growlab.lab.training.provenance import git_commit, machine, versions
from growlab.lab.training.resuming import LAST


def results_row(
    cfg: DictConfig, plan: Plan, task: Task, recorder: RunRecorder, world_size: int, num_nodes: int
) -> dict[str, Any]:
    """The content of `results.json`.

    Args:
        cfg: the run's configuration.
        plan: the run as it was carried out.
        task: tested.
        recorder: of every epoch.
        world_size: processes.
        num_nodes: machines.
    """
    grower = task.grower
    config = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    choices, overrides = HydraConfig.get().runtime.choices, list(HydraConfig.get().overrides.task)
    # A run that was interrupted is the same as one that was not.
    whole = [one for one in overrides if one != LAST]
    stages = recorder.stages(plan, grower.events)
    errors = [event[f"parity_error_{mode}"] for event in grower.events for mode in ("eval", "train")]
    last = recorder.rows[-1]
    return {
        "experiment": cfg.name,
        **{key: choices[key] for key in ("model", "data", "growth", "lr_adapt", "optimizer")},
        "seed": cfg.seed,
        "epochs": plan.schedule.total_epochs,
        "reference_epochs": plan.reference_epochs,
        "precision": str(cfg.trainer.precision),
        "world_size": world_size,
        "num_nodes": num_nodes,
        "batch_size": plan.schedule.batch_sizes[-1],
        "batch_fit": task.batch_fit,
        # What runs are compared by.
        "metric": dict(
            zip(
                ("name", "higher_is_better"),
                getattr(task.objective, "compared_by", ("accuracy", True)),
                strict=True,
            )
        ),
        **task.metrics("test"),
        **{key: value for name in grower.copies() for key, value in task.metrics(f"test_{name}").items()},
        **{
            f"{split}_{name}": last.get(f"{split}_{name}")
            for split in ("train", "val")
            for name in (
                *task.objective.metric_names,
                *(task.objective.evaluated_names if split == "val" else ()),
            )
        },
        "train_cost_percent": plan.train_cost_percent,
        "train_flops": plan.train_flops,
        "seconds": sum(stage["seconds"] for stage in stages),
        "parity_max_error": max((error for error in errors if error is not None), default=None),
        "memory_measure": recorder.memory_measure,
        "stages": stages,
        "schedule": config["schedule"],
        "settings": row_settings(config, *(choices[key] for key in ("data", "optimizer", "growth"))),
        "overrides": overrides,
        "command": shlex.join(["python", "-m", "growlab", *search_options(), *whole]),
        "git_commit": git_commit(),
        "versions": versions(),
        "machine": machine(task.device),
    }
