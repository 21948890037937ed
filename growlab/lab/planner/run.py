"""One plan, from configuration to files."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from growlab.base.errors import UserError
from growlab.base.files import CHECKPOINT_FOLDER, write_json, write_text
from growlab.lab.planner.configured import problem_of, settings_of
from growlab.lab.planner.experiments import write_experiments
from growlab.lab.planner.figure import draw
from growlab.lab.planner.problem import Problem
from growlab.lab.planner.report import content, paragraph, table
from growlab.lab.planner.search import Planned, plan
from growlab.lab.training.library_messages import plain_errors, quiet_libraries
from growlab.lab.training.processes import program
from growlab.lab.training.run_folder import held_alone


def run(cfg: DictConfig) -> None:
    """Plan as configured; the plan lies in the run's folder.

    Args:
        cfg: the composed configuration of `conf/config.yaml`, with `plan`.

    Raises:
        UserError: the configuration cannot be probed.
    """
    if HydraConfig.get().mode != RunMode.RUN:
        raise UserError("a plan is of one budget: leave -m out, and plan others one after the other.")
    folder = Path(HydraConfig.get().runtime.output_dir)
    with plain_errors(), quiet_libraries(), contextlib.ExitStack() as ending:
        ending.enter_context(held_alone(folder))
        _check_place(folder)
        settings = settings_of(cfg)
        if cfg.num_threads:
            torch.set_num_threads(cfg.num_threads)
        problem, data = problem_of(cfg)
        ending.callback(data.teardown, "test")
        # Before minutes of probing, if nothing can be written there.
        write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        planned = plan(problem, settings, lambda line: print(line, file=sys.stderr, flush=True))
        print(f"\n{paragraph(planned)}\n", flush=True)
        _write(folder, cfg, data, planned, problem)


def _write(folder: Path, cfg: DictConfig, data: Any, planned: Planned, problem: Problem) -> None:
    candidates = {one.name: one for one in problem.candidates}
    command = write_experiments(folder, cfg, data, planned, candidates)
    write_json(folder / "plan.json", {**content(planned), "command": command})
    write_text(folder / "plan.md", table(planned))
    draw(folder)
    here = command.replace("python -m growlab", program(), 1)
    print(f"plan: {folder}\nrun it with:\n  {here}")


def _check_place(folder: Path) -> None:
    """Refuse a folder that holds a run, whose configuration a plan's would take the place of.

    Raises:
        UserError: it does.
    """
    if any((folder / name).exists() for name in (CHECKPOINT_FOLDER, "metrics.csv", "results.json")):
        raise UserError(f"{folder} holds a run: name another folder for the plan with hydra.run.dir=FOLDER.")
