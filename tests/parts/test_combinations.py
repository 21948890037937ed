"""Features that do not know of each other, together: resumed like uninterrupted, two ranks like each other."""

import shutil
from pathlib import Path

import pytest
import torch

from growlab.grower.cost import forward_flops
from growlab.lab.networks import resnet20
from tests.command_line import CommandLine
from tests.parts.combined import check_resumed, check_two_ranks
from tests.runs import MLP, SMALL, Left, kept_run, resumed_from
from tests.test_resume import INCREMENTAL

_DEMAND = ("schedule.epochs=null", "schedule.total_epochs=6", "schedule.num_stages=3", "schedule.widths=null")
DEEP = (*SMALL, "model.width=4", "depth.blocks=auto", "ema.decay=0.9", *_DEMAND)
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "depth within a budget, averages": (*DEEP, "schedule=budget", "schedule.demand.percent=90"),
    "depth on demand": (
        *(*DEEP, "schedule=plateau", "schedule.demand.patience=1"),
        "schedule.demand.metric=train_loss",
    ),
    "depth by copies with their state": (
        *(*SMALL, "model.width=4", "depth.blocks=auto", "depth.start=stack", "depth.state=copy"),
        *("growth=pairs", "lr_adapt=none", "optimizer=adamw", "ema.decay=0.9"),
    ),
    "arriving classes, a method that looks at data": (
        *(*INCREMENTAL, "growth=gradmax", "growth.steps=1"),
        "lr_adapt=none",
    ),
    "old gradient by stages, on demand": (
        *(*MLP, *_DEMAND, "osgd.anneal=stage", "ema.decay=0.9", "schedule=plateau"),
        "schedule.demand.patience=1",
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_resumed_equals_uninterrupted(cli: CommandLine, tmp_path: Path, name: str) -> None:
    events = check_resumed(cli, tmp_path, COMBINATIONS[name]).growth["events"]
    assert len(events) == 2
    if "depth" in name:
        # Copies need a block of the same shapes that is there: one less in each later part of the network.
        assert sum(len(event["inserted"]) for event in events) == (4 if "copies" in name else 6)


@pytest.mark.parametrize(
    "name",
    [
        "depth within a budget, averages",
        "depth by copies with their state",
        "old gradient by stages, on demand",
    ],
)
def test_two_ranks_hold_the_same(cli: CommandLine, tmp_path: Path, name: str) -> None:
    assert len(check_two_ranks(cli, tmp_path, COMBINATIONS[name]).growth["events"]) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_smaller_network_in_parts_of_epochs_within_a_budget_resumes(
    cli: CommandLine, tmp_path: Path, ranks: int
) -> None:
    """Three of six blocks, never grown: at one budget it trains for more epochs than the full network."""
    command = (
        *("data.limit_train=96", "data.limit_test=20", "data.batch_size=16", "data.epoch_parts=3"),
        *("model.width=4", "depth.blocks=auto", "growth=none", "growth.depth_multiple=0.5", "lr_adapt=none"),
        *("schedule.budget=2", "schedule.learning_rate.clock=cost", "checkpoint.every_n_steps=1"),
        *(["trainer=ddp_cpu", f"trainer.devices={ranks}"] if ranks > 1 else []),
    )
    whole, kept = kept_run(cli, tmp_path, command)
    steps, (stage,) = whole.checkpoint["global_step"], whole.results["stages"]
    blocks = {".".join(name.split(".")[:3]) for name in whole.weights if name.startswith("layers.")}
    assert len(blocks) == 3 + 3 and whole.growth["events"] == []
    full = 2 * 96 * forward_flops(resnet20((1, 8, 8), 10, width=4), torch.zeros(1, 1, 8, 8))
    spent = stage["epochs"] * 32 * stage["flops_per_sample"]
    assert stage["epochs"] > 2 * 3 and 0 <= full - spent < 32 * stage["flops_per_sample"]
    # In the middle of a part of an epoch, at its end, and in the last one.
    for step in (1, steps // 2, steps // 2 + 1, steps - 1) if ranks == 1 else (steps // 2,):
        outcome = resumed_from(cli, tmp_path, command, kept[step])
        assert outcome.code == 0, outcome.err
        assert not Left.by(tmp_path / "run").differences(whole)
        shutil.rmtree(tmp_path / "run")
