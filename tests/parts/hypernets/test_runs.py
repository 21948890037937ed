"""Whole runs of the command line with `growth=hyperfan`."""

import signal
from pathlib import Path

import pytest
import torch

from growlab.grower.cost import forward_flops
from growlab.lab.networks import resnet20
from tests.command_line import CommandLine
from tests.parts.combined import check_average_of_one_step
from tests.runs import MLP, Left
from tests.test_resume import CHUNKS
from tests.test_resume import HYPERFAN as SMALL

SIGKILL = int(signal.SIGKILL)


@pytest.mark.parametrize("arguments", [SMALL, CHUNKS], ids=["layer", "chunk"])
def test_a_run_leaves_a_plain_network_and_resumes_exactly(
    cli: CommandLine, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    whole = cli(*arguments, "hydra.run.dir=whole", cwd=tmp_path)
    assert whole.code == 0, whole.err
    left = Left.by(tmp_path / "whole")
    resnet20([1, 8, 8], 10, width=8).load_state_dict(left.weights, strict=True)
    assert left.results["parity_max_error"] < 1e-3
    events = left.growth["events"]
    assert [event["method"] for event in events] == ["Hyperfan", "Hyperfan"]
    assert max(event["parity_error_eval"] for event in events) <= 1e-5
    assert any(row["parameter"].endswith("weight.0.weight") for row in left.rates) == (arguments is CHUNKS)
    assert any(row["parameter"].endswith("0.output.weight") for row in left.rates) == (arguments is SMALL)
    # The main network's FLOPs alone.
    flops = forward_flops(resnet20([1, 8, 8], 10, width=8), torch.zeros(1, 1, 8, 8))
    assert left.results["stages"][-1]["flops_per_sample"] == flops
    fault = ("before_growth", 1, SIGKILL) if arguments is SMALL else ("at_step", 5, SIGKILL)
    killed = cli(*arguments, "hydra.run.dir=run", cwd=tmp_path, fault=fault)
    assert killed.code == -SIGKILL, killed.err
    resumed = cli(*arguments, "hydra.run.dir=run", "ckpt_path=last", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert left.differences(Left.by(tmp_path / "run")) == []
    assert not any("parametrizations" in name for name in left.weights)
    assert all(torch.isfinite(value).all() for value in left.weights.values())


def test_settings_that_cannot_be_are_told_in_a_sentence(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*CHUNKS, "growth.chunk_channels=3", cwd=tmp_path)
    assert outcome.code == 2
    assert "chunks of 3" in outcome.err and "Traceback" not in outcome.err


def test_an_average_of_one_step_is_the_network(cli: CommandLine, tmp_path: Path) -> None:
    check_average_of_one_step(cli, tmp_path, (*MLP, "growth=hyperfan", "lr_adapt=none"))
