"""A failure in any phase, with and without data workers, on one and two ranks, ends all processes of the run."""

import signal
import time
from pathlib import Path

import pytest

from tests.command_line import CommandLine, Outcome
from tests.faults import PHASES
from tests.whole_runs import MLP, slow

STREAMED = (*MLP, "data.in_memory=false", "trainer=cpu", "hydra.run.dir=run")
TWO_RANKS = "trainer=ddp_cpu"
SENTENCE = "the disk is gone."
# Limit for a failed run to end on a busy machine; on an idle one it takes less than a second.
SECONDS = 20.0
# Cases that are not marked as slow.
FAST = {("read", 2, 1), ("event", 2, 1), ("read", 2, 2)}


def fail(
    cli: CommandLine, folder: Path, phase: str, workers: int, ranks: int, sentence: str | None = SENTENCE
) -> Outcome:
    """Make a run fail in a phase, on the second of two ranks; check the time that it takes to end."""
    fault = ("fails", phase, 1 if phase in ("trace", "test", "loggers") else 2, sentence)
    if ranks == 2:
        # Only rank 0 writes checkpoints.
        fault = ("on_rank", 0 if phase == "checkpoint" else 1, *fault)
    more = [TWO_RANKS] if ranks == 2 else []
    # The call fails if the run leaves a process behind or does not end.
    outcome = cli(*STREAMED, f"data.num_workers={workers}", *more, cwd=folder, fault=fault)
    assert time.time() - float((folder / "failed").read_text()) < SECONDS
    return outcome


@pytest.mark.parametrize(
    ("phase", "workers", "ranks"),
    [
        pytest.param(phase, workers, ranks, marks=[] if (phase, workers, ranks) in FAST else pytest.mark.slow)
        for phase in PHASES
        for workers in (0, 2)
        for ranks in (1, 2)
    ],
)
def test_a_failure_in_any_phase_ends_every_process_with_its_sentence(
    cli: CommandLine, tmp_path: Path, phase: str, workers: int, ranks: int
) -> None:
    outcome = fail(cli, tmp_path, phase, workers, ranks)
    assert (outcome.code, "Traceback" in outcome.err) == (2, False), outcome.err
    assert outcome.err.splitlines()[-1] == f"error: {SENTENCE}"


@pytest.mark.parametrize("phase", ["read", slow("event")])
def test_a_bug_with_data_workers_is_a_traceback(cli: CommandLine, tmp_path: Path, phase: str) -> None:
    outcome = fail(cli, tmp_path, phase, 2, 1, sentence=None)
    assert outcome.code == 1 and "RuntimeError: our own mistake" in outcome.err


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


@pytest.mark.parametrize(
    ("number", "ranks"),
    [(signal.SIGKILL, 1), slow(signal.SIGTERM, 1), slow(signal.SIGTERM, 2), slow(signal.SIGKILL, 2)],
)
def test_a_signal_with_data_workers_leaves_nothing_behind(
    cli: CommandLine, tmp_path: Path, number: signal.Signals, ranks: int
) -> None:
    """No processes (checked by `cli`), shared memory or lock: the same command resumes."""
    command = (*STREAMED, "data.num_workers=2", *[TWO_RANKS] * (ranks - 1))
    fault = ("at_step", 4, int(number))
    before = _shared_memory()
    outcome = cli(*command, cwd=tmp_path, fault=("on_rank", 1, *fault) if ranks == 2 else fault)
    if number == signal.SIGTERM:
        assert outcome.code == 0 and "SIGTERM: saved after step 4" in outcome.err, outcome.err
    else:
        assert outcome.code == (2 if ranks == 2 else -signal.SIGKILL), outcome.err
    # Shared memory of tests that run at the same time disappears, too.
    deadline = time.monotonic() + SECONDS
    while (left := _shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert cli(*command, "ckpt_path=last", cwd=tmp_path).code == 0
