"""rates.csv: norms and rate factors of regions; layers.csv; spectra of weights."""

from pathlib import Path

import lightning
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab.growth import PairGrowth, make_seed
from growlab.lab.data import ImageData
from growlab.lab.networks import mlp8
from growlab.lab.training.loggers import spectra
from growlab.lab.training.recorder import LayerStatistics
from growlab.widths import trace
from tests.command_line import CommandLine
from tests.whole_runs import table

IMAGES = {"limit_train": 96, "limit_test": 40, "batch_size": 32, "shift": 1, "mirror": True, "validation": "none"}
ARGUMENTS = (
    *(f"data.{key}={str(value).lower()}" for key, value in IMAGES.items()),
    *("schedule.epochs=[1,1,1]", "schedule.widths=[0.5,0.75,1]", "log_rates_every_n_steps=1"),
    *("model=mlp8", "model.width=12", "model.batch_norm=true", "growth=pairs"),
)
FOREIGN = (
    *("optimizer=lars", "optimizer._target_=torch.optim.RMSprop", "~optimizer.trust_coefficient"),
    *("optimizer.eps=1e-8", "optimizer.lr=1e-3"),
)


@pytest.mark.parametrize("optimizer", [FOREIGN, ("optimizer=muon",)], ids=["torch", "muon"])
def test_norms_are_recorded_without_rate_adaptation_too(
    cli: CommandLine, tmp_path: Path, optimizer: tuple[str, ...]
) -> None:
    cli.done(*ARGUMENTS, "lr_adapt=none", *optimizer, "hydra.run.dir=run", cwd=tmp_path)
    rows = table(tmp_path / "run" / "rates.csv")
    assert {row["rate_factor"] for row in rows} == {"1"}
    regions = {(int(row["stage"]), row["parameter"], int(row["region"])) for row in rows}
    for stage in range(3):
        assert {k for s, name, k in regions if (s, name) == (stage, "hidden.3.weight")} == {*range(stage + 1)}
    assert len({row["step"] for row in rows}) == 9
    assert not (tmp_path / "run" / "figures" / "rate_factors.png").exists()

    # The first step by hand.
    data = ImageData("digits", **IMAGES, seed=0)
    data.setup()
    lightning.seed_everything(0, verbose=False)
    network = mlp8(data.image_shape, data.num_classes, width=12, batch_norm=True)
    graph = trace(network, data.probe_batch(2))
    make_seed(network, graph, PairGrowth(noise_std=0.001), dict.fromkeys(graph.groups, 6), 0)
    loader = data.train_dataloader()
    loader.sampler.set_epoch(0)
    x, y = next(iter(loader))
    F.cross_entropy(network(x), y).backward()
    first = {row["parameter"]: row for row in rows if row["step"] == "0"}
    weights = {name: p for name, p in network.named_parameters() if p.dim() > 1}
    assert set(first) == set(weights)
    for name, weight in weights.items():
        assert float(first[name]["weight_norm"]) == pytest.approx(weight.norm().item(), rel=1e-4)
        assert float(first[name]["grad_norm"]) == pytest.approx(weight.grad.norm().item(), rel=1e-4)


def test_with_rate_adaptation_factors_are_the_ratios_of_the_recorded_norms(cli: CommandLine, tmp_path: Path) -> None:
    cli.done(*ARGUMENTS, "lr_adapt=stagewise_norm", "hydra.run.dir=run", cwd=tmp_path)
    recorded = table(tmp_path / "run" / "rates.csv")
    rows = [row for row in recorded if row["parameter"] == "hidden.3.weight"]
    oldest = {row["step"]: float(row["weight_norm"]) for row in rows if row["region"] == "0"}
    for row in rows:
        ratio = float(row["weight_norm"]) / oldest[row["step"]]
        assert float(row["rate_factor"]) == pytest.approx(ratio, rel=1e-4)
    assert any(row["rate_factor"] != "1" for row in rows)
    # In the output layer factors are divided by its fan-in in the seed (Table 1: 1 / C_0).
    rows = [row for row in recorded if row["parameter"] == "classifier.weight"]
    oldest = {row["step"]: float(row["weight_norm"]) for row in rows if row["region"] == "0"}
    assert {int(row["stage"]) for row in rows} == {0, 1, 2}
    for row in rows:
        ratio = float(row["weight_norm"]) / oldest[row["step"]]
        assert float(row["rate_factor"]) == pytest.approx(ratio / 6, rel=1e-4)


class Turned(nn.Module):
    """Task and network in one; its first parameter is complex."""

    network = property(lambda self: self)

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.out = nn.Parameter(torch.ones(3, dtype=torch.cfloat)), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4).flatten(1))


def test_images_are_cast_to_the_precision_of_real_parameters(tmp_path: Path) -> None:
    statistics = LayerStatistics(tmp_path, torch.randn(6, 1, 3, 4).double(), torch.arange(6) % 5, 1)
    statistics._measure(Turned(), 0)
    rows = statistics.state_dict()["rows"].splitlines()
    assert [row.split(",")[2] for row in rows[:4]] == ["loss", "accuracy", "activation", "gradient"]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_have_no_histogram(tmp_path: Path, value: float) -> None:
    statistics = LayerStatistics(tmp_path, torch.zeros(1), torch.zeros(1), 1)
    statistics._add(0, "0", "activation", torch.tensor([1.0, value]))
    assert statistics._rows[0].startswith("0,0,activation,") and statistics._rows[0].endswith(",")


@pytest.mark.parametrize("dtype", [torch.cfloat, torch.cdouble, torch.double, torch.bfloat16])
def test_spectra_are_of_weights_of_any_dtype(dtype: torch.dtype) -> None:
    layer = nn.Linear(2, 2, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([3j if dtype.is_complex else 3, 1])))
    values = [value for *_, value in spectra(layer)]
    assert (values[0], values[-1]) == (pytest.approx(3), pytest.approx(1))
