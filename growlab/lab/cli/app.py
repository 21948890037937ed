"""The command line: `growlab` or `python -m growlab` composes and runs an experiment, or runs another command.

Exit codes: 0 success, or saved and ended by a signal; 2 invalid input, with one sentence on stderr; 130 interrupted by
Ctrl-C; 1 anything else, with its traceback.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import textwrap
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from growlab.lab.cli import commands

try:
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
except ModuleNotFoundError as missing:
    # Installed without dependencies, as by `pip install --no-deps growlab` next to an existing torch.
    sys.exit(commands.run_without(missing))

from growlab.base.command_parser import whole_words
from growlab.base.errors import FolderLocked, Stopped, UserError
from growlab.base.files import FAILURE, write_json
from growlab.lab.cli import settings, sweeps
from growlab.lab.cli.explain import explain
from growlab.lab.training import processes
from growlab.lab.training.configuration import (
    LAST,
    PRIMARY,
    composed,
    config_dir,
    naming_override,
    resume_override,
    set_plugin_defaults,
)

_HELP_COLUMNS = 79
# Numbers of a sweep's failed jobs in this process, by reason.
_FAILED: dict[str, list[int]] = {}


class JobFailed(BaseException):
    """Carries a job's exception past Hydra, which would print a message about it; users never see it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _job(cfg: DictConfig) -> Any:
    """Train in this process or several; skip a finished job of a sweep, resume an interrupted one."""
    run_dir, job = Path(HydraConfig.get().runtime.output_dir), HydraConfig.get()
    failure, alone = run_dir / FAILURE, not processes.started_elsewhere()
    try:
        sweeps.check_selection(cfg)
    except UserError as error:
        # This concerns the whole search, not one trial.
        raise JobFailed(error) from None
    try:
        if alone and sweeps.has_finished(cfg, run_dir):
            print(f"finished before: {run_dir}")
            return sweeps.objective(cfg, run_dir)
        more = [LAST] if alone and sweeps.resumes(cfg, run_dir) else []
        failure.unlink(missing_ok=True)
        sweeps.name_group(cfg)
        if (gpus := sweeps.gpus_in_turn(cfg)) is not None:
            cfg.trainer.devices = gpus
            more.append(f"trainer.devices={gpus}")
        trainer = cfg.get("trainer") or {}
        if number := processes.to_start(trainer):
            from growlab.lab.training import launcher

            launcher.run(number, processes.max_restarts(trainer), run_dir, more)
        else:
            processes.announce("importing PyTorch and Lightning")
            from growlab.lab.training.build import train

            train(cfg)
        return sweeps.objective(cfg, run_dir)
    except Exception as error:
        if job.mode == RunMode.RUN:
            if not isinstance(error, FolderLocked):
                _remove_if_empty(run_dir)
            raise JobFailed(error) from None
        # In a sweep, Hydra runs the remaining jobs and raises the first failure at the end.
        overrides = list(job.overrides.task)
        reason = explain(error, overrides) or repr(error)
        failed = _FAILED.setdefault(reason, [])
        text = f"as job {failed[0]} did." if failed else reason
        failed.append(job.job.num)
        print(f"job {job.job.num} ({job.job.override_dirname}) failed: {text}", file=sys.stderr)
        if not isinstance(error, FolderLocked):
            trace = "".join(traceback.format_exception(error))
            write_json(failure, {"reason": reason, "overrides": overrides, "traceback": trace})
        raise


def _remove_if_empty(run_dir: Path) -> None:
    """Remove the folder of a run that failed before it wrote anything but Hydra's files, and empty folders above."""
    if not processes.is_first() or not run_dir.is_dir():
        return
    paths = (path for path in run_dir.iterdir() if path.name != ".hydra")
    if any(path.suffix != ".log" or path.stat().st_size for path in paths):
        return
    if run_dir.resolve() in (Path.cwd(), *Path.cwd().parents):
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    if "hydra.run.dir" not in map(processes.name_of, HydraConfig.get().overrides.hydra):
        with contextlib.suppress(OSError):
            run_dir.parent.rmdir()
            run_dir.parent.parent.rmdir()


def _read_arguments() -> Namespace:
    """Parse the command line as Hydra does."""

    def complain(message: str) -> None:
        raise UserError(f"{message}; put options before or after all overrides, see growlab --help")

    parser = get_args_parser()
    for action in parser._actions:
        if "--version" in action.option_strings:
            action.version = f"growlab {version('growlab')}"  # type: ignore[attr-defined]
        if "--cfg" in action.option_strings:
            action.choices = [*(action.choices or ()), "diff"]
    parser.add_argument("--help-config", metavar="NAME")
    parser.error = complain  # type: ignore[method-assign, assignment]
    return parser.parse_args()


def _printed(arguments: Namespace, overrides: list[str]) -> bool:
    """Print the configuration for `--cfg job`, `--cfg diff` or `--help-config`; return False without these options."""
    name = arguments.help_config
    if name is None and (arguments.cfg not in ("job", "diff") or arguments.package):
        return False
    where = (arguments.config_dir, arguments.config_name or PRIMARY)
    cfg = composed(overrides, *where)
    if name is not None:
        print(settings.explanation(cfg, name, HydraConfig.get().runtime.choices))
    elif arguments.cfg == "diff":
        print(settings.difference(cfg, composed([], *where)))
    else:
        if arguments.resolve:
            OmegaConf.resolve(cfg)
        typed = set(map(processes.name_of, overrides))
        sys.stdout.write(settings.in_short(cfg, composed([], *where), typed))
    return True


def _with_more(argv: list[str], overrides: list[str], more: list[str]) -> list[str]:
    """Insert more overrides right after those of the command line, as options may not be between overrides."""
    last = len(argv)
    if overrides:
        ends = range(last, 0, -1)
        last = next((end for end in ends if argv[end - len(overrides) : end] == overrides), last)
    return [*argv[:last], *more, *argv[last:]]


def _fail(error: BaseException, overrides: list[str], with_traceback: bool) -> int:
    try:
        sentence = explain(error, overrides)
    except Exception:  # a failed explanation must not hide the error
        sentence = None
    if processes.report(1 if sentence is None else 2, sentence or "".join(traceback.format_exception(error)).rstrip()):
        return 1 if sentence is None else 2
    if isinstance(error, processes.ProcessFailed) and not with_traceback:
        print(error, file=sys.stderr)
    elif sentence is None or with_traceback:
        traceback.print_exception(error)
    if sentence is None:
        return 1
    if sentence in _FAILED:
        # Each job has printed its reason.
        number = sum(map(len, _FAILED.values()))
        sentence = f"{number} job{'s' if number > 1 else ''} of the sweep failed."
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def _groups() -> str:
    """Return the groups of the configuration, wrapped for a terminal."""
    running: Any = GlobalHydra.instance().hydra
    groups = running.list_all_config_groups()
    names = ", ".join(name for name in groups if "/" not in name and name not in ("hydra", "plan", "experiment"))
    return textwrap.fill(names, _HELP_COLUMNS, initial_indent="  ", subsequent_indent="  ")


def _interrupted(error: BaseException | None) -> bool:
    """True if Ctrl-C caused the exception; Lightning turns it into a SystemExit."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _complete_commands() -> bool:
    """Print completions of commands for a shell; return False if there is nothing left for Hydra to do."""
    if not any(argument.startswith("query=") for argument in sys.argv[1:]):
        return True
    names, line = commands.complete(os.environ.get("COMP_LINE", ""))
    for name in names:
        print(name)
    os.environ["COMP_LINE"] = line or ""
    return line is not None


def main(job: Callable[[DictConfig], Any] = _job, more: Sequence[str] = ()) -> int:
    """Run a command line and return the exit code."""
    try:
        with whole_words():
            try:
                return _main(job, more)
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output is gone, as in `growlab --cfg job | head`; avoid Python's message at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _main(job: Callable[[DictConfig], Any], more: Sequence[str]) -> int:
    commands.import_from_here()
    _FAILED.clear()
    if not _complete_commands():
        return 0
    if sys.argv[1:2] == ["run"]:
        del sys.argv[1]
    code = commands.run_command(sys.argv[1:]) if job is _job else None
    if code is not None:
        return code
    # With this variable Hydra raises errors instead of printing them. If the user has set it, we also print tracebacks.
    with_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    overrides: list[str] = []
    try:
        arguments = _read_arguments()
        overrides, multirun = list(arguments.overrides), bool(arguments.multirun)
        names = set(map(processes.name_of, overrides))
        explicit = [override for override in overrides if override.startswith(("growth=", "lr_adapt="))]
        if "method" in names and explicit:
            print(f"note: {' and '.join(explicit)} overrides the choice of method=", file=sys.stderr)
        added = [override for override in more if processes.name_of(override) not in names]
        set_plugin_defaults()
        short = partial(commands.described, short=True)
        OmegaConf.register_new_resolver("growlab.commands", short, replace=True)
        begin = partial(commands.experiments, config_dir() / "experiment") if arguments.help else str
        OmegaConf.register_new_resolver("growlab.experiments", begin, replace=True)
        # Composing always resolves it, and the list takes a second.
        OmegaConf.register_new_resolver("growlab.groups", _groups if arguments.help else str, replace=True)
        plan = partial(commands.settings_of_plan, config_dir() / "plan" / "default.yaml")
        OmegaConf.register_new_resolver("growlab.settings_of_plan", plan, replace=True)
        folder = resume_override(overrides, multirun, arguments.config_dir, arguments.config_name or PRIMARY)
        added += [] if folder is None else [folder]
        if _printed(arguments, [*overrides, *added]):
            return 0
        if multirun and not any(name.startswith("hydra.job.config.override_dirname") for name in names):
            added.append(naming_override(overrides))
        added += processes.apart([*overrides, folder or ""], multirun)
        sys.argv = _with_more(sys.argv, overrides, added)
        processes.end_with_parent()
        # It prints errors that are also raised.
        logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=PRIMARY)(job)()
    except JobFailed as failed:
        return _fail(failed.error, overrides, with_traceback)
    except BrokenPipeError:
        raise
    except Stopped as stop:
        if processes.report(-stop.signal, stop.sentence):
            return 0
        if processes.is_first():
            print(f"{stop.signal.name}: {stop.sentence}", file=sys.stderr)
        return 130 if stop.signal == signal.SIGINT else 0
    except (KeyboardInterrupt, SystemExit) as stop:
        if not _interrupted(stop):
            raise
        if processes.report(130, "interrupted"):
            return 130
        hint = "growlab resume RUN resumes from the last checkpoint in a run's folder"
        print(f"interrupted; {hint if job is _job else 'nothing is kept'}", file=sys.stderr)
        return 130
    except Exception as error:
        sweeps.conclude()
        if _FAILED and str(error) == "Record does not exist.":
            # Optuna's message for a search without a best trial, because every trial failed.
            error = UserError(next(iter(_FAILED)))
        return _fail(error, overrides, with_traceback)
    return 0
