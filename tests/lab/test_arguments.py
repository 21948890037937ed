"""Invalid arguments from Python raise an error that names them, when the object is created."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from growlab import growth, optim, parts
from growlab.base import settings
from growlab.base.errors import UserError
from growlab.frontends.lightning import Growth
from growlab.grower import Grower

OPTIMIZERS = [optim.SGD, optim.Adam, optim.AdamW, optim.AvaGrad, optim.LARS, optim.Muon]


def made(optimizer: type[torch.optim.Optimizer], **arguments: Any) -> torch.optim.Optimizer:
    return optimizer(nn.Linear(3, 2).parameters(), **{"lr": 0.1, **arguments})


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", [None, "x", True, [], float("nan"), float("inf"), -1.0], ids=repr)
def test_optimizers_refuse_invalid_numbers(optimizer: type, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be ") as raised:
        made(optimizer, **{name: value})
    assert repr(value) in str(raised.value)
    # As a positional argument too.
    if name == "lr":
        with pytest.raises(ValueError, match=r"^lr must be "):
            optimizer(nn.Linear(3, 2).parameters(), value)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.__name__)
def test_optimizers_accept_rates_that_are_tensors_or_zero(optimizer: type) -> None:
    assert made(optimizer, lr=0).param_groups[0]["lr"] == 0
    if optimizer in (optim.SGD, optim.Adam, optim.AdamW):
        assert made(optimizer, lr=torch.tensor(0.5)).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("optimizer", [optim.Adam, optim.AdamW, optim.AvaGrad, optim.Muon])
@pytest.mark.parametrize("betas", [None, 0.9, "x", (), (0.9,), (0.9, 0.99, 0.999), (0.9, 1.0), ("a", "b")])
def test_betas_are_two_numbers(optimizer: type, betas: Any) -> None:
    with pytest.raises(ValueError, match="betas must be two numbers, each from 0 to below 1, not "):
        made(optimizer, betas=betas)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.__name__)
def test_parameter_groups_are_checked_too(optimizer: type) -> None:
    with pytest.raises(ValueError, match="lr must be a finite number, not nan"):
        optimizer([{"params": nn.Linear(3, 2).parameters(), "lr": float("nan")}], lr=0.1)
    whole = made(optimizer)
    with pytest.raises(ValueError, match="weight_decay must be at least 0, not -1"):
        whole.add_param_group({"params": nn.Linear(3, 2).parameters(), "weight_decay": -1})
    assert len(whole.param_groups) == 1
    for nothing in ([], ["weight"], [None]):
        with pytest.raises((ValueError, TypeError), match=r"empty parameter list|can only optimize Tensors"):
            optimizer(nothing, lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(optim.SGD, momentum="0.9"), "momentum must be a finite number, not '0.9'"),
        (lambda: made(optim.SGD, nesterov="no"), "nesterov must be True or False, not 'no'"),
        (lambda: made(optim.AvaGrad, maximize="false"), "maximize must be True or False, not 'false'"),
        (lambda: made(optim.AvaGrad, eps=0), "eps must be above 0, not 0"),
        (lambda: optim.NormRatio("x"), "max_factor='x' must be at least 1"),
        (lambda: optim.MaxOne(None), "max_factor=None must be at least 1"),
        (lambda: growth.Tiny(update_old="no"), "update_old must be True or False, not 'no'"),
        (lambda: growth.FixedSize(depth_multiple="x"), "depth_multiple must be a finite number, not 'x'"),
        (lambda: growth.VarianceTransfer(as_published="no"), "as_published must be True or False, not 'no'"),
        (lambda: growth.make_schedule(9, 32, batch_sizes=[0, 2]), "batch_sizes must be at least 1, not 0"),
        (lambda: parts.Classes(5, len), "order must name every class from 0 on once"),
        (lambda: parts.Classes([0, 1], 3), "counts must be a function of the number of stages, not 3"),
        (lambda: parts.Features(5), "counts must be a list with a number of features for each stage"),
        (lambda: parts.Features([2, 4], columns="x"), "columns must be zero or drawn, not 'x'"),
        (lambda: parts.GainWeights(decay="x"), "decay must be a finite number, not 'x'"),
        (lambda: parts.Depth(start="x"), "start must be zero, identity, stack or gstack, not 'x'"),
        (lambda: parts.Hyperfan(output_multiplier="x"), "output_multiplier must be True or False, not 'x'"),
        (lambda: parts.Hyperfan(chunk_channels=0), "chunk_channels must be at least 1, not 0"),
        (lambda: parts.Isotropic(max_pruning_error=-1), "max_pruning_error must be at least 0, not -1"),
        (lambda: parts.Isotropic(last="x"), "last must be an integer, not 'x'"),
        (lambda: parts.Isotropic(first=5, last=4), "last=4 is before the first analysis of the layers, at 5"),
        (lambda: parts.Isotropic(relative="no"), "relative must be True or False, not 'no'"),
        (lambda: parts.Isotropic(bias="x"), "bias must be a finite number, not 'x'"),
        (lambda: parts.Isotropic(rotate=2), "rotate must be True or False, not 2"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, UserError)) as raised:
        make()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("counts", [[1], [2, 1], [1, 4], [0, 3], [1.5, 3]], ids=str)
def test_counts_of_classes_must_fit_the_stages(counts: list[Any]) -> None:
    part = parts.Classes([2, 0, 1], lambda number: counts)
    part.groups = ("classes",)
    with pytest.raises(UserError, match=r"counts must give 2 ascending numbers of classes from 1 to 3"):
        part.stage_widths(2)


def test_integers_beyond_the_largest_float_are_numbers() -> None:
    settings.finite(size=10**400)
    with pytest.raises(ValueError, match="size must be an integer"):
        settings.whole(1, size=float("inf"))


def test_an_optimizer_of_another_network_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    other = nn.Linear(3, 2)
    before, foreign = optim.SGD(network.parameters(), lr=0.1), optim.SGD(other.parameters(), lr=0.1)
    grower = Grower(network, torch.randn(4, 6), method=growth.PairGrowth(), trigger={0: 0.5, 1: 1.0})
    with caplog.at_level(logging.WARNING):
        # An optimizer of some of the network's parameters, and one created before the network was narrowed.
        grower.follow(optim.SGD([*network[0].parameters(), *other.parameters()], lr=0.1), before)
        # Lightning passes all optimizers.
        grower.follow(foreign, announced=True)
        assert "contains no parameter" not in caplog.text
        grower.follow(optim.SGD(other.parameters(), lr=0.1))
    assert "SGD contains no parameter of the growing network" in caplog.text


def test_a_grower_refuses_an_incomplete_state() -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    grower = Grower(network, torch.randn(4, 6), method=growth.PairGrowth(), trigger={0: 0.5, 1: 1.0})
    whole = grower.state_dict()
    grower.load_state_dict(whole)
    # Optional entries: annealing, vocabulary and experts.
    needed = [name for name in whole if name not in ("annealing", "vocabulary", "experts")]
    without = [{n: v for n, v in whole.items() if n != name} for name in needed]
    wrong = [{**whole, name: value} for name in needed for value in (None, "x")]
    for state in (*without, *wrong):
        with pytest.raises(UserError, match="this is not the state of a Grower"):
            grower.load_state_dict(state)


@pytest.mark.parametrize("names", [(), ("net", "net"), (None, "net")], ids=str)
def test_lightnings_callback_refuses_repeated_names(names: tuple[str | None, ...]) -> None:
    with pytest.raises(UserError, match="must be different names: the submodule that grows"):
        Growth(names, method=growth.PairGrowth(), trigger={0: 0.5, 1: 1.0})  # type: ignore[arg-type]
