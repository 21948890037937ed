"""Runs of the command line with parts, which together cover each part and each pair that could interact in the runner.

tests/unit/parts tests parts in plain loops, with every growth method and trigger.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import starmap
from pathlib import Path

import pytest
import torch

from growlab.grower.cost import forward_flops
from growlab.lab.data import ImageData
from growlab.lab.networks import CifarResNet, mlp8, resnet20
from tests.command_line import CommandLine
from tests.experiments import write_fake_images
from tests.whole_runs import SMALL, Left, assert_resumes, kept_run, mlp8_flops, whole_run

# Two layers of two blocks; the second ones are inserted.
_RESNET = (*SMALL, "model=custom", "model._target_=tests.runs.test_parts.small_resnet", "depth.blocks=auto")
_FEW_IMAGES = ("data.limit_train=96", "data.limit_test=20", "data.batch_size=16", "data.epochs_per_pass=3")
BLOCKS = (
    *(*_RESNET, "ema.decay=0.9", "optimizer_state=inherit", "resolution.sizes=[4,6,8]", "osgd.anneal=run"),
    "trainer.precision=64-true",
)
CLASSES = (
    *("data=digits_incremental", "data.limit_train=200", "data.batch_size=20", "data.shift=0"),
    *("data.incremental.start=0.4", "data.validation=test", "schedule.epochs=[1,1,2]"),
    *("schedule.widths=[0.5,0.75,1]", "model=mlp8", "model.width=12", "model.batch_norm=true"),
)
SMALLER = (
    *(*_FEW_IMAGES, "model.width=4", "depth.blocks=auto", "growth=none", "growth.depth_multiple=0.5"),
    "lr_adapt=none",
    *("schedule.budget=2", "schedule.learning_rate.progress_unit=cost", "checkpoint.every_n_steps=1"),
)
RESUMED: dict[str, tuple[str, ...]] = {
    "blocks": BLOCKS,
    "classes": (*CLASSES, "ema.decay=0.9", "osgd.anneal=stage", "growth.noise_std=0"),
    # With almost no decay the average equals the network, before and after every event.
    "hypernetworks": (
        *(*_RESNET, "depth.start=stack", "growth=hyperfan", "growth.sharing=chunk", "+model.width=8"),
        *("growth.embedding_features=3", "growth.hidden_features=[4]", "optimizer.lr=0.01"),
        *("schedule.widths=[0.25,0.75,1]", "ema.decay=1e-9"),
    ),
    # Isotropic layers between layers with ReLU.
    "isotropic": (
        *(*SMALL, "model=custom", "model._target_=tests.unit.parts.isotropic.mixed.mixed", "lr_adapt=none"),
        *("isotropic.mode=reserve", "isotropic.threshold=0.5", "isotropic.reserve_neurons=2"),
        *("isotropic.every_n_epochs=1", "optimizer=adamw", "optimizer.lr=0.01", "schedule.epochs=null"),
        *("schedule.total_epochs=6", "schedule.num_stages=3", "schedule.widths=null"),
        *("schedule.initial_width=0.5", "schedule=plateau", "schedule.grow_when.metric=train_loss"),
        *("schedule.grow_when.patience=1", "schedule.grow_when.min_delta=0.5", "osgd.anneal=run"),
        *("norm_anneal_fraction=0.5", "+model.norm=layer", "ema.decay=0.9"),
    ),
}
INPUTS: dict[str, tuple[str, ...]] = {
    "sizes alone": (
        *(*_FEW_IMAGES, *_RESNET[-3:-1], "method=grown_resolution", "schedule.budget=3"),
        *("schedule.num_stages=3", "schedule.epoch_growth_rate=0", "schedule.initial_fraction=0.3"),
        "schedule.learning_rate.progress_unit=cost",
    ),
    "sequences": (
        *("experiment=gpt_char", "data.context=8", "data.limit_characters=900", "data.batch_size=8"),
        *("model.num_layers=1", "model.width=16", "model.num_heads=2", "model.head_dim=8"),
        *("model.rotary_dim=4", "model.hidden=16", "schedule.total_epochs=6", "schedule.num_stages=3"),
        "schedule.initial_width=0.5",
    ),
}
Kept = Callable[[str], tuple[Left, dict[int, Path], Path]]


def small_resnet(image_shape: Sequence[int], num_classes: int, width: int = 4) -> CifarResNet:
    """Network for `model._target_`."""
    return CifarResNet(2, num_classes, image_shape[0], (width, 2 * width))


def finished(cli: CommandLine, folder: Path, *command: str) -> Left:
    cli.done(*command, "hydra.run.dir=run", cwd=folder)
    return Left.by(folder / "run")


@pytest.fixture(scope="module")
def kept(cli: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Return a function that gives files, checkpoints by step and folder of a run, made once."""

    @cache
    def run(name: str) -> tuple[Left, dict[int, Path], Path]:
        folder = tmp_path_factory.mktemp("kept")
        return (*kept_run(cli, folder, RESUMED[name]), folder)

    return run


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("hypernetworks", "isotropic"))) for name in RESUMED],
)
def test_resuming_before_the_last_event_is_exact(cli: CommandLine, kept: Kept, name: str) -> None:
    whole, checkpoints, folder = kept(name)
    events = whole.growth["events"]
    assert len(events) >= 2
    for event in events:
        for mode in ("eval", "train"):
            tolerance = event[f"parity_tolerance_{mode}"]
            assert tolerance is None or event[f"parity_error_{mode}"] <= tolerance
        for one in event.get("inserted", []):
            assert max(one["parity_error_eval"], one["parity_error_train"]) <= one["parity_tolerance"]
    before = max(step for step in checkpoints if step <= events[-1]["step"])
    assert_resumes(cli, folder, RESUMED[name], checkpoints[before], whole)


def test_cost_of_blocks_widths_and_image_sizes_that_grow_in_one_run(kept: Kept) -> None:
    run, *_ = kept("blocks")
    events, stages = run.growth["events"], run.results["stages"]
    assert [[one["block"] for one in e["inserted"]] for e in events] == [["layers.0.1"], ["layers.1.1"]]
    assert all(event["widths_before"] != event["widths_after"] for event in events)
    assert [event["input_size"] for event in events] == [6, 8]
    # New channels come in pairs: 0.75 of 4 channels is rounded up to 4.
    whole, middle = small_resnet((1, 8, 8), 10), CifarResNet(2, 10, 1, (4, 6))
    whole.load_state_dict(run.weights)
    middle.layers[1][1] = torch.nn.Identity()
    networks = [CifarResNet(1, 10, 1, (2, 4)), middle, whole]
    sizes = [sum(p.numel() for p in network.parameters()) for network in networks]
    assert [stage["num_params"] for stage in stages] == sizes
    assert events[0]["num_params_before"] == sizes[0] and events[-1]["num_params"] == sizes[-1]
    inputs = [torch.zeros(1, 1, side, side) for side in (4, 6, 8)]
    flops = list(starmap(forward_flops, zip(networks, inputs, strict=True)))
    assert [stage["flops_per_sample"] for stage in stages] == flops
    # One pass over full-size images before each event.
    passes = sum(forward_flops(network, inputs[-1]) for network in networks[:-1])
    spent = sum(stage["epochs"] * stage["flops_per_sample"] for stage in stages) + passes
    assert run.results["train_cost_percent"] == pytest.approx(100 * spent / (6 * flops[-1]))


@pytest.mark.slow
def test_emitted_weights_and_their_averages_leave_plain_networks(cli: CommandLine, kept: Kept) -> None:
    run, *_ = kept("hypernetworks")
    whole = small_resnet((1, 8, 8), 10, width=8)
    whole.load_state_dict(run.weights, strict=True)
    assert {event["method"] for event in run.growth["events"]} == {"Hyperfan"}
    assert run.results["parity_max_error"] < 1e-3
    assert max(event["parity_error_eval"] for event in run.growth["events"]) <= 1e-5
    assert any(row["parameter"].endswith("weight.0.weight") for row in run.rates)
    # Without the FLOPs of the hypernetwork.
    assert run.results["stages"][-1]["flops_per_sample"] == forward_flops(whole, torch.zeros(1, 1, 8, 8))
    average = torch.load(whole_run(cli, *RESUMED["hypernetworks"]).folder / "model_ema.pt", weights_only=True)
    assert average.keys() == run.weights.keys()
    for key, tensor in run.weights.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(average[key], tensor, rtol=1e-4, atol=1e-5)
    for row in run.metrics:
        assert float(row["val_ema_loss"]) == pytest.approx(float(row["val_loss"]), rel=1e-4)
    assert run.results["test_ema_loss"] == pytest.approx(run.results["test_loss"], rel=1e-4)


def test_isotropic_layers_change_in_separate_events(kept: Kept) -> None:
    run, *_ = kept("isotropic")
    asked = [event.get("asked_by") == "isotropic" for event in run.growth["events"]]
    assert asked.count(False) == 2 and any(asked)
    # Each epoch counts for the stage with its widths.
    stages = run.results["stages"]
    assert sum(stage["epochs"] for stage in stages) == 6
    assert stages[-1]["widths"] == run.growth["events"][-1]["widths_after"]


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_grow_to_their_full_size(cli: CommandLine, tmp_path: Path, name: str) -> None:
    run = finished(cli, tmp_path, *INPUTS[name], "resolution.sizes=[4,6,8]")
    assert [event["input_size"] for event in run.growth["events"]] == [6, 8]
    flops = [stage["flops_per_sample"] for stage in run.results["stages"]]
    assert flops[0] < flops[1] < flops[2]


# Data that arrives with the stages: of 10 classes or 200 images ----------------------------------------------

PARTS, EPOCHS = (0.4, 0.7, 1.0), (1, 1, 2)


def test_classes_appear_and_the_head_grows(cli: CommandLine, kept: Kept) -> None:
    run, *_ = kept("classes")
    folder = whole_run(cli, *RESUMED["classes"]).folder
    results, events = run.results, run.growth["events"]
    assert [stage["widths"]["classes"] for stage in results["stages"]] == [4, 7, 10]
    assert [event["widths_after"]["classes"] for event in events] == [7, 10]
    assert all("ema_parity_error_eval" in event for event in events)
    # One pass over the images of the previous stage before each event.
    assert [event["auxiliary_samples"] for event in events] == [80, 140]
    flops = list(starmap(mlp8_flops, ((6, 4), (10, 7), (12, 10))))
    assert [stage["flops_per_sample"] for stage in results["stages"]] == flops
    trained = sum(e * f * 200 * p for e, f, p in zip(EPOCHS, flops, PARTS, strict=True))
    passes = 80 * flops[0] + 140 * flops[1]
    reference = mlp8_flops(12, 10) * sum(e * 200 * p for e, p in zip(EPOCHS, PARTS, strict=True))
    assert results["train_cost_percent"] == pytest.approx(100 * (trained + passes) / reference)
    assert results["train_flops"] == pytest.approx(3 * (trained + passes))
    # The saved weights load into a plain network, with outputs in the order of the labels.
    data = ImageData("digits", limit_train=200, shift=0)
    data.setup()
    for name, key in (("model.pt", "test_accuracy"), ("model_ema.pt", "test_ema_accuracy")):
        network = mlp8((1, 8, 8), 10, width=12, batch_norm=True)
        network.load_state_dict(torch.load(folder / name, weights_only=True))
        network.eval()
        with torch.no_grad():
            right = [(network(x).argmax(1) == y).float().sum() for x, y in data.test_dataloader()]
        assert float(sum(right)) / data.num_test == pytest.approx(results[key])


def test_channels_of_images_arrive(cli: CommandLine, tmp_path: Path) -> None:
    """Each stage costs as much as a network with its number of input channels."""
    images = write_fake_images(tmp_path / "images")
    run = finished(
        *(cli, tmp_path, "experiment=resnet20_cifar10", "data=folder", f"data.root={images}", "data.batch_size=4"),
        *("data.image_size=8", "data.resize_size=8", "probe_size=2", "batch_norm_samples=4", "trainer.accelerator=cpu"),
        *("model=custom", "model._target_=tests.runs.test_parts.small_resnet", "features.counts=[1,2,3]"),
        *("schedule.epochs=[1,1,1]", "schedule.widths=[0.5,0.5,1]"),
    )
    events, stages = run.growth["events"], run.results["stages"]
    assert [event["widths_after"]["input features"] for event in events] == [2, 3]
    assert all(event["features_output_change"] < 1e-5 for event in events)
    networks = [CifarResNet(2, 10, channels, (width, 2 * width)) for channels, width in ((1, 2), (2, 2), (3, 4))]
    assert [stage["num_params"] for stage in stages] == [sum(p.numel() for p in one.parameters()) for one in networks]
    flops = [forward_flops(one, torch.zeros(1, n, 8, 8)) for n, one in enumerate(networks, start=1)]
    assert [stage["flops_per_sample"] for stage in stages] == flops
    networks[-1].load_state_dict(run.weights)


def test_the_fixed_size_network_has_the_same_data(cli: CommandLine, tmp_path: Path) -> None:
    run = finished(cli, tmp_path, *CLASSES, "method=fixed_size", "data.incremental.mode=images")
    assert run.growth["events"] == [] and run.results["train_cost_percent"] == pytest.approx(100)
    trained = sum(int(e * 200 * p) for e, p in zip(EPOCHS, PARTS, strict=True))
    assert run.results["train_flops"] == 3 * mlp8_flops(12, 10) * trained


def test_a_smaller_network_within_a_budget_trains_longer_and_resumes(cli: CommandLine, tmp_path: Path) -> None:
    """Three of six blocks, never grown, and three epochs for each pass over the data."""
    whole, checkpoints = kept_run(cli, tmp_path, SMALLER)
    steps, (stage,) = whole.checkpoint["global_step"], whole.results["stages"]
    blocks = {".".join(name.split(".")[:3]) for name in whole.weights if name.startswith("layers.")}
    assert len(blocks) == 3 + 3 and whole.growth["events"] == []
    full = 2 * 96 * forward_flops(resnet20((1, 8, 8), 10, width=4), torch.zeros(1, 1, 8, 8))
    spent = stage["epochs"] * 32 * stage["flops_per_sample"]
    assert stage["epochs"] > 2 * 3 and 0 <= full - spent < 32 * stage["flops_per_sample"]
    # In the middle of the last epoch.
    assert_resumes(cli, tmp_path, SMALLER, checkpoints[steps - 1], whole)
