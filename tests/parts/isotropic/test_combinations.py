"""Isotropic layers that decide their widths, beside other features."""

from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.parts.combined import check_resumed, check_two_ranks
from tests.runs import SMALL, Left

MIXED = (
    *(*SMALL, "model=custom", "model._target_=tests.parts.isotropic.mixed.mixed", "lr_adapt=none"),
    *(
        "isotropic.mode=scaffold",
        "isotropic.threshold=0.5",
        "isotropic.scaffold=2",
        "isotropic.every_n_epochs=2",
    ),
    *("optimizer=adamw", "optimizer.lr=0.01"),
)
_DEMAND = (
    *("schedule.epochs=null", "schedule.widths=null", "schedule.total_epochs=6", "schedule.num_stages=3"),
    *("schedule.initial_width=0.5", "isotropic.every_n_epochs=1"),
)
ON_DEMAND = (*MIXED, "schedule=plateau", *_DEMAND, "schedule.demand.metric=train_loss")
COMBINATIONS = {
    "ours, averages, annealed norms": (*MIXED, "ema.decay=0.9", "norm_anneal=0.5", "+model.norm=layer"),
    "net2net, old gradients": (*MIXED, "growth=net2net", "osgd.anneal=run", "+model.norm=batch"),
    "pairs, steps, momentum": (
        *(*MIXED, "growth=pairs", "isotropic.every_n_steps=4", "isotropic.importance=gradient"),
        *("optimizer=sgd", "optimizer.lr=0.05", "isotropic.correction=batch"),
    ),
    "a method that looks at data": (*MIXED, "growth=gradmax", "growth.steps=1"),
    "a plateau": (*ON_DEMAND, "schedule.demand.patience=1", "schedule.demand.min_delta=0.5", "ema.decay=0.9"),
    "small gradients, group by group": (
        *(*MIXED, "schedule=gradient", *_DEMAND, "schedule.demand.groups=gradient"),
        *("schedule.demand.ratio=1", "+model.norm=batch"),
    ),
}


def asked(run: Left) -> list[bool]:
    return [event.get("asked_by") == "isotropic" for event in run.growth["events"]]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_resumed_equals_uninterrupted(cli: CommandLine, tmp_path: Path, name: str) -> None:
    whole = check_resumed(cli, tmp_path, COMBINATIONS[name])
    # By demand, group by group, growing takes more events.
    assert asked(whole).count(False) >= 2 and any(asked(whole))
    # Each epoch's cost is that of the widths that it was trained with.
    stages = whole.results["stages"]
    assert sum(stage["epochs"] for stage in stages) == 6
    assert stages[-1]["widths"] == whole.growth["events"][-1]["widths_after"]


@pytest.mark.parametrize("name", ["ours, averages, annealed norms", "a plateau"])
def test_two_ranks_hold_the_same(cli: CommandLine, tmp_path: Path, name: str) -> None:
    run = check_two_ranks(cli, tmp_path, COMBINATIONS[name])
    assert asked(run).count(False) == 2 and any(asked(run))


def test_two_ranks_hold_the_same_where_groups_grow_one_by_one(cli: CommandLine, tmp_path: Path) -> None:
    run = check_two_ranks(cli, tmp_path, COMBINATIONS["small gradients, group by group"])
    assert asked(run).count(False) > 2 and any(asked(run))


def test_what_cannot_go_together_is_told(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*MIXED, "schedule.learning_rate.clock=cost", cwd=tmp_path)
    assert outcome.code == 2 and "needs to know before the run how wide" in outcome.err
    outcome = cli(*MIXED, "schedule=budget", *_DEMAND, "schedule.demand.percent=90", cwd=tmp_path)
    assert outcome.code == 2 and "singular values decide on the way" in outcome.err
    outcome = cli(*MIXED, "isotropic.columns=ones", cwd=tmp_path)
    assert outcome.code == 2 and "isotropic.columns" in outcome.err and "Traceback" not in outcome.err
