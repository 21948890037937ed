"""Runs of the command line in forks of one process that has imported everything.

Starting Python, torch and Lightning takes longer than a small run. Exit codes, signals, output and files are those of
a separate process.
"""

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Environment variable that makes a run call `growlab.lab.planner`.
PLAN = "GROWLAB_TEST_PLAN"
# Starts of the progress lines that a run prints.
PROGRESS = ("odds: ", "growing ", "stage ", "grew ")


@dataclass(frozen=True)
class Outcome:
    """Exit code (-9 after SIGKILL), standard output and standard error of a run."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """Error message of a run that failed with exit code 2 and printed only progress before it."""
        assert (self.code, self.out) == (2, ""), self.err
        *lines, last = self.err.splitlines()
        assert all(line.startswith((*PROGRESS, "warning: no checkpoint")) for line in lines), self.err
        assert last.startswith("error: ") and last.endswith(".")
        return last


# Environment variable with the address of the process that forks.
SERVER = "GROWLAB_TESTSERVER"


def shared_folder(address: str, name: str) -> Path:
    """Path of a folder that all test processes share."""
    return Path(address).parent / name


class Server:
    """The process that imports everything once and forks for every run (tests/forking.py).

    Test processes find its address in the environment; it ends with the process that started it.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = os.path.join(self._folder.name, "socket")
        traces = shared_folder(self.address, "traces")
        for folder in (traces, shared_folder(self.address, "runs")):
            folder.mkdir()
        # Without compiled files, starting takes three times as long.
        environment = _environment("HYDRA_FULL_ERROR", "PYTHONDONTWRITEBYTECODE")
        # Callers wait until everything is imported; if the process dies, they fail.
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.address)
            listening.listen()
            number = listening.fileno()
            command = [sys.executable, "-m", "tests.forking", str(number), str(traces)]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, pass_fds=[number]
            )

    def announce(self) -> None:
        """Export the address to child processes."""
        os.environ[SERVER] = self.address

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._folder.cleanup()


class CommandLine:
    """Run `python -m growlab ARGUMENTS` in a fork of the server.

    Attributes:
        shared: folder of runs that all test processes share.
    """

    def __init__(self) -> None:
        self._own = None if SERVER in os.environ else Server()
        address = os.environ[SERVER] if self._own is None else self._own.address
        self.shared = shared_folder(address, "runs")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._lines = self._socket.makefile("rw")

    def __call__(
        self,
        *arguments: object,
        cwd: Path,
        fault: tuple[Any, ...] | None = None,
        environment: dict[str, str] | None = None,
        program: str | None = None,
        limit_sec: float = 120.0,
    ) -> Outcome:
        """Run and wait.

        Args:
            arguments: overrides and options.
            cwd: working directory.
            fault: name in `FAULTS` and its arguments, installed before the run begins.
            environment: variables added to this process's.
            program: Python source to run in place of the command line.
            limit_sec: time after which the run is killed.
        """
        with tempfile.TemporaryDirectory() as folder:
            order = {
                "arguments": [str(a) for a in arguments],
                "program": program,
                "cwd": str(cwd),
                "fault": fault,
                "environment": environment or {},
                "files": folder,
                "limit_sec": limit_sec,
            }
            print(json.dumps(order), file=self._lines, flush=True)
            answer = self._lines.readline()
            assert answer, "the process that forks for runs has died"
            code, left = json.loads(answer)
            outcome = Outcome(code, *((Path(folder) / name).read_text() for name in ("stdout", "stderr")))
            assert not left, f"left behind: {left}\n{outcome.err}"
            return outcome

    def done(self, *arguments: object, cwd: Path, **more: Any) -> Outcome:
        """Run and assert that the exit code is 0."""
        outcome = self(*arguments, cwd=cwd, **more)
        assert outcome.code == 0, outcome.err
        return outcome

    def on_two_ranks(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function(rank, *arguments)` in two processes and assert that both succeed."""
        outcome = self.on_ranks(2, function, *arguments)
        assert outcome.code == 0, outcome.err

    def on_ranks(
        self, number: int, function: Callable[..., None], *arguments: Any, limit_sec: float = 120.0
    ) -> Outcome:
        """Call `function(rank, *arguments)` in several processes that start together."""
        program = _RANKS.format(pickle.dumps((function, arguments)), number)
        return self(cwd=ROOT, program=program, limit_sec=limit_sec)

    def close(self) -> None:
        """Disconnect."""
        self._lines.close()
        self._socket.close()
        if self._own is not None:
            self._own.close()


def _environment(*without: str) -> dict[str, str]:
    """Variables of this process that let a new one import the checkout and use one thread, without the named ones."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def new_process(*arguments: object, cwd: Path, limit_sec: float = 280.0) -> Outcome:
    """Run `python ARGUMENTS` in a new process, as a user starts it."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=limit_sec)
    return Outcome(done.returncode, done.stdout, done.stderr)


def offer_port(folder: Path) -> None:
    """Write a free port into a folder, for `join`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))


def join(rank: int, folder: Path) -> None:
    """Set torchrun's variables for one of two ranks, which connect at the port in the folder."""
    port = (folder / "port").read_text()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK="0", GROUP_RANK="0")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(TORCHELASTIC_RUN_ID="x")


_RANKS = """
import pickle, torch
torch.multiprocessing.start_processes(*pickle.loads({!r}), nprocs={}, start_method="fork")
"""
