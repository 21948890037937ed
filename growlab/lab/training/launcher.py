"""Run a job in several processes on this machine, and restart them if one dies.

torch's elastic launcher kills the other processes before they can report their errors, allows 30 seconds for saving
after a signal, and restarts runs that failed on bad input. This launcher sets the same environment variables, and:

- forwards signals: after SIGTERM there is time for a checkpoint, a second Ctrl-C stops at once;
- reports one reason: after a failure the others have a few seconds to report theirs, then it chooses the cause;
- resumes from the last checkpoint when restarting, and does not restart after bad input or a signal to end;
- ends the processes if it ends itself (`growlab.lab.training.processes.end_with_parent`).
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from torch.distributed import TCPStore

from growlab.base.errors import Stopped, UserError
from growlab.base.files import CHECKPOINT_FOLDER
from growlab.lab.training.configuration import LAST, search_options
from growlab.lab.training.processes import ERROR_FILE, RUN_ID, ProcessFailed, in_folder, name_of, quoted, run_id

# Time for the other processes to end by themselves once one has failed.
_GRACE_SEC = 5.0
_POLL_SEC = 0.05
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_FORWARDED = {*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}


def run(number: int, max_restarts: int, run_dir: Path, more: Sequence[str] = ()) -> None:
    """Run the current Hydra job in several processes, wait for them, and raise the reason of a failure."""
    # The folder may contain checkpoints of an older run.
    older, overrides = _checkpoints(run_dir), [*HydraConfig.get().overrides.task, *more]
    # Not TemporaryDirectory, which would be removed when a process forked from this one ends.
    folder = tempfile.mkdtemp(prefix="growlab_")
    try:
        with _Processes(number, run_dir) as processes:
            for attempt in range(max_restarts + 1):
                # New for each attempt: the last one has the addresses of dead processes.
                store = TCPStore("127.0.0.1", 0, 1, True)
                if _checkpoints(run_dir) - older:
                    overrides = [*(o for o in overrides if name_of(o) != "ckpt_path"), LAST]
                command = [sys.executable, "-m", "growlab", *search_options(), *overrides]
                # Not as a sweep, and without a second copy of Hydra's output.
                command += [f"hydra.run.dir={quoted(run_dir)}", "hydra.mode=RUN", "hydra.output_subdir=null"]
                environment = {"MASTER_ADDR": store.host, "MASTER_PORT": store.port, RUN_ID: run_id()}
                environment["TORCHELASTIC_RESTART_COUNT"] = attempt
                processes.start(command, environment, Path(folder, str(attempt)))
                reason = processes.wait(attempt)
                if attempt == max_restarts or not processes.restart_helps(reason):
                    break
                print(f"{reason!r}; restart {attempt + 1} of {max_restarts}", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if reason is not None:
        raise reason


class _Killed(UserError):
    """A signal ended a process of the run."""

    def __repr__(self) -> str:
        return str(self).partition(";")[0]


def start(command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    """Start one process in a separate session; its output goes to a file, or to this process's output."""
    with contextlib.ExitStack() as ending:
        out = None if log is None else ending.enter_context(log.open("wb"))
        return subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=out, stderr=out, start_new_session=True
        )


class _Processes:
    """The processes of a run; as a context it forwards signals to them."""

    def __init__(self, number: int, run_dir: Path) -> None:
        self._number, self._run_dir = number, run_dir
        self._running: list[subprocess.Popen[bytes]] = []
        self._folder = Path()
        self._too_slow: set[int] = set()
        self._received: set[int] = set()
        # Signals that arrived before the processes were started; None while they are running.
        self._pending: list[int] | None = []
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> "_Processes":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        return self

    def __exit__(self, *error: object) -> None:
        self._end(0.0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._received.add(number)
        if self._pending is not None:
            self._pending.append(number)
            return
        for process in self._running:
            process.send_signal(number)

    def start(self, command: Sequence[str], common: Mapping[str, object], folder: Path) -> None:
        """Start all processes; only the first one prints, the others only if they fail."""
        folder.mkdir()
        self._folder, self._running = folder, []
        self._too_slow.clear()
        for rank in range(self._number):
            environment = {
                **common,
                **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), self._number),
                **{"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "growlab"},
                "TORCHELASTIC_USE_AGENT_STORE": True,
                ERROR_FILE: folder / f"{rank}.json",
            }
            log = folder / f"{rank}.log" if rank else None
            self._running.append(start(command, {k: str(v) for k, v in environment.items()}, log))
        waiting, self._pending = self._pending or [], None
        for number in waiting:
            self._forward(number, None)

    def wait(self, restarts: int) -> BaseException | None:
        """Wait until all have ended, or a few seconds after one has failed; return the reason, if any."""
        while not any(codes := [process.poll() for process in self._running]) and None in codes:
            time.sleep(_POLL_SEC)
        self._end(_GRACE_SEC)
        self._pending = []
        reports = [json.loads(path.read_text())["message"] for path in sorted(self._folder.glob("*.json"))]
        failed = {
            rank: code
            for rank, process in enumerate(self._running)
            if (code := process.poll()) and rank not in self._too_slow
        }
        interrupted = signal.SIGINT in self._received
        if not failed:
            stop = next((report for report in reports if report["errorCode"] < 0), None)
            # Ranks that did not receive the signal report SIGTERM.
            return stop and Stopped(signal.SIGINT if interrupted else -stop["errorCode"], stop["message"])
        if interrupted:
            return KeyboardInterrupt()
        if bad_input := next((report for report in reports if report["errorCode"] == 2), None):
            return UserError(bad_input["message"])
        # Processes that lose a peer fail too: one that was killed (negative code) is the cause.
        code, rank = min((code, rank) for rank, code in failed.items())
        if code < 0:
            after = f" (restarts so far: {restarts})" * bool(restarts)
            return _Killed(
                f"process {rank} of {self._number} was ended by {signal.Signals(-code).name} (out of memory, or from "
                f"outside){', and the others with it' * (self._number > 1)}{after}; resume with: "
                f"{LAST} {shlex.quote(in_folder(self._run_dir))}"
            )
        if reports:
            return ProcessFailed(min(reports, key=lambda report: report["extraInfo"]["timestamp"])["message"])
        log = self._folder / f"{rank}.log"
        printed = log.read_text(errors="replace") if rank else ""
        return ProcessFailed(f"process {rank} of {self._number} ended with code {code}\n{printed}")

    def restart_helps(self, reason: BaseException | None) -> bool:
        """Return True if a restart may succeed."""
        ended_by = {-code for process in self._running if (code := process.poll())}
        return isinstance(reason, _Killed | ProcessFailed) and not self._received & (_ENDING | ended_by)

    def _end(self, grace_sec: float) -> None:
        """Wait some seconds for running processes, then kill them and their data workers."""
        deadline = time.monotonic() + grace_sec
        for rank, process in enumerate(self._running):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._too_slow.add(rank)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _checkpoints(run_dir: Path) -> set[tuple[int, int]]:
    """Identities of the checkpoints in a run's folder, unaffected by renaming."""
    stats = [path.stat() for path in (run_dir / CHECKPOINT_FOLDER).glob("*.ckpt")]
    return {(stat.st_ino, stat.st_mtime_ns) for stat in stats}
