"""Networks on device meta, without values, have the width groups that they have with values."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growlab.widths import UnsupportedOperation, trace
from tests.cases import Around


def biased() -> nn.Module:
    """Buffers of zeros, a table that is not saved, a mask, and a running mean that the forward follows."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.embed(x) + net.table
        bias = torch.cat([net.q_bias, net.k_bias, net.v_bias])
        q, k, v = nn.functional.linear(x, net.qkv.weight, bias).chunk(3, -1)
        return net.out(net.norm((x + (net.mask @ (q * torch.sigmoid(k))) + v).mean(1)))

    biases = {name: nn.Parameter(torch.zeros(8)) for name in ("q_bias", "v_bias")}
    buffers = {"k_bias": torch.zeros(8), "table": torch.linspace(0, 1, 5 * 8).view(5, 8)}
    buffers = {name: nn.Buffer(tensor, persistent=False) for name, tensor in buffers.items()}
    layers = {"qkv": [8, 24, False], "norm": nn.BatchNorm1d(8), "out": [8, 3], "embed": [6, 8]}
    return Around(forward, **biases, **buffers, **layers, mask=nn.Buffer(torch.ones(5, 5).tril()))


class Asking(nn.Module):
    """Looks at a number in the data, but where it is exported if `careful`."""

    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.a, self.b, self.careful = nn.Linear(6, 8), nn.Linear(8, 3), careful

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        if not (self.careful and torch.compiler.is_compiling()) and (x > 1e9).any():
            raise ValueError("too large")
        return self.b(x)


def on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("make", [biased, lambda: Asking(careful=True)])
def test_networks_without_values_trace_as_those_with_values(make):
    with_values = trace(make(), torch.randn(2, 5, 6))
    without = trace(on_meta(make), torch.randn(2, 5, 6, device="meta"))
    assert without.full_widths and without.full_widths == with_values.full_widths
    assert without.axes == with_values.axes


def test_code_that_asks_for_numbers_is_named():
    network, x = on_meta(lambda: Asking(careful=False)), torch.randn(2, 6, device="meta")
    with pytest.raises(UnsupportedOperation, match=r"asks for numbers in a tensor \(.*x > 1e9.*device meta"):
        trace(network, x)


def test_flags_of_export_are_as_before_where_a_forward_fails():
    with pytest.raises(UnsupportedOperation):
        trace(Asking(careful=True), torch.randn(2, 5))
    assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [("GPT2", ("input_ids",)), pytest.param("Mistral", ("input_ids", "attention_mask"), marks=pytest.mark.slow)],
)
def test_language_models_trace_without_values_and_without_a_mask(kind, inputs):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 32, "num_key_value_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    network = on_meta(lambda: transformers.AutoModelForCausalLM.from_config(config))
    example = {name: torch.ones(2, 6, dtype=torch.long, device="meta") for name in inputs}
    graph = trace(network, example)
    assert sum(p.numel() for n, p in network.named_parameters() if graph.grows(n)) > 0
