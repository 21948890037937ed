"""Runs on a GPU with and without CUDA graphs."""

from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.whole_runs import SMALL, table

DETERMINISTIC = ("trainer=gpu", "+trainer.deterministic=true", "trainer.precision=64-true")


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["resnet14", "mlp8"])
def test_losses_with_and_without_graphs_are_equal(cli: CommandLine, tmp_path: Path, model: str) -> None:
    """To nine digits: kernels are equal, workspaces may differ."""
    losses = []
    for callbacks in ("none", "cuda_graphs"):
        command = (*SMALL, *DETERMINISTIC, f"model={model}", f"callbacks={callbacks}")
        cli.done(*command, f"hydra.run.dir={callbacks}", cwd=tmp_path)
        losses.append([float(row["train_loss"]) for row in table(tmp_path / callbacks / "metrics.csv")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
