"""Weights of wider networks whose code multiplies the outputs of embeddings."""

import pytest
import torch
from torch import Tensor, nn

from growlab.growth import HyperCloning
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.widen.weights import METHODS, Widening, read_off
from growlab.widths import layouts


class Embedded(nn.Module):
    """A stream of embeddings times a number in the code, as in Gemma; the head may be tied to the table."""

    def __init__(self, width: int, times: float, tied: bool) -> None:
        super().__init__()
        self.times = times
        self.embed, self.norm, self.last = nn.Embedding(11, width), nn.RMSNorm(width), nn.RMSNorm(width)
        self.inside = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 5) if not tied else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.times
        x = self.last(x + self.inside(self.norm(x)))
        return (self.head(x) if self.head else nn.functional.linear(x, self.embed.weight)).mean(1)


@pytest.mark.parametrize("by_code", [2.0, 0.7])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [12, 16])
def test_a_factor_in_the_code_is_divided_out_of_the_table(tied: bool, by_code: float, width: int) -> None:
    """Embeddings may be multiplied by more, or less, than the growth of their stream."""
    torch.manual_seed(0)
    narrow = Embedded(8, 3.0, tied).double().eval()
    ids = torch.randint(0, 11, (4, 6))
    with torch.no_grad():
        for parameter in narrow.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    wide = Embedded(width, 3.0 * by_code, tied).double().eval()
    graph = layouts(wide, (ids,))
    widths = {group: 8 for group in graph.groups}
    exact, inexact = set[tuple[str, float | None]](), 0
    state = narrow.state_dict()
    widening = Widening(graph, lambda name, rows: state[name][rows], widths, 0, HyperCloning())
    for way in widening.ways([by_code]):
        wide.load_state_dict(widening.tensors(way))
        if relative_error(evaluate(narrow, (ids,)), evaluate(wide, (ids,))) < 1e-12:
            exact.add((way.fill, way.by_code))
        else:
            inexact += 1
    expected = {("zero", by_code), ("copies", by_code)} if width == 16 else {("zero", by_code)}
    assert expected <= exact and inexact


class Fused(nn.Module):
    """Queries, keys and values of one layer, stored one after the other or head by head."""

    def __init__(self, heads: int, dimension: int, by_head: bool) -> None:
        super().__init__()
        self.heads, self.dimension, self.by_head = heads, dimension, by_head
        width = heads * dimension
        self.inside, self.qkv, self.out = nn.Linear(5, 8), nn.Linear(8, 3 * width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.inside(x))
        if self.by_head:
            y = y.view(*x.shape[:2], self.heads, 3, self.dimension)
            q, k, v = (y[..., place, :].transpose(1, 2) for place in range(3))
        else:
            shape = *x.shape[:2], self.heads, self.dimension
            q, k, v = (each.reshape(shape).transpose(1, 2) for each in y.chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) * self.dimension**-0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)).mean(1)


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("sizes", [(4, 3), (2, 6), (2, 5)])
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_of_queries_and_keys_by_more_heads_or_wider_ones(
    by_head: bool, sizes: tuple[int, int], method: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 5).double()
    narrow, wide = (Fused(*each, by_head).double().eval() for each in ((2, 3), sizes))
    graph = layouts(wide, (x,), narrow)
    state = narrow.state_dict()
    widths = read_off(graph, {name: tuple(tensor.shape) for name, tensor in state.items()}, wide.state_dict())
    widening = Widening(graph, lambda name, rows: state[name][rows], widths, 0, METHODS[method]())
    ways = list(widening.ways())
    wide.load_state_dict(widening.tensors(ways[0]))
    assert relative_error(evaluate(narrow, (x,)), evaluate(wide, (x,))) < 1e-12
    assert len(ways) == (2 if sizes[0] == 2 else 1)
    # New entries learn, because they are never zero together with their factors in a product.
    wide.train()(x).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in wide.parameters())
