"""`start_from=FILE`: weights, state of the optimizer, and files of other optimizers."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from growlab import optim
from growlab.grower import Grower
from growlab.growth import PairGrowth
from growlab.lab.data import ImageData
from growlab.lab.networks import mlp5, mlp8
from growlab.lab.training.checkpoints import start_from
from growlab.optim import named_state
from tests.command_line import CommandLine
from tests.whole_runs import same


def make(seed: int) -> Grower:
    torch.manual_seed(seed)
    data = ImageData("digits", limit_train=110, limit_test=10, batch_size=20)
    data.setup()
    network = mlp8(data.image_shape, 10, width=8)
    return Grower(network, data.probe_batch(2), method=PairGrowth(), trigger={0: 0.5, 1: 1.0})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(grower: Grower) -> torch.optim.Optimizer:
    optimizer = sgd(grower.network.parameters())
    grower.network(torch.randn(4, 1, 8, 8)).square().mean().backward()
    optimizer.step()
    return optimizer


def test_weights_and_optimizer_state_are_loaded(tmp_path: Path) -> None:
    one, other = make(0), make(1)
    optimizer = trained(one)
    saved = {name: tensor.clone() for name, tensor in one.network.state_dict().items()}
    assert not same(other.network.state_dict(), saved)
    taken = named_state(optimizer, one.network)
    torch.save({"state_dict": saved, "optimizer": taken}, tmp_path / "seed.pt")
    begun = start_from(other, str(tmp_path / "seed.pt"), sgd)(other.network.parameters())
    assert same(other.network.state_dict(), saved)
    assert taken["state"]
    for name, parameter in other.network.named_parameters():
        assert torch.equal(begun.state[parameter]["momentum_buffer"], taken["state"][name]["momentum_buffer"])


@pytest.mark.parametrize("optimizer", ["none", "foreign", "other"])
def test_state_of_another_optimizer_is_ignored_with_a_warning(
    optimizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = make(0), make(1)
    state = trained(one)
    content: dict[str, Any] = dict(one.network.state_dict())
    if optimizer == "foreign":
        # Many scripts save the state by number.
        content = {"model": content, "optimizer": state.state_dict()}
    elif optimizer == "other":
        content = {"state_dict": content, "optimizer": {"class": "torch.optim.adam.Adam", "state": {}}}
    torch.save(content, tmp_path / "seed.pt")
    with caplog.at_level(logging.WARNING):
        begun = start_from(other, str(tmp_path / "seed.pt"), sgd)(other.network.parameters())
    assert not begun.state
    assert same(other.network.state_dict(), one.network.state_dict())
    warned = "left aside: it is of torch.optim.adam.Adam, not of growlab.optim.sgd.SGD" in caplog.text
    assert warned == (optimizer == "other")


def test_a_run_loads_both_and_a_resumed_one_neither(cli: CommandLine, tmp_path: Path) -> None:
    """A resumed run loads its checkpoint; the file is not needed."""
    options = (
        *("model=mlp5", "model.width=8", "data.limit_train=60", "data.limit_test=20", "growth=none"),
        *("lr_adapt=none", "schedule=exponential", "schedule.total_epochs=2", "data.validation=none"),
    )
    torch.manual_seed(1)
    weights = mlp5((1, 8, 8), 10, width=8).state_dict()
    momentum = {name: {"momentum_buffer": torch.ones_like(weight)} for name, weight in weights.items()}
    ends = {}
    for name, optimizer in {"without": None, "with": {"class": "growlab.optim.sgd.SGD", "state": momentum}}.items():
        torch.save({"state_dict": weights, "optimizer": optimizer}, tmp_path / f"{name}.pt")
        cli.done(*options, f"start_from={name}.pt", f"hydra.run.dir={name}", cwd=tmp_path)
        ends[name] = torch.load(tmp_path / name / "model.pt", weights_only=True)
    assert not same(ends["with"], ends["without"])
    (tmp_path / "with.pt").unlink()
    cli.done(*options, "start_from=with.pt", "hydra.run.dir=with", "ckpt_path=last", cwd=tmp_path)
    assert same(torch.load(tmp_path / "with" / "model.pt", weights_only=True), ends["with"])
