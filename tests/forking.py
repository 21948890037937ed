"""Process that imports everything and forks for the runs of `tests.command_line.CommandLine`."""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from tests.command_line import PLAN
from tests.faults import FAULT_ON_RANK, FAULTS, FAULTS_OF_ATTEMPTS
from tests.once import read_conf_once, trace_once

_AS_RUN = "hydra.mode=RUN"
# Time for the child processes of a finished run to end.
_LEFT_SEC = 10.0


def _serve(listening: socket.socket, traces: Path) -> None:
    """Import everything; fork for every connection until standard input ends."""
    _import_everything(traces)
    # Runs need not unregister torch's libraries when they end.
    for finalizer in list(weakref.finalize._registry):
        if finalizer.peek()[1] is torch.library._del_library:
            finalizer.detach()
    # Otherwise a run's first full collection visits everything imported, and copies its pages.
    gc.collect()
    gc.freeze()
    while sys.stdin not in (ready := select.select([sys.stdin, listening], [], [])[0]):
        connection, _ = ready[0].accept()
        if os.fork() == 0:
            listening.close()
            _answer(connection)
            os._exit(0)
        connection.close()
    # An orderly end takes seconds.
    os._exit(0)


def _answer(connection: socket.socket) -> None:
    """Fork for every order of a connection; answer with the exit code and ids of processes left behind."""
    with connection.makefile("rw") as lines:
        for line in lines:
            order = json.loads(line)
            child = os.fork()
            if child == 0:
                # A new session identifies the processes of the run.
                os.setsid()
                connection.close()
                _leave(_run(order))
            print(json.dumps([_exit_code(child, order["limit_sec"]), _end_session(child)]), file=lines, flush=True)


def _exit_code(child: int, limit_sec: float) -> int:
    """Wait for a run, kill it after a time limit, and return its exit code."""
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], limit_sec)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _end_session(session: int) -> list[int]:
    """Kill the processes of a session that do not end within `_LEFT_SEC`; return their ids."""
    deadline = time.monotonic() + _LEFT_SEC
    while (members := _members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return members


def _members(session: int) -> list[int]:
    """Ids of the running processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number, *_ = path.read_text().rpartition(")")[2].split()
            if int(number) == session and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _leave(code: int) -> None:
    """End this process as the interpreter does: threads that block the exit block it here too."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    os._exit(code)


def _import_everything(traces: Path) -> None:
    _adapt_once()
    from hydra._internal.hydra import Hydra

    from growlab.base.errors import UserError
    from growlab.lab.data import image_files
    from growlab.lab.networks import mlp8, resnet20
    from growlab.lab.training import run as experiment
    from growlab.recipes.translation.sentence_pairs import fairseq_module
    from growlab.widths import trace

    # Lazy imports of runs.
    for name in (
        "growlab.lab.training.build",
        "growlab.lab.training.launcher",
        "growlab.lab.planner.__main__",
        "growlab.lab.planner.run",
        "growlab.lab.cli.sweeps",
        "hydra._internal.logging_config",
        "hydra.experimental.callback",
        "rich._emoji_codes",
        "torch.utils.serialization.config",
        "pydantic.dataclasses",
        "pydantic.types",
        "sympy.combinatorics",
        "sympy.tensor.tensor",
    ):
        # Not in every version of a library.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    # It takes a second; tests/lab/analysis tests figures.
    experiment.write_run_report = lambda run_dir: None
    # Hydra composes the configuration twice to read `hydra.mode`, which no file in conf/ sets.
    image_files.load_digits = cache(image_files.load_digits)
    image_files.load_digits()
    Hydra.get_mode = lambda self, config_name, overrides: RunMode.RUN if _AS_RUN in overrides else None
    # By default, data workers check every five seconds if their parent has died.
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5
    # Not needed for files to survive a killed process.
    os.fsync = lambda descriptor: None
    # fairseq imports wandb, whose temporary folder disappears with the first process that ends.
    sys.modules["wandb"] = None
    with contextlib.suppress(UserError):
        for name in ("fairseq.data", "fairseq.models.transformer", "fairseq.sequence_generator"):
            fairseq_module(name)
        # It compiles patterns for two seconds.
        importlib.import_module("sacremoses")
    del sys.modules["wandb"]
    _compose_once()
    # The first trace imports much of torch. Do not call backward here: forks could not do so afterwards.
    for make, size in ((partial(mlp8, batch_norm=True), 2), (resnet20, 8)):
        trace(make([1, size, size], 2, width=2), torch.zeros(2, 1, size, size))
    trace_once(traces)


def _compose_once() -> None:
    """Fill the caches of files in `conf/` and of checked settings."""
    from hydra import compose, initialize_config_dir

    from growlab.lab.training.build import check_settings
    from growlab.lab.training.configuration import PRIMARY, config_dir, set_plugin_defaults

    read_conf_once()
    set_plugin_defaults()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(PRIMARY, overrides=["name=warm"])
        cfg.logger = {}
        check_settings(cfg)


def _adapt_once() -> None:
    """Cache pydantic's type adapters, each of which takes milliseconds to make."""
    import pydantic

    make, known = pydantic.TypeAdapter, {}

    def made_once(kind: Any, **settings: Any) -> Any:
        key = repr(kind), repr(settings)
        if key not in known:
            known[key] = make(kind, **settings)
        return known[key]

    pydantic.TypeAdapter = made_once


class _Forked:
    """Replaces the `Popen` of the launcher by a fork, which has everything imported."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path | None) -> None:
        self.returncode: int | None = None
        with warnings.catch_warnings():
            # Python 3.12 and later warn of forks from multi-threaded processes.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            # The defaults of a new process.
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if log is not None:
                for number in (1, 2):
                    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), number)
            os.environ.update(env)
            _leave(_main([a for a in command[3:] if a not in ("--config-name", "config")]))
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("growlab", timeout)
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(order: dict[str, Any]) -> int:
    from growlab.lab.training import launcher

    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    launcher.start = _Forked
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(order["files"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    if order["fault"]:
        FAULTS[order["fault"][0]](*order["fault"][1:])
    return _main(order["arguments"], order["program"])


def _main(arguments: list[str], program: str | None = None) -> int:
    """Run the command line, or a program, in this process; return the exit code."""
    import traceback

    from growlab.lab.cli.app import main
    from growlab.lab.planner.__main__ import main as plan

    rank, *fault = json.loads(os.environ.get(FAULT_ON_RANK, "[null]"))
    attempts = json.loads(os.environ.get(FAULTS_OF_ATTEMPTS, "[]"))
    if (attempt := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) < len(attempts):
        rank, *fault = attempts[attempt]
    if fault and os.environ.get("RANK") == str(rank):
        FAULTS[fault[0]](*fault[1:])

    try:
        sys.stdin.close()
        # Initialised if the parent process has used Hydra.
        GlobalHydra.instance().clear()
        sys.argv = ["growlab", *arguments]
        if program is not None:
            sys.path.insert(0, "")
            code = exec(program, {"__name__": "__main__"})
        else:
            code = plan() if os.environ.get(PLAN) else main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
