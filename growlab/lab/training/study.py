"""Run the study that the configuration names."""

import shlex
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from growlab.base.errors import UserError
from growlab.base.files import write_json, write_text
from growlab.lab.training.configuration import search_options
from growlab.lab.training.memory import keep_freed
from growlab.lab.training.provenance import git_commit, machine, versions


def run_study(cfg: DictConfig, run_dir: Path) -> None:
    """Call `cfg.study` with the run's folder and seed; beside what it writes there, say where it comes from.

    Args:
        cfg: the composed configuration of `conf/config.yaml`.
        run_dir: the run's folder.

    Raises:
        UserError: `cfg.study` names no function.
    """
    if not isinstance(cfg.study, DictConfig) or "_target_" not in cfg.study:
        raise UserError(f"study={cfg.study} is no study: give it a _target_ and its arguments, or null.")
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    keep_freed()
    torch.manual_seed(cfg.seed)
    given = [*search_options(), *HydraConfig.get().overrides.task]
    provenance = {
        "command": shlex.join(["python", "-m", "growlab", *given]),
        "git_commit": git_commit(),
        "versions": versions(),
        "machine": machine(torch.device("cpu")),
    }
    write_text(run_dir / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    write_json(run_dir / "provenance.json", provenance)
    hydra.utils.instantiate(cfg.study, run_dir=run_dir, seed=cfg.seed, _convert_="all")
