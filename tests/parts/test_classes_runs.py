"""Whole runs on data that arrives with the stages: what they cost, and that an ordinary network comes out."""

import json
from pathlib import Path

import pytest
import torch

from growlab.lab.data import ImageData
from growlab.lab.networks import mlp8
from tests.command_line import CommandLine

IMAGES = (
    *("data.limit_train=200", "data.batch_size=20", "data.shift=0", "data.incremental.start=0.4"),
    "data.validation=test",
)
NETWORK = ("model=mlp8", "model.width=12", "model.batch_norm=true", "ema.decay=0.9")
STAGES = ("schedule.epochs=[1,1,2]", "schedule.widths=[0.5,0.75,1]")
RUN = ("data=digits_incremental", *IMAGES, *NETWORK)
# Of 10 classes or 200 images.
PARTS, EPOCHS = (0.4, 0.7, 1.0), (1, 1, 2)


def finished(cli: CommandLine, folder: Path, *arguments: str) -> tuple[dict, list[dict]]:
    outcome = cli(*RUN, *STAGES, *arguments, "hydra.run.dir=run", cwd=folder)
    assert outcome.code == 0, outcome.err
    results = json.loads((folder / "run" / "results.json").read_text())
    return results, json.loads((folder / "run" / "growth.json").read_text())["events"]


def forward_flops(width: int, classes: int) -> int:
    """Of mlp8 on 8x8 images by hand: eight hidden layers, two for each multiply-add."""
    return 2 * (64 * width + 7 * width * width + width * classes)


def test_classes_appear_and_the_head_grows(cli: CommandLine, tmp_path: Path) -> None:
    results, events = finished(cli, tmp_path, "osgd.anneal=stage", "growth.noise_std=0")
    assert [stage["widths"]["classes"] for stage in results["stages"]] == [4, 7, 10]
    assert [event["widths_after"]["classes"] for event in events] == [7, 10]
    assert all(event["parity_error_eval"] <= event["parity_tolerance_eval"] for event in events)
    assert all("ema_parity_error_eval" in event for event in events)
    # One pass over the images of the stage that ends, before the network grows.
    assert [event["auxiliary_samples"] for event in events] == [80, 140]
    widths, classes = (6, 10, 12), (4, 7, 10)
    flops = [forward_flops(*pair) for pair in zip(widths, classes, strict=True)]
    assert [stage["flops_per_sample"] for stage in results["stages"]] == flops
    trained = sum(e * f * 200 * p for e, f, p in zip(EPOCHS, flops, PARTS, strict=True))
    passes = 80 * flops[0] + 140 * flops[1]
    reference = forward_flops(12, 10) * sum(e * 200 * p for e, p in zip(EPOCHS, PARTS, strict=True))
    assert results["train_cost_percent"] == pytest.approx(100 * (trained + passes) / reference)
    assert results["train_flops"] == pytest.approx(3 * (trained + passes))
    # The weights that are left are an ordinary network's, whose outputs are in the order of the labels.
    data = ImageData("digits", limit_train=200, shift=0)
    data.setup()
    for name, key in (("model.pt", "test_accuracy"), ("model_ema.pt", "test_ema_accuracy")):
        network = mlp8((1, 8, 8), 10, width=12, batch_norm=True)
        network.load_state_dict(torch.load(tmp_path / "run" / name, weights_only=True))
        network.eval()
        with torch.no_grad():
            right = [(network(x).argmax(1) == y).float().sum() for x, y in data.test_dataloader()]
        assert float(sum(right)) / data.num_test == pytest.approx(results[key])


def test_the_fixed_size_network_has_the_same_data(cli: CommandLine, tmp_path: Path) -> None:
    results, events = finished(cli, tmp_path, "method=fixed_size", "data.incremental.mode=images")
    assert events == [] and results["train_cost_percent"] == pytest.approx(100)
    assert results["train_flops"] == 3 * forward_flops(12, 10) * sum(
        int(e * 200 * p) for e, p in zip(EPOCHS, PARTS, strict=True)
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("log_layers_every_n_steps=1",), "log_layers_every_n_steps needs all classes"),
        (
            ("growth=isotropic", "model=isotropic_mlp", "lr_adapt=none", "osgd.anneal=stage"),
            "anneal='run'",
        ),
    ],
)
def test_what_does_not_go_together_is_told(
    cli: CommandLine, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    network = () if "model=isotropic_mlp" in arguments else (*NETWORK, *STAGES)
    outcome = cli("data=digits_incremental", *IMAGES, *network, *arguments, cwd=tmp_path)
    assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome.err
    assert told in outcome.err


def test_state_that_follows_copies_goes_along_when_classes_come(cli: CommandLine, tmp_path: Path) -> None:
    """Net2Net tells where every channel's state comes from, also that of the classes that it saw."""
    _, events = finished(
        cli, tmp_path, "growth=net2net", "optimizer=adamw", "lr_adapt=none", "optimizer_state=inherit"
    )
    assert [event["widths_after"]["classes"] for event in events] == [7, 10]
