"""Warm-up of newborn entries, freezing of old entries, and averages that grow."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from growlab import Grower, HyperCloning, UserError
from growlab.grower.part import Part
from growlab.growth import GrowthState, Net2Net, PairGrowth, VarianceTransfer, grow, make_seed
from growlab.lab.training.build import user_callbacks
from growlab.parts import Averages, Freeze, Warmup
from growlab.widths import tensors_of
from tests.cases import NETWORKS, differing, graph_of, roughen, same_parameters, widths_at
from tests.unit.grower.test_grower import PROBE, Loop, mlp

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
RATE = 0.01
OPTIMIZERS: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "sgd": lambda n: [torch.optim.SGD(n.parameters(), lr=RATE, momentum=0.9, weight_decay=0.1)],
    "adamw": lambda n: [torch.optim.AdamW(n.parameters(), lr=RATE, weight_decay=0.1)],
    "two": lambda n: [
        torch.optim.AdamW([p for p in n.parameters() if p.dim() == 2], lr=RATE),
        torch.optim.SGD([p for p in n.parameters() if p.dim() == 1], lr=RATE),
    ],
}


class Perceptron(nn.Module):
    """A residual stream of fixed width; hidden layers grow."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4)) for _ in range(layers)
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(network: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (network(X) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def grown(
    name: str, parts: list[Part], state: Any = "auto", layers: int = 2, width: int = 8, steps: int = 3
) -> tuple[Any, list[torch.optim.Optimizer], Any]:
    """Train a small network, then a larger one that starts from it and grows at epoch 1."""
    torch.manual_seed(0)
    small = Perceptron(4)
    optimizers = OPTIMIZERS[name](small)
    train(small, optimizers, steps)
    torch.manual_seed(1)
    wide = Perceptron(width, layers)
    grower = Grower.from_trained(
        small, wide, X, optimizer=optimizers, parts=parts, state=state, verbose=False,
        method=HyperCloning(noise_std=0.1), trigger={0: "small", 1: 1.0},
    )  # fmt: skip
    train(wide, optimizers, 1)
    grower.step(epoch=1)
    return wide, optimizers, grower


def moves(network: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    train(network, optimizers, 1)
    return {name: p.detach() - before[name] for name, p in network.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_warmup_scales_only_the_steps_of_newborn_entries(name: str) -> None:
    wide, optimizers, grower = grown(name, [Warmup(4)])
    twin, others, _ = grown(name, [])
    masks = grower.newborn().masks
    assert set(masks) == {f"layers.{i}.{n}" for i in range(2) for n in ("0.weight", "0.bias", "2.weight")}
    for step in range(1, 6):
        twin.load_state_dict(wide.state_dict())
        found, expected = moves(wide, optimizers), moves(twin, others)
        for key, full_step in expected.items():
            factor = torch.ones_like(full_step)
            if key in masks:
                factor[masks[key]] = min(1.0, step / 4)
            assert torch.allclose(found[key], factor * full_step, rtol=1e-9, atol=1e-14), (step, key)


def test_all_entries_may_warm_up_by_the_rates_of_groups() -> None:
    wide, optimizers, grower = grown("two", [Warmup(4, who="all")])
    twin, others, _ = grown("two", [])
    assert grower.events
    found, expected = moves(wide, optimizers), moves(twin, others)
    assert all(torch.allclose(found[key], step / 4, rtol=1e-9, atol=1e-14) for key, step in expected.items())
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {RATE}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_freeze_keeps_old_entries_bit_for_bit_for_its_steps(name: str) -> None:
    wide, optimizers, grower = grown(name, [Freeze(5)])
    new = grower.newborn()
    before = {key: p.detach().clone() for key, p in wide.named_parameters()}
    train(wide, optimizers, 5)
    for key, parameter in wide.named_parameters():
        mask = new.masks.get(key, torch.zeros_like(parameter, dtype=torch.bool))
        assert torch.equal(parameter[~mask], before[key][~mask])
        assert bool((parameter[mask] != before[key][mask]).all())
    mask = new.masks["layers.0.0.weight"]
    assert moves(wide, optimizers)["layers.0.0.weight"][~mask].all()


def test_old_layers_stay_bit_for_bit_and_new_ones_warm_up() -> None:
    """As in LLaMA-Pro, only new blocks train, although all parameters have weight decay."""
    wide, optimizers, grower = grown("adamw", [Freeze(), Warmup(3)], layers=4, width=4)
    new = grower.newborn()
    assert set(new.parameters) == {f"layers.{i}.{n}.{w}" for i in (1, 3) for n in (0, 2) for w in ("weight", "bias")}
    before = {key: p.detach().clone() for key, p in wide.named_parameters()}
    train(wide, optimizers, 100)
    moved = {key for key, p in wide.named_parameters() if not torch.equal(p, before[key])}
    assert moved == set(new.parameters)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_training_is_equal_bit_for_bit(stop: int) -> None:
    def begin() -> tuple[Any, list[torch.optim.Optimizer], Any]:
        return grown("adamw", [Warmup(4), Freeze(6)])

    wide, optimizers, _ = begin()
    train(wide, optimizers, 8)
    first, (optimizer,), grower = begin()
    train(first, [optimizer], stop)
    saved = copy.deepcopy([each.state_dict() for each in (first, optimizer, grower)])
    again, (other,), resumed = begin()
    train(again, [other], 2)
    for each, state in zip((again, other, resumed), saved, strict=True):
        each.load_state_dict(state)
    train(again, [other], 8 - stop)
    assert same_parameters(wide, again)


def test_state_of_newborn_entries_and_layers_alone_is_reset() -> None:
    found = {}
    for state in ("inherit", "reset_new"):
        wide, (optimizer,), grower = grown("adamw", [], state)
        found[state] = {name: optimizer.state[p]["exp_avg_sq"] for name, p in wide.named_parameters()}
    for name, mask in grower.newborn().masks.items():
        carried, reset = (found[state][name] for state in ("inherit", "reset_new"))
        assert torch.equal(reset[~mask], carried[~mask]) and bool((carried[~mask] > 0).all())
        assert not reset[mask].any() and bool((carried[mask] > 0).all())
    wide, (optimizer,), _ = grown("adamw", [], "reset_new", layers=4, width=4)
    known = {name for name, p in wide.named_parameters() if p in optimizer.state}
    assert known == {name for name, _ in wide.named_parameters() if name[7] in "02"}


METHODS = {
    "net2net": Net2Net(noise_std=1e-3),
    "pairs": PairGrowth(noise_std=1e-3),
    "ours": VarianceTransfer(noise_std=1e-3),
    "constraint": VarianceTransfer(rule="constraint"),
}


def network_at(seed: int, method: Any) -> tuple[nn.Module, GrowthState]:
    network, graph = NETWORKS["resnet B"].make(), graph_of("resnet B")
    state = make_seed(network, graph, method, widths_at(graph, 0.5), seed)
    # Statistics too: as after some training, and different for each seed.
    roughen(network, seed)
    return network, state


@pytest.mark.parametrize("name", METHODS)
def test_the_grown_average_is_the_average_of_grown_networks(name: str) -> None:
    """In float64; `grow` itself checks that outputs are preserved."""
    method, probe, graph = METHODS[name], NETWORKS["resnet B"].inputs(), graph_of("resnet B")
    (early, state), (late, _) = network_at(1, method), network_at(2, method)
    average = AveragedModel(early, multi_avg_fn=get_ema_multi_avg_fn(0.25), use_buffers=True)
    for network in (early, late):
        average.update_parameters(network)
    leader = tensors_of(late, graph)
    for network in (early, average.module, late):
        before = GrowthState.from_dict(state.as_dict())
        grow(network, graph, method, before, graph.full_widths, 0, (probe,), averaged=leader)
    norms = {n for norm in graph.norms for n in (norm.weight, norm.running_var, norm.running_mean)}
    for key, tensor in average.module.state_dict().items():
        # Norms are left out, because variances scale quadratically and weights compensate eps.
        if tensor.is_floating_point() and key not in norms:
            expected = 0.25 * early.state_dict()[key] + 0.75 * late.state_dict()[key]
            torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-12)


def test_averages_grow_as_a_part_or_as_the_users_module() -> None:
    average = Averages(decay=0.7)
    loop = Loop(parts=[average])
    own = AveragedModel(loop.network, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    loop.grower.follow(own)
    loop.optimizer.register_step_post_hook(lambda *_: own.update_parameters(loop.network))
    loop.train()
    assert not differing(own.module.state_dict(), average.module.state_dict())
    assert all(e.notes["ema_parity_error_eval"] < 1e-5 for e in loop.grower.events)
    outputs = average.module.eval()(PROBE)
    loop.grower.finish()
    plain = mlp().eval()
    plain.load_state_dict(average.module.state_dict())
    assert torch.allclose(plain(PROBE), outputs, atol=1e-6)


def test_an_average_changes_nothing_else() -> None:
    plain, averaged = Loop().train(), Loop(parts=[Averages(decay=0.7)]).train()
    assert not differing(plain.network.state_dict(), averaged.network.state_dict())


@pytest.mark.parametrize("callback", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_averages_that_do_not_grow_raise_an_error(callback: str) -> None:
    given = {"_target_": f"lightning.pytorch.callbacks.{callback}"}
    if callback.startswith("Stochastic"):
        given["swa_lrs"] = 0.1
    with pytest.raises(UserError, match="does not follow a growing network"):
        user_callbacks(OmegaConf.create({"trainer": {"callbacks": [given]}}))


def test_buffers_that_are_not_saved_take_on_the_networks_precision_too() -> None:
    network, part = nn.Linear(2, 2), Averages(0.5)
    network.register_buffer("angles", torch.tensor([1.0, 2.0]), persistent=False)
    run = SimpleNamespace(network=network, averages={})
    part.begin(run)
    network.bfloat16()
    part.after_step(run)
    network.angles *= 3
    part.after_step(run)
    assert part.module.angles.dtype == part.module.weight.dtype == torch.bfloat16
    assert part.module.angles.tolist() == [2.0, 4.0]
