"""Checks of runs in which several features meet."""

from pathlib import Path

import pytest
import torch

from tests.command_line import CommandLine
from tests.runs import Left, kept_run, resumed_from


def check_events(run: Left) -> None:
    """Every event keeps its promise."""
    for event in run.growth["events"]:
        for mode in ("eval", "train"):
            tolerance = event[f"parity_tolerance_{mode}"]
            assert tolerance is None or event[f"parity_error_{mode}"] <= tolerance


def check_resumed(cli: CommandLine, folder: Path, arguments: tuple[str, ...]) -> Left:
    """A run that goes on from the checkpoint before its last event equals one that was never interrupted."""
    whole, kept = kept_run(cli, folder, arguments)
    check_events(whole)
    before = max(step for step in kept if step <= whole.growth["events"][-1]["step"])
    outcome = resumed_from(cli, folder, arguments, kept[before])
    assert outcome.code == 0, outcome.err
    assert not Left.by(folder / "run").differences(whole)
    return whole


def check_two_ranks(cli: CommandLine, folder: Path, arguments: tuple[str, ...]) -> Left:
    """Two processes hold the same, which the run itself compares after every event and at the end."""
    command = (*arguments, "trainer=ddp_cpu", "trainer.devices=2", "hydra.run.dir=run")
    outcome = cli(*command, cwd=folder)
    assert outcome.code == 0, outcome.err
    run = Left.by(folder / "run")
    check_events(run)
    return run


def check_average_of_one_step(cli: CommandLine, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """The average of one step's weights is the network: through every event it takes the same way."""
    outcome = cli(*arguments, "ema.decay=1e-9", "hydra.run.dir=run", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    left = Left.by(tmp_path / "run")
    assert len(left.growth["events"]) >= 2
    average = torch.load(tmp_path / "run" / "model_ema.pt", weights_only=True)
    assert average.keys() == left.weights.keys()
    for key, tensor in left.weights.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(average[key], tensor, rtol=1e-4, atol=1e-5)
    for row in left.metrics:
        assert float(row["val_ema_loss"]) == pytest.approx(float(row["val_loss"]), rel=1e-4)
