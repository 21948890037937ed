"""Runs on two CPU processes: equal ranks, the numbers of one process, restarts, and failures that end all ranks."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import whole_runs
from tests.command_line import PROGRESS, CommandLine
from tests.rank_faults import same_on_both_ranks
from tests.whole_runs import MLP3, SMOOTH, STEPWISE, Left, read_events, read_results, slow, table

IMAGES = (*whole_runs.IMAGES, "data.validation=none")
STAGES = ("schedule.epochs=[1,2,1]", "schedule.widths=[0.5,0.75,1]")
TWO = ("trainer=ddp_cpu", "hydra.run.dir=run")
MLP = (*IMAGES, *STAGES, *MLP3)


@pytest.fixture
def finished(cli: CommandLine, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a run and returns its folder."""

    def run(*arguments: str, folder: str = "run", fault: tuple | None = None) -> Path:
        outcome = cli.done(*arguments, f"hydra.run.dir={folder}", cwd=tmp_path, fault=fault)
        # torch's C++ code warns about `find_unused_parameters` before growlab can silence it.
        lines = [line for line in outcome.err.splitlines() if not line.startswith("[rank0]:[W")]
        assert all(line.startswith(PROGRESS) for line in lines), outcome.err
        return tmp_path / folder

    return run


def assert_as_one(two: Path, one: Path, **tolerance: float) -> list[float]:
    """Assert equal losses and weights of runs on two processes and on one; return the losses."""
    losses = [[float(row["train_loss"]) for row in table(run / "metrics.csv")] for run in (two, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)
    weights, expected = (torch.load(run / "model.pt", weights_only=True) for run in (two, one))
    torch.testing.assert_close(weights, expected, **tolerance)
    return losses[1]


# Numbers --------------------------------------------------------------------------------------------------


PRECISE = (*IMAGES, "trainer.precision=64-true")
MLP8 = ("model=mlp8", "model.width=12")


@pytest.mark.parametrize(
    "arguments",
    [
        # Synchronised batch normalisation, a batch size for each stage.
        (
            *(*SMOOTH, "schedule.batch_growth_rate=0.1", "schedule.total_epochs=4"),
            *("schedule.num_stages=4", "schedule.initial_width=0.25", "optimizer.lr=0.02"),
            *("schedule.epoch_growth_rate=0", "trainer.sync_batchnorm=true"),
        ),
        slow(
            (
                *(*STAGES, *MLP8, "trainer.accumulate_grad_batches=2"),
                *("trainer.strategy.find_unused_parameters=true", "trainer.strategy.gradient_as_bucket_view=false"),
                *("optimizer=adamw", "optimizer.lr=0.001", "lr_adapt=none"),
            )
        ),
        slow((*STAGES, *MLP8, "trainer.strategy.static_graph=true", "trainer.gradient_clip_val=0.5")),
    ],
    ids=["synchronised", "accumulated", "static_graph"],
)
def test_ranks_are_equal_and_losses_are_those_of_one_process(
    finished: Callable[..., Path], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """In float64, after each event and epoch; losses differ by the order of sums."""
    kept = tmp_path / "kept"
    kept.mkdir()
    two = finished(*PRECISE, *arguments, "trainer=ddp_cpu", folder="two", fault=("keep_ranks", str(kept)))
    events, results = read_events(two), read_results(two)
    names = {*(f"stage{stage}" for stage in range(1, len(events) + 1)), *(f"epoch{epoch}" for epoch in range(4))}
    assert len(events) >= 2 and same_on_both_ranks(kept) == names
    assert all(event["seconds_by_part"]["rank_check"] > 0 for event in events)
    sizes = [stage["batch_size"] for stage in results["stages"]]
    assert (results["world_size"], results["batch_size"], sizes[-1]) == (2, 32, 32)
    alone = [a for a in arguments if not any(name in a for name in ("strategy", "batch_growth", "sync_"))]
    alone += [f"schedule.batch_sizes={sizes}".replace(" ", "")] * ("batch_growth" in str(arguments))
    one = finished(*PRECISE, *alone, "trainer=cpu", folder="one")
    losses = assert_as_one(two, one, rtol=1e-5, atol=1e-7)
    assert losses[-1] != losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("data=digits_incremental", "data.incremental.mode=images", "data.incremental.start=0.5", "osgd.anneal=stage"),
        ("depth.blocks=[hidden.2:4,hidden.4:6]", "depth.start=identity"),
        (
            *("schedule=gradient", "schedule.epochs=null", "schedule.total_epochs=4", "schedule.num_stages=2"),
            *("schedule.widths=[0.5,1]", "schedule.grow_when.ratio=1", "schedule.grow_when.groups=gradient"),
        ),
    ],
    ids=["looks_back", "deepens", "decides"],
)
def test_osgd_depth_and_triggers_on_two_processes_equal_one(
    finished: Callable[..., Path], options: tuple[str, ...]
) -> None:
    # Without batch normalisation, which would use each rank's own images.
    arguments = (*MLP, "model.batch_norm=false", "trainer.precision=64-true", *options)
    two = finished(*arguments, "trainer=ddp_cpu", folder="two")
    one = finished(*arguments, "trainer=cpu", folder="one")
    assert_as_one(two, one, rtol=1e-6, atol=1e-9)


def test_ranks_with_their_own_statistics_are_equal_after_each_epoch(
    finished: Callable[..., Path], tmp_path: Path
) -> None:
    """In mixed precision; within an epoch each rank has its own running statistics."""
    kept = tmp_path / "kept"
    kept.mkdir()
    arguments = (
        *(*IMAGES, *STAGES, *SMOOTH),
        "trainer=ddp_cpu",
        "trainer.precision=bf16-mixed",
        "growth=net2net",
        "data.validation=split",
    )
    run = finished(*arguments, fault=("keep_ranks", str(kept)))
    assert same_on_both_ranks(kept) == {"stage1", "stage2", "epoch0", "epoch1", "epoch2", "epoch3"}
    kept_last = torch.load(kept / "epoch3_rank0.pt", weights_only=True)
    assert any("running_mean" in name for name in kept_last) and any("momentum" in name for name in kept_last)
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(checkpoint["network.1.running_var"], kept_last["1.running_var"])


# Restarts -------------------------------------------------------------------------------------------------

KILL = int(signal.SIGKILL)
RESTARTED = (*MLP, STEPWISE, "log_rates_every_n_steps=1")


def test_ranks_stop_and_restart_together_with_exact_results(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path
) -> None:
    """A signal to one rank stops both; killing one in an event restarts both; results are equal bit for bit."""
    command = (*RESTARTED, *TWO, "trainer.max_restarts=1")
    outcome = cli.done(*command, cwd=tmp_path, fault=("on_rank", 1, "at_step", 2, int(signal.SIGTERM)))
    (line,) = (line for line in outcome.err.splitlines() if "resume with" in line)
    assert line.startswith("SIGTERM: saved after step 2; resume with: growlab ")
    fault = ("attempts", (0, "in_growth", 1, KILL))
    outcome = cli.done(*command, "ckpt_path=last", cwd=tmp_path, fault=fault)
    (line,) = (line for line in outcome.err.splitlines() if "; restart " in line)
    assert line.startswith("process 0 of 2 was ended by SIGKILL") and line.endswith("; restart 1 of 1")
    whole = uninterrupted(*RESTARTED, "trainer=ddp_cpu")
    assert Left.by(tmp_path / "run").differences(whole) == []


@pytest.mark.parametrize(
    ("ranks", "kills", "messages"),
    [
        # Before the first checkpoint, and in an event.
        (1, [(0, "at_step", 1, KILL), (0, "in_growth", 1, KILL)], ["process 0 of 1"] * 2),
        slow(2, [(1, "at_step", 1, KILL), (0, "in_growth", 1, KILL)], ["process 1 of 2", "process 0 of 2"]),
        # Inside an epoch, and between two files of a checkpoint.
        slow(2, [(0, "at_step", 5, KILL), (0, "at_write", 2, "unnamed", KILL)], ["process 0 of 2"] * 2),
        # A bug that occurs in the first attempt only.
        slow(2, [(1, "breaks", 4)], ["RuntimeError: our own mistake"]),
    ],
    ids=["one_device", "event", "checkpoint", "mistake"],
)
def test_restarts_are_exact(
    cli: CommandLine,
    uninterrupted: Callable[..., Left],
    tmp_path: Path,
    ranks: int,
    kills: list[tuple[object, ...]],
    messages: list[str],
) -> None:
    """Bit for bit; an older checkpoint in the folder is not used."""
    arguments = (*RESTARTED, "trainer=cpu" if ranks == 1 else "trainer=ddp_cpu")
    older = tmp_path / "run" / "checkpoints" / "last.ckpt"
    older.parent.mkdir(parents=True)
    older.write_bytes(b"older")
    more = (f"trainer.max_restarts={len(kills)}", "hydra.run.dir=run")
    outcome = cli.done(*arguments, *more, cwd=tmp_path, fault=("attempts", *kills))
    lines = [line for line in outcome.err.splitlines() if "; restart " in line]
    assert [line.split(" was ended by SIGKILL")[0].split("; ")[0] for line in lines] == messages, outcome.err
    assert lines[-1].endswith(f"; restart {len(kills)} of {len(kills)}")
    assert Left.by(tmp_path / "run").differences(uninterrupted(*arguments)) == []


@pytest.mark.parametrize(
    ("fault", "message", "restarts"),
    [
        (("at_step", 2, KILL), "process 1 of 2 was ended by SIGKILL (out of memory, or from outside)", 1),
        # Errors that the user has to fix would occur again.
        (("fails", "step", 2, "the disk is gone."), "error: the disk is gone.", 0),
        slow(("at_write", 2, "unnamed", KILL), "(restarts so far: 1)", 1),
    ],
    ids=["killed", "user_error", "checkpoint"],
)
def test_the_number_of_restarts_is_limited(
    cli: CommandLine, tmp_path: Path, fault: tuple[object, ...], message: str, restarts: int
) -> None:
    rank = 0 if fault[0] == "at_write" else 1
    more = (*TWO, "trainer.max_restarts=1")
    # The parent process connects to the ranks without a name server.
    both = ("together", ["on_rank", rank, *fault], ["no_names"])
    outcome = cli(*RESTARTED, *more, cwd=tmp_path, fault=both)
    assert outcome.code == 2, outcome.err
    assert message in outcome.err.splitlines()[-1] and "Traceback" not in outcome.err
    assert outcome.err.count("; restart 1 of 1") == restarts


def test_sigterm_does_not_restart(cli: CommandLine, tmp_path: Path) -> None:
    """It kills ranks that do not handle signals yet."""
    fault = ("on_rank", 1, "signal_parent", int(signal.SIGTERM))
    outcome = cli(*RESTARTED, *TWO, "trainer.max_restarts=3", cwd=tmp_path, fault=fault)
    assert outcome.code == 2 and "was ended by SIGTERM" in outcome.err and "; restart" not in outcome.err


# Failures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (("drift", "weight", 5), "ranks hold different values at the end of epoch 1 (stage 1): classifier.weight"),
        slow(("drift", "state", 9), "after growth to stage 2: momentum_buffer of classifier.weight"),
        slow(("other_draws",), "after growth to stage 1: hidden.0.weight, "),
        slow(("parity_fails",), "changed the output by 1.00e+00"),
        (("loss_is_nan", 4), "the training loss became NaN or infinite at step 4"),
        slow(("weights_are_nan", 2), "was NaN or infinite after step 2 (epoch 0"),
    ],
    ids=lambda value: "_".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_failure_of_one_rank_stops_all_with_one_message(
    cli: CommandLine, tmp_path: Path, fault: tuple[object, ...], message: str
) -> None:
    outcome = cli(*MLP, "optimizer_state=inherit", *TWO, cwd=tmp_path, fault=("on_rank", 1, *fault))
    assert message in outcome.sentence
    assert not (tmp_path / "run" / "results.json").exists()


@pytest.mark.slow
def test_the_rank_check_ignores_running_statistics_and_can_be_disabled(finished: Callable[..., Path]) -> None:
    finished(*MLP, *TWO, fault=("on_rank", 1, "drift", "buffer", 3))
    run = finished(*MLP, *TWO, "check_ranks=false", fault=("on_rank", 1, "drift", "weight", 5))
    assert [event["stage"] for event in read_events(run)] == [1, 2]


@pytest.mark.slow
def test_a_full_disk_on_the_rank_that_writes(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*MLP, *TWO, cwd=tmp_path, fault=("on_rank", 0, "full_disk", 1, 8_000))
    assert "File too large" in outcome.sentence


def test_a_bug_on_one_rank_is_one_traceback(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*MLP, *TWO, cwd=tmp_path, fault=("on_rank", 1, "breaks", 4))
    assert outcome.code == 1
    assert outcome.err.count("Traceback") == 1 and outcome.err.splitlines()[-1] == "RuntimeError: our own mistake"


def test_processes_end_with_the_one_that_started_them(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*MLP, *TWO, cwd=tmp_path, fault=("parent_dies", 2, str(tmp_path)))
    assert outcome.code == -signal.SIGKILL
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    deadline = time.monotonic() + 20
    while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(runs(pid) for pid in pids)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie, if its exit code has not been read.
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.slow
def test_ctrl_c(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*MLP, *TWO, cwd=tmp_path, fault=("interrupt_parent", 5))
    assert outcome.code == 130
    last = outcome.err.splitlines()[-1]
    assert last.startswith("SIGINT: saved after step ") and "resume with: growlab " in last
    assert outcome.err.count("SIGINT: ") == 1 and "Traceback" not in outcome.err
