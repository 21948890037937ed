"""A layer that is inserted changes nothing at first and learns then."""

import pytest
import torch
from torch import nn

from growlab.parts.isotropic import IsotropicMLP, deepen, spectra
from growlab.widths import tensors_of, trace


def test_a_network_is_deepened_and_trained_on() -> None:
    torch.manual_seed(0)
    network, x, y = IsotropicMLP(6, [5, 4], 3), torch.randn(32, 6), torch.arange(32) % 3
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    before = network(x)
    new = deepen(network.hidden, 1)
    assert torch.allclose(network(x), before, rtol=1e-6)
    optimizer.add_param_group({"params": new})
    assert {id(p) for p in network.parameters()} == {
        id(p) for g in optimizer.param_groups for p in g["params"]
    }
    old = [p.detach().clone() for p in new]
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(old, new, strict=True)), (
        "a part of the new layer does not learn"
    )
    assert loss < nn.functional.cross_entropy(before, y)
    # The deeper network is an isotropic one, of three layers.
    graph = trace(network, x[:2], follow_norms=True)
    assert list(spectra(graph, tensors_of(network, graph), graph.full_widths)) == [
        "hidden.0",
        "hidden.2",
        "hidden.4",
    ]


@pytest.mark.parametrize("position", [-1, 4, 9])
def test_a_wrong_place_is_told(position: int) -> None:
    layers = (
        nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) if position == -1 else IsotropicMLP(6, [5, 4], 3).hidden
    )
    with pytest.raises(ValueError, match="no linear layer at or before position"):
        deepen(layers, position)
