"""The command line: `python -m growlab` or `growlab` composes one experiment and runs it, or does another command.

Exit codes: 0 done, or saved and ended because a signal asked for it; 2 input that cannot be used, told in one
sentence on stderr; 130 interrupted by Ctrl-C; 1 anything else, with its traceback.
"""

import os
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

from growlab.lab.cli.commands import (
    complete,
    described,
    import_from_here,
    run_command,
    run_without,
    settings_of_plan,
)

try:
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf
except ModuleNotFoundError as missing:
    # `pip install --no-deps growlab` beside a torch that is there already.
    sys.exit(run_without(missing))

from growlab.base.errors import FolderHeld, Stopped, UserError
from growlab.base.streams import drop_output, flushed, guard_streams
from growlab.base.terminal import wrapped
from growlab.lab.cli.explain import explain
from growlab.lab.training.configuration import PRIMARY, config_dir, register_schemas
from growlab.lab.training.override_checks import check_choices, check_parts_of_job
from growlab.lab.training.processes import ProcessFailed, apart, end_with_parent, is_first, name_of, report
from growlab.lab.training.resuming import LAST, resume_override

_HELP_COLUMNS = 79


class JobFailed(BaseException):
    """Carries a job's exception past Hydra, which would print a line of its own; never seen by users."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _train(cfg: DictConfig, run_dir: Path, gpus: list[int] | None, resumed: bool) -> None:
    """Train in this process, or in as many as were asked for."""
    from growlab.lab.training import processes

    trainer = cfg.get("trainer") or {}
    number = processes.to_start(trainer)
    if number:
        from growlab.lab.training import launcher

        more = [] if gpus is None else [f"trainer.devices={gpus}"]
        more += [LAST] if resumed else []
        launcher.run(number, processes.max_restarts(trainer), run_dir, more)
    else:
        processes.announce("importing PyTorch and Lightning")
        from growlab.lab.training.build import train

        train(cfg)


def _job(cfg: DictConfig) -> Any:
    # Imported here: help, completion and error sentences need not wait for torch.
    from growlab.lab.cli import sweeps
    from growlab.lab.training import processes

    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        check_parts_of_job()
        sweeps.check_selection(cfg)
        if not processes.started_elsewhere() and sweeps.has_finished(cfg, run_dir):
            print(f"finished before: {run_dir}")
            return sweeps.objective(cfg, run_dir)
        resumed = not processes.started_elsewhere() and sweeps.resumes(cfg, run_dir)
        sweeps.forget_failure(run_dir)
        sweeps.name_group(cfg)
        gpus = sweeps.gpus_in_turn(cfg)
        if gpus is not None:
            cfg.trainer.devices = gpus
        with sweeps.run_of_sweep():
            _train(cfg, run_dir, gpus, resumed)
        return sweeps.objective(cfg, run_dir)
    except Exception as error:
        job = HydraConfig.get()
        if job.mode == RunMode.RUN:
            raise JobFailed(error) from None
        # In a sweep Hydra goes on with the other jobs and raises the first failure after the last one.
        sentence = explain(error, list(job.overrides.task))
        reason = sentence or repr(error)
        print(f"job {job.job.num} ({job.job.override_dirname}) failed: {reason}", file=sys.stderr)
        if not isinstance(error, FolderHeld):
            sweeps.record_failure(run_dir, reason, "".join(traceback.format_exception(error)))
        raise


def _read_arguments() -> Namespace:
    """The command line, after checking options as Hydra will.

    Raises:
        UserError: an option that does not exist or does not fit.
    """

    def complain(message: str) -> None:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message and not unknown.startswith("-"):
            raise UserError(
                f"options such as -m must not stand between overrides: move '{unknown}' beside the others"
            )
        raise UserError(f"{message}; see growlab --help")

    parser = get_args_parser()
    for action in parser._actions:
        if "--version" in action.option_strings:
            action.version = f"growlab {version('growlab')}"  # type: ignore[attr-defined]
    parser.error = complain  # type: ignore[method-assign, assignment]
    arguments = parser.parse_args()
    check_choices(arguments.overrides, config_dir(), arguments.config_dir)
    return arguments


def _with_more(argv: list[str], overrides: list[str], more: list[str]) -> list[str]:
    """The command line with more overrides beside its own: options between overrides are not understood."""
    last = len(argv)
    if overrides:
        ends = range(last, 0, -1)
        last = next((end for end in ends if argv[end - len(overrides) : end] == overrides), last)
    return [*argv[:last], *more, *argv[last:]]


def _fail(error: BaseException, overrides: list[str], with_traceback: bool) -> int:
    try:
        sentence = explain(error, overrides, _conf_or_none())
    except Exception:  # explaining must never hide what it explains
        sentence = None
    if report(1 if sentence is None else 2, sentence or "".join(traceback.format_exception(error)).rstrip()):
        return 1 if sentence is None else 2
    if isinstance(error, ProcessFailed) and not with_traceback:
        print(error, file=sys.stderr)
    elif sentence is None or with_traceback:
        traceback.print_exception(error)
    if sentence is None:
        return 1
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def _conclude() -> None:
    """Print the table of a sweep in which a job has failed, if it was one."""
    from growlab.lab.cli.sweeps import conclude

    conclude()


def _conf_or_none() -> Path | None:
    try:
        return config_dir()
    except UserError:
        return None


def _settings_of_plan() -> str:
    return wrapped(settings_of_plan(config_dir() / "plan" / "default.yaml"))


def _groups() -> str:
    """Groups and their options as Hydra lists them, no line longer than a terminal; `$`: as its template has it."""
    listed = GlobalHydra.instance().hydra.format_config_groups(
        lambda group: not f"{group}/".startswith("hydra/")
    )
    wrap = partial(textwrap.fill, width=_HELP_COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(map(wrap, listed.splitlines()))


def _help_page(more: Sequence[str]) -> list[str]:
    """The override that chooses a command's own help: the page named like a group that the command adds."""
    pages = {path.stem for path in (config_dir() / "hydra" / "help").glob("*.yaml")}
    return [f"hydra/help={group}" for group in (one.partition("=")[0] for one in more) if group in pages]


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind the exception; Lightning turns it into an exit of its own."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _complete_commands() -> bool:
    """Answer a shell that asks what comes next; False where nothing of the configuration, which Hydra knows, does."""
    if not any(argument.startswith("query=") for argument in sys.argv[1:]):
        return True
    names, line = complete(os.environ.get("COMP_LINE", ""))
    for name in names:
        print(name)
    os.environ["COMP_LINE"] = line or ""
    return line is not None


def main(job: Callable[[DictConfig], Any] = _job, more: Sequence[str] = ()) -> int:
    """Run what the command line says and return the exit code.

    Args:
        job: what is done with the composed configuration.
        more: overrides beside the command line's, unless that has ones of the same names.
    """
    guard_streams()
    try:
        return flushed(_main(job, more))
    except SystemExit as stop:
        stop.code = flushed(stop.code)
        raise


def _main(job: Callable[[DictConfig], Any], more: Sequence[str]) -> int:
    import_from_here()
    if not _complete_commands():
        return 0
    if sys.argv[1:2] == ["run"]:
        del sys.argv[1]
    code = run_command(sys.argv[1:]) if job is _job else None
    if code is not None:
        return code
    # With this set Hydra raises what went wrong instead of printing it. A user who sets it sees tracebacks
    # as well as sentences.
    with_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    overrides: list[str] = []
    try:
        arguments = _read_arguments()
        overrides, multirun = list(arguments.overrides), bool(arguments.multirun)
        given = set(map(name_of, overrides))
        added = [one for one in more if name_of(one) not in given]
        register_schemas()
        OmegaConf.register_new_resolver("growlab.commands", described, replace=True)
        OmegaConf.register_new_resolver("growlab.groups", _groups, replace=True)
        OmegaConf.register_new_resolver("growlab.settings_of_plan", _settings_of_plan, replace=True)
        added += _help_page(more)
        folder = resume_override(overrides, multirun, arguments.config_dir, arguments.config_name or PRIMARY)
        added += [] if folder is None else [folder]
        added += apart([*overrides, folder or ""], multirun)
        sys.argv = _with_more(sys.argv, overrides, added)
        end_with_parent()
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=PRIMARY)(job)()
    except JobFailed as failed:
        return _fail(failed.error, overrides, with_traceback)
    except BrokenPipeError:
        # The reader of our output has gone, as in `growlab --cfg job | head`.
        drop_output()
        return 141
    except Stopped as stop:
        if report(-stop.signal, stop.sentence):
            return 0
        if is_first():
            print(f"{stop.signal.name}: {stop.sentence}", file=sys.stderr)
        return 130 if stop.signal == signal.SIGINT else 0
    except (KeyboardInterrupt, SystemExit) as stop:
        if not _interrupted(stop):
            raise
        if report(130, "interrupted"):
            return 130
        further = "the same command with ckpt_path=last goes on from the last checkpoint"
        print(f"interrupted; {further if job is _job else 'nothing of it is kept'}", file=sys.stderr)
        return 130
    except Exception as error:
        _conclude()
        return _fail(error, overrides, with_traceback)
    return 0


if __name__ == "__main__":
    sys.exit(main())
