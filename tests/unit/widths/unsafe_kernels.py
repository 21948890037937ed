"""Backward passes of many convolutions in channels_last, to be run with torch limited to AVX2.

As a program it prints each case before it tries it, since torch may take the process down, and exits with 1 where a
gradient differs from the one in the default layout.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from growlab.growth import VarianceTransfer, make_seed
from growlab.lab.networks import CifarResNet
from growlab.widths import avoid_unsafe_kernels, resize, trace

# Layouts of the input and of the weights; either may select the unsafe kernel.
_LAYOUTS = (
    (torch.channels_last, torch.contiguous_format),
    (torch.contiguous_format, torch.channels_last),
    (torch.channels_last, torch.channels_last),
)
# Batch size, height and width by kernel size. The buffer that is overrun has an image per sample.
_SHAPE = {1: (16, 12, 24), 3: (2, 7, 8)}


def convolutions() -> Iterator[tuple[int, int, int, int, int, str]]:
    """Input and output channels, kernel, stride, groups and number format."""
    yield from ((channels, 8, 1, stride, 1, "float32") for channels in range(1, 9) for stride in (2, 3))
    yield from ((3, 8, 3, 2, 1, "float32"), (5, 8, 1, 2, 1, "bfloat16"))
    yield from ((5, 5, 1, 2, 5, "float32"), (6, 6, 1, 2, 2, "float32"))


def gradients(
    network: nn.Module, shape: tuple[int, ...], layout: torch.memory_format, weights: torch.memory_format
) -> list[Tensor]:
    """Gradients of the input and of all parameters."""
    dtype = next(network.parameters()).dtype
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype, memory_format=layout)
    network.to(memory_format=weights).zero_grad()
    y = network(x.requires_grad_())
    towards = torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype)
    y.backward(towards.contiguous(memory_format=layout) if y.dim() == 4 else towards)
    return [x.grad, *(p.grad.clone() for p in network.parameters())]


def agree(network: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return True if gradients in all layouts are the same up to rounding."""
    tolerance = 1e-4 if next(network.parameters()).dtype == torch.float32 else 0.05
    expected = gradients(network, shape, torch.contiguous_format, torch.contiguous_format)
    return all(
        float((a - b).norm()) <= tolerance * float(b.norm())
        for layout, weights in _LAYOUTS
        for a, b in zip(gradients(network, shape, layout, weights), expected, strict=True)
    )


def main() -> int:
    """Try everything; `--bare` leaves torch's own choice of kernels alone."""
    torch.manual_seed(0)
    guard = (lambda network: None) if "--bare" in sys.argv else avoid_unsafe_kernels
    wrong = 0
    for case in convolutions():
        print(*case, flush=True)
        channels, outputs, kernel, stride, groups, dtype = case
        network = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups)
        guard(network)
        batch, height, width = _SHAPE[kernel]
        wrong += not agree(network.to(getattr(torch, dtype)), (batch, channels, height, width))
    # A seed of a network, and one narrowed without a method.
    full = CifarResNet(1, 4, channels=(16, 24, 32), shortcut="B")
    graph = trace(full, torch.randn(2, 3, 12, 12))
    for part in (0.0, 0.2, 0.3):
        print("network", part, flush=True)
        network = CifarResNet(1, 4, channels=(16, 24, 32), shortcut="B")
        widths = {name: max(2, int(part * width)) for name, width in graph.full_widths.items()}
        if part == 0.2:
            make_seed(network, graph, VarianceTransfer(), widths, seed=0)
        else:
            resize(network, graph, graph.full_widths, widths)
        wrong += not agree(network, (16, 3, 12, 12))
    print(f"{wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
