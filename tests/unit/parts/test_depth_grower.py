"""Depth in a plain loop: with every method, optimizer and average, resumed at any step."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.triggers import At, Budget, OnDemand
from growlab.growth import (
    FireFly,
    GradMax,
    GrowthMethod,
    Net2Net,
    PairGrowth,
    RandomGrowth,
    Splitting,
    Tiny,
    VarianceTransfer,
    make_schedule,
)
from growlab.lab.networks import CifarResNet
from growlab.parts import Averages, Depth, OldGradient, Part
from growlab.widths import UnsupportedOperation
from tests.cases import Around
from tests.command_line import ROOT
from tests.unit.grower.test_grower import EPOCHS, OPTIMIZERS, PROBE, STAGES, STEPS, Loop, batch, two_groups
from tests.unit.parts.stages import Residual

PAGE = (ROOT / "notebooks" / "docs" / "pages" / "guide" / "schedules.md").read_text(encoding="utf-8")


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
# What of a run differs from the default: optimizer, network, and settings of the grower.
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


# Others have these optimizers and states.
REPEATED = ("regions and rates", "copies with their state")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in RUNS])
def test_resumed_at_any_step_it_is_the_uninterrupted_run_in_which_all_learns(name: str) -> None:
    whole = loop(**RUNS[name])
    files = [whole.train(killed).saved() for killed in (2, STEPS * 3 - 1)]
    # From the second step after a block came in.
    files.append(whole.train(STEPS * 3 + 1).saved())
    before = {key: p.detach().clone() for key, p in whole.network.named_parameters()}
    wanted = whole.train().everything()
    last = [(key, p) for key, p in whole.network.named_parameters() if key.startswith("3.")]
    assert last and not any(torch.equal(before[key], p) for key, p in last)
    assert sorted(name for names in blocks_of(whole) for name in names) == ["2", "3"] and len(blocks_of(whole)) == 2
    for file in files:
        assert loop(**RUNS[name]).resume(file).train().everything() == wanted
    assert list(whole.grower.finish().state_dict()) == list(RUNS[name].get("network", layer_normed)().state_dict())


def without_fixed_tensors() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Linear(6, 8), *(Residual(8, 10) for _ in range(3)), nn.LayerNorm(8)]
    return nn.Sequential(*blocks, nn.Linear(8, 3, bias=False))


_ORDERS = list(itertools.permutations(("network", "optimizer", "grower")))


@pytest.mark.parametrize(("network", "orders"), [(layer_normed, _ORDERS[2:4]), (without_fixed_tensors, _ORDERS)])
def test_a_checkpoint_loads_in_any_order(network: Any, orders: list[tuple[str, ...]]) -> None:
    """An optimizer that comes first waits for the blocks that its state is of."""

    def made() -> Loop:
        return Loop(OPTIMIZERS["momentum"], network, parts=[Depth()])

    file, whole = made().train(STEPS + 1).saved(), made().train().everything()
    for order in orders:
        file.seek(0)
        assert made().resume(file, (*order, "rate")).train().everything() == whole, order


@pytest.mark.parametrize("order", [("network", "grower"), ("grower", "network")])
def test_blocks_that_were_loaded_without_the_optimizers_state_are_trained(order: tuple[str, ...]) -> None:
    def made() -> Loop:
        return Loop(OPTIMIZERS["momentum"], without_fixed_tensors, parts=[Depth()])

    resumed = made().resume(made().train(STEPS + 1).saved(), order)
    held = {id(p) for group in resumed.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in resumed.network.parameters()}


def test_an_optimizer_that_waits_for_its_network_does_not_step() -> None:
    def made() -> Loop:
        return Loop(OPTIMIZERS["momentum"], layer_normed, parts=[Depth()])

    late, early = made().train(STEPS + 1), made()
    early.optimizer.load_state_dict(late.optimizer.state_dict())
    with pytest.raises(UserError, match=r"SGD was given the state of \d+ parameters, and has \d+"):
        early.train()
    early.optimizer.load_state_dict(made().optimizer.state_dict())
    assert early.train().done == STEPS * EPOCHS


def doubled(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(step)
    return x.double(), y


@pytest.mark.parametrize(
    ("method", "start"),
    [
        *((PairGrowth(), "stack"), (Net2Net(), "zero"), (VarianceTransfer(), "stack"), (RandomGrowth(), "zero")),
        # Channels under a layer normalisation are not theirs.
        *((GradMax(fallback="pairs"), "zero"), (FireFly(fallback="pairs"), "stack")),
        *((Splitting(fallback="pairs"), "zero"), (Tiny(fallback="pairs"), "stack")),
    ],
    ids=str,
)
def test_blocks_come_in_exactly_while_any_method_widens(method: GrowthMethod, start: str) -> None:
    network = layer_normed().double()
    part = Depth(start=start)
    grower = Grower(network, PROBE, method=method, trigger=STAGES, parts=[part], anneal_steps=2)
    grower.provide(lambda number: [doubled(n) for n in range(number)], F.cross_entropy)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    grower.follow(optimizer)
    for step in range(STEPS * EPOCHS):
        grower.step(epoch=step // STEPS)
        x, y = doubled(step)
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    inserted = [one for event in grower.events for one in event.notes["inserted"]]
    assert [one["block"] for one in inserted] == ["2", "3"]
    assert all(one["parity_tolerance"] == 1e-10 for one in inserted)
    assert max(one[f"parity_error_{mode}"] for one in inserted for mode in ("eval", "train")) <= 1e-10
    assert grower.events[-1].widths_after == grower.full_graph.full_widths
    layer_normed().double().load_state_dict(grower.finish().state_dict())


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


def test_groups_by_layer_do_not_say_where_a_new_one_belongs() -> None:
    def by_layer(network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": m.parameters()} for m in network if len(list(m.parameters()))], lr=0.1)

    # The only block with tensors of such names is one group's: what comes in joins it.
    run = loop(by_layer).train()
    held = [{id(p) for p in group["params"]} for group in run.optimizer.param_groups]
    assert {id(p) for p in run.network[3].parameters()} <= held[1]
    several = loop(by_layer, parts={"blocks": ["3"]})
    with pytest.raises(UserError, match=r"SGD's 4 groups 2 hold parameters named like 3\.norm\.weight"):
        several.train()


class Tabled(nn.Module):
    """A residual block with a constant table, which no training changes."""

    def __init__(self, index: int, kept: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        table = torch.sin((index + 1) * torch.arange(40.0).view(5, 8))
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


def trained_with_blocks(network: nn.Module, start: Any, resumed: dict[str, Any] | None, end: int) -> Grower:
    grower = Grower(
        network,
        torch.randn(4, 5, 6, dtype=torch.float64),
        method=VarianceTransfer(),
        trigger=At({0: 0.25, 1: 0.5, 2: 1.0}),
        parts=[Depth(start=start)],
        anneal_steps=1,
    )
    if resumed is not None:
        grower.load_state_dict(resumed["grower"])
        network.load_state_dict(resumed["network"])
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], 0.01)
    grower.follow(optimizer)
    for epoch in range(0 if resumed is None else resumed["epoch"], end):
        grower.step(epoch=epoch)
        for _ in range(2):
            optimizer.zero_grad()
            network(torch.randn(4, 5, 6, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    return grower


@pytest.mark.parametrize(
    ("start", "kept", "resumed"),
    [
        *(("zero", "plain", False), ("zero", "persistent", True), ("stack", "plain", True)),
        *(("stack", "not persistent", False), ("gstack", "not persistent", True), ("gstack", "frozen", False)),
    ],
)
def test_constants_of_late_blocks_end_as_they_began(start: str, kept: str, resumed: bool) -> None:
    network, fresh, state = tabled(kept), tabled(kept), None
    tables = [block.table.clone() for block in fresh[1:5]]
    if resumed:
        first = tabled(kept)
        grower = trained_with_blocks(first, start, None, 2)
        state = {"grower": grower.state_dict(), "network": first.state_dict(), "epoch": 2}
    grower = trained_with_blocks(network, start, state, 3)
    grower.finish()
    fresh.load_state_dict(network.state_dict())
    for block, table in zip(network[1:5], tables, strict=True):
        torch.testing.assert_close(block.table, table, rtol=0, atol=0)
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(fresh(x), network(x), rtol=0, atol=1e-12)


def untraceable() -> nn.Module:
    """Widths cannot be found: the forward leaves torch for NumPy."""
    return Around(lambda net, x: net.layers(x if x.detach().numpy().sum() < 1e6 else -x), layers=layer_normed())


def test_a_network_that_keeps_its_widths_need_not_be_traced() -> None:
    settings: dict[str, Any] = {"network": untraceable, "trigger": ALONE, "parts": {"start": "stack"}}
    whole = loop(**settings)
    assert not whole.grower.full_graph.groups
    files = [whole.train(killed).saved() for killed in (STEPS, STEPS + 1, 3 * STEPS, 3 * STEPS + 2)]
    wanted = whole.train().everything()
    assert blocks_of(whole) == [["layers.2"], ["layers.3"]]
    for file in files:
        assert loop(**settings).resume(file).train().everything() == wanted
    # Names of tensors alone determine which blocks there are.
    other = loop(**settings)
    other.network.load_state_dict(dict(loop(**settings).train(STEPS + 1).network.state_dict()))
    assert set(other.grower.state.blocks) == {"layers.2"}
    with pytest.raises(UnsupportedOperation):
        loop(network=untraceable)


def test_the_guides_example_runs() -> None:
    (program,) = [b for b in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "Depth(" in b]
    torch.manual_seed(0)
    names: dict[str, Any] = {"network": layer_normed(), "x": PROBE, "loader": [batch(0), batch(1)]}
    exec(program, names)
    inserted = [one for event in names["grower"].events for one in event.notes["inserted"]]
    assert [one["block"] for one in inserted] == ["2", "3"]
    assert all(one["copied_from"] for one in inserted)
    layer_normed().load_state_dict(names["network"].state_dict())


def test_methods_that_see_data_leave_blocks_alone_that_are_yet_to_come() -> None:
    """A block that comes in with an event is there before the network widens."""
    torch.manual_seed(0)
    network = CifarResNet(3, 10, 1, (8,))
    part, method = Depth(), GradMax(steps=1)
    x, y = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
    grower = Grower(network, x, method=method, trigger={0: 0.5, 1: 0.75, 2: 1.0}, parts=[part])
    grower.provide(lambda number: [(x, y)] * number, F.cross_entropy)
    for epoch in range(3):
        grower.step(epoch=epoch)
    groups = [set(event.report["groups"]) for event in grower.events]
    assert "layers.0.1.conv1" in groups[0] and "layers.0.2.conv1" not in groups[0]
    assert {f"layers.0.{block}.conv1" for block in range(3)} <= groups[1]
    assert all(event.parity_error_eval <= event.parity_tolerance_eval for event in grower.events)
