"""Runs a job in several processes of this machine under torch's elastic agent, which can start them again.

`torch.distributed.elastic` gives the processes a store to meet at, starts each as a command in a separate session,
keeps their output and error files and restarts all of them. This module keeps what the agent does not offer:

- Signals are forwarded. The agent ends its processes at the first one and kills them 30 s later; here SIGTERM may take
  as long as a checkpoint takes, a second Ctrl-C stops at once, and SIGUSR1 need not end a run, nor the processes that
  read data.
- One reason is reported. The agent ends the others as soon as one process has failed, which is often one that lost its
  neighbour; here they have a few seconds to say why, and the cause is reported instead of what followed from it.
- Restarts resume from the last checkpoint, and what would fail again (bad input, a signal to end) is not restarted.
- Processes end with the one that started them (`growlab.lab.training.processes.end_with_parent`).
- Nothing is looked up by name: the agent asks for this machine's full name at each event.
"""

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from growlab.base.errors import Stopped, UserError
from growlab.base.files import CHECKPOINT_FOLDER
from growlab.lab.training.configuration import search_options
from growlab.lab.training.processes import ProcessFailed, in_folder, quoted, run_id

# How long the others may take to end by themselves once one process has failed.
_GRACE_SEC = 5.0
_POLL_SEC = 0.05
_TIMEOUT_SEC = 600
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_FORWARDED = {*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}


def run(number: int, max_restarts: int, run_dir: Path, more: Sequence[str] = ()) -> None:
    """Run the job that Hydra has composed in processes of their own and wait for them.

    Args:
        number: of processes.
        max_restarts: times that all processes start again after one of them was killed or failed.
        run_dir: the run's folder, for all of them.
        more: further overrides.

    Raises:
        UserError: a process met input that cannot be used, or was ended from outside.
        ProcessFailed: a process ended with a traceback.
        KeyboardInterrupt: the run was interrupted before it could save itself.
        Stopped: a signal ended the run in good order.
    """
    # The agent's own signal handlers and messages are left out.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate, logger.handlers = False, [logging.NullHandler()]
    folder = tempfile.mkdtemp(prefix="growlab_")
    try:
        # The first process talks, the others only if they fail.
        logs = DefaultLogsSpecs(folder, dict.fromkeys(range(1, number), Std.ALL))
        spec = WorkerSpec(
            role="growlab",
            local_world_size=number,
            rdzv_handler=_Rendezvous("127.0.0.1", 0, 0, 1, run_id(), _TIMEOUT_SEC),
            entrypoint=sys.executable,
            # The agent takes arguments for templates.
            args=tuple(text.replace("$", "$$") for text in _command_line(run_dir, more)),
            max_restarts=max_restarts,
            monitor_interval=_POLL_SEC,
        )
        agent = _Agent(spec, logs, run_dir)
        with agent.forwarding():
            agent.run()
        reason = agent.reason()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if reason is not None:
        raise reason


class _Killed(UserError):
    """A signal ended a process of the run."""

    def __repr__(self) -> str:
        return str(self).partition(";")[0]


class _Rendezvous(StaticTCPRendezvous):
    """A new store on a free port for each attempt: in the last one are the addresses of processes that have died."""

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = TCPStore(self.master_addr, 0, 1, True, self.timeout)
        self.master_port = self._store.port
        return super().next_rendezvous()


class _Agent(LocalElasticAgent):
    """Torch's agent with what the module's docstring lists; it replaces the methods that are there to be replaced."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, run_dir: Path) -> None:
        super().__init__(spec, logs)
        self._spec, self._run_dir, self._restarts = spec, run_dir, 0
        # A new run may have been given the folder of an older one.
        self._older_checkpoints = _checkpoints(run_dir)
        self._too_slow: set[int] = set()
        self._received: set[int] = set()
        # Signals that came while there were no processes yet to hand them on to; None: there are.
        self._pending: list[int] | None = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if _checkpoints(self._run_dir) - self._older_checkpoints:
            given = [text for text in self._spec.args if not text.lstrip("+").startswith("ckpt_path=")]
            self._spec.args = (*given, "ckpt_path=last")
        self._too_slow.clear()
        self._pending = self._pending or []
        started = super()._start_workers(worker_group)
        waiting, self._pending = self._pending, None
        for signal_number in waiting:
            self._hand_on(signal_number)
        return started

    def _hand_on(self, number: int) -> None:
        for process in self._processes():
            process.send_signal(number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [process.poll() for process in self._processes()]
        if None in codes and not any(codes):
            # Torch would ask once more, and one that dies in between would be its alone.
            return RunResult(WorkerState.HEALTHY)
        if any(codes):
            self._let_end()
            self._pending = []
            reason = self.reason()
            if not self._restart_helps(reason):
                self._remaining_restarts = 0  # as in torch's own agent where it gives up
            elif self._remaining_restarts > 0:
                self._restarts += 1
                print(f"{reason!r}; restart {self._restarts} of {self._spec.max_restarts}", file=sys.stderr)
        return super()._monitor_workers(worker_group)

    def _construct_event(self, state: str, source: EventSource, *rest: Any, **more: Any) -> Event:
        return Event(f"torchelastic.worker.status.{state}", source)

    def _processes(self) -> list[Any]:
        return [] if self._pcontext is None else [h.proc for h in self._pcontext.subprocess_handlers.values()]

    def _let_end(self) -> None:
        """Give those that still run a few seconds, then kill them with the processes that read data for them."""
        deadline = time.monotonic() + _GRACE_SEC
        for rank, process in enumerate(self._processes()):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._too_slow.add(rank)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _restart_helps(self, reason: BaseException | None) -> bool:
        ended_by = {-process.poll() for process in self._processes()}
        return isinstance(reason, _Killed | ProcessFailed) and not self._received & (_ENDING | ended_by)

    def reason(self) -> BaseException | None:
        """The one reason among several why processes have ended: what a user can mend, else what came first.

        Returns:
            An exception with it; None after a run that came to its end.
        """
        files = map(Path, self._pcontext.error_files.values())
        found = [json.loads(path.read_text())["message"] for path in files if path.exists()]
        processes = enumerate(self._processes())
        failed = {rank: p.poll() for rank, p in processes if p.poll() and rank not in self._too_slow}
        interrupted, number = signal.SIGINT in self._received, self._spec.local_world_size
        if not failed:
            stop = next((one for one in found if one["errorCode"] < 0), None)
            # Ranks that got no signal of their own say SIGTERM.
            return stop and Stopped(signal.SIGINT if interrupted else -stop["errorCode"], stop["message"])
        if interrupted:
            return KeyboardInterrupt()
        if bad_input := next((one for one in found if one["errorCode"] == 2), None):
            return UserError(bad_input["message"])
        # Processes that lose a neighbour fail too: one that was killed is the cause.
        code, rank = min((code, rank) for rank, code in failed.items())
        if code < 0:
            after = f" (restarts so far: {self._restarts})" * bool(self._restarts)
            return _Killed(
                f"process {rank} of {number} was ended by {signal.Signals(-code).name} (out of memory, or from "
                f"outside){', and the others with it' * (number > 1)}{after}; go on with: "
                f"ckpt_path=last {shlex.quote(in_folder(self._run_dir))}"
            )
        if found:
            return ProcessFailed(min(found, key=lambda one: one["extraInfo"]["timestamp"])["message"])
        logs = [paths[rank] for paths in (self._pcontext.stdouts, self._pcontext.stderrs) if paths[rank]]
        printed = "".join(Path(path).read_text(errors="replace") for path in logs)
        return ProcessFailed(f"process {rank} of {number} ended with code {code}\n{printed}")

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        """Hand signals on to the processes, which know what to do at each."""

        def forward(number: int, frame: FrameType | None) -> None:
            self._received.add(number)
            if self._pending is not None:
                self._pending.append(number)
            else:
                self._hand_on(number)

        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, forward) for number in _FORWARDED if main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _checkpoints(run_dir: Path) -> set[tuple[int, int]]:
    """Identities of the checkpoints in a run's folder, which stay as they are when a file is renamed."""
    found = [path.stat() for path in (run_dir / CHECKPOINT_FOLDER).glob("*.ckpt")]
    return {(one.st_ino, one.st_mtime_ns) for one in found}


def _command_line(run_dir: Path, more: Sequence[str]) -> Iterator[str]:
    """The job as the command of a process that is one of several: no sweep, and nothing that Hydra leaves twice."""
    hydra = HydraConfig.get()
    yield from ("-m", "growlab", *search_options(), *hydra.overrides.task, *more)
    yield f"hydra.run.dir={quoted(run_dir)}"
    yield from ("hydra.mode=RUN", "hydra.output_subdir=null")
