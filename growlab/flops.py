"""Forward FLOPs of a network at any widths, and what a growing run costs (spec: Yuan et al. 2023, Section 4.1)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached, is_parametrized
from torch.utils.flop_counter import FlopCounterMode


def forward_flops(model: nn.Module, sample: Tensor | tuple[Tensor, ...]) -> int:
    """FLOPs of one forward pass on one sample: two per multiply-add of convolutions, linear layers, attention.

    Args:
        model: any network; run in eval mode and left as it was.
        sample: one input [1, ...], or the tuple of the forward's positional inputs.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    counter = FlopCounterMode(display=False)
    # The counter's hooks trip over a parameter that is itself an input of a module (a class token).
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        # Weights that are computed from others are so once a batch, not once a sample: they are not counted.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), cached(), _no_fused_layers():
            for module in model.modules():
                if is_parametrized(module):
                    for name in module.get_submodule("parametrizations")._modules:
                        getattr(module, name)
            with counter:
                model(*(sample if isinstance(sample, tuple) else (sample,)))
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module, training in modes.items():
            module.training = training
    return int(counter.get_total_flops())


@contextmanager
def _no_fused_layers() -> Iterator[None]:
    """Let torch's Transformer layers and LSTMs run as operations that the counter knows."""
    fused, one_dnn = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        torch.backends.mkldnn.set_flags(one_dnn)


def train_cost_percent(
    epochs: Sequence[int], flops: Sequence[int], full_flops: int, reference_epochs: float
) -> float:
    """Forward FLOPs of a run over those of the fixed-size network, in percent.

    Args:
        epochs: epochs of each stage.
        flops: forward FLOPs per sample of each stage.
        full_flops: forward FLOPs per sample of the full-width network.
        reference_epochs: epochs of the fixed-size run.
    """
    spent = sum(epoch * flop for epoch, flop in zip(epochs, flops, strict=True))
    return 100.0 * spent / (reference_epochs * full_flops)
