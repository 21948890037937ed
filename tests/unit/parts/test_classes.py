"""The head's rows that open as classes appear."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab.grower import Grower
from growlab.grower.part import open_channels
from growlab.growth import GradMax, Net2Net, PairGrowth, VarianceTransfer, grow, make_seed
from growlab.lab.networks import MLP
from growlab.parts.classes import CLASSES, Classes, sort_classes, with_classes
from growlab.widths import WidthGraph, trace
from tests.cases import Around

METHODS = [PairGrowth(), Net2Net(), VarianceTransfer(noise_std=0.0)]


def planted(method, classes: int) -> tuple[nn.Module, WidthGraph, object]:
    torch.manual_seed(0)
    network = MLP(20, [12, 8], 10, batch_norm=True).double()
    graph = with_classes(trace(network, torch.randn(2, 20).double()), 10)
    widths = {name: 4 for name in graph.groups} | {CLASSES: classes}
    return network, graph, make_seed(network, graph, method, widths, 0)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_old_logits_stay_and_new_rows_are_drawn(method) -> None:
    network, graph, state = planted(method, 3)
    x = torch.randn(16, 20).double()
    before = network.eval()(x)
    assert before.shape == (16, 3)
    wider = {**graph.full_widths, CLASSES: 3}
    event = grow(network, graph, method, state, wider, 0, (x,))
    factor = event.output_factor
    replaced = open_channels(network, graph, method, state, CLASSES, 7, 0)
    after = network.eval()(x)
    assert after.shape == (16, 7) and torch.allclose(after[:, :3] * factor, before, rtol=1e-9, atol=1e-12)
    head = network.get_parameter(next(name for name in replaced if name.endswith("weight")))
    rows = head[3:]
    # New classes are no copies of others, and on the scale that the method draws the head at.
    assert torch.linalg.matrix_rank(rows) == 4
    expected = 1 / 8 if isinstance(method, VarianceTransfer) else 8**-0.5
    assert 0.5 * expected < rows.std() < 1.7 * expected
    assert state.widths[CLASSES] == 7 and state.births[CLASSES] == [0, 0, 0, 1, 1, 1, 1]
    assert {name for name, (_, new) in replaced.items() if new.shape[0] == 7} == set(replaced)


@pytest.mark.parametrize("method", [GradMax(steps=1), Net2Net()], ids=lambda m: m.name)
def test_methods_that_see_data_or_copies_meet_classes_that_come(method) -> None:
    """Net2Net says where every channel's optimizer state comes from, also that of the classes that it saw."""

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(step)
        return torch.randn(8, 20, generator=source), torch.randint(4, (8,), generator=source)

    torch.manual_seed(0)
    network, order = MLP(20, [12, 8], 10, batch_norm=True), torch.randperm(10).tolist()
    part = Classes(order, lambda stages: [4, 7, 10][:stages])
    trigger = {0: 0.5, 1: 0.75, 2: 1.0}
    grower = Grower(network, batch(0)[0], method=method, trigger=trigger, parts=[part])
    grower.provide(lambda number: [batch(n) for n in range(number)], F.cross_entropy)
    optimizer = torch.optim.AdamW(network.parameters(), 0.01)
    grower.follow(optimizer, state="inherit")
    for step in range(6):
        grower.step(epoch=step // 2)
        x, y = batch(step)
        optimizer.zero_grad()
        # Labels of the classes that have arrived, as the network's rows.
        F.cross_entropy(network(x), grower.targets(torch.tensor(order)[y])).backward()
        optimizer.step()
    events = grower.events
    assert [event.widths_after["classes"] for event in events] == [7, 10]
    assert all(event.parity_error_eval <= event.parity_tolerance_eval for event in events)
    x = batch(9)[0]
    before = network.eval()(x)
    assert torch.allclose(grower.finish().eval()(x)[:, order], before, rtol=1e-5, atol=1e-6)


def test_rows_go_to_the_places_of_their_labels() -> None:
    network, graph, _ = planted(PairGrowth(), 10)
    x = torch.randn(5, 20).double()
    before, order = network.eval()(x), torch.randperm(10).tolist()
    sort_classes(network, graph, order)
    assert torch.allclose(network(x)[:, order], before, rtol=1e-12, atol=1e-13)


def test_a_head_that_is_no_layer_does_not_grow() -> None:
    two = Around(lambda net, x: net.one(h := net.body(x).relu()) + net.other(h), body=[6, 8], one=[8, 4], other=[8, 4])
    graph = trace(two, torch.randn(2, 6))
    assert with_classes(graph, 4) is None and with_classes(trace(two.body, torch.randn(2, 6)), 4) is None
