"""Net2Net against its own formula, entry by entry."""

import pytest
import torch

from growlab.growth import Net2Net, grow, make_seed
from tests.cases import NETWORKS, graph_of, roughen


def replicated_from(rows_before: torch.Tensor, rows_after: torch.Tensor) -> list[int]:
    """Old row that each new one copies."""
    return [next(c for c, old in enumerate(rows_before) if torch.equal(row, old)) for row in rows_after]


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_copied_and_columns_divided(seed):
    """Chen et al. 2016, Algorithm 1, on a multi-layer perceptron."""
    network, graph = NETWORKS["mlp"].make(), graph_of("mlp")
    before = {"hidden.0": 4, "hidden.2": 3, "hidden.4": 5}
    state = make_seed(network, graph, Net2Net(), before, seed=0)
    roughen(network)
    old = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    grow(network, graph, Net2Net(), state, graph.full_widths, seed, (NETWORKS["mlp"].inputs(),))
    new = network.state_dict()
    names = ["hidden.0", "hidden.2", "hidden.4", "classifier"]
    previous = list(range(12))
    for name in names:
        weight, bias = old[f"{name}.weight"], old[f"{name}.bias"]
        # Biases are all different, so they tell what was copied.
        source = replicated_from(bias[:, None], new[f"{name}.bias"][:, None])
        assert source[: len(bias)] == list(range(len(bias)))
        for i, c in enumerate(source):
            for j, d in enumerate(previous):
                assert new[f"{name}.weight"][i, j] == weight[c, d] / previous.count(d)
        previous = source


def test_a_flattened_channel_is_divided_at_all_its_positions():
    network, graph = NETWORKS["flatten"].make(), graph_of("flatten")
    state = make_seed(network, graph, Net2Net(), {"conv": 2, "hidden": 7}, seed=0)
    roughen(network)
    old = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    grow(network, graph, Net2Net(), state, graph.full_widths, 1, (NETWORKS["flatten"].inputs(),))
    source = replicated_from(old["conv.bias"][:, None], network.conv.bias.detach()[:, None])
    before, after = old["hidden.weight"].view(7, 2, 6), network.hidden.weight.detach().view(7, 5, 6)
    for j, c in enumerate(source):
        assert torch.equal(after[:, j], before[:, c] / source.count(c))


def test_replicas_are_drawn_from_all_channels():
    network, graph = NETWORKS["mlp"].make(), graph_of("mlp")
    drawn = set()
    for seed in range(40):
        state = make_seed(network := NETWORKS["mlp"].make(), graph, Net2Net(), graph.full_widths, seed=0)
        roughen(network)
        old = network.hidden[0].bias.detach().clone()
        grow(
            network, graph, Net2Net(), state, graph.full_widths | {"hidden.0": 10}, seed, (torch.randn(2, 12).double(),)
        )
        drawn |= set(replicated_from(old[:, None], network.hidden[0].bias.detach()[9:, None]))
    assert drawn == set(range(9))
