"""Hypernetworks of `conf/model`, and runs with them."""

from functools import partial
from pathlib import Path

import pytest
import torch

from growlab.base.errors import UserError
from growlab.lab.networks import mlp5
from growlab.parts.hypernets import MonteCarlo, emitted, hypernetwork
from tests.command_line import CommandLine
from tests.whole_runs import read_results, same, table

SMALL = (
    *("experiment=papers/hyperfan_mnist", "data=digits", "data.limit_train=60", "data.limit_test=40"),
    "data.batch_size=20",
    *("data.validation=none", "model.network.width=9", "schedule.total_epochs=2", "log_layers_every_n_steps=2"),
)


def test_weights_are_drawn_with_torchs_generator() -> None:
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        network = hypernetwork([1, 4, 4], 3, partial(mlp5, width=6), sharing="size", embedding_features=4)
        made.append(torch.cat([module.weight.detach().flatten() for module, _ in emitted(network)]))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_without_sharing_it_is_the_plain_network_with_the_given_initialisation() -> None:
    """Xavier's uniform one, in the last layer too: Chang et al. 2020, Section 5.1."""
    plain, made = mlp5([1, 4, 4], 3, width=60).state_dict(), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        net = hypernetwork([1, 4, 4], 3, partial(mlp5, width=60), sharing="none", initialisation="xavier_in")
        made.append(net.state_dict())
    assert [(n, v.shape) for n, v in made[0].items()] == [(n, v.shape) for n, v in plain.items()]
    assert torch.equal(made[0]["classifier.weight"], made[1]["classifier.weight"])
    assert not torch.equal(made[0]["classifier.weight"], made[2]["classifier.weight"])
    bound = (3 / 60) ** 0.5
    assert 0.95 * bound < float(made[0]["classifier.weight"].abs().max()) <= bound


def test_monte_carlo_averages_probabilities_in_eval_mode_only() -> None:
    torch.manual_seed(0)
    factory = partial(mlp5, width=6)
    network = hypernetwork([1, 4, 4], 3, factory, monte_carlo_samples=7, noise=0.5, embedding_features=4)
    assert isinstance(network, MonteCarlo)
    x = torch.randn(5, 1, 4, 4)
    torch.manual_seed(1)
    passes = [network.network(x).softmax(1) for _ in range(7)]
    torch.manual_seed(1)
    torch.testing.assert_close(network.eval()(x).exp(), torch.stack(passes).mean(0))
    torch.manual_seed(1)
    torch.testing.assert_close(network.train()(x).softmax(1), passes[0])
    for impossible, message in (
        ({"monte_carlo_samples": 0}, "^monte_carlo_samples must be at least 1, not 0"),
        ({"initialisation": "lucky"}, "^initialisation must be hyperfan_in, hyperfan_out"),
    ):
        with pytest.raises(UserError, match=message):
            hypernetwork([1, 4, 4], 3, factory, **impossible)


def test_a_run_records_its_layers_and_resumes_exactly(cli: CommandLine, tmp_path: Path) -> None:
    cli.done(*SMALL, "hydra.run.dir=whole", cwd=tmp_path)
    text = (tmp_path / "whole" / "layers.csv").read_text()
    rows = table(tmp_path / "whole" / "layers.csv")
    # Two epochs of 3 steps: before steps 0, 2 and 4, and after the last.
    assert sorted({int(row["step"]) for row in rows}) == [0, 2, 4, 6]
    layers = ["hidden.0", "hidden.2", "hidden.4", "hidden.6", "hidden.8", "classifier"]
    for quantity in ("activation", "gradient", "weight", "weight_gradient"):
        assert [row["layer"] for row in rows if row["quantity"] == quantity and row["step"] == "0"] == layers
    sizes = {"hidden.0": 64 * 9, "hidden.2": 81, "classifier": 90}
    for row in rows:
        if row["quantity"] == "weight" and row["layer"] in sizes:
            assert sum(map(int, row["counts"].split("|"))) == sizes[row["layer"]]
        if row["counts"]:
            mean, reach = float(row["mean"]), 4 * float(row["std"])
            low, high = float(row["low"]), float(row["high"])
            rounding = 1e-4 * (abs(mean) + reach)
            assert mean - reach - rounding <= low < mean < high <= mean + reach + rounding
    results = read_results(tmp_path / "whole")
    last = {row["quantity"]: float(row["mean"]) for row in rows if row["layer"] == "network"}
    assert last["accuracy"] == pytest.approx(results["test_accuracy"], abs=1e-6)
    assert last["loss"] == pytest.approx(results["test_loss"], rel=1e-5)
    killed = cli(*SMALL, "hydra.run.dir=run", cwd=tmp_path, fault=("at_step", 5, 9))
    assert killed.code == -9, killed.err
    cli.done(*SMALL, "hydra.run.dir=run", "ckpt_path=last", cwd=tmp_path)
    assert (tmp_path / "run" / "layers.csv").read_text() == text
    one, other = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "run"))
    assert same(one, other)


def test_recording_layers_changes_nothing(cli: CommandLine, tmp_path: Path) -> None:
    """Forward passes draw noise, so recording must restore the generator."""
    for name, every in (("with", "1"), ("without", "null")):
        cli.done(*SMALL, "model.noise=0.1", f"log_layers_every_n_steps={every}", f"hydra.run.dir={name}", cwd=tmp_path)
    one, other = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("with", "without"))
    assert same(one, other)
