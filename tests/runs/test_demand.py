"""Runs that grow on demand: their cost, and growth to the full width."""

import json
import signal
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.whole_runs import IMAGES, mlp8_flops, read_events, read_results, table

RUN = (
    *(*IMAGES, "model=mlp8", "model.width=12"),
    *("schedule.initial_width=0.5", "schedule.num_stages=3"),
)
EPOCHS = 10


@pytest.mark.parametrize(
    "schedule",
    [
        ("schedule=budget", "schedule.grow_when.percent=60"),
        ("schedule=plateau", "schedule.grow_when.patience=1", "schedule.grow_when.min_delta=0.5"),
    ],
    ids=["budget", "plateau"],
)
def test_cost_counts_the_epochs_at_each_width(cli: CommandLine, tmp_path: Path, schedule: tuple[str, ...]) -> None:
    cli.done(*RUN, *schedule, f"schedule.total_epochs={EPOCHS}", "hydra.run.dir=run", cwd=tmp_path)
    results, events = read_results(tmp_path / "run"), read_events(tmp_path / "run")
    metrics = table(tmp_path / "run" / "metrics.csv")
    widths = [6, 8, 12]
    assert [set(event["widths_after"].values()) for event in events] == [{width} for width in widths[1:]]
    trained = sum(mlp8_flops(widths[int(row["stage"])]) for row in metrics)
    cost = 100 * trained / (EPOCHS * mlp8_flops(12))
    assert results["train_cost_percent"] == pytest.approx(cost)
    assert [stage["epochs"] for stage in results["stages"]] == [
        sum(row["stage"] == str(stage) for row in metrics) for stage in range(3)
    ]
    for event in events:
        demand, before = event["demand"], [row for row in metrics if int(row["epoch"]) < event["epoch"]]
        spent = sum(mlp8_flops(widths[int(row["stage"])]) for row in before)
        assert demand["spent_percent"] == pytest.approx(100 * spent / (EPOCHS * mlp8_flops(12)))
        if schedule[0] == "schedule=budget":
            assert demand["climbing_percent"] <= 60 and demand["by"] == "Budget"
        elif not demand["due"]:
            stage = [float(row["val_loss"]) for row in before if int(row["stage"]) == event["stage"] - 1]
            assert stage[-1] > 0.5 * min(stage[:-1])
    if schedule[0] == "schedule=budget":
        assert 60 - 100 / EPOCHS < cost <= 60


def test_passes_over_the_data_count_as_cost_and_survive_a_kill(cli: CommandLine, tmp_path: Path) -> None:
    run = (*RUN, "schedule=expressivity", "schedule.grow_when.ratio=1", "schedule.grow_when.batches=3")
    run = (*run, "schedule.total_epochs=6", "schedule.num_stages=3", "checkpoint.every_n_steps=1")
    assert cli(*run, "hydra.run.dir=whole", cwd=tmp_path).code == 0
    assert cli(*run, "hydra.run.dir=run", cwd=tmp_path, fault=("at_step", 7, int(signal.SIGKILL))).code < 0
    cli.done(*run, "hydra.run.dir=run", "ckpt_path=last", cwd=tmp_path)
    growth, whole = (json.loads((tmp_path / run / "growth.json").read_text()) for run in ("run", "whole"))
    times = ("auxiliary_held_bytes", "auxiliary_peak_memory_bytes")
    for looks in (growth["looks"], whole["looks"]):
        for look in looks:
            assert all(0 <= one["missing"] <= one["wanted"] for one in look["bottlenecks"].values())
            for key in times:
                look.pop(key)
    assert growth["looks"] == whole["looks"] and len(whole["looks"]) >= 2
    assert [look["epoch"] for look in whole["looks"]] == [1, 2, 3, 4][: len(whole["looks"])]
    metrics, widths = table(tmp_path / "run" / "metrics.csv"), [6, 8, 12]
    trained = 86 * sum(mlp8_flops(widths[int(row["stage"])]) for row in metrics)
    looked = sum(look["auxiliary_flops"] for look in growth["looks"])
    results = read_results(tmp_path / "run")
    cost = 100 * (trained + looked) / (86 * 6 * mlp8_flops(12))
    assert looked > 0 and results["train_cost_percent"] == pytest.approx(cost)


def test_running_gradients_need_an_optimizer_that_keeps_them(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*RUN, f"schedule.total_epochs={EPOCHS}", "schedule=gradient", "optimizer.momentum=0", cwd=tmp_path)
    assert outcome.code == 2 and "set its momentum" in outcome.err and "Traceback" not in outcome.err
