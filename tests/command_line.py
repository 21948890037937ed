"""Real runs of the command line, each in a process of its own that has everything imported already.

Starting Python, torch and Lightning takes longer than a small run. So one process imports them once and forks
for every run: exit codes, signals, what is printed and what is left behind are those of a real process.
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

from tests.parts_here import skip_without

ROOT = Path(__file__).resolve().parent.parent
# A variable in a run's environment: the command is `growlab.lab.planner`.
PLAN = "GROWLAB_TEST_PLAN"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code (-9 after SIGKILL) and what it printed."""

    code: int
    out: str
    err: str


# A variable in the environment: where the process that forks listens.
SERVER = "GROWLAB_TESTSERVER"


def traces_beside(address: str) -> Path:
    """The folder in which all processes keep what they trace (tests/once.py)."""
    return Path(address).parent / "traces"


class Server:
    """The process that imports everything once and forks for the runs of all callers (tests/forking.py).

    Whoever finds its address in the environment calls it; it ends with the process that has started it.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = os.path.join(self._folder.name, "socket")
        traces = traces_beside(self.address)
        traces.mkdir()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment.pop("HYDRA_FULL_ERROR", None)
        # Whoever calls before everything is imported waits; if the process dies, it is told.
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.address)
            listening.listen()
            number = listening.fileno()
            command = [sys.executable, "-m", "tests.forking", str(number), str(traces)]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, pass_fds=[number]
            )

    def announce(self) -> None:
        """Tell the processes that this one starts."""
        os.environ[SERVER] = self.address

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._folder.cleanup()


class CommandLine:
    """`python -m growlab ARGUMENTS`, many times over."""

    def __init__(self) -> None:
        self._own = None if SERVER in os.environ else Server()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SERVER] if self._own is None else self._own.address)
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
            cwd: the folder that it is called from.
            fault: name in `FAULTS` and its arguments, put in place before the run begins.
            environment: variables added to this process's.
            program: the text of a program in Python, which runs in place of the command line.
            limit_sec: it is killed after.
        """
        skip_without(arguments)
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
            assert answer, "the process that forks the runs has died"
            code, left = json.loads(answer)
            outcome = Outcome(code, *((Path(folder) / name).read_text() for name in ("stdout", "stderr")))
            # Whatever happens to a run.
            assert not left, f"left behind: {left}\n{outcome.err}"
            return outcome

    def on_two_ranks(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function of a rank and further arguments in two processes."""
        program = _TWO_RANKS.format(pickle.dumps((function, arguments)))
        outcome = self(cwd=ROOT, program=program)
        assert outcome.code == 0, outcome.err

    def close(self) -> None:
        """Call it no more."""
        self._lines.close()
        self._socket.close()
        if self._own is not None:
            self._own.close()


def offer_port(folder: Path) -> None:
    """Write a port that is free into a folder, for `join`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))


def join(rank: int, folder: Path) -> None:
    """Let this process be a rank of two, as torchrun tells it, which meet at the folder's port."""
    port = (folder / "port").read_text()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK="0", GROUP_RANK="0")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(TORCHELASTIC_RUN_ID="x")


_TWO_RANKS = """
import pickle, torch
torch.multiprocessing.start_processes(*pickle.loads({!r}), nprocs=2, start_method="fork")
"""
