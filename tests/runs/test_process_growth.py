"""Growth that depends on data, on progress or on the weights is the same with two processes as with one."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import CommandLine
from tests.rank_faults import same_on_both_ranks
from tests.whole_runs import Left, read_events

RUN = (
    *("data.limit_train=64", "data.limit_test=20", "data.batch_size=32", "data.validation=split"),
    *("lr_adapt=none", "trainer.precision=64-true", "checkpoint.every_n_steps=1"),
)
MLP = ("model=custom", "model._target_=tests.whole_runs.plain_mlp")
# Synchronised batch normalisation: auxiliary passes communicate, forward and backward.
NORMED = (*MLP, "+model.batch_norm=true", "trainer.sync_batchnorm=true")
STAGES = ("schedule.epochs=[1,2,1]", "schedule.widths=[0.5,0.75,1]")
DEMAND = (
    *("schedule.total_epochs=4", "schedule.num_stages=3", "schedule.initial_width=0.5"),
    "schedule.grow_when.final_fraction=0.1",
)
ISOTROPIC = (
    *("model=isotropic_mlp", "model.width=6", "model.depth=2", "schedule.total_epochs=4"),
    *("growth=isotropic", "growth.threshold=0.55", "growth.reserve_neurons=2", "growth.neurons_per_event=2"),
    *("optimizer=adamw", "optimizer.lr=0.02"),
)
CASES = {
    "gradmax": (*MLP, *STAGES, "growth=gradmax", "growth.steps=3"),
    "gradmax_normed": (*STAGES, *NORMED, "growth=gradmax", "growth.steps=3"),
    "tiny": (*MLP, *STAGES, "growth=tiny"),
    "tiny_normed": (*DEMAND, *NORMED, "growth=tiny", "schedule=budget", "schedule.grow_when.percent=80"),
    "splitting": (*MLP, *STAGES, "growth=splitting", "growth.iterations=3"),
    "splitting_normed": (*STAGES, *NORMED, "growth=splitting", "growth.iterations=3"),
    "firefly": (*MLP, *STAGES, "growth=firefly", "growth.steps=2"),
    "firefly_normed": (*STAGES, *NORMED, "growth=firefly", "growth.steps=2", "ema.decay=0.9"),
    "firefly_split_plateau": (
        *(*MLP, *DEMAND, "growth=firefly_split", "growth.steps=2", "growth.fallback=pairs", "ema.decay=0.9"),
        *("schedule=plateau", "schedule.grow_when.patience=1", "schedule.grow_when.min_delta=0.5"),
    ),
    "splitting_gradient": (
        *(*MLP, *DEMAND, "growth=splitting", "growth.iterations=2", "growth.fallback=pairs"),
        *("schedule=gradient", "schedule.grow_when.groups=gradient", "schedule.grow_when.ratio=1"),
    ),
    "tiny_expressivity": (
        *(*MLP, *DEMAND, "growth=tiny", "schedule=expressivity", "schedule.grow_when.batches=2"),
        "schedule.grow_when.groups=bottleneck",
    ),
    "isotropic": ISOTROPIC,
    "isotropic_average": (*ISOTROPIC, "ema.decay=0.9"),
}
QUICK = ("tiny_normed",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_two_processes_grow_as_one(cli: CommandLine, tmp_path: Path, case: str) -> None:
    """Equal bits on both ranks and after resuming; equal to one process except for the order of sums."""
    kept, checkpoints = tmp_path / "kept", tmp_path / "checkpoints"
    kept.mkdir()
    checkpoints.mkdir()

    def run(folder: str, *more: str, fault: tuple[Any, ...] | None = None) -> Path:
        arguments = [a for a in (*CASES[case], *more) if "trainer=cpu" not in more or "sync" not in a]
        cli.done(*RUN, *arguments, f"hydra.run.dir={folder}", cwd=tmp_path, fault=fault)
        return tmp_path / folder

    both = ("together", ["keep_ranks", str(kept)], ["keep_checkpoints", str(checkpoints)])
    two = run("two", "trainer=ddp_cpu", fault=both)
    events = read_events(two)
    assert same_on_both_ranks(kept) >= {f"stage{event['stage']}" for event in events}

    one = run("one", "trainer=cpu")
    for key in ("widths_after", "step"):
        assert [event[key] for event in events] == [event[key] for event in read_events(one)]
    assert len(events) >= 2
    alone, together = Left.by(one), Left.by(two)
    for row, other in zip(together.metrics, alone.metrics, strict=True):
        assert float(row["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-6)
    torch.testing.assert_close(together.weights, alone.weights, rtol=1e-5, atol=1e-7)

    if case == "firefly_split_plateau":
        return
    # Resume from the step before the last event, whose gradients are computed again.
    folder = tmp_path / "resumed"
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copy(checkpoints / f"{events[-1]['step']}.ckpt", folder / "checkpoints" / "last.ckpt")
    resumed = run("resumed", "trainer=ddp_cpu", "ckpt_path=last")
    assert Left.by(resumed).differences(together) == []
