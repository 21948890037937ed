"""One plan, from configuration to files."""

import contextlib
import sys
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from growlab.errors import UserError
from growlab.files import write_json, write_text
from growlab.plan.configured import problem_of, settings_of
from growlab.plan.experiments import write_experiments
from growlab.plan.figure import draw
from growlab.plan.report import content, paragraph, table
from growlab.plan.search import plan
from growlab.processes import program
from growlab.setting_names import named_as_settings
from growlab.training.library_messages import plain_errors, quiet_libraries
from growlab.training.memory import keep_freed


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
    with named_as_settings(cfg), plain_errors(), quiet_libraries(), contextlib.ExitStack() as ending:
        settings = settings_of(cfg)
        if cfg.num_threads:
            torch.set_num_threads(cfg.num_threads)
        keep_freed()
        problem, data = problem_of(cfg)
        ending.callback(data.teardown, "test")
        planned = plan(problem, settings, lambda line: print(line, file=sys.stderr, flush=True))
    candidates = {one.name: one for one in problem.candidates}
    command = write_experiments(folder, cfg, data, planned, candidates)
    write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    write_json(folder / "plan.json", {**content(planned), "command": command})
    write_text(folder / "plan.md", table(planned))
    draw(folder)
    here = command.replace("python -m growlab", program(), 1)
    print(f"\n{paragraph(planned)}\n\nplan: {folder}\nrun it with:\n  {here}")
