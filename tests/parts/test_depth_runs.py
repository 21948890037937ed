"""Whole runs that grow in depth and width at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from growlab.grower.cost import forward_flops
from growlab.lab.networks import resnet20
from growlab.lab.networks.resnet import CifarResNet
from tests.command_line import CommandLine
from tests.runs import Left
from tests.test_resume import DEEPENED


def test_depth_and_width_grow_in_one_run(uninterrupted: Callable[..., Left]) -> None:
    left = uninterrupted(*DEEPENED)
    events, stages = left.growth["events"], left.results["stages"]
    assert [[one["block"] for one in event["inserted"]] for event in events] == [
        ["layers.0.1", "layers.1.1", "layers.2.1"],
        ["layers.0.2", "layers.1.2", "layers.2.2"],
    ]
    for event in events:
        assert event["widths_before"] != event["widths_after"]
        for one in event["inserted"]:
            assert max(one["parity_error_eval"], one["parity_error_train"]) <= one["parity_tolerance"]
        assert event["parity_error_eval"] <= event["parity_tolerance_eval"]
        assert event["parity_error_train"] <= event["parity_tolerance_train"]
    whole = resnet20((1, 8, 8), 10, width=4)
    whole.load_state_dict(left.weights)
    sample = torch.zeros(1, 1, 8, 8)
    sizes = [
        sum(p.numel() for p in network.parameters()) for network in (CifarResNet(1, 10, 1, (2, 4, 8)), whole)
    ]
    assert [stages[0]["num_params"], stages[-1]["num_params"]] == sizes
    assert events[0]["num_params_before"] == sizes[0] and events[-1]["num_params"] == sizes[1]
    flops = [forward_flops(network, sample) for network in (CifarResNet(1, 10, 1, (2, 4, 8)), whole)]
    assert [stages[0]["flops_per_sample"], stages[-1]["flops_per_sample"]] == flops
    spent = sum(stage["epochs"] * stage["flops_per_sample"] for stage in stages)
    assert left.results["train_cost_percent"] == pytest.approx(100 * spent / (6 * flops[1]))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("depth.blocks=[layers.0.9]",), "no layers.0.9"),
        (
            ("depth.blocks=auto", "growth=hyperfan", "depth.start=identity"),
            "it has a residual branch",
        ),
        (("depth.blocks=auto", "depth.start=nothing"), "zero"),
    ],
)
def test_what_does_not_go_together_is_told(
    cli: CommandLine, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    outcome = cli("data.limit_train=64", "data.limit_test=20", "model.width=4", *arguments, cwd=tmp_path)
    assert outcome.code == 2 and "Traceback" not in outcome.err, outcome.err
    assert told in outcome.err


def test_methods_that_look_at_data_leave_blocks_alone_that_are_yet_to_come(
    cli: CommandLine, tmp_path: Path
) -> None:
    small = ("data.limit_train=64", "data.limit_test=20", "model.width=4", "schedule.num_stages=3")
    outcome = cli(
        *(*small, "schedule.total_epochs=3", "depth.blocks=auto", "growth=gradmax", "growth.steps=1"),
        *("lr_adapt=none", "hydra.run.dir=run"),
        cwd=tmp_path,
    )
    assert outcome.code == 0, outcome.err
    events = Left.by(tmp_path / "run").growth["events"]
    first, last = (set(event["report"]["groups"]) for event in events)
    # What comes in with an event is there before the network widens.
    assert {"layers.2.0.conv1", "layers.2.1.conv1"} <= first and "layers.2.2.conv1" not in first
    assert {"layers.2.0.conv1", "layers.2.1.conv1", "layers.2.2.conv1"} <= last
    assert all(event["parity_error_eval"] <= event["parity_tolerance_eval"] for event in events)
