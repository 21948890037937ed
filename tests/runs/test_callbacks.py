"""Runs that a user's callback stops: with results if growth is complete, and without further training if resumed."""

from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.whole_runs import MLP, Left

# No loss improves by 10, so a run stops `patience` epochs after the first.
STOPPED = (*MLP, "callbacks=early_stopping", "callbacks.early_stopping.min_delta=10", "schedule.epochs=[1,1,9]")


def test_a_run_that_stops_early_has_results_and_is_not_trained_further(cli: CommandLine, tmp_path: Path) -> None:
    nothing = "{_target_: lightning.pytorch.callbacks.LambdaCallback}"
    both = (f"+callbacks.mine={nothing}", f"+trainer.callbacks=[{nothing}]")
    command = (*STOPPED, *both, "callbacks.early_stopping.patience=3", "hydra.run.dir=run")
    cli.done(*command, cwd=tmp_path)
    assert (tmp_path / "run" / "config.yaml").read_text().count("callbacks.LambdaCallback") == 2
    left = Left.by(tmp_path / "run")
    assert [row["epoch"] for row in left.metrics] == ["0", "1", "2", "3"]
    stages = left.results["stages"]
    assert [stage["epochs"] for stage in stages] == [1, 1, 2] and left.results["epochs"] == 4
    work = sum(stage["epochs"] * stage["flops_per_sample"] for stage in stages)
    full = 11 * stages[-1]["flops_per_sample"]
    assert left.results["train_cost_percent"] == pytest.approx(100 * work / full)
    (tmp_path / "run" / "results.json").unlink()
    cli.done(*command, "ckpt_path=last", cwd=tmp_path)
    assert Left.by(tmp_path / "run").differences(left) == []


def test_a_run_that_stops_before_it_is_fully_grown_fails(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*STOPPED, "callbacks.early_stopping.patience=1", "hydra.run.dir=run", cwd=tmp_path)
    assert outcome.code == 2 and "stopped after 2 of 11 epochs, before the network was fully grown" in outcome.err
