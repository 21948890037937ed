"""A run that was killed between any two steps, or that a signal ended, goes on as if nothing had happened."""

import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from growlab.lab.training.checkpoints import LAST, PREVIOUS
from tests.command_line import CommandLine
from tests.runs import MLP, NUM_STEPS, SMALL, Left

SIGKILL, SIGTERM, SIGINT, SIGUSR1 = map(int, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
DROPOUT = (*SMALL, "model=custom", "model._target_=tests.runs.dropout_mlp", "growth=net2net")
STREAMED = (*DROPOUT, "data.in_memory=false", "data.num_workers=1", "trainer.precision=bf16-mixed")
# Steps of two batches: only every second batch ends in a state that can be saved.
ACCUMULATED = (*MLP, "data.batch_size=16", "trainer.accumulate_grad_batches=2")
SOME = sorted(random.Random(0).sample(range(1, NUM_STEPS + 1), 3))


def killed_at(cli: CommandLine, folder: Path, arguments: Sequence[str], steps: Sequence[int]) -> Left:
    """What a run leaves that was killed at each of the steps, resumed each time."""
    command = (*arguments, "hydra.run.dir=run", "checkpoint.every_n_steps=1")
    for number, step in enumerate(steps):
        resume = ["ckpt_path=last"] * (number > 0)
        outcome = cli(*command, *resume, cwd=folder, fault=("at_step", step, SIGKILL))
        assert outcome.code == -SIGKILL, outcome.err
    outcome = cli(*command, "ckpt_path=last", cwd=folder)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    return Left.by(folder / "run")


def test_killed_in_the_middle_of_epochs(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path
) -> None:
    assert killed_at(cli, tmp_path, DROPOUT, SOME).differences(uninterrupted(*DROPOUT)) == []


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [MLP, STREAMED, ACCUMULATED], ids=["mlp", "streamed", "accumulated"])
def test_killed_at_every_step(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Every step: ends of epochs, ends of stages and whatever lies between."""
    left = killed_at(cli, tmp_path, arguments, range(1, NUM_STEPS + 1))
    assert left.differences(uninterrupted(*arguments)) == []


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        (("at_step", 4, SIGTERM), 4),
        pytest.param(("at_step", 5, SIGUSR1), 5, marks=pytest.mark.slow),
        # The last step of an epoch and of a stage: the epoch's end and validation follow first.
        pytest.param(("at_step", 6, SIGTERM), 6, marks=pytest.mark.slow),
        pytest.param(("at_validation", 3, 0, SIGTERM), 12, marks=pytest.mark.slow),
        (("at_validation", 3, 1, SIGTERM), 12),
        (("at_step", 7, SIGINT), 7),
    ],
    ids=lambda value: "_".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_signal_saves_at_once_and_says_how_to_go_on(
    cli: CommandLine,
    uninterrupted: Callable[..., Left],
    tmp_path: Path,
    fault: tuple[object, ...],
    step: int,
) -> None:
    arguments = (*MLP, "data.eval_batch_size=4")
    command = (*arguments, "hydra.run.dir=run", "checkpoint.signals=[SIGTERM,SIGUSR1]")
    outcome = cli(*command, cwd=tmp_path, fault=fault)
    assert outcome.code == (130 if fault[-1] == SIGINT else 0), outcome.err
    told = outcome.err.splitlines()[-1]
    assert told.startswith(
        f"{signal.Signals(fault[-1]).name}: saved after step {step}; resume with: growlab "
    )
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "run" / "results.json").exists()
    saved = torch.load(tmp_path / "run" / "checkpoints" / LAST, weights_only=True)
    assert saved["global_step"] == step
    # What it says works.
    outcome = cli(*told.split("resume with: growlab ")[1].replace("'", "").split(), cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert Left.by(tmp_path / "run").differences(uninterrupted(*arguments)) == []


@pytest.mark.parametrize(
    "damage", ["flipped", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torn", "missing"))]
)
def test_a_damaged_checkpoint_is_recognised_and_the_one_before_it_used(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path, damage: str
) -> None:
    command = (*MLP, "hydra.run.dir=run", "checkpoint.every_n_steps=1")
    assert cli(*command, cwd=tmp_path, fault=("at_step", 9, SIGKILL)).code == -SIGKILL
    folder = tmp_path / "run" / "checkpoints"
    last = folder / LAST
    content = bytearray(last.read_bytes())
    name, weight = next(iter(torch.load(last, weights_only=True)["state_dict"].items()))
    if damage == "flipped":
        # One bit of one number: the file looks whole, and torch loads it without a word.
        content[content.index(weight.numpy().tobytes()) + 2] ^= 1
        last.write_bytes(content)
        assert not torch.equal(torch.load(last, weights_only=True)["state_dict"][name], weight)
    elif damage == "torn":
        last.write_bytes(content[: len(content) // 2])
    else:
        last.unlink()
    outcome = cli(*command, "ckpt_path=last", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert ("is damaged (" in outcome.err) == (damage != "missing")
    assert Left.by(tmp_path / "run").differences(uninterrupted(*MLP)) == []
    # Nothing is left but the two newest.
    assert sorted(path.name for path in folder.iterdir()) == [LAST, PREVIOUS]


def test_two_damaged_checkpoints_are_told(cli: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for name in (LAST, PREVIOUS):
        (folder / name).write_bytes(b"nothing")
    outcome = cli(*MLP, "hydra.run.dir=run", "ckpt_path=last", cwd=tmp_path)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome.err
    assert "no checkpoint can be read" in outcome.err and LAST in outcome.err and PREVIOUS in outcome.err


@pytest.mark.parametrize(
    ("limit", "code"),
    [(30_000, 0), pytest.param(8_000, 2, marks=pytest.mark.slow)],
    ids=["checkpoints", "results"],
)
def test_a_full_disk_is_told_and_training_goes_on(
    cli: CommandLine, tmp_path: Path, limit: int, code: int
) -> None:
    """From the second epoch on no checkpoint can be written, then no result either: the first one survives."""
    command = (*MLP, "hydra.run.dir=run")
    outcome = cli(*command, cwd=tmp_path, fault=("full_disk", 1, limit))
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.count("warning: no checkpoint at step") == 5
    assert "epoch 5/5" in outcome.err
    assert code == 0 or "File too large" in outcome.err.splitlines()[-1]
    assert (tmp_path / "run" / "results.json").exists() == (code == 0)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == [LAST]
    assert torch.load(folder / LAST, weights_only=True)["epoch"] == 0
    assert cli(*command, "ckpt_path=last", cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("checkpoint.every_n_steps=0", "checkpoint.every_n_steps=0 must be at least 1"),
        ("checkpoint.every_minutes=-1", "checkpoint.every_minutes=-1.0 must be positive"),
        ("checkpoint.signals=[SIGKILL]", "SIGKILL is no signal that a run can wait for"),
        ("checkpoint.signals=[TERM]", "TERM is no signal that a run can wait for"),
    ],
)
def test_impossible_policies_are_refused(cli: CommandLine, tmp_path: Path, override: str, told: str) -> None:
    outcome = cli(*MLP, "hydra.run.dir=run", override, cwd=tmp_path)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome.err
    assert told in outcome.err


TWO_RANKS = (*MLP, "trainer=ddp_cpu")


def test_two_ranks_stop_together_and_go_on(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path
) -> None:
    """A signal that reaches one rank, then one rank killed: in the middle of epochs both times."""
    command = (*TWO_RANKS, "hydra.run.dir=run", "checkpoint.every_n_steps=1")
    outcome = cli(*command, cwd=tmp_path, fault=("on_rank", 1, "at_step", 4, SIGTERM))
    assert outcome.code == 0, outcome.err
    told = [line for line in outcome.err.splitlines() if "resume with" in line]
    assert len(told) == 1 and told[0].startswith("SIGTERM: saved after step 4; resume with: growlab ")
    command = (*command, "ckpt_path=last")
    outcome = cli(*command, cwd=tmp_path, fault=("on_rank", 1, "at_step", 8, SIGKILL))
    assert outcome.code == 2 and "process 1 of 2 was ended by SIGKILL" in outcome.err, outcome.err
    outcome = cli(*command, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert Left.by(tmp_path / "run").differences(uninterrupted(*TWO_RANKS)) == []


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path
) -> None:
    """Batches are global ones, so only float sums differ, if batch normalisation sees whole batches."""
    command = ("hydra.run.dir=run", "checkpoint.every_n_steps=1")
    assert cli(*MLP, *command, cwd=tmp_path, fault=("at_step", 5, SIGKILL)).code == -SIGKILL
    command = (*command, "ckpt_path=last")
    outcome = cli(*TWO_RANKS, *command, cwd=tmp_path)
    assert outcome.code == 2 and "statistics over 1/2 of each batch, not 1/1" in outcome.err, outcome.err
    outcome = cli(*TWO_RANKS, "trainer.sync_batchnorm=true", *command, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    left, whole = Left.by(tmp_path / "run"), uninterrupted(*MLP)
    for row, wanted in zip(left.metrics, whole.metrics, strict=True):
        assert float(row["train_loss"]) == pytest.approx(float(wanted["train_loss"]), rel=1e-3)
        assert row["step"] == wanted["step"]
