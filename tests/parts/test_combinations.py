"""Features that do not know of each other, together: resumed like uninterrupted, two ranks like each other."""

from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

import pytest

from tests.runs import MLP, SMALL, CommandLine, Left
from tests.test_resume import INCREMENTAL

_DEMAND = ("schedule.epochs=null", "schedule.total_epochs=6", "schedule.num_stages=3", "schedule.widths=null")
DEEP = (*SMALL, "model.width=4", "depth.blocks=auto", "ema.decay=0.9", *_DEMAND)
COMBINATIONS: dict[str, tuple[str, ...]] = {
    "depth within a budget, averages": (*DEEP, "schedule=budget", "schedule.demand.percent=90"),
    "depth on demand": (
        *(*DEEP, "schedule=plateau", "schedule.demand.patience=1"),
        "schedule.demand.metric=train_loss",
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
def test_killed_and_resumed_equals_uninterrupted(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path, name: str
) -> None:
    command = (*COMBINATIONS[name], "hydra.run.dir=run")
    whole = uninterrupted(*COMBINATIONS[name])
    events = whole.growth["events"]
    assert len(events) == 2
    if "depth" in name:
        assert sum(len(event["inserted"]) for event in events) == 6
    for event in events:
        for mode in ("eval", "train"):
            tolerance = event[f"parity_tolerance_{mode}"]
            assert tolerance is None or event[f"parity_error_{mode}"] <= tolerance
    killed = events[-1]["step"] + 1
    assert cli(*command, cwd=tmp_path, fault=("at_step", killed, int(SIGKILL))).code == -SIGKILL
    outcome = cli(*command, "ckpt_path=last", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert not Left.by(tmp_path / "run").differences(whole)


@pytest.mark.parametrize("name", ["depth within a budget, averages", "old gradient by stages, on demand"])
def test_two_ranks_hold_the_same(cli: CommandLine, tmp_path: Path, name: str) -> None:
    """Compared after every event and at the end, by the run itself."""
    command = (*COMBINATIONS[name], "trainer=ddp_cpu", "trainer.devices=2", "hydra.run.dir=run")
    outcome = cli(*command, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert len(Left.by(tmp_path / "run").growth["events"]) == 2
