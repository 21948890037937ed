"""Runs of the command line: against independent references, effects of settings, and endings."""

import io
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import cos, pi
from pathlib import Path
from types import SimpleNamespace

import hydra
import lightning
import PIL.Image
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import OmegaConf
from torch.nn import functional as F

from growlab.growth import PairGrowth, grow, make_seed
from growlab.lab.data import ImageData
from growlab.lab.data.loaders import MemoryLoader
from growlab.lab.networks import resnet20
from growlab.lab.training.loggers import WandbRecords
from growlab.widths import trace
from tests.command_line import CommandLine
from tests.experiments import COVERING, EXPERIMENTS, two_steps, write_fake_images
from tests.whole_runs import (
    MLP3,
    SMOOTH,
    Left,
    Whole,
    mlp3,
    read_events,
    read_results,
    same,
    smooth,
    table,
    whole_run,
)

IMAGES = {"limit_train": 96, "limit_test": 40, "batch_size": 32, "shift": 1, "mirror": True, "validation": "split"}
DATA = tuple(f"data.{key}={str(value).lower()}" for key, value in IMAGES.items())
STAGES = ("schedule.epochs=[2,1,2]", "schedule.widths=[0.5,0.75,1]")
MLP = (*DATA, *STAGES, *MLP3)
SHORT = (*MLP, "schedule.epochs=[1,1]", "schedule.widths=[0.5,1]")
LOGGED = (*MLP, "data=digits", "logger=tensorboard", "log_rates_every_n_steps=3")


@pytest.fixture
def finished(cli: CommandLine, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a run, with an empty cache, and returns its folder."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*arguments: str, folder: str = "run") -> Path:
        cli.done(*arguments, f"hydra.run.dir={folder}", cwd=tmp_path, environment=cache)
        return tmp_path / folder

    return run


@pytest.fixture(scope="session")
def logged(cli: CommandLine) -> Whole:
    """A grown run with TensorBoard and figures."""
    pytest.importorskip("tensorboard")
    return whole_run(cli, *LOGGED, fault=("with_figures",))


def batches_of(data: ImageData, epoch: int) -> MemoryLoader:
    """Training batches of an epoch, without a trainer."""
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return loader


def accuracy_and_loss(network: torch.nn.Module, data: ImageData) -> tuple[float, float]:
    dtype = next(network.eval().parameters()).dtype
    correct = loss = count = 0.0
    with torch.no_grad():
        for x, y in data.test_dataloader():
            logits = network(x.to(dtype))
            correct += (logits.argmax(1) == y).sum().item()
            loss += F.cross_entropy(logits, y).item() * len(y)
            count += len(y)
    return correct / count, loss / count


# References that share no code with the callback and the task -------------------------------------


def test_without_growth_it_is_plain_sgd(finished: Callable[..., Path]) -> None:
    """Same losses and weights as a hand-written loop with torch.optim.SGD, bit for bit."""
    arguments = ("growth=none", "lr_adapt=none", "schedule.epochs=null", "schedule.total_epochs=3", "seed=5")
    rate = ("schedule.learning_rate.shape=cosine", "schedule.learning_rate.progress_unit=epochs")
    run = finished(*MLP, *arguments, *rate, "optimizer.nesterov=true", "batch_norm_samples=0")
    data = ImageData("digits", **IMAGES, seed=5)
    data.setup()
    lightning.seed_everything(5, verbose=False)
    network = mlp3(data.image_shape, data.num_classes, width=12, batch_norm=True)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True)
    losses = []
    for epoch in range(3):
        loader, total = batches_of(data, epoch), 0.0
        for index, (x, y) in enumerate(loader):
            optimizer.param_groups[0]["lr"] = 0.1 * (0.5 * (1 + cos(pi * (epoch + index / len(loader)) / 3)))
            loss = F.cross_entropy(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach() * len(y))
        losses.append(f"{total / data.num_train:.8g}")
    assert [row["train_loss"] for row in table(run / "metrics.csv")] == losses
    assert same(network.state_dict(), torch.load(run / "model.pt", weights_only=True))


def test_growing_in_one_fit_equals_a_loop_with_a_new_optimizer_for_each_stage(finished: Callable[..., Path]) -> None:
    """`grow` in a hand-written loop gives the same weights, bit for bit."""
    arguments = ("growth=pairs", "lr_adapt=none", "schedule.learning_rate.shape=constant")
    run = finished(*MLP, *arguments, "schedule.batch_sizes=[48,40,32]", "batch_norm_samples=0", "seed=3")
    data = ImageData("digits", **IMAGES, seed=3)
    data.setup()
    lightning.seed_everything(3, verbose=False)
    network = mlp3(data.image_shape, data.num_classes, width=12, batch_norm=True)
    graph = trace(network, data.probe_batch(2))
    widths = [dict.fromkeys(graph.groups, width) for width in (6, 10, 12)]
    method = PairGrowth(noise_std=0.001)
    state = make_seed(network, graph, method, widths[0], 3)
    sizes, starts = [48, 48, 40, 32, 32], [0, 2, 3]
    for epoch in range(5):
        if epoch in starts:
            if epoch:
                grow(network, graph, method, state, widths[starts.index(epoch)], 3, (data.probe_batch(32),))
            optimizer = torch.optim.SGD(network.parameters(), 0.1, 0.9, weight_decay=5e-4)
        data.batch_size = sizes[epoch]
        for x, y in batches_of(data, epoch):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    assert same(network.state_dict(), torch.load(run / "model.pt", weights_only=True))
    rows = table(run / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(accumulate(-(-86 // size) for size in sizes))
    assert [int(row["batch_size"]) for row in rows] == sizes


@pytest.mark.parametrize(
    ("arguments", "make"),
    [
        (("model.width=4",), partial(resnet20, width=4)),
        ((*SMOOTH, "trainer.precision=64-true", "growth=pairs", "growth.noise_std=0"), lambda *s: smooth(*s).double()),
        ((*MLP3, "growth=none", "growth.width_multiple=1.5"), partial(mlp3, width=18, batch_norm=True)),
    ],
    ids=["grown", "float64", "wider"],
)
def test_the_model_loads_into_the_plain_network_with_the_reported_accuracy(
    finished: Callable[..., Path], arguments: tuple[str, ...], make: Callable
) -> None:
    run = finished(*DATA, *STAGES, *arguments)
    results = read_results(run)
    data = ImageData("digits", **IMAGES)
    data.setup()
    network = make(data.image_shape, 10)
    dtype = next(network.parameters()).dtype
    weights = torch.load(run / "model.pt", weights_only=True)
    assert {w.dtype for w in weights.values() if w.is_floating_point()} == {dtype}
    network.load_state_dict(weights, strict=True)
    accuracy, loss = accuracy_and_loss(network, data)
    assert accuracy == results["test_accuracy"]
    assert loss == pytest.approx(results["test_loss"], rel=1e-6)
    if dtype == torch.float64:
        assert results["parity_max_error"] <= 1e-10
    elif "growth=none" not in arguments:
        # The output multiplier is folded into these weights, but not in the last checkpoint.
        checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
        assert checkpoint["growlab"]["grower"]["growth"]["multipliers"]


def test_steps_in_float32_and_float64_differ_by_rounding(finished: Callable[..., Path]) -> None:
    """Without ReLU: one activation near zero with another sign changes gradients by percents."""
    step = ("trainer.limit_train_batches=1", "schedule.total_epochs=1")
    plain = ("growth=none", "lr_adapt=none", "optimizer.momentum=0", "optimizer.weight_decay=0")
    weights = {}
    for bits in (32, 64):
        run = finished(*DATA, *SMOOTH, f"trainer.precision={bits}-true", *step, *plain, folder=str(bits))
        weights[bits] = torch.load(run / "model.pt", weights_only=True)
    lightning.seed_everything(0, verbose=False)
    start = dict(smooth((1, 8, 8), 10).named_parameters())
    for name, value in start.items():
        moved = (weights[64][name] - value).norm()
        # Biases before a batch normalisation have no gradient.
        least = 1e-7 * value.norm() + 1e-8
        assert (weights[32][name] - weights[64][name]).norm() <= 1e-5 * moved + least, name
    assert (weights[64]["0.weight"] - start["0.weight"]).norm() > 1e-3


# Effects of settings -----------------------------------------------------------------------------------------


def test_watching_the_test_set_changes_no_weights(finished: Callable[..., Path]) -> None:
    """Metrics of a watched test set are named test, never val."""
    watched = finished(*SHORT, "data.validation=test", folder="watched")
    unwatched = finished(*SHORT, "data.validation=none", "data.limit_test=20", folder="unwatched")
    assert Left.by(watched).differences(Left.by(unwatched)) == ["metrics", "results"]
    assert all(row["val_loss"] == "" for row in table(unwatched / "metrics.csv"))
    assert read_results(unwatched)["val_accuracy"] is None
    last, results = table(watched / "metrics.csv")[-1], read_results(watched)
    assert float(last["test_accuracy"]) == pytest.approx(results["test_accuracy"])
    assert float(last["test_loss"]) == pytest.approx(results["test_loss"], rel=1e-5)
    assert results["val_accuracy"] is None and not any(name.startswith("val") for name in last)


def test_by_default_validation_images_are_neither_trained_nor_tested_on(finished: Callable[..., Path]) -> None:
    """By default a tenth of each class of the training images is held out, the same in every run."""
    arguments = [argument for argument in SHORT if "validation" not in argument]
    run = finished(*arguments)
    settings = OmegaConf.load(run / "config.yaml").data
    data = [hydra.utils.instantiate(settings, seed=seed) for seed in (0, 1)]
    for module in data:
        module.setup()
    assert (data[0].num_train, data[0].num_val, data[0].num_test) == (86, 10, 40)
    held_out, again = (torch.cat([x for x, _ in module.val_dataloader()]) for module in data)
    assert torch.equal(held_out, again)
    others = [torch.cat([x for x, _ in data[0].training_batches(3)]), *(x for x, _ in data[0].test_dataloader())]
    assert not any(torch.equal(image, other) for image in held_out for other in torch.cat(others))
    results = read_results(run)
    assert results["val_accuracy"] not in (None, results["test_accuracy"])


def test_stages_and_epochs_have_the_same_numbers_on_the_screen_and_in_all_files(logged: Whole) -> None:
    """Counted from 0: the last of three stages is 2."""
    run, (title, *lines) = logged.folder, logged.out.splitlines()
    assert title.strip() == "mlp3_on_digits: ours, seed 0"
    rows = table(run / "metrics.csv")
    shown = re.findall(r"^stage (\d)/2 .* epoch (\d)/4 ", logged.err, re.MULTILINE)
    assert shown == [(row["stage"], row["epoch"]) for row in rows]
    assert [stage for stage, _ in shown] == ["0", "0", "1", "2", "2"]
    results = logged.results
    stages = [stage["stage"] for stage in results["stages"]]
    assert [int(cells[1]) for line in lines if (cells := line.split("│"))[1:]] == stages == [0, 1, 2]
    receipts = read_events(run)
    events = [receipt["stage"] for receipt in receipts]
    assert [int(n) for n in re.findall(r"^grew to stage (\d)", logged.err, re.MULTILINE)] == events == [1, 2]
    for receipt in receipts:
        parts = receipt["seconds_by_part"]
        assert min(parts.values()) >= 0 and receipt["seconds"] >= sum(parts.values()) * (1 - 1e-9)
    assert sum(receipt["seconds"] for receipt in receipts) < results["seconds"]
    assert {row["region"] for row in table(run / "rates.csv")} <= {"0", "1", "2"}
    assert results["experiment"] == "mlp3_on_digits"


def test_batches_may_be_limited_and_accumulated(finished: Callable[..., Path]) -> None:
    run = finished(*SHORT, "trainer.limit_train_batches=2", "data.batch_size=16")
    results = read_results(run)
    assert [row["step"] for row in table(run / "metrics.csv")] == ["2", "4"]
    flops = [stage["flops_per_sample"] for stage in results["stages"]]
    assert results["train_flops"] == 3 * 32 * sum(flops)
    run = finished(*SHORT, "trainer.accumulate_grad_batches=4", "data.batch_size=16", folder="accumulated")
    assert [row["step"] for row in table(run / "metrics.csv")] == ["2", "4"]


def test_equal_flops_trains_as_long_as_growing_costs(finished: Callable[..., Path], logged: Whole) -> None:
    arguments = ("growth=none", "schedule.equal_flops=true", "growth.width_multiple=0.5")
    half = read_results(finished(*MLP, *arguments))
    flops = half["stages"][0]["flops_per_sample"]
    assert half["epochs"] == round(logged.results["train_flops"] / (3 * 86 * flops)) > 5
    assert half["reference_epochs"] == 5


def test_weights_are_saved_in_float32_with_mixed_precision(finished: Callable[..., Path]) -> None:
    run = finished(*SHORT, "growth=pairs", "growth.noise_std=0", "trainer.precision=bf16-mixed")
    assert read_results(run)["parity_max_error"] <= 1e-5
    assert torch.load(run / "model.pt", weights_only=True)["hidden.0.weight"].dtype == torch.float32


# Loggers --------------------------------------------------------------------------------------------------


def test_a_resumed_curve_in_tensorboard_has_each_point_once(tmp_path: Path) -> None:
    """A run that logged ten steps and was killed resumes from its checkpoint of step 4."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first in (0, 5):
        board = TensorBoardLogger(tmp_path, "tensorboard", "")
        board.log_hyperparams({"width": 12})
        resumed = SimpleNamespace(is_global_zero=True, global_step=max(0, first - 1))
        WandbRecords([board]).on_train_start(resumed, None)
        for step in range(first, 10):
            board.log_metrics({"loss": float(first)}, step)
        board.finalize("success")
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(point.step, point.value) for point in events.Scalars("loss")]
    assert points == [(step, 0.0 if step < 5 else 5.0) for step in range(10)]


def test_tensorboard_gets_metrics_events_rates_results_and_figures(logged: Whole) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, results = logged.folder, logged.results
    events = event_accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    metrics = table(run / "metrics.csv")
    losses = events.Scalars("train_loss")
    assert [event.step for event in losses] == [int(row["step"]) for row in metrics]
    assert [event.value for event in losses] == pytest.approx([float(row["train_loss"]) for row in metrics])
    assert [event.value for event in events.Scalars("growth/stage")] == [1, 2]
    assert [event.step for event in events.Scalars("growth/stage")] == [6, 9]
    rates = [row for row in table(run / "rates.csv") if row["parameter"] == "hidden.3.weight"]
    newest = [float(row["rate_factor"]) for row in rates if row["region"] == "2"]
    factors = events.Scalars("rate_factor/hidden.3.weight/stage_2")
    assert [event.value for event in factors] == pytest.approx(newest, rel=1e-5)
    (final,) = events.Scalars("result/test_accuracy")
    assert final.value == pytest.approx(results["test_accuracy"])
    assert "width: 12" in (run / "tensorboard" / "hparams.yaml").read_text()
    groups = json.loads((run / "growth.json").read_text())["groups"]
    for name, group in groups.items():
        widths = [(event.step, event.value) for event in events.Scalars(f"width/{name}")]
        assert widths == list(zip([0, 6, 9], group["widths"], strict=True))
    figures = sorted((run / "figures").glob("*.png"))
    assert events.Tags()["images"] == [f"figures/{path.stem}" for path in figures]
    for path in figures:
        (shown,) = events.Images(f"figures/{path.stem}")
        with PIL.Image.open(path) as drawn, PIL.Image.open(io.BytesIO(shown.encoded_image_string)) as got:
            assert got.tobytes() == drawn.convert("RGB").tobytes()


# Endings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message", "epochs"),
    [
        (("loss_is_nan", 7), "the training loss became NaN or infinite at step 7 (epoch 2, stage 1)", 2),
        # After the last step of an epoch, no loss is computed before the checkpoint would be saved.
        (("weights_are_nan", 5), "was NaN or infinite after step 5 (epoch 1, stage 0)", 1),
    ],
    ids=["loss", "weights"],
)
def test_a_diverged_run_gives_the_reason_and_keeps_its_last_good_checkpoint(
    cli: CommandLine, tmp_path: Path, fault: tuple[object, ...], message: str, epochs: int
) -> None:
    command = (*MLP, "hydra.run.dir=run")
    assert message in cli(*command, cwd=tmp_path, fault=fault).sentence
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == epochs - 1
    assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["last.ckpt", "previous.ckpt"][:epochs]
    assert not (tmp_path / "run" / "results.json").exists()


# Every experiment -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_images(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize(
    "experiment", [pytest.param(one, marks=[] if one in COVERING else pytest.mark.slow) for one in EXPERIMENTS]
)
def test_every_experiment_runs_two_steps(finished: Callable[..., Path], fake_images: Path, experiment: str) -> None:
    """One step at the first widths and one after growing to the last, on fake images."""
    smaller = ("data.image_size=64", "data.resize_size=72") if "imagenet" in experiment else ()
    run = finished(*two_steps(experiment, fake_images), *smaller)
    results = read_results(run)
    assert results["experiment"] == experiment.removeprefix("papers/")
    assert [row["step"] for row in table(run / "metrics.csv")] == ["1", "2"]
    assert (run.parent / "cache" / "growlab" / "tokens").is_dir() == (experiment == "llama_text")
    first, last = (results["stages"][stage]["num_params"] for stage in (0, -1))
    assert results["growth"] == "none" or (first != last if "isotropic" in experiment else first < last)
