"""Shape rules against torch's; networks on the meta device, without values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.widths import UnsupportedOperation, trace
from growlab.widths.meta import Shapes
from tests.cases import Around


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


ATEN = torch.ops.aten
CALLS: dict[str, Callable[[], Any]] = {
    "layer norm": lambda: F.layer_norm(made(2, 3, 4), (4,), made(4), made(4)),
    "layer norm of columns": lambda: F.layer_norm(made(2, 4, 3).mT, (4,)),
    "layer norm of other channels": lambda: F.layer_norm(made(2, 3, 4), (5,)),
    "layer norm with other weights": lambda: F.layer_norm(made(2, 3, 4), (4,), made(3)),
    "linear": lambda: F.linear(made(2, 3, 4), made(5, 4), made(5)),
    "linear of a vector": lambda: F.linear(made(4), made(5, 4)),
    "linear of others": lambda: F.linear(made(2, 3), made(5, 4)),
    "linear with a bias of others": lambda: F.linear(made(2, 4), made(5, 4), made(4)),
    "function of each entry": lambda: -F.silu(F.gelu(made(2, 3).T) ** 2),
    "power of integers": lambda: made(2, dtype=torch.int64) ** 0.5,
    "power of each": lambda: made(2, 1) ** made(3),
    "function of integers": lambda: F.gelu(made(2, dtype=torch.int64)),
    "rolled": lambda: torch.roll(made(2, 3), (1, 1), (0, 1)),
    "batch norm": lambda: F.batch_norm(made(2, 4, 3), made(4), made(4), made(4), made(4), training=True),
    "batch norm of others": lambda: F.batch_norm(made(2, 4, 3), made(4), made(5)),
    "batch norm of no others": lambda: F.batch_norm(made(1, 4), None, None, training=True),
    "transposed convolution": lambda: F.conv_transpose2d(made(2, 4, 5, 5), made(4, 2, 3, 3), made(4), groups=2),
    "transposed convolution of one": lambda: F.conv_transpose1d(made(4, 5), made(4, 3, 2)),
    "rows added": lambda: made(3, 4).index_add(0, made(2, dtype=torch.int64), made(2, 4)),
    "sum": lambda: made(2, 1, 4) + made(3, 1),
    "sum of two types": lambda: made(2, dtype=torch.int64) + made(2, dtype=torch.float16),
    "sum of others": lambda: made(2, 4) + made(3),
    "part of a sum": lambda: torch.add(made(2, 4), made(4), alpha=2),
    "product": lambda: made(2, 4) * 0.5,
    "product in front": lambda: 2 * made(2, 4, dtype=torch.int64),
    "difference": lambda: made(2, 4) - made(4),
    "ATen's layer norm": lambda: ATEN.layer_norm.default(made(2, 3, 4), (4,), made(4), made(4), 1e-5, False),
    "ATen's batch norm": lambda: ATEN.batch_norm.default(made(2, 4, 3), *[made(4)] * 4, True, 0.1, 1e-5, False),
    "ATen's batch norm of others": lambda: ATEN.batch_norm.default(made(2, 4), *[made(5)] * 4, True, 0.1, 1e-5, False),
    "ATen's linear": lambda: ATEN.linear.default(made(2, 3, 4), made(5, 4), made(5)),
    "ATen's functions of each entry": lambda: [
        *(f.default(made(2, 3)) for f in (ATEN.gelu, ATEN.silu, ATEN.rsqrt, ATEN.neg)),
        ATEN.roll.default(made(2, 3), [1], [0]),
        ATEN.pow.Tensor_Scalar(made(2, 3), 2),
    ],
    "ATen's pairs": lambda: [
        *(f.Tensor(made(2, 3), made(3)) for f in (ATEN.add, ATEN.mul, ATEN.sub)),
        ATEN.mul.Tensor(made(2, 3, dtype=torch.int64), 0.5),
        ATEN.add.Tensor(made(2, 3), made(3), alpha=2),
    ],
}


def outcome(call: Callable[[], Any]) -> list[Any] | None:
    try:
        result = call()
    except (RuntimeError, ValueError, AssertionError):
        return None
    tensors = [result] if isinstance(result, Tensor) else list(result)
    assert tensors[0].is_meta
    return [x if x is None else (x.shape, x.dtype, x.stride()) for x in tensors]


@pytest.mark.parametrize("name", CALLS)
def test_predicted_shapes_equal_torchs(name: str) -> None:
    expected = outcome(CALLS[name])
    with Shapes("calls") as mode:
        found = outcome(CALLS[name])
    assert found == expected and mode.calls
    assert (found is None) == ("other" in name)


def test_tensors_in_memory_are_computed() -> None:
    with Shapes():
        assert torch.equal(torch.ones(2, 3) + torch.ones(3), torch.full((2, 3), 2.0))


def test_channels_that_device_meta_does_not_compare_are_compared() -> None:
    with Shapes():
        for number, call in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1):
            with pytest.raises(ValueError, match="transposed weight"):
                call(made(2, 2, *[5] * number), made(8, 4, *[3] * number))
        for add in (torch.index_add, Tensor.index_add, Tensor.index_add_):
            with pytest.raises(ValueError, match="cannot be added into"):
                add(made(3, 4), 0, made(2, dtype=torch.int64), made(2, 5))


# Networks without values have the width groups that they have with values.


def biased() -> nn.Module:
    """Buffers of zeros, a non-persistent table, a mask, and a running mean that the forward updates."""

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


def asking(careful: bool) -> nn.Module:
    """Reads a number in the data; if `careful`, not while it is exported."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.relu(net.a(x))
        if not (careful and torch.compiler.is_compiling()) and (x > 1e9).any():
            raise ValueError("too large")
        return net.b(x)

    return Around(forward, a=[6, 8], b=[8, 3])


def on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("make", [biased, lambda: asking(careful=True)])
def test_networks_without_values_trace_as_those_with_values(make):
    with_values = trace(make(), torch.randn(2, 5, 6))
    without = trace(on_meta(make), torch.randn(2, 5, 6, device="meta"))
    assert without.full_widths and without.full_widths == with_values.full_widths
    assert without.axes == with_values.axes


def test_code_that_needs_values_is_named():
    network, x = on_meta(lambda: asking(careful=False)), torch.randn(2, 6, device="meta")
    with pytest.raises(UnsupportedOperation, match=r"reads numbers from a tensor \(.*x > 1e9.*device meta"):
        trace(network, x)


def test_flags_of_export_are_as_before_where_a_forward_fails():
    with pytest.raises(UnsupportedOperation):
        trace(asking(careful=True), torch.randn(2, 5))
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
