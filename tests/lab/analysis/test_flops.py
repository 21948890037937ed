"""FLOPs compared with direct counts."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from growlab.grower.cost import forward_flops, train_cost_percent
from growlab.lab.networks import MLP, resnet20
from growlab.widths import trace
from tests.cases import Around


def resnet20_flops(a: int, b: int, c: int) -> int:
    """Two per multiply-add: 3x3 convolutions at 32x32, 16x16 and 8x8 positions, then the classifier."""
    multiply_adds = 9 * (1024 * (3 * a + 6 * a * a) + 256 * (a * b + 5 * b * b) + 64 * (b * c + 5 * c * c))
    return 2 * (multiply_adds + 10 * c)


@pytest.fixture(scope="module")
def resnet():
    network = resnet20((3, 32, 32), 10)
    return network, trace(network, torch.randn(2, 3, 32, 32))


def test_resnet20_has_40_million_multiply_adds(resnet):
    flops = forward_flops(resnet[0], torch.randn(1, 3, 32, 32))
    assert flops == resnet20_flops(16, 32, 64)
    assert flops / 2 == pytest.approx(40.55e6, rel=1e-3)


def test_flops_of_linear_layers_and_modes():
    network = MLP(12, [8], 4, batch_norm=True)
    network.train()
    network.hidden[1].eval()
    assert forward_flops(network, torch.randn(1, 3, 4)) == 2 * (12 * 8 + 8 * 4)
    assert network.training and not network.hidden[1].training
    assert network.hidden[1].num_batches_tracked == 0


def test_cost_is_relative_to_the_full_network():
    assert train_cost_percent([10], [7], 7, 10) == 100.0
    assert train_cost_percent([5, 5], [1, 3], 4, 10) == 50.0


TRANSFORMER = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


@pytest.mark.parametrize(
    ("layer", "shape", "by_hand"),
    [
        # Projections of queries, keys, values and output; scores and weighted sums; two linear layers.
        (TRANSFORMER, (1, 10, 64), 2 * 10 * (4 * 64 * 64 + 2 * 10 * 64 + 2 * 64 * 128)),
        (nn.LSTM(64, 64, batch_first=True), (1, 10, 64), 2 * 10 * 4 * (64 * 64 + 64 * 64)),
    ],
)
def test_layers_that_torch_fuses_are_counted(layer: nn.Module, shape: tuple[int, ...], by_hand: int) -> None:
    fused = torch.backends.mha.get_fastpath_enabled()
    assert forward_flops(layer, torch.randn(shape)) == by_hand
    assert torch.backends.mha.get_fastpath_enabled() == fused


class OnGpu(nn.Module):
    """An LSTM as the operation that it is on a GPU, on meta tensors."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm.to("meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = partial(torch.empty, device="meta")
        layers, lstm = self.lstm.num_layers * 2, self.lstm
        states = made(layers, x.shape[1], lstm.proj_size), made(layers, x.shape[1], lstm.hidden_size)
        sizes = lstm.hidden_size, lstm.proj_size, lstm.num_layers
        weights = lstm._flat_weights
        settings = (False, 0.0, False, True, [], made(0))
        return torch._cudnn_rnn(x, weights, len(lstm.all_weights[0]), None, *states, 2, *sizes, *settings)[0]


def test_an_lstm_costs_the_same_on_a_gpu() -> None:
    lstm, x = nn.LSTM(5, 8, 2, bidirectional=True, proj_size=3), torch.randn(7, 2, 5)
    on_cpu = forward_flops(lstm, x)
    assert forward_flops(OnGpu(lstm), x.to("meta")) == on_cpu > 0


COMPLEX = torch.complex64


@pytest.mark.parametrize(
    ("operation", "inputs", "by_hand"),
    [
        (torch.mv, (torch.ones(5, 7), torch.ones(7)), 2 * 5 * 7),
        (torch.matmul, (torch.ones(2, 5, 7), torch.ones(7)), 2 * 2 * 5 * 7),
        (torch.addmv, (torch.ones(5), torch.ones(5, 7), torch.ones(7)), 2 * 5 * 7),
        (torch.dot, (torch.ones(7), torch.ones(7)), 2 * 7),
        (torch.inner, (torch.ones(7), torch.ones(7)), 2 * 7),
        (torch.addbmm, (torch.ones(2, 6), torch.ones(3, 2, 4), torch.ones(3, 4, 6)), 2 * 3 * 2 * 4 * 6),
        # Per sample and output: 7 x 4 products with the second input, then 7 with the first.
        (nn.functional.bilinear, (torch.ones(2, 7), torch.ones(2, 4), torch.ones(3, 7, 4)), 2 * 2 * 3 * (7 * 4 + 7)),
        (torch.mm, (torch.ones(5, 7, dtype=COMPLEX), torch.ones(7, 2, dtype=COMPLEX)), 4 * 2 * 5 * 7 * 2),
        (torch.mv, (torch.ones(5, 7, dtype=COMPLEX), torch.ones(7, dtype=COMPLEX)), 4 * 2 * 5 * 7),
        (torch.bmm, (torch.ones(2, 5, 7), torch.ones(2, 7, 3)), 2 * 2 * 5 * 7 * 3),
        # Four heads of queries share two of keys and values.
        (
            partial(nn.functional.scaled_dot_product_attention, enable_gqa=True),
            (torch.ones(3, 4, 5, 8), torch.ones(3, 2, 7, 8), torch.ones(3, 2, 7, 8)),
            2 * 3 * 4 * 5 * 7 * (8 + 8),
        ),
    ],
)
def test_products_of_every_kind_are_counted(
    operation: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], by_hand: int
) -> None:
    assert forward_flops(Around(lambda _, *x: operation(*x)), inputs) == by_hand
