"""Several runs of one command: what a search may select on, and the table that a sweep ends with."""

import json
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from growlab.errors import UserError


def check_selection(cfg: DictConfig) -> None:
    """Refuse a search that would select on images that are trained or tested on.

    Raises:
        UserError: the sweeper selects, and nothing is held out.
    """
    job = HydraConfig.get()
    searches = "BasicSweeper" not in str(job.sweeper.get("_target_"))
    if job.mode == RunMode.MULTIRUN and searches and not _holds_out(cfg):
        raise UserError(
            "a sweeper that selects needs images that are neither trained on nor tested on: set "
            "data.validation=split."
        )


def objective(cfg: DictConfig, run_dir: Path) -> float | None:
    """What a search may select on: accuracy on images held out from the training set.

    Returns:
        None without `data.validation=split`, or if the run has not come to its end.
    """
    path = run_dir / "results.json"
    if not _holds_out(cfg) or not path.exists():
        return None
    return float(json.loads(path.read_text())["val_accuracy"])


def _holds_out(cfg: DictConfig) -> bool:
    return (cfg.get("data") or {}).get("validation") == "split"


class SweepTable(Callback):
    """Prints one table over all runs of a sweep when the last has ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print it; runs that failed or were stopped have no row."""
        # Imported here: Hydra makes callbacks before it knows whether anything will run.
        from growlab.analysis.results import load_runs
        from growlab.analysis.tables import summarise, write_table
        from growlab.processes import is_first

        folder = Path(config.hydra.sweep.dir)
        if is_first() and any(folder.rglob("results.json")):
            sys.stdout.write("\n" + write_table(summarise(load_runs([str(folder)])), "markdown"))
            print(f"everything about these runs: {folder}")
