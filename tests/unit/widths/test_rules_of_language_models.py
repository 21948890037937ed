"""Rules for language models: tied embeddings, hand-written norms, experts, unused results."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.grower import Grower
from growlab.growth import GrowthMethod, Net2Net, PairGrowth, VarianceTransfer, grow, make_seed
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.lab.training import RateAdaptation
from growlab.lab.training.progress import first_line
from growlab.optim import SGD, NormRatio, follow
from growlab.widths import layouts, tensors_of, trace
from tests.cases import Around, check_growth

TOKENS = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))


class RootMeanSquare(nn.Module):
    """Hand-written RMS normalisation, as in language models."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * x.to(dtype)


class OneMore(RootMeanSquare):
    """RMS normalisation that multiplies by 1 + w, as in Gemma."""

    def __init__(self, channels: int, adds_sum: bool = False) -> None:
        super().__init__(channels)
        nn.init.zeros_(self.weight)
        self.adds_sum = adds_sum

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * (1.0 + self.weight.to(x.dtype))
        return x + self.weight.sum() if self.adds_sum else x


class Language(nn.Module):
    """An embedding, a residual hidden layer, a normalisation, and logits by the embedding's table."""

    def __init__(self, norm: Any = RootMeanSquare, seen_twice: bool = False, chosen: Any = lambda x: x) -> None:
        super().__init__()
        self.chosen = chosen
        self.table, self.norm, self.seen_twice = nn.Embedding(11, 12), norm(12), seen_twice
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.norm(x + self.down(F.relu(self.up(x))))
        logits = F.linear(self.chosen(x), self.table.weight)
        return logits + x.mean() if self.seen_twice else logits


#: Ways to select the positions whose logits are computed, and other functions that treat all channels equally.
CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x[:, :, :],
    "last, in a list": lambda x: x[:, [-1], :],
    "last": lambda x: x[:, -1],
    "last of each length": lambda x: x[torch.arange(len(x)), torch.tensor([2, 4])],
    "one by index": lambda x: x.index_select(1, torch.tensor([3])),
    "gathered": lambda x: x.gather(1, torch.zeros(2, 1, 1, dtype=torch.int64).expand(2, 1, x.shape[-1])),
    "unbound": lambda x: x.unbind(1)[-1],
    "split": lambda x: x.split(3, 1)[1],
    "first of others": lambda x: x.transpose(0, 1)[0].contiguous().view(-1, x.shape[-1]),
    "channels first": lambda x: x.mT[..., -1],
    "mean": lambda x: x.mean(1) / 3,
    "masked sum": lambda x: (x * (TOKENS > 4)[..., None].to(x)).sum(1),
}


@pytest.mark.parametrize(
    ("norm", "chosen", "methods"),
    [
        *(
            (norm, "all", (PairGrowth(), Net2Net(), VarianceTransfer()))
            for norm in (RootMeanSquare, nn.LayerNorm, OneMore)
        ),
        *((nn.LayerNorm, name, (VarianceTransfer(),)) for name in CHOSEN if name != "all"),
    ],
)
def test_a_stream_with_a_tied_table_grows_exactly(norm: Any, chosen: str, methods: tuple[GrowthMethod, ...]) -> None:
    torch.manual_seed(0)
    made = Language(norm, chosen=CHOSEN[chosen])
    graph = trace(made, TOKENS)
    assert {group.full_width for group in graph.groups.values()} == {12, 16}
    assert (graph.axes["table.weight"][1].role, graph.axes["norm.weight"][0].role) == ("out", "in")
    # RMS normalisation in float32.
    check_growth(made.double(), graph, TOKENS, *methods, limit=1e-6)


def test_gains_that_a_constant_is_added_to_follow_in_averages_and_in_optimizers() -> None:
    torch.manual_seed(0)
    network, method = Language(OneMore).double(), Net2Net()
    graph = trace(network, TOKENS)
    assert graph.offsets == {"norm.weight": 1.0}
    state = make_seed(network, graph, method, dict.fromkeys(graph.groups, 6), 0)
    assert not network.norm.weight.any()
    average, ends = copy.deepcopy(network), copy.deepcopy(network)
    with torch.no_grad():
        for middle, end, parameter in zip(average.parameters(), ends.parameters(), network.parameters(), strict=True):
            end += 0.3 * torch.randn_like(end)
            middle.copy_((end + parameter) / 2)
    before, after = state.widths, dict.fromkeys(graph.groups, 9)
    leader, optimizer = tensors_of(network, graph), torch.optim.SGD(network.parameters(), 0.0, momentum=0.9)
    _backward(network)
    optimizer.step()
    leading = grow(network, graph, method, copy.deepcopy(state), after, 0, (TOKENS,))
    follow(optimizer, leading.replaced, graph, before, after, "inherit", leading.carry)
    network.zero_grad()
    _backward(network)
    momentum = optimizer.state[network.norm.weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, network.norm.weight.grad)
    for other in (average, ends):
        grow(other, graph, method, copy.deepcopy(state), after, 0, (TOKENS,), averaged=leader, averaged_event=leading)
    middle = (ends.norm.weight + network.norm.weight) / 2
    torch.testing.assert_close(average.norm.weight, middle, rtol=0, atol=1e-14)


def _backward(network: nn.Module) -> None:
    F.cross_entropy(network(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()


def test_a_tied_table_ends_the_network_and_is_no_output_layer_of_the_rules() -> None:
    torch.manual_seed(0)
    network, method = Language(), VarianceTransfer()
    graph = trace(network, TOKENS)
    assert graph.tied_outputs == ("table.weight",) and "table" not in graph.last_layers
    ending = "output layers: table (an embedding's table too: neither rescaled nor given an output layer's rate)"
    assert first_line(graph) == f"growing 2 width groups; {ending}"
    assert first_line(graph, grows=False) == f"2 width groups; {ending}"
    grower = Grower(network, (TOKENS,), method=method, trigger={0: dict.fromkeys(graph.groups, 4)})
    optimizer = SGD(network.parameters(), 0.1)
    RateAdaptation(NormRatio(), divide_output_lr_by_fan_in=True).apply(optimizer)
    grower.follow(optimizer)
    assert optimizer.factors(network.table.weight) is None
    old = network.table.weight.detach().clone()
    state = grower.state
    event = grow(network, graph, method, state, dict.fromkeys(graph.groups, 8), 0, (TOKENS,))
    assert "table.weight" not in event.report.get("rescaled", {})
    torch.testing.assert_close(network.table.weight[:, :4], old, rtol=0, atol=0)


def test_a_gain_that_something_else_sees_keeps_its_stream() -> None:
    assert not trace(Language(lambda channels: OneMore(channels, adds_sum=True)), TOKENS).grows("table.weight")
    graph = trace(Language(seen_twice=True, chosen=CHOSEN["all"]), TOKENS)
    assert not graph.grows("table.weight")
    assert "is both an embedding's table and a layer's weight" in graph.fixed["down"]


def test_layouts_do_not_depend_on_code_that_runs_at_one_width_only() -> None:
    """A width in the code; rows sorted by expert, with a matrix for each expert."""

    def experts(net: Any, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 5], dtype=torch.int32)
        x = F.grouped_mm(net.inside(x), net.up.transpose(-2, -1), offs=ends)
        return net.out(F.grouped_mm(F.silu(x), net.down, offs=ends))

    up, down = (nn.Parameter(torch.randn(2, 12, 8)) for _ in "ab")
    # The kernel needs widths that are multiples of 16 bytes, but a trace would try others.
    graph = layouts(Around(experts, inside=[6, 8], up=up, down=down, out=[8, 3]), torch.randn(5, 6))
    assert [group.full_width for group in graph.groups.values()] == [8, 12, 8]
    assert [axis.role for axis in graph.axes["up"]] == ["fixed", "out", "in"]
    assert [axis.role for axis in graph.axes["down"]] == ["fixed", "in", "out"]
    written = Around(lambda net, x: net.out(net.inside(x).reshape(2, 8)), inside=[4, 8], out=[8, 3])
    assert trace(written, torch.randn(2, 4)).full_widths == {}
    assert layouts(written, torch.randn(2, 4)).full_widths == {"inside": 8}


def test_a_network_in_float64_is_observed_in_float64() -> None:
    torch.manual_seed(0)
    norm = RootMeanSquare(12).double()
    x = torch.randn(3, 12, dtype=torch.float64)
    exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    assert relative_error(exact, evaluate(norm, x)) <= 1e-15
    with torch.no_grad():
        assert relative_error(exact, norm(x)) > 1e-9


def captioned(whole_rows: bool = True) -> nn.Module:
    """Features of an image replace those of some tokens, as in models of text and images."""

    def forward(net: Any, tokens: Tensor, image: Tensor) -> Tensor:
        x, picked = net.words(tokens), (tokens == 5)[..., None]
        mask = picked.expand_as(x) if whole_rows else picked & (torch.arange(x.shape[-1]) < 3)
        return net.head(net.norm(x.masked_scatter(mask.to(x.device), net.image(image).to(x.dtype))))

    return Around(forward, words=nn.Embedding(11, 8), image=[6, 8], norm=RootMeanSquare(8), head=[8, 3]).double()


def test_streams_grow_through_rows_that_are_scattered_among_others() -> None:
    torch.manual_seed(0)
    tokens = torch.tensor([[5, 5, 1, 2], [3, 5, 5, 4]])
    inputs = (tokens, torch.randn(4, 6, dtype=torch.float64))
    network, fresh = captioned(), captioned()
    grower = Grower(network, inputs, method=Net2Net(), trigger={0: 0.5, 1: 1.0}, anneal_steps=1)
    grower.follow(optimizer := torch.optim.SGD(network.parameters(), lr=0.01))
    assert grower.full_graph.full_widths == {"image": 8}
    before = network(*inputs).detach()
    grower.step(epoch=1)
    assert relative_error(before, network(*inputs).detach()) <= 1e-6
    for _ in range(2):
        network(*inputs).square().mean().backward()
        optimizer.step()
    fresh.load_state_dict(grower.finish().state_dict())
    assert relative_error(fresh(*inputs).detach(), network(*inputs).detach()) <= 1e-6
    fixed = trace(captioned(whole_rows=False), inputs).fixed
    assert fixed["words"] == "used by masked_scatter"
