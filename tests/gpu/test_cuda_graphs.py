"""Runs of the lab on a GPU with and without graphs: equal records."""

import csv
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.whole_runs import SMALL

DETERMINISTIC = ("trainer=gpu", "+trainer.deterministic=true", "trainer.precision=64-true")


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["resnet14", "mlp8"])
def test_graphs_change_no_number(cli: CommandLine, tmp_path: Path, model: str) -> None:
    """Nine digits of each epoch's loss: kernels are the same, their workspaces may differ."""
    losses = []
    for callbacks in ("none", "cuda_graphs"):
        command = (*SMALL, *DETERMINISTIC, f"model={model}", f"callbacks={callbacks}")
        cli.done(*command, f"hydra.run.dir={callbacks}", cwd=tmp_path)
        rows = csv.DictReader((tmp_path / callbacks / "metrics.csv").read_text().splitlines())
        losses.append([float(row["train_loss"]) for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
