"""A run that was killed and goes on equals one that was never interrupted, bit for bit."""

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.training.checkpoints import read_header
from growlab.lab.training.resuming import resume_override
from tests.command_line import CommandLine
from tests.runs import MLP, SMALL, Left, table

SIGKILL = int(signal.SIGKILL)
RESNET = (
    *(*SMALL, "model.width=4", "schedule.batch_growth_rate=0.5", "optimizer.nesterov=true"),
    *("schedule.learning_rate.clock=cost", "schedule.learning_rate.shape=wsd"),
    "schedule.learning_rate.rewarm_steps=2",
)
ADAM = (
    *(*MLP, "growth=net2net", "lr_adapt=none", "optimizer=adamw", "optimizer_state=zero_new"),
    "trainer.precision=64-true",
)
ACCUMULATED = (
    *(*MLP, "growth=pairs", "trainer.accumulate_grad_batches=2", "trainer.precision=bf16-mixed"),
    *("schedule.learning_rate.restarts=stage", "schedule.learning_rate.warmup_epochs=0.5"),
)
# Looks at training data at every event; its average must not look again.
FIREFLY = (*MLP, "growth=firefly", "growth.steps=2", "lr_adapt=none", "ema.decay=0.9")
# A method that decides widths by itself, by epochs and within them; both grow and shrink.
_ISOTROPIC = (
    *("data.limit_train=96", "data.limit_test=40", "data.batch_size=32", "data.validation=split"),
    *("schedule.total_epochs=6", "log_rates_every_n_steps=2", "model=isotropic_mlp", "model.width=9"),
    *("model.depth=2", "growth=isotropic", "lr_adapt=none", "optimizer=adamw", "optimizer.lr=0.02"),
)
ISOTROPIC = (*_ISOTROPIC, "growth.threshold=0.55", "growth.scaffold=2", "growth.neurons_per_event=2")
BY_STEPS = (
    *(*_ISOTROPIC, "model.chi_norm=true", "growth.every_n_steps=2", "growth.importance=gradient"),
    *("growth.threshold=0.1", "growth.scaffold=2", "growth.correction=batch", "growth.least_squares=true"),
)
# Growth on demand: widths that the run decides by what was recorded and by the optimizer's state.
ON_DEMAND = (
    *("data.limit_train=96", "data.limit_test=40", "data.batch_size=32", "data.validation=split"),
    *("schedule=gradient", "schedule.total_epochs=6", "schedule.num_stages=3", "schedule.initial_width=0.5"),
    *("schedule.demand.groups=gradient", "schedule.demand.ratio=1", "log_rates_every_n_steps=2"),
    *("model=mlp8", "model.width=12", "model.batch_norm=true"),
)
# Depth and width growing in one run.
DEEPENED = (*SMALL, "model.width=4", "depth.blocks=auto", "ema.decay=0.9", "optimizer_state=inherit")
# Classes that appear with the stages, and the gradient on the old ones that goes through growth.
INCREMENTAL = (*MLP, "data=digits_incremental", "osgd.anneal=stage", "ema.decay=0.9", "data.validation=test")
# A hypernetwork emits the weights.
HYPERFAN = (
    *("data.limit_train=96", "data.limit_test=40", "data.batch_size=32", "data.validation=none"),
    *("schedule.epochs=[1,1,1]", "schedule.widths=[0.25,0.75,1]", "log_rates_every_n_steps=2"),
    *("growth=hyperfan", "growth.embedding_features=3", "model.width=8", "optimizer.lr=0.01"),
)
CHUNKS = (*HYPERFAN, "growth.sharing=chunk", "growth.hidden_features=[4]")


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        # Any moment: before the first checkpoint, in the middle of stages, at the last step.
        *((MLP, [("at_step", step, SIGKILL)]) for step in sorted(random.Random(0).sample(range(1, 19), 3))),
        (RESNET, [("before_growth", 1, SIGKILL)]),
        (MLP, [("before_growth", 2, SIGKILL)]),
        # The epoch's rows are written, its checkpoint is not.
        (MLP, [("at_checkpoint", 4, "before", SIGKILL)]),
        # The checkpoint is there, the epoch has not ended.
        (MLP, [("at_checkpoint", 2, "after", SIGKILL)]),
        (MLP, [("at_checkpoint", 6, "after", SIGKILL)]),
        # Twice, the second time at the event that the first resumption had to catch up with.
        (MLP, [("before_growth", 1, SIGKILL), ("before_growth", 1, SIGKILL), ("at_step", 14, SIGKILL)]),
        (ADAM, [("before_growth", 1, SIGKILL), ("at_step", 11, SIGKILL)]),
        (ACCUMULATED, [("before_growth", 1, SIGKILL), ("at_step", 7, SIGKILL)]),
        (INCREMENTAL, [("before_growth", 1, SIGKILL), ("at_checkpoint", 4, "after", SIGKILL)]),
        (ON_DEMAND, [("before_growth", 1, SIGKILL), ("at_checkpoint", 4, "after", SIGKILL)]),
        (DEEPENED, [("before_growth", 2, SIGKILL), ("at_step", 14, SIGKILL)]),
        (FIREFLY, [("before_growth", 1, SIGKILL), ("at_step", 11, SIGKILL)]),
        (ISOTROPIC, [("before_growth", 2, SIGKILL), ("at_step", 11, SIGKILL)]),
        (BY_STEPS, [("at_step", 7, SIGKILL), ("before_growth", 4, SIGKILL)]),
    ],
    ids=lambda value: (
        "-".join("_".join(map(str, fault)) for fault in value) if isinstance(value, list) else ""
    ),
)
def test_killed_and_resumed_equals_uninterrupted(
    cli: CommandLine,
    uninterrupted: Callable[..., Left],
    tmp_path: Path,
    arguments: tuple[str, ...],
    faults: list[tuple[object, ...]],
) -> None:
    command = (*arguments, "hydra.run.dir=run")
    for number, fault in enumerate(faults):
        outcome = cli(*command, *["ckpt_path=last"] * (number > 0), cwd=tmp_path, fault=fault)
        assert outcome.code == -SIGKILL, outcome.err
    outcome = cli(*command, "ckpt_path=last", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    left, whole = Left.by(tmp_path / "run"), uninterrupted(*arguments)
    assert left.differences(whole) == []
    # The comparison sees something: rows of every epoch, and weights that have moved since the first stage.
    assert [row["epoch"] for row in left.metrics] == ["0", "1", "2", "3", "4", "5"]
    assert len(left.growth["events"]) >= 2
    assert "Traceback" not in outcome.err and "Warning" not in outcome.err


def test_a_job_of_a_sweep_that_was_killed_resumes(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path
) -> None:
    """The same command as before, without `ckpt_path`; a job of other settings starts from the beginning."""
    sweep = ("-m", *MLP, "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${seed}", "seed=0,1")
    assert cli(*sweep, cwd=tmp_path, fault=("at_step", 14, SIGKILL)).code == -SIGKILL
    job = tmp_path / "sweep" / "0"
    assert not (job / "results.json").exists()
    shutil.copytree(tmp_path / "sweep", tmp_path / "other")
    again = cli(*sweep, cwd=tmp_path)
    assert again.code == 0, again.err
    assert again.out.count("resuming from") == 1 and "sweep/0/checkpoints" in again.out
    for seed in (0, 1):
        whole = uninterrupted(*MLP, f"seed={seed}")
        assert Left.by(tmp_path / "sweep" / str(seed)).differences(whole) == []
    changed = cli(*(*sweep[:-1], "seed=0", "hydra.sweep.dir=other", "optimizer.lr=0.025"), cwd=tmp_path)
    assert changed.code == 0, changed.err
    assert "resuming" not in changed.out
    assert "starting from the beginning: " in changed.err
    assert "other/0 was interrupted with optimizer.lr=" in changed.err


def test_a_finished_run_is_not_trained_again(cli: CommandLine, tmp_path: Path) -> None:
    """Killed after the last checkpoint, before results: they are made from the checkpoint."""
    command = (*MLP, "hydra.run.dir=run")
    assert cli(*command, cwd=tmp_path).code == 0
    before = Left.by(tmp_path / "run")
    told = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))["command"]
    (tmp_path / "run" / "results.json").unlink()
    (tmp_path / "run" / "model.pt").unlink()
    outcome = cli(*command, "ckpt_path=last", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "stage" not in outcome.err
    assert Left.by(tmp_path / "run").differences(before) == []
    # The command that makes the run, not the one that went on with it.
    again = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))["command"]
    assert again == told and "ckpt_path" not in told


def test_last_is_the_newest_run_of_the_experiment(cli: CommandLine, tmp_path: Path) -> None:
    """Without a folder, `ckpt_path=last` finds the run and goes on in its folder."""
    assert cli(*MLP, cwd=tmp_path, fault=("at_step", 4, SIGKILL)).code == -SIGKILL
    (run,) = (tmp_path / "runs").glob("*/*")
    outcome = cli(*MLP, "ckpt_path=last", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert list((tmp_path / "runs").glob("*/*")) == [run]
    assert [row["epoch"] for row in table(run / "metrics.csv")] == ["0", "1", "2", "3", "4", "5"]
    outcome = cli(*MLP, "ckpt_path=last", "experiment=resnet20_cifar10", cwd=tmp_path)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "holds no earlier run of this experiment" in outcome.err


def test_a_sweep_goes_on_in_the_folder_that_it_is_given() -> None:
    command = ["seed=0,1", "ckpt_path=last"]
    with pytest.raises(UserError, match=r"add hydra\.sweep\.dir=FOLDER"):
        resume_override(command, multirun=True)
    assert resume_override([*command, "hydra.sweep.dir=sweep"], multirun=True) is None


def test_a_checkpoint_goes_on_in_another_folder_with_another_place_for_the_data(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path
) -> None:
    assert cli(*MLP, "hydra.run.dir=a", cwd=tmp_path, fault=("at_step", 8, SIGKILL)).code == -SIGKILL
    arguments = ("ckpt_path=a/checkpoints/last.ckpt", "data.in_memory=false", "data.eval_batch_size=7")
    outcome = cli(*MLP, "hydra.run.dir=b", *arguments, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    left, whole = Left.by(tmp_path / "b"), uninterrupted(*MLP)
    assert set(left.differences(whole)) <= {"metrics", "results"}, "only sums over other batches may differ"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("model.width=16", "model.width=12, not 16"),
        ("model=resnet20", "model._target_=growlab.lab.networks.mlp8, not growlab.lab.networks.resnet20"),
        ("growth=net2net", "growth._target_=growlab.growth.VarianceTransfer, not growlab.growth.Net2Net"),
        ("optimizer.lr=0.5", "optimizer.lr=0.1, not 0.5"),
        ("seed=3", "seed=0, not 3"),
        ("schedule.epochs=[2,2,3]", "schedule.epochs=[2, 2, 2], not [2, 2, 3]"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    cli: CommandLine, checkpoint: Path, change: str, told: str
) -> None:
    arguments = [a for a in MLP if not (change == "model=resnet20" and a.startswith("model"))]
    outcome = cli(*arguments, change, f"ckpt_path={checkpoint}", cwd=checkpoint.parent)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1), outcome.err
    assert told in outcome.err


@pytest.fixture(scope="module")
def checkpoint(cli: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    assert cli(*MLP, "hydra.run.dir=run", cwd=folder, fault=("at_step", 4, SIGKILL)).code == -SIGKILL
    return folder / "run" / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path, good: None, "is not a file"),
        (lambda path, good: path.mkdir(), "is not a file"),
        (
            lambda path, good: path.write_bytes(b"not a checkpoint"),
            "is not a checkpoint that growlab can read",
        ),
        (
            lambda path, good: path.write_bytes(good[: len(good) // 2]),
            "is not a checkpoint that growlab can read",
        ),
        (
            lambda path, good: torch.save({"weight": torch.ones(2)}, path),
            "is not a checkpoint of a growlab run",
        ),
        (lambda path, good: torch.save([1, 2], path), "is not a checkpoint of a growlab run"),
    ],
    ids=["missing", "folder", "text", "torn", "weights", "list"],
)
def test_what_is_no_checkpoint_is_told(
    cli: CommandLine, checkpoint: Path, tmp_path: Path, make: Callable[[Path, bytes], object], told: str
) -> None:
    path = tmp_path / "given.ckpt"
    make(path, checkpoint.read_bytes())
    outcome = cli(*MLP, f"ckpt_path={path}", cwd=tmp_path)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1), outcome.err
    assert f"ckpt_path={path} {told}" in outcome.err


@pytest.mark.parametrize(
    "without",
    ["state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "pytorch-lightning_version"],
)
@pytest.mark.parametrize("emptied", [False, True])
def test_a_checkpoint_that_lacks_what_a_run_goes_on_from_is_told(
    checkpoint: Path, tmp_path: Path, without: str, emptied: bool
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    if emptied:
        content[without] = [] if isinstance(content[without], list) else {}
    else:
        del content[without]
    torch.save(content, tmp_path / "given.ckpt")
    with pytest.raises(UserError, match=f"is a checkpoint without {without}, which a run needs to go on"):
        read_header(tmp_path / "given.ckpt")
    assert read_header(checkpoint)
