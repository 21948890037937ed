"""Runs that are killed, stopped or damaged at any moment and resumed equal uninterrupted ones, bit for bit."""

import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.training.checkpoints import LAST, PREVIOUS, read_header, usable_checkpoint
from growlab.lab.training.configuration import resume_override
from tests.command_line import CommandLine
from tests.whole_runs import (
    BASE,
    IMAGES,
    MLP,
    NUM_STEPS,
    SMALL,
    SMOOTH,
    STEPWISE,
    Left,
    Whole,
    assert_resumes,
    resumed_from,
    slow,
    struck,
)

SIGKILL, SIGTERM, SIGINT, SIGUSR1 = map(int, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
BATCHES = (
    *(*SMALL, "schedule.batch_growth_rate=0.5", "optimizer.nesterov=true"),
    *("schedule.learning_rate.progress_unit=cost", "schedule.learning_rate.shape=wsd"),
    "schedule.learning_rate.warmup_steps_after_growth=2",
)
RESNET = (*BATCHES, "model.width=4")
ADAM = (
    *(*MLP, "growth=net2net", "lr_adapt=none", "optimizer=adamw", "optimizer_state=zero_new"),
    "trainer.precision=64-true",
)
ACCUMULATED = (
    *(*MLP, "growth=pairs", "trainer.accumulate_grad_batches=2", "trainer.precision=bf16-mixed"),
    *("schedule.learning_rate.restarts=stage", "schedule.learning_rate.warmup_epochs=0.5"),
)
# Uses training data at every event, but not again for the average.
FIREFLY = (*MLP, "growth=firefly", "growth.steps=2", "lr_adapt=none", "ema.decay=0.9")
# A method that chooses widths, after epochs or within them; they grow and shrink.
_ISOTROPIC = (
    *(*BASE, "schedule.total_epochs=6", "model=isotropic_mlp", "model.width=9"),
    *("model.depth=2", "growth=isotropic", "lr_adapt=none", "optimizer=adamw", "optimizer.lr=0.02"),
)
ISOTROPIC = (*_ISOTROPIC, "growth.threshold=0.55", "growth.reserve_neurons=2", "growth.neurons_per_event=2")
BY_STEPS = (
    *(*_ISOTROPIC, "model.chi_norm=true", "growth.every_n_steps=2", "growth.importance=gradient"),
    *("growth.threshold=0.1", "growth.reserve_neurons=2", "growth.removal_compensation=batch"),
    "growth.least_squares=true",
)
# Growth on demand, by records and the optimizer's state.
ON_DEMAND = (
    *(*BASE, "schedule=gradient", "schedule.total_epochs=6", "schedule.num_stages=3", "schedule.initial_width=0.5"),
    *("schedule.grow_when.groups=gradient", "schedule.grow_when.ratio=1"),
    *("model=mlp8", "model.width=12", "model.batch_norm=true"),
)
# Weights emitted by a hypernetwork.
HYPERFAN = (
    *(*IMAGES, "data.validation=none"),
    *("schedule.epochs=[1,1,1]", "schedule.widths=[0.25,0.75,1]", "log_rates_every_n_steps=2"),
    *("growth=hyperfan", "growth.embedding_features=3", "model.width=8", "optimizer.lr=0.01"),
)
CHUNKS = (*HYPERFAN, "growth.sharing=chunk", "growth.hidden_features=[4]")
DROPOUT = (*SMALL, "model=custom", "model._target_=tests.whole_runs.dropout_mlp", "growth=net2net")
STREAMED = (*DROPOUT, "data.in_memory=false", "data.num_workers=1", "trainer.precision=bf16-mixed")
TWO_RANKS = (*MLP, "trainer=ddp_cpu")


def test_killed_again_and_again(cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path) -> None:
    """With checkpoints at the ends of epochs only; `tests.chaos` kills runs with checkpoints at every step."""
    faults = [
        # Before the first checkpoint, and before a growth event.
        ("at_step", 2, SIGKILL),
        # After the rows of an epoch and before its checkpoint; after the checkpoint and before the epoch's end.
        ("at_checkpoint", 2, "before", SIGKILL),
        ("at_checkpoint", 1, "after", SIGKILL),
        ("before_growth", 2, SIGKILL),
        ("at_step", NUM_STEPS, SIGKILL),
    ]
    left = struck(cli, tmp_path, MLP, faults)
    assert left.differences(uninterrupted(*MLP)) == []
    assert [row["epoch"] for row in left.metrics] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("arguments", "behind"),
    [
        *(((*BATCHES, *SMOOTH), 0), (ACCUMULATED, 1), (BY_STEPS, 1), (DROPOUT, 1)),
        *(slow(ISOTROPIC, 0), slow(ADAM, 1), slow(ON_DEMAND, 0), slow(FIREFLY, 1)),
    ],
    ids=lambda value: "before" if value == 0 else "behind" if value == 1 else "",
)
def test_every_kind_of_run_resumes(
    cli: CommandLine, whole: Callable[..., Whole], tmp_path: Path, arguments: tuple[str, ...], behind: int
) -> None:
    """Right before the first growth event, or one step after it; test_parts.py resumes runs with parts."""
    run = whole(*arguments)
    first, second, *_ = (event["step"] for event in run.left.growth["events"])
    assert first + behind < second
    assert_resumes(cli, tmp_path, arguments, run.checkpoints[first + behind], run.left)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [MLP, STREAMED, ACCUMULATED], ids=["mlp", "streamed", "accumulated"])
def test_killed_at_every_step(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    steps = range(1, uninterrupted(*arguments).checkpoint["global_step"] + 1)
    left = struck(cli, tmp_path, (*arguments, STEPWISE), [("at_step", step, SIGKILL) for step in steps])
    assert left.differences(uninterrupted(*arguments)) == []


# Signals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        (MLP, [(("at_step", 4, SIGTERM), 4), (("at_validation", 3, 0, SIGTERM), 12), (("at_step", 14, SIGINT), 14)]),
        slow(
            (*MLP, "data.eval_batch_size=4"),
            # After the last step of an epoch and stage, validation runs before the signal is handled.
            [(("at_step", 5, SIGUSR1), 5), (("at_step", 6, SIGTERM), 6), (("at_validation", 3, 1, SIGTERM), 12)],
        ),
    ],
    ids=["inside", "boundaries"],
)
def test_a_signal_saves_and_prints_the_command_that_resumes(
    cli: CommandLine,
    uninterrupted: Callable[..., Left],
    tmp_path: Path,
    arguments: tuple[str, ...],
    faults: list[tuple[tuple[Any, ...], int]],
) -> None:
    """The printed command works from any folder, `ckpt_path=last` from that of the first call."""
    place = tmp_path / "odd (copy), v2={x}"
    place.mkdir()
    command = (*arguments, "checkpoint.signals=[SIGTERM,SIGUSR1]")
    printed, where = list(command), place
    for number, (fault, step) in enumerate(faults):
        if number == 2:
            printed, where = [*command, "ckpt_path=last"], place
        outcome = cli(*printed, cwd=where, fault=fault)
        assert outcome.code == (130 if fault[-1] == SIGINT else 0) and "Traceback" not in outcome.err
        line = outcome.err.splitlines()[-1]
        name = signal.Signals(fault[-1]).name
        assert line.startswith(f"{name}: saved after step {step}; resume with: growlab ")
        (run,) = (place / "runs").glob("*/*")
        assert not (run / "results.json").exists()
        assert torch.load(run / "checkpoints" / LAST, weights_only=True)["global_step"] == step
        printed, where = shlex.split(line.split("resume with: growlab ")[1]), tmp_path
    cli.done(*printed, cwd=where)
    assert list((place / "runs").glob("*/*")) == [run] and not (tmp_path / "runs").exists()
    # The name contains microseconds, since runs may start within a second.
    assert re.fullmatch(r"[\d-]{10}_[\d-]{8}_\d{6}", run.name)
    assert Left.by(run).differences(uninterrupted(*arguments)) == []


# Folders of resumed runs -------------------------------------------------------------------------


def test_a_job_of_a_sweep_that_was_killed_resumes(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path
) -> None:
    """By the same command without `ckpt_path`; a job with other settings starts from the beginning."""
    sweep = ("-m", *MLP, "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${seed}", "seed=0,1")
    assert cli(*sweep, cwd=tmp_path, fault=("at_step", 14, SIGKILL)).code == -SIGKILL
    job = tmp_path / "sweep" / "0"
    assert not (job / "results.json").exists()
    shutil.copytree(tmp_path / "sweep", tmp_path / "other")
    again = cli.done(*sweep, cwd=tmp_path)
    assert again.out.count("resuming from") == 1 and "sweep/0/checkpoints" in again.out
    # The second job of a process equals a separate run.
    for seed in (0, 1):
        whole = uninterrupted(*MLP, *[f"seed={seed}"] * seed)
        assert Left.by(tmp_path / "sweep" / str(seed)).differences(whole) == []
    other = (*sweep[:-1], "seed=0", "hydra.sweep.dir=other", "optimizer.lr=0.025")
    changed = cli(*other, cwd=tmp_path, fault=("at_step", 1, SIGKILL))
    assert changed.code == -SIGKILL and "resuming" not in changed.out
    assert "starting from the beginning: " in changed.err
    assert "other/0 was interrupted with optimizer.lr=" in changed.err


def test_a_finished_run_is_not_trained_further(cli: CommandLine, whole: Callable[..., Whole], tmp_path: Path) -> None:
    """After a kill between the last checkpoint and the results, these are made from the checkpoint."""
    run = whole(*MLP)
    shutil.copytree(run.folder, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    (tmp_path / "run" / "model.pt").unlink()
    outcome = cli.done(*MLP, STEPWISE, "hydra.run.dir=run", "ckpt_path=last", cwd=tmp_path)
    assert "stage" not in outcome.err
    again = Whole(tmp_path / "run", outcome.out, outcome.err)
    assert again.left.differences(run.left) == []
    # The recorded command is that of the run, without `ckpt_path`.
    assert again.results["command"].split() == [
        word for word in run.results["command"].split() if "ckpt_path" not in word
    ]


def test_resuming_a_sweep_needs_its_folder() -> None:
    command = ["seed=0,1", "ckpt_path=last"]
    with pytest.raises(UserError, match=r"add hydra\.sweep\.dir=FOLDER"):
        resume_override(command, multirun=True)
    assert resume_override([*command, "hydra.sweep.dir=sweep"], multirun=True) is None


def test_a_checkpoint_resumes_in_another_folder_with_other_data_settings(
    cli: CommandLine, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(*MLP)
    more = (f"ckpt_path={run.checkpoints[8]}", "data.in_memory=false", "data.eval_batch_size=7")
    cli.done(*MLP, "hydra.run.dir=b", *more, cwd=tmp_path)
    differences = Left.by(tmp_path / "b").differences(run.left)
    assert set(differences) <= {"metrics", "results"}, "only sums over other batches may differ"


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_ranks(
    cli: CommandLine, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    """With synchronised batch normalisation only sums differ, since batch sizes are global."""
    run = whole(*MLP)
    outcome = resumed_from(cli, tmp_path, TWO_RANKS, run.checkpoints[5])
    assert outcome.code == 2 and "statistics over 1/2 of each batch, not 1/1" in outcome.err, outcome.err
    command = (*TWO_RANKS, "trainer.sync_batchnorm=true", "hydra.run.dir=run", "ckpt_path=last")
    cli.done(*command, cwd=tmp_path)
    for row, wanted in zip(Left.by(tmp_path / "run").metrics, run.left.metrics, strict=True):
        assert float(row["train_loss"]) == pytest.approx(float(wanted["train_loss"]), rel=1e-3)
        assert row["step"] == wanted["step"]


# Checkpoints that cannot be resumed from ------------------------------------------------------------------


def test_a_checkpoint_of_other_settings_is_refused(
    cli: CommandLine, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    changes = ("model.width=16", "optimizer.lr=0.5", "seed=3", "schedule.epochs=[2,2,3]")
    outcome = cli(*MLP, *changes, f"ckpt_path={whole(*MLP).checkpoints[4]}", cwd=tmp_path)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1), outcome.err
    assert "model.width=12, not 16; optimizer.lr=0.1, not 0.5 and 2 more: " in outcome.err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path, good: None, "is not a file"),
        (lambda path, good: path.mkdir(), "is not a file"),
        (lambda path, good: path.write_bytes(b"not a checkpoint"), "is not a checkpoint that growlab can read"),
        (lambda path, good: path.write_bytes(good[: len(good) // 2]), "is not a checkpoint that growlab can read"),
        (lambda path, good: torch.save({"weight": torch.ones(2)}, path), "is not a checkpoint of a growlab run"),
        (lambda path, good: torch.save([1, 2], path), "is not a checkpoint of a growlab run"),
    ],
    ids=["missing", "folder", "text", "torn", "weights", "list"],
)
def test_other_files_are_refused(
    whole: Callable[..., Whole], tmp_path: Path, make: Callable[[Path, bytes], object], message: str
) -> None:
    path = tmp_path / "given.ckpt"
    make(path, whole(*MLP).checkpoints[4].read_bytes())
    with pytest.raises(UserError, match=re.escape(f"ckpt_path={path} {message}")):
        read_header(path)


@pytest.fixture
def two_checkpoints(whole: Callable[..., Whole], tmp_path: Path) -> Path:
    """Checkpoints folder of a run that was killed after its ninth step."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step, name in ((8, PREVIOUS), (9, LAST)):
        shutil.copy(whole(*MLP).checkpoints[step], folder / name)
    return folder


def flip_a_bit(path: Path) -> None:
    """Change one bit of a weight, in a file that torch still loads without a warning."""
    content = bytearray(path.read_bytes())
    name, weight = next(iter(torch.load(path, weights_only=True)["state_dict"].items()))
    content[content.index(weight.numpy().tobytes()) + 2] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["state_dict"][name], weight)


def test_a_damaged_checkpoint_is_detected_and_the_previous_one_used(
    cli: CommandLine, uninterrupted: Callable[..., Left], two_checkpoints: Path, tmp_path: Path
) -> None:
    flip_a_bit(two_checkpoints / LAST)
    outcome = cli(*MLP, STEPWISE, "hydra.run.dir=run", "ckpt_path=last", cwd=tmp_path)
    assert outcome.code == 0 and "is damaged (" in outcome.err, outcome.err
    assert Left.by(tmp_path / "run").differences(uninterrupted(*MLP)) == []
    # Only the two newest are kept.
    assert sorted(path.name for path in two_checkpoints.iterdir()) == [LAST, PREVIOUS]


def test_the_newest_undamaged_checkpoint_is_found(two_checkpoints: Path) -> None:
    run, last, previous = two_checkpoints.parent, two_checkpoints / LAST, two_checkpoints / PREVIOUS
    whole = last.read_bytes()
    assert usable_checkpoint(run) == (last, None)
    last.write_bytes(whole[: len(whole) // 2])
    found, warning = usable_checkpoint(run)
    assert found == previous and "is damaged (" in warning
    last.unlink()
    assert usable_checkpoint(run) == (previous, None)
    last.write_bytes(b"nothing")
    previous.write_bytes(b"nothing")
    with pytest.raises(UserError, match=f"no checkpoint can be read .*{LAST}.*{PREVIOUS}"):
        usable_checkpoint(run)


@pytest.mark.parametrize(("limit", "code"), [(20_000, 0), slow(8_000, 2)], ids=["checkpoints", "results"])
def test_training_continues_on_a_full_disk(cli: CommandLine, tmp_path: Path, limit: int, code: int) -> None:
    """From the second epoch on no checkpoint can be saved, with the lower limit no results either."""
    outcome = cli(*MLP, "hydra.run.dir=run", cwd=tmp_path, fault=("full_disk", 1, limit))
    assert outcome.code == code and "Traceback" not in outcome.err, outcome.err
    assert outcome.err.count("warning: no checkpoint at step") == 5 and "epoch 5/5" in outcome.err
    assert code == 0 or "File too large" in outcome.err.splitlines()[-1]
    assert (tmp_path / "run" / "results.json").exists() == (code == 0)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == [LAST]
    assert torch.load(folder / LAST, weights_only=True)["epoch"] == 0
