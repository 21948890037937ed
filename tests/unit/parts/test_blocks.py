"""Blocks inserted during training: by themselves, and in a plain loop, resumed at any step."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from growlab.base.errors import UserError
from growlab.grower.triggers import At, Budget, OnDemand
from growlab.growth import (
    FireFly,
    GradMax,
    GrowthMethod,
    GrowthState,
    Net2Net,
    PairGrowth,
    RandomGrowth,
    Splitting,
    Tiny,
    VarianceTransfer,
    grow,
    make_schedule,
    make_seed,
)
from growlab.growth.multipliers import fold_multipliers
from growlab.growth.state import ParityError
from growlab.lab.networks import MLP, CifarResNet
from growlab.optim import weight_regions
from growlab.parts import Averages, Depth, OldGradient, Part
from growlab.parts.depth import Blocks
from growlab.widths import UnsupportedOperation, WidthGraph, trace
from tests.cases import Around, tracked, train
from tests.unit.grower.test_grower import EPOCHS, OPTIMIZERS, PROBE, STAGES, STEPS, Loop, batch, two_groups
from tests.unit.grower.test_sharded import in_guide
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
    """Insert a block and widen, as a growth event does."""
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
    # An ordinary ResNet-20, all of whose parameters learn.
    fresh = resnet()
    fold_multipliers(network)
    fresh.load_state_dict(network.state_dict())
    assert torch.equal(fresh.eval()(IMAGES), network(IMAGES))
    assert [type(module) for module in fresh.modules()] == [type(module) for module in network.modules()]
    train(network.train(), torch.optim.SGD(network.parameters(), lr=0.01), IMAGES, steps=2)
    assert all(p.grad.abs().max() > 0 for p in network.parameters())


@pytest.mark.parametrize("method", [Net2Net(), VarianceTransfer()], ids=lambda m: m.name)
def test_net2deeper_in_a_network_without_residuals(method: Any) -> None:
    """While a layer is left out, its inputs and outputs are the same channels."""
    torch.manual_seed(0)
    network = MLP(20, [8, 8, 8, 8], 5, batch_norm=True).double()
    graph = trace(network, SAMPLES)
    names = ["hidden.3:6", "hidden.6:9"]
    depth = Blocks(network, graph, names, "identity", (SAMPLES,))
    depth.leave_out(network)
    state = make_seed(network, depth.graph([]), method, {g: 4 for g in graph.groups}, 0)
    # Make running statistics differ from the batch's.
    network.train()(SAMPLES + 1)
    before = network.eval()(SAMPLES)
    for width in (6, 8):
        receipt = step(network, depth, state, method, names.pop(), {g: width for g in graph.groups}, SAMPLES)
        assert receipt["parity_error_eval"] < 1e-12 and receipt["parity_error_train"] < 1e-12
    assert torch.allclose(network.eval()(SAMPLES) * state.output_factor, before, rtol=1e-5, atol=1e-7)
    fold_multipliers(network)
    MLP(20, [8, 8, 8, 8], 5, batch_norm=True).double().load_state_dict(network.state_dict())


def test_inputs_and_outputs_of_a_layer_have_one_group_only_while_it_is_left_out() -> None:
    network = MLP(20, [8, 8, 8], 5)
    graph = trace(network, SAMPLES.float())
    depth = Blocks(network, graph, ["hidden.2:4"], "identity", (SAMPLES.float(),))
    without = depth.graph([])
    assert depth.graph(["hidden.2:4"]) == graph
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


def test_blocks_are_inserted_evenly_and_have_their_own_birth_stage() -> None:
    network = resnet()
    graph = trace(network, IMAGES)
    depth = Blocks(network, graph, None, "zero", (IMAGES,))
    assert [len(depth.present_at(stage / 4)) for stage in range(5)] == [0, 2, 3, 4, 6]
    births = {name: [0] * width for name, width in graph.full_widths.items()}
    regions = weight_regions(graph, births, dict.fromkeys(depth.tensors("layers.1.1"), 2))
    assert regions["layers.1.1.conv1.weight"].stages.tolist() == [2]
    assert regions["layers.1.1.bn2.bias"].stages.tolist() == [2]
    assert regions["layers.1.0.conv1.weight"].stages.tolist() == [0]


def test_a_block_whose_insertion_fails_is_removed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An insertion that changes the outputs, and one whose block to copy is missing."""
    for start, error, message in (
        ("zero", ParityError, r"the block layers\.0\.2 .* taken out again"),
        ("gstack", UserError, r"no block of the same shape before layers\.0\.2 to copy"),
    ):
        network = resnet()
        depth = Blocks(network, trace(network, IMAGES), ["layers.0.2"], start, (IMAGES,))
        depth.leave_out(network)
        if start == "zero":
            monkeypatch.setitem(depth.insert.__globals__["STARTS"], "zero", lambda *arguments: None)
        else:
            network.layers[0][0] = network.layers[0][1] = nn.Identity()
        before, keys = network.eval()(IMAGES), network.state_dict().keys()
        with pytest.raises(error, match=message):
            depth.insert(network, "layers.0.2", PairGrowth(), depth.full.full_widths, 0, 1, (IMAGES,))
        assert network.state_dict().keys() == keys and torch.equal(network(IMAGES), before)


def wide_first() -> nn.Module:
    """Blocks of one class, the second with another hidden width."""
    torch.manual_seed(0)
    network = transformer()
    network[2].up, network[2].down = nn.Linear(10, 8).double(), nn.Linear(8, 10).double()
    return network


@pytest.mark.parametrize(
    ("make", "x", "block", "start", "message"),
    [
        (resnet, IMAGES, "layers.0.7", "zero", r"names layers\.0\.7, but the network has no layers\.0\.7"),
        (resnet, IMAGES, "layers.0:0", "zero", "no such modules"),
        (resnet, IMAGES, "layers.1.0", "zero", "cannot be|changes the number|does not run"),
        (resnet, IMAGES, "classifier", "zero", "does not run without|cannot be"),
        (resnet, IMAGES, "layers.0.2", "identity", "it has a residual branch, for which there is start='zero'"),
        (wide_first, SAMPLES, "2", "gstack", "no block of the same shapes comes before it to copy"),
        (transformer, SAMPLES, "1", "gstack", "no block of the same shapes comes before it to copy"),
        (transformer, SAMPLES, "2.up", "identity", r"2\.up maps shape \[64, 10\] to \[64, 12\]|it maps shape"),
    ],
)
def test_blocks_that_cannot_be_inserted_later_raise_errors(
    make: Any, x: Tensor, block: str, start: str, message: str
) -> None:
    network = make()
    with pytest.raises(UserError, match=message):
        Blocks(network, trace(network, x), [block], start, (x,))


def test_blocks_with_computed_weights_raise_errors() -> None:
    network = nn.Sequential(nn.Linear(20, 8), *(Residual(8, 12) for _ in range(3)), nn.Linear(8, 3)).double()
    nn.utils.parametrizations.orthogonal(network[2].up)
    with pytest.raises(UserError, match=r"those of 2\.up are computed from others"):
        Depth("auto").prepare(network, trace(network, SAMPLES[:2]), 0, (SAMPLES[:2],))


def layer_normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *(Residual(8, 10) for _ in range(3)), nn.Linear(8, 3))


def batch_normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *(Residual(8, 10, nn.BatchNorm1d) for _ in range(3)), nn.Linear(8, 3))


def adam(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=0.01)


ALONE = {0: 1.0, 1: 1.0, 3: 1.0}
BY_STEPS = At({0: 0.5, 4: 0.75, 7: 1.0}, unit="step")
SCHEDULE = make_schedule(EPOCHS, 8, epochs=[1, 2, 1], widths=[0.5, 0.75, 1.0])
BUDGET = OnDemand(Budget(90), SCHEDULE, EPOCHS)
# Differences from the default run: optimizer, network, and settings of the grower.
RUNS: dict[str, dict[str, Any]] = {
    "regions and rates": {"make": OPTIMIZERS["growlab"]},
    "batch normalisation": {"make": OPTIMIZERS["growlab"], "network": batch_normed},
    "copies with their state": {"make": adam, "parts": {"start": "stack", "state": "copy"}},
    "whole copies": {"make": adam, "parts": {"start": "gstack", "state": "copy"}, "method": PairGrowth()},
    "two groups of parameters": {"make": two_groups, "parts": {"start": "stack", "state": "copy"}},
    "depth alone": {"make": adam, "trigger": ALONE},
    "at steps": {"make": adam, "trigger": BY_STEPS},
    "a schedule": {"make": OPTIMIZERS["momentum"], "trigger": SCHEDULE, "method": Net2Net()},
    "averages, old gradients, named in another order": {
        **{"make": adam, "parts": {"blocks": ["3", "2"]}},
        "more": lambda: [Averages(0.9), OldGradient("stage")],
    },
    "copies in a budget, old gradients": {
        **{"make": adam, "parts": {"start": "stack", "state": "copy"}, "method": PairGrowth()},
        **{"trigger": BUDGET, "more": lambda: [OldGradient("run"), Averages(0.9)]},
    },
}


def loop(
    make: Any = adam,
    network: Any = layer_normed,
    trigger: Any = STAGES,
    parts: dict[str, Any] | None = None,
    more: Callable[[], list[Part]] = list,
    **settings: Any,
) -> Loop:
    made = Loop(make, network, trigger, parts=[Depth(**(parts or {})), *more()], **settings)
    batches, samples = [batch(number) for number in range(9)], [8 * STEPS] * EPOCHS
    of_run = {
        "steps": [STEPS] * EPOCHS,
        "epoch_batches": lambda epoch, order: batches[:STEPS],
        "samples": samples,
        "flops": lambda widths, fraction: int(sum(widths.values()) * (1 + fraction)),
        "reference_flops": 2 * sum(made.grower.full_graph.full_widths.values()) * sum(samples),
    }
    loss = F.cross_entropy
    made.grower.provide(lambda number: batches[:number], loss, **(of_run if more is not list else {}))
    return made


def blocks_of(run: Loop) -> list[list[str]]:
    return [[one["block"] for one in event.notes.get("inserted", [])] for event in run.grower.events]


# Other runs cover these optimizers and states too.
REPEATED = ("regions and rates", "copies with their state")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in RUNS])
def test_a_run_resumed_at_any_step_equals_the_uninterrupted_one_in_which_all_learns(name: str) -> None:
    run = loop(**RUNS[name])
    files = [run.train(step).saved() for step in (2, STEPS * 3 - 1)]
    # From the second step after the insertion.
    files.append(run.train(STEPS * 3 + 1).saved())
    before = {key: p.detach().clone() for key, p in run.network.named_parameters()}
    expected = run.train().everything()
    last = [(key, p) for key, p in run.network.named_parameters() if key.startswith("3.")]
    assert last and not any(torch.equal(before[key], p) for key, p in last)
    assert sorted(name for names in blocks_of(run) for name in names) == ["2", "3"] and len(blocks_of(run)) == 2
    for file in files:
        assert loop(**RUNS[name]).resume(file).train().everything() == expected
    assert list(run.grower.finish().state_dict()) == list(RUNS[name].get("network", layer_normed)().state_dict())


def without_fixed_tensors() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Linear(6, 8), *(Residual(8, 10) for _ in range(3)), nn.LayerNorm(8)]
    return nn.Sequential(*blocks, nn.Linear(8, 3, bias=False))


_ORDERS = list(itertools.permutations(("network", "optimizer", "grower")))


@pytest.mark.parametrize(("network", "orders"), [(layer_normed, _ORDERS[2:4]), (without_fixed_tensors, _ORDERS)])
def test_a_checkpoint_loads_in_any_order(network: Any, orders: list[tuple[str, ...]]) -> None:
    """An optimizer that is loaded first waits for the blocks of its state."""

    def made() -> Loop:
        return Loop(OPTIMIZERS["momentum"], network, parts=[Depth()])

    file, expected = made().train(STEPS + 1).saved(), made().train().everything()
    for order in orders:
        file.seek(0)
        assert made().resume(file, (*order, "rate")).train().everything() == expected, order


def test_loaded_blocks_are_trained_once_the_optimizer_has_their_state() -> None:
    def made(network: Any = layer_normed) -> Loop:
        return Loop(OPTIMIZERS["momentum"], network, parts=[Depth()])

    file = made(without_fixed_tensors).train(STEPS + 1).saved()
    for order in (("network", "grower"), ("grower", "network")):
        file.seek(0)
        resumed = made(without_fixed_tensors).resume(file, order)
        assert set(tracked(resumed.optimizer)) == {id(p) for p in resumed.network.parameters()}
    # An optimizer that waits for its network does not step.
    late, early = made().train(STEPS + 1), made()
    early.optimizer.load_state_dict(late.optimizer.state_dict())
    with pytest.raises(UserError, match=r"SGD was given the state of \d+ parameters, and has \d+"):
        early.train()
    early.optimizer.load_state_dict(made().optimizer.state_dict())
    assert early.train().done == STEPS * EPOCHS


@pytest.mark.parametrize(
    ("method", "start"),
    [
        *((PairGrowth(), "stack"), (Net2Net(), "zero"), (VarianceTransfer(), "stack"), (RandomGrowth(), "zero")),
        # Channels in a layer normalisation do not grow.
        *((GradMax(fallback="pairs"), "zero"), (FireFly(fallback="pairs"), "stack")),
        *((Splitting(fallback="pairs"), "zero"), (Tiny(fallback="pairs"), "stack")),
    ],
    ids=str,
)
def test_blocks_are_inserted_exactly_while_any_method_widens(method: GrowthMethod, start: str) -> None:
    run = Loop(OPTIMIZERS["momentum"], lambda: layer_normed().double(), parts=[Depth(start=start)], method=method)
    run.grower.provide(lambda number: [batch(n, torch.float64) for n in range(number)], F.cross_entropy)
    run.train()
    inserted = [one for event in run.grower.events for one in event.notes["inserted"]]
    assert [one["block"] for one in inserted] == ["2", "3"]
    assert all(one["parity_tolerance"] == 1e-10 for one in inserted)
    assert max(one[f"parity_error_{mode}"] for one in inserted for mode in ("eval", "train")) <= 1e-10
    assert run.grower.events[-1].widths_after == run.grower.full_graph.full_widths
    layer_normed().double().load_state_dict(run.grower.finish().state_dict())


@pytest.mark.parametrize(("state", "start"), [("copy", "stack"), ("copy", "gstack"), ("zero", "stack")])
def test_state_of_copies_is_a_copy_or_none(state: str, start: str) -> None:
    run = loop(parts={"start": start, "state": state}, trigger=ALONE, method=PairGrowth()).train(STEPS)
    run.grower.step(epoch=1)
    moments = run.optimizer.state
    own, twin = dict(run.network[2].named_parameters()), dict(run.network[1].named_parameters())
    for name, parameter in own.items():
        if state == "zero" or (start == "stack" and name.startswith("down")):
            assert parameter not in moments
        else:
            assert torch.equal(moments[parameter]["exp_avg_sq"], moments[twin[name]]["exp_avg_sq"])
            assert moments[parameter]["exp_avg_sq"] is not moments[twin[name]]["exp_avg_sq"]
            assert moments[parameter]["step"] == STEPS


def test_a_module_that_follows_gets_the_blocks_too() -> None:
    run = loop(parts={"start": "stack"})
    average = AveragedModel(run.network)
    run.grower.follow(average)
    run.train()
    assert average.module.state_dict().keys() == run.network.state_dict().keys()
    assert isinstance(average.module[3], Residual)


def test_inserted_blocks_join_the_group_of_like_named_parameters_if_there_is_one() -> None:
    def by_layer(network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": m.parameters()} for m in network if len(list(m.parameters()))], lr=0.1)

    # Only one group has a block with tensors of these names, so inserted ones join it.
    run = loop(by_layer).train()
    assert {id(p) for p in run.network[3].parameters()} <= {id(p) for p in run.optimizer.param_groups[1]["params"]}
    several = loop(by_layer, parts={"blocks": ["3"]})
    with pytest.raises(UserError, match=r"SGD's 4 groups 2 have parameters named like 3\.norm\.weight"):
        several.train()


class Tabled(Residual):
    """A residual block with a constant table, which is not trained."""

    def __init__(self, index: int, kept: str) -> None:
        super().__init__(8, 8)
        table = torch.sin((index + 1) * torch.arange(8.0))
        if kept == "plain":
            self.table = table
        elif kept == "frozen":
            self.table = nn.Parameter(table, requires_grad=False)
        else:
            self.register_buffer("table", table, persistent=kept == "persistent")
        self.register_buffer("scale", torch.tensor(1.0 / (index + 1)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x)) + self.table.to(x)))


def tabled(kept: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = (Tabled(index, kept) for index in range(4))
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 3)).double()


def trained_alone(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.01)


@pytest.mark.parametrize(
    ("start", "kept", "resumed"),
    [
        *(("zero", "plain", False), ("zero", "persistent", True), ("stack", "plain", True)),
        *(("stack", "not persistent", False), ("gstack", "not persistent", True), ("gstack", "frozen", False)),
    ],
)
def test_constants_of_late_blocks_end_as_they_began(start: str, kept: str, resumed: bool) -> None:
    def made() -> Loop:
        return Loop(trained_alone, lambda: tabled(kept), parts=[Depth(start=start)], anneal_steps=1)

    run = made().train(2 * STEPS)
    run = made().resume(run.saved()) if resumed else run
    network, fresh = run.train().grower.finish(), tabled(kept)
    tables = [block.table.clone() for block in fresh[1:5]]
    fresh.load_state_dict(network.state_dict())
    for block, table in zip(network[1:5], tables, strict=True):
        torch.testing.assert_close(block.table, table, rtol=0, atol=0)
    torch.testing.assert_close(fresh(PROBE.double()), network(PROBE.double()), rtol=0, atol=1e-12)


def untraceable() -> nn.Module:
    """A network whose widths cannot be traced, because its forward uses NumPy."""
    return Around(lambda net, x: net.layers(x if x.detach().numpy().sum() < 1e6 else -x), layers=layer_normed())


def test_a_network_that_keeps_its_widths_need_not_be_traced() -> None:
    settings: dict[str, Any] = {"network": untraceable, "trigger": ALONE, "parts": {"start": "stack"}}
    run = loop(**settings)
    assert not run.grower.full_graph.groups
    files = [run.train(step).saved() for step in (STEPS, STEPS + 1, 3 * STEPS, 3 * STEPS + 2)]
    expected = run.train().everything()
    assert blocks_of(run) == [["layers.2"], ["layers.3"]]
    for file in files:
        assert loop(**settings).resume(file).train().everything() == expected
    # Names of tensors alone determine which blocks there are.
    other = loop(**settings)
    other.network.load_state_dict(dict(loop(**settings).train(STEPS + 1).network.state_dict()))
    assert set(other.grower.state.blocks) == {"layers.2"}
    with pytest.raises(UnsupportedOperation):
        loop(network=untraceable)


def test_the_guides_example_runs() -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"network": layer_normed(), "x": PROBE, "loader": [batch(0), batch(1)]}
    exec(in_guide("Depth(", "schedules"), names)
    inserted = [one for event in names["grower"].events for one in event.notes["inserted"]]
    assert [one["block"] for one in inserted] == ["2", "3"]
    assert all(one["copied_from"] for one in inserted)
    layer_normed().load_state_dict(names["network"].state_dict())
