"""What to try after a run: three commands that can be copied."""

import re
import shlex
import shutil

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from growlab.lab.training.configuration import config_dir, search_options
from growlab.lab.training.processes import program

# Overrides that the command which compares has its own of, or that belong to one run.
_OWN = ("method=", "growth", "lr_adapt", "seed=", "ckpt_path=", "start_from=", "hydra.")
_ONE_RUN = ("seed=", "ckpt_path=", "hydra.")
_SCHEDULES = ("exponential", "linear")
# Longer commands are no measure for where the remarks stand.
_ALIGNED = 60
_NO_END = 10**6


def next_commands(cfg: DictConfig) -> str:
    """The commands, with what was chosen on the run's command line.

    Args:
        cfg: of the run that has ended.
    """
    compared, does = _comparison(cfg)
    commands = {
        compared: does,
        "table runs": "a table of all runs so far",
        "widths torchvision/resnet18": "what of a network can grow; yours: package.module:factory",
    }
    start = program()
    longest = max(len(command) for command in commands if len(command) <= _ALIGNED)
    lines = [f"  {start} {command:<{longest}}  # {does}" for command, does in commands.items()]
    # Not a terminal: as long as they are.
    if max(map(len, lines)) > shutil.get_terminal_size((_NO_END, 24)).columns:
        lines = [f"  # {does}\n  {start} {command}" for command, does in commands.items()]
    return "\n".join(["next:", *lines])


def _comparison(cfg: DictConfig) -> tuple[str, str]:
    """The run beside the full network stopped at its cost, where the two can be compared; else other seeds."""
    job = HydraConfig.get()
    growth, schedule = (job.runtime.choices.get(group) for group in ("growth", "schedule"))
    given, where = list(job.overrides.task), search_options()
    kept = [override for override in given if not override.startswith(_OWN)]
    by_schedule = schedule in _SCHEDULES and cfg.schedule.budget is None
    # Beside a part that was asked for, a run stopped at equal cost is not the comparison.
    parts = {"parts", *(path.stem for path in (config_dir() / "parts").glob("*.yaml"))}
    has_part = any(re.split(r"[.=]", override.lstrip("+"))[0] in parts for override in given)
    if growth == "ours" and by_schedule and not has_part:
        sweep = shlex.join([*where, *kept, "method=ours,equal_flops", "seed=0,1"])
        return f"-m {sweep}", "against a fixed-size network of equal cost"
    again = [override for override in given if not override.startswith(_ONE_RUN)]
    return f"-m {shlex.join([*where, *again, 'seed=0,1,2'])}", "the same from three seeds"
