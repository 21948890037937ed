"""What sparsifying an isotropic network gains at inference, in turns with the dense network (make bench).

Nine maps of width N: sparsified, five stay matrices and four become vectors (Eq. 19 with D = 4), so that arithmetic
alone would make it 9/5 = 1.8 times as fast.
"""

import statistics
import time

import pytest
import torch

from growlab.parts.isotropic import IsotropicMLP, sparsify
from growlab.widths import trace

MAPS = 9


def seconds(network, x):
    began = time.perf_counter()
    with torch.inference_mode():
        network(x)
    return time.perf_counter() - began


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("width", [256, 512, 1024, 2048])
def test_inference_against_dense(width, batch):
    torch.manual_seed(0)
    dense = IsotropicMLP(width, [width] * (MAPS - 1), width).eval()
    x = torch.randn(batch, width)
    sparse = sparsify(dense, trace(dense, torch.randn(2, width), follow_norms=True))
    error = float((sparse(x) - dense(x)).detach().abs().max() / dense(x).detach().abs().max())
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = [(seconds(dense, x), seconds(sparse, x)) for _ in range(43)][3:]
    finally:
        torch.set_num_threads(before)
    slow, fast = (statistics.median(times) for times in zip(*turns, strict=True))
    parameters = [sum(p.numel() for p in network.parameters()) for network in (dense, sparse)]
    print(
        f"\nN={width}, batch {batch}: dense {1e3 * slow:.3f} ms, sparse {1e3 * fast:.3f} ms: {slow / fast:.2f} times "
        f"as fast, {parameters[1] / parameters[0]:.1%} of the parameters, output error {error:.1e}"
    )
    assert error < 1e-4
