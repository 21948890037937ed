"""Forward FLOPs of a network at any widths, and what a growing run costs (spec: Yuan et al. 2023, Section 4.1)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached, is_parametrized

from growlab.widths.inputs import Example, call_with, inputs_of
from growlab.widths.unchanged import unchanged

aten = torch.ops.aten


def forward_flops(model: nn.Module, sample: Example) -> int:
    """Count the FLOPs of a forward pass on one sample: two per multiply-add of convolutions, matmuls and attention.

    A complex multiply-add counts as four real ones. The network runs in eval mode; its mode is then restored.
    """
    # Not at the top: it imports triton.
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    counter = FlopCounterMode(display=False, custom_mapping=_formulas(flop_registry))
    with unchanged(model):
        # The counter's hooks fail if a parameter that requires gradients is the input of a module (a class token).
        model.eval().requires_grad_(False)
        # Parametrizations are computed once per batch, not per sample: they are cached before counting.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), cached(), _no_fused_layers():
            for module in model.modules():
                if is_parametrized(module):
                    for name in module.get_submodule("parametrizations")._modules:
                        getattr(module, name)
            with counter:
                call_with(model, inputs_of(sample, model))
    return int(counter.get_total_flops())


def _formulas(known: Mapping[Any, Callable[..., int]]) -> dict[Any, Callable[..., int]]:
    """FLOP formulas that torch's counter lacks: products with vectors, bilinear layers, cuDNN's LSTMs, complex numbers.

    In torch 2.11 also attention on a CPU, and shared keys and values on any device.
    """
    formulas: dict[Any, Callable[..., int]] = {
        **{op: known[op] for op in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)},
        **dict.fromkeys((aten.mv, aten.dot, aten.vdot), lambda left, *_, **__: 2 * left.numel()),
        aten.addmv: lambda _, matrix, *__, **___: 2 * matrix.numel(),
        aten.addbmm: lambda _, one, other, *__, **___: 2 * one.numel() * other.shape[-1],
        aten._trilinear: _trilinear,
        aten._cudnn_rnn: _recurrent,
        # Tokens sorted by expert, times the expert's matrix.
        aten._grouped_mm: lambda tokens, matrices, *_, **__: 2 * tokens.numel() * matrices.shape[-1],
        **dict.fromkeys(
            (
                aten._scaled_dot_product_flash_attention_for_cpu,
                aten._scaled_dot_product_flash_attention,
                aten._scaled_dot_product_efficient_attention,
                aten._scaled_dot_product_cudnn_attention,
            ),
            _attention,
        ),
    }
    result: dict[Any, Callable[..., int]] = {op: partial(_complex, formula) for op, formula in formulas.items()}
    for formula in result.values():
        # The counter then passes tensors, not shapes.
        formula._get_raw = True  # type: ignore[attr-defined]
    return result


def _complex(formula: Callable[..., int], first: Tensor, *args: Any, **kwargs: Any) -> int:
    return formula(first, *args, **kwargs) * (4 if first.is_complex() else 1)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores and weighted sums; several heads may share keys and values."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _recurrent(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """LSTM, GRU and RNN of cuDNN, all layers and directions: each token is multiplied by each matrix."""
    return 2 * x[..., 0].numel() * sum(weight.numel() for weight in weights if weight.dim() > 1)


def _trilinear(
    one: Tensor,
    two: Tensor,
    three: Tensor,
    expand_1: Sequence[int],
    expand_2: Sequence[int],
    expand_3: Sequence[int],
    summed: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """`nn.Bilinear`: x W over one index, then the sum over the other; two FLOPs per multiply-add."""
    shapes = []
    for tensor, expanded in ((one, expand_1), (two, expand_2), (three, expand_3)):
        shape = list(tensor.shape)
        for dim in sorted(expanded):
            shape.insert(dim, 1)
        shapes.append(shape)
    every = [max(lengths) for lengths in zip(*shapes, strict=True)]
    last = min((every[dim] for dim in summed), default=1)
    return 2 * prod(every) + 2 * prod(every) // last


@contextmanager
def _no_fused_layers() -> Iterator[None]:
    """Run torch's Transformer layers and LSTMs unfused, as operations that the counter knows."""
    mha, mkldnn = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(mha)
        torch.backends.mkldnn.set_flags(mkldnn)


def train_cost_percent(epochs: Sequence[int], flops: Sequence[int], full_flops: int, reference_epochs: float) -> float:
    """Forward FLOPs of a run in percent of those of the fixed-size network over `reference_epochs`.

    `epochs` and `flops` (per sample) are given by stage; `full_flops` are those of the fixed-size network per sample.
    """
    spent = sum(epoch * flop for epoch, flop in zip(epochs, flops, strict=True))
    return 100.0 * spent / (reference_epochs * full_flops)
