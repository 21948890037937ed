"""Blocks that come into a network while it trains."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.grower.triggers import ByMethod
from growlab.growth import GrowthState, Net2Net, PairGrowth, VarianceTransfer, grow, make_seed
from growlab.growth.multipliers import fold_multipliers
from growlab.growth.state import ParityError
from growlab.lab.networks import MLP, CifarResNet
from growlab.optim import weight_regions
from growlab.parts.depth import Blocks, Depth
from growlab.widths import WidthGraph, trace
from tests.unit.parts.stages import Residual

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()
SAMPLES = torch.randn(64, 20, generator=torch.Generator().manual_seed(1)).double()


def resnet(num_blocks: int = 3) -> CifarResNet:
    torch.manual_seed(0)
    return CifarResNet(num_blocks, 5, 3, (4, 8, 16)).double()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 10), *(Residual(10, 12) for _ in range(4)), nn.Linear(10, 3)).double()


def half(graph: WidthGraph) -> dict[str, int]:
    return {name: max(1, width // 2) for name, width in graph.full_widths.items()}


def step(
    network: nn.Module, depth: Blocks, state: GrowthState, method: Any, name: str, widths: Any, x: Tensor
) -> dict[str, Any]:
    """Put a block in and widen, as an event of a run does."""
    receipt, _ = depth.insert(network, name, method, state.widths, 0, state.stage + 1, (x,))
    state.blocks[name] = state.stage + 1
    grow(network, depth.graph(state.blocks), method, state, widths, 0, (x,))
    return receipt


@pytest.mark.parametrize("method", [PairGrowth(), VarianceTransfer()], ids=lambda m: m.name)
def test_a_resnet_8_becomes_a_resnet_20_while_it_widens(method: Any) -> None:
    network = resnet()
    graph = trace(network, IMAGES)
    depth = Blocks(network, graph, None, "zero", (IMAGES,))
    assert list(depth.blocks) == [f"layers.{layer}.{block}" for block in (1, 2) for layer in (0, 1, 2)]
    depth.leave_out(network)
    small = resnet(1)
    assert network.state_dict().keys() == small.state_dict().keys()
    widths = half(graph)
    state = make_seed(network, depth.graph([]), method, widths, 0)
    before = network.eval()(IMAGES)
    for number, name in enumerate(depth.blocks, start=1):
        wider = {g: w + (graph.full_widths[g] - w) * number // 6 for g, w in widths.items()}
        receipt = step(network, depth, state, method, name, wider, IMAGES)
        assert max(receipt["parity_error_eval"], receipt["parity_error_train"]) <= receipt["parity_tolerance"]
    after = network.eval()(IMAGES) * state.output_factor
    assert torch.allclose(after, before, rtol=1e-5, atol=1e-7)
    # An ordinary ResNet-20, of which every part learns.
    whole = resnet()
    fold_multipliers(network)
    whole.load_state_dict(network.state_dict())
    assert torch.equal(whole.eval()(IMAGES), network(IMAGES))
    assert [type(module) for module in whole.modules()] == [type(module) for module in network.modules()]
    network.train()
    for _ in range(2):
        network.zero_grad()
        network(IMAGES).square().sum().backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.01 * parameter.grad
    assert all(p.grad.abs().max() > 0 for p in network.parameters())


@pytest.mark.parametrize("method", [Net2Net(), VarianceTransfer()], ids=lambda m: m.name)
def test_net2deeper_in_a_network_without_residuals(method: Any) -> None:
    """While a layer is left out, what it reads and what it would put out are the same channels."""
    torch.manual_seed(0)
    network = MLP(20, [8, 8, 8, 8], 5, batch_norm=True).double()
    graph = trace(network, SAMPLES)
    names = ["hidden.3:6", "hidden.6:9"]
    depth = Blocks(network, graph, names, "identity", (SAMPLES,))
    depth.leave_out(network)
    state = make_seed(network, depth.graph([]), method, {g: 4 for g in graph.groups}, 0)
    # Running statistics that differ from the batch's.
    network.train()(SAMPLES + 1)
    before = network.eval()(SAMPLES)
    for width in (6, 8):
        receipt = step(network, depth, state, method, names.pop(), {g: width for g in graph.groups}, SAMPLES)
        assert receipt["parity_error_eval"] < 1e-12 and receipt["parity_error_train"] < 1e-12
    assert torch.allclose(network.eval()(SAMPLES) * state.output_factor, before, rtol=1e-5, atol=1e-7)
    fold_multipliers(network)
    MLP(20, [8, 8, 8, 8], 5, batch_norm=True).double().load_state_dict(network.state_dict())


def test_what_is_handed_on_needs_equal_widths_only_where_it_is_left_out() -> None:
    """Groups of a layer that is there are their own again."""
    network = MLP(20, [8, 8, 8], 5)
    graph = trace(network, SAMPLES.float())
    depth = Blocks(network, graph, ["hidden.2:4"], "identity", (SAMPLES.float(),))
    without, whole = depth.graph([]), depth.graph(["hidden.2:4"])
    assert whole == graph
    assert without.axes["hidden.4.weight"][1].groups == ("hidden.0",)
    assert graph.axes["hidden.4.weight"][1].groups == ("hidden.2",)
    assert "hidden.2.weight" not in without.axes


@pytest.mark.parametrize(("start", "same"), [("zero", True), ("stack", True), ("gstack", False)])
def test_branches_of_a_transformer_and_stacking(start: str, same: bool) -> None:
    network = transformer()
    graph = trace(network, SAMPLES)
    depth = Blocks(network, graph, None, start, (SAMPLES,))
    assert list(depth.blocks) == ["2", "3", "4"]
    depth.leave_out(network)
    before = network.eval()(SAMPLES)
    receipt, copied = depth.insert(network, "2", PairGrowth(), graph.full_widths, 0, 1, (SAMPLES,))
    assert torch.equal(network(SAMPLES), before) == same
    assert (receipt["parity_tolerance"] is not None) == same
    assert receipt["copied_from"] == (None if start == "zero" else ["1"])
    zeroed = {"down.weight", "down.bias"} if same else set()
    own, source = network[2].state_dict(), network[1].state_dict()
    for name, tensor in own.items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if name in zeroed else source[name]) == (
            start != "zero" or name in zeroed or name.startswith("norm")
        )
    assert copied == {f"2.{name}": f"1.{name}" for name in own if start != "zero" and name not in zeroed}
    if not same:
        assert receipt["parity_error_eval"] > 0.01
    # Copies, not the same tensors.
    assert network[2].up.weight is not network[1].up.weight


def test_a_block_is_as_old_as_it_is() -> None:
    network = resnet()
    graph = trace(network, IMAGES)
    depth = Blocks(network, graph, None, "zero", (IMAGES,))
    births = {name: [0] * width for name, width in graph.full_widths.items()}
    regions = weight_regions(graph, births, dict.fromkeys(depth.tensors("layers.1.1"), 2))
    assert regions["layers.1.1.conv1.weight"].stages.tolist() == [2]
    assert regions["layers.1.1.bn2.bias"].stages.tolist() == [2]
    assert regions["layers.1.0.conv1.weight"].stages.tolist() == [0]


def test_a_block_that_changes_the_outputs_is_taken_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    network = resnet()
    depth = Blocks(network, trace(network, IMAGES), None, "zero", (IMAGES,))
    depth.leave_out(network)
    before, keys = network.eval()(IMAGES), network.state_dict().keys()
    monkeypatch.setitem(depth.insert.__globals__["STARTS"], "zero", lambda *arguments: None)
    with pytest.raises(ParityError, match=r"the block layers\.0\.1 .* taken out again"):
        depth.insert(network, "layers.0.1", PairGrowth(), depth.full.full_widths, 0, 1, (IMAGES,))
    assert network.state_dict().keys() == keys and torch.equal(network(IMAGES), before)


@pytest.mark.parametrize(
    ("blocks", "start", "message"),
    [
        (["layers.0.7"], "zero", r"names layers\.0\.7, but the network has no layers\.0\.7"),
        (["layers.0:0"], "zero", "no such modules"),
        (["layers.1.0"], "zero", "cannot be|changes the number|does not run"),
        (["classifier"], "zero", "does not run without|cannot be"),
    ],
)
def test_blocks_that_cannot_be_left_out_are_refused(blocks: list[str], start: str, message: str) -> None:
    network = resnet()
    with pytest.raises(UserError, match=message):
        Blocks(network, trace(network, IMAGES), blocks, start, (IMAGES,))


def wide_first() -> nn.Module:
    """Blocks of one class, the second of another width inside."""
    torch.manual_seed(0)
    network = transformer()
    network[2].up, network[2].down = nn.Linear(10, 8).double(), nn.Linear(8, 10).double()
    return network


@pytest.mark.parametrize(
    ("make", "x", "block", "start", "message"),
    [
        (resnet, IMAGES, "layers.0.2", "identity", "it has a residual branch, for which there is start='zero'"),
        (wide_first, SAMPLES, "2", "gstack", "no block of the same shapes comes before it to copy"),
        (transformer, SAMPLES, "1", "gstack", "no block of the same shapes comes before it to copy"),
        (transformer, SAMPLES, "2.up", "identity", r"2\.up puts out \[64, 12\] where \[64, 10\] goes in|it puts out"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(make: Any, x: Tensor, block: str, start: str, message: str) -> None:
    network = make()
    with pytest.raises(UserError, match=message):
        Blocks(network, trace(network, x), [block], start, (x,))


def test_a_block_without_one_to_copy_is_refused_when_it_comes_in() -> None:
    network = resnet()
    depth = Blocks(network, trace(network, IMAGES), ["layers.0.2"], "gstack", (IMAGES,))
    depth.leave_out(network)
    network.layers[0][0] = network.layers[0][1] = nn.Identity()
    keys = network.state_dict().keys()
    with pytest.raises(UserError, match=r"no block of the same shape before layers\.0\.2 to copy"):
        depth.insert(network, "layers.0.2", PairGrowth(), depth.full.full_widths, 0, 1, (IMAGES,))
    assert network.state_dict().keys() == keys


def test_blocks_come_evenly() -> None:
    network = resnet()
    depth = Blocks(network, trace(network, IMAGES), None, "zero", (IMAGES,))
    assert [len(depth.present_at(stage / 4)) for stage in range(5)] == [0, 2, 3, 4, 6]
    assert len(depth.present_at(1.0)) == 6


def test_blocks_need_a_trigger_that_knows_how_far_growth_has_come() -> None:
    run = SimpleNamespace(trigger=ByMethod(), seed_widths=trace(resnet(), IMAGES).full_widths)
    with pytest.raises(UserError, match="need a trigger that knows how far growth has come"):
        Depth().check(run)


def test_blocks_whose_weights_are_computed_from_others_are_refused() -> None:
    network = nn.Sequential(nn.Linear(20, 8), *(Residual(8, 12) for _ in range(3)), nn.Linear(8, 3)).double()
    nn.utils.parametrizations.orthogonal(network[2].up)
    with pytest.raises(UserError, match=r"no functions of others, which those of 2\.up are"):
        Depth("auto").prepare(network, trace(network, SAMPLES[:2]), 0, (SAMPLES[:2],))
