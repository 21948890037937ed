"""Networks whose layers are of several types, and inputs of another type than the network."""

from itertools import permutations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower
from growlab.growth import GradMax, GrowthMethod, Net2Net, Tiny, VarianceTransfer
from growlab.growth.parity import ROUNDING
from growlab.widths import UnsupportedOperation, trace
from tests.cases import OLD_TORCH

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 5


class Mixed(nn.Module):
    """A body, norm and head of three types, with casts between them.

    Args:
        types: of the first layer, of the norm and the next layer, of the one after that.
        norm_first: register the norm before the layer that reads the input.
    """

    def __init__(self, types: tuple[torch.dtype, ...], norm_first: bool = False) -> None:
        super().__init__()
        first, second, third = types
        if norm_first:
            self.norm = nn.LayerNorm(16, dtype=second)
        self.a = nn.Linear(6, 16, dtype=first)
        self.norm = nn.LayerNorm(16, dtype=second)
        self.b, self.c = nn.Linear(16, 24, dtype=second), nn.Linear(24, 16, dtype=third)
        self.head = nn.Linear(16, 5, dtype=second)

    def forward(self, x: Tensor) -> Tensor:
        second, third = self.b.weight.dtype, self.c.weight.dtype
        x = self.b(self.norm(self.a(x).to(second))).relu()
        return self.head(self.c(x.to(third)).relu().to(second))


def loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), y)


METHODS = [VarianceTransfer(), Net2Net(), GradMax(fallback="pairs"), Tiny(fallback="pairs")]
TYPES = [*permutations([torch.bfloat16, torch.float32, torch.float64])]


@pytest.mark.parametrize(
    ("method", "types", "norm_first"),
    # Every method with every order, and every order with normalisation before and behind.
    [(method, types, (i + j) % 2 == 1) for i, method in enumerate(METHODS) for j, types in enumerate(TYPES)],
)
def test_layers_keep_their_types(method: GrowthMethod, types: tuple[torch.dtype, ...], norm_first: bool) -> None:
    torch.manual_seed(0)
    network, x = Mixed(types, norm_first), X.to(types[0])
    before = {name: parameter.dtype for name, parameter in network.named_parameters()}
    grower = Grower(network, x, method=method, trigger={0: 0.5, 1: 1.0})
    grower.provide(batches=lambda number: [(x, Y)] * number, loss=loss)
    grower.step(epoch=0)
    (event,) = grower.step(epoch=1)
    assert {name: parameter.dtype for name, parameter in network.named_parameters()} == before
    if method.preserves:
        assert event.parity_error_eval <= ROUNDING[torch.bfloat16]
    loss(network(x), Y).backward()


@pytest.mark.parametrize("given", [torch.float64, torch.float16])
def test_an_example_of_another_type_becomes_the_networks(given: torch.dtype) -> None:
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
    grower = Grower(network, X.to(given), trigger={0: 0.5, 1: 1.0})
    grower.step(epoch=0)
    (event,) = grower.step(epoch=1)
    assert event.parity_error_eval <= ROUNDING[torch.float32]


@pytest.mark.parametrize(
    ("network", "x", "sentence"),
    [
        (
            nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 5).double()),
            X,
            "its layers are in torch.float32 and torch.float64: cast",
        ),
        (nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 5)), Y.expand(6, 8).T, "take .torch.float32, or int"),
        (nn.Sequential(nn.Embedding(6, 16), nn.Linear(16, 5)), X, "take .torch.float32, or int"),
        (nn.Conv2d(3, 8, 3), torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "take .torch.float32, or int"),
    ],
    ids=["layers", "linear", "embedding", "convolution"],
)
def test_a_type_that_a_layer_does_not_take_is_named_at_the_trace(network: nn.Module, x: Tensor, sentence: str) -> None:
    if OLD_TORCH and any(isinstance(module, nn.Embedding) for module in network.modules()):
        pytest.skip("its embeddings on device meta take numbers of any type")
    with pytest.raises(UnsupportedOperation, match=sentence):
        trace(network, x)
