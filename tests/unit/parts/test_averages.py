"""An average of the weights that grows with the network."""

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from growlab.base.errors import UserError
from growlab.growth import GrowthState, Net2Net, PairGrowth, VarianceTransfer, grow, make_seed
from growlab.lab.networks import resnet20
from growlab.lab.training.build import user_callbacks
from growlab.parts import Averages
from growlab.widths import WidthGraph, tensors_of, trace
from tests.unit.grower.test_grower import PROBE, Loop, mlp, normed

METHODS = {
    "net2net": Net2Net(noise_std=1e-3),
    "pairs": PairGrowth(noise_std=1e-3),
    "ours": VarianceTransfer(noise_std=1e-3),
    "constraint": VarianceTransfer(rule="constraint"),
}


@cache
def traced() -> tuple[Tensor, WidthGraph, dict[str, int]]:
    """A probe batch, the graph of the full network, and half its widths."""
    torch.manual_seed(0)
    probe = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    graph = trace(resnet20((3, 8, 8), 4, width=8).double(), probe[:2])
    return probe, graph, {group: max(2, width // 2) for group, width in graph.full_widths.items()}


def network_at(seed: int, method: Any) -> tuple[nn.Module, GrowthState]:
    _, graph, narrow = traced()
    torch.manual_seed(seed)
    network = resnet20((3, 8, 8), 4, width=8).double()
    state = make_seed(network, graph, method, narrow, seed)
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            # Statistics too: as after some training, and different for each seed.
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    return network, state


@pytest.mark.parametrize("name", METHODS)
def test_the_grown_average_is_the_average_of_grown_networks(name: str) -> None:
    """In float64; that it computes what it did is checked by `grow` itself."""
    method, (probe, graph, _) = METHODS[name], traced()
    wide = {group: max(4, 3 * width // 4) for group, width in graph.full_widths.items()}
    (early, state), (late, _) = network_at(1, method), network_at(2, method)
    average = AveragedModel(early, multi_avg_fn=get_ema_multi_avg_fn(0.25), use_buffers=True)
    for network in (early, late):
        average.update_parameters(network)
    leader = tensors_of(late, graph)
    for network in (early, average.module, late):
        before = GrowthState.from_dict(state.as_dict())
        grow(network, graph, method, before, wide, 0, (probe,), averaged=leader)
    norms = {n for norm in graph.norms for n in (norm.weight, norm.running_var, norm.running_mean)}
    for key, tensor in average.module.state_dict().items():
        # Variances scale with the square of what means scale with, and weights of norms with what eps needs.
        if tensor.is_floating_point() and key not in norms:
            wanted = 0.25 * early.state_dict()[key] + 0.75 * late.state_dict()[key]
            torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=1e-12)


def test_scales_computed_from_the_average_would_part_it_from_the_network() -> None:
    """The negative case: scales that a network's weights decide differ from average to network."""
    method, (probe, graph, _) = METHODS["constraint"], traced()
    late, state = network_at(2, method)
    rows = late.conv1.out_channels
    grown = []
    for leader in (None, tensors_of(late, graph)):
        halved = copy.deepcopy(late)
        with torch.no_grad():
            halved.conv1.weight.mul_(0.5)
        own = GrowthState.from_dict(state.as_dict())
        grow(halved, graph, method, own, graph.full_widths, 0, (probe,), averaged=leader)
        grown.append(halved.conv1.weight[:rows])
    grow(late, graph, method, state, graph.full_widths, 0, (probe,))
    torch.testing.assert_close(grown[1], 0.5 * late.conv1.weight[:rows])
    assert not torch.allclose(grown[0], 0.5 * late.conv1.weight[:rows])


def test_averages_grow_along_as_a_part_or_as_the_users_module() -> None:
    average = Averages(decay=0.7)
    loop = Loop(parts=[average])
    own = AveragedModel(loop.network, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    loop.grower.follow(own)
    loop.optimizer.register_step_post_hook(lambda *_: own.update_parameters(loop.network))
    loop.train()
    for name, tensor in own.module.state_dict().items():
        assert torch.equal(average.module.state_dict()[name], tensor), name
    assert all(e.notes["ema_parity_error_eval"] < 1e-5 for e in loop.grower.events)
    outputs = average.module.eval()(PROBE)
    loop.grower.finish()
    plain = mlp().eval()
    plain.load_state_dict(average.module.state_dict())
    assert torch.allclose(plain(PROBE), outputs, atol=1e-6)


def test_averages_resume() -> None:
    def loop() -> Loop:
        return Loop(network=normed, parts=[Averages(decay=0.7)])

    def average(loop: Loop) -> list[object]:
        return [t.tolist() for t in loop.grower.parts[0].module.state_dict().values()]

    whole = average(loop().train())
    for killed in (2, 3, 4, 9):
        assert average(loop().resume(loop().train(killed).saved()).train()) == whole


def test_an_average_changes_nothing_else() -> None:
    plain, averaged = Loop().train(), Loop(parts=[Averages(decay=0.7)]).train()
    for name, tensor in plain.network.state_dict().items():
        assert torch.equal(averaged.network.state_dict()[name], tensor), name


@pytest.mark.parametrize("decay", [0.0, 1.0, None, "x"])
def test_impossible_decays_are_refused(decay: Any) -> None:
    with pytest.raises(UserError, match=r"^decay must lie between 0 and 1"):
        Averages(decay)


@pytest.mark.parametrize("callback", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_averages_that_do_not_grow_are_refused(callback: str) -> None:
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
