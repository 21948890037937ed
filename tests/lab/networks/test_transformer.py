"""Transformers: causality, padding, width groups, and exact growth."""

import copy

import pytest
import torch
from torch import Tensor, nn

from growlab.growth import Net2Net, VarianceTransfer
from growlab.growth.outputs import without_side_effects
from growlab.lab.networks import CausalTransformer, EncoderDecoder
from growlab.widths import trace
from tests.cases import check_growth

VOCABULARY, POSITIONS, PADDING = 11, 7, 1


def decoder() -> nn.Module:
    return CausalTransformer(
        VOCABULARY, POSITIONS + 2, num_layers=2, width=16, num_heads=2, head_dim=8, rotary_dim=2, hidden=20
    )


def encoder_decoder(**settings: bool | float) -> nn.Module:
    sizes = {"num_layers": 1, "width": 16, "num_heads": 2, "head_dim": 8, "hidden": 20}
    return EncoderDecoder(VOCABULARY, VOCABULARY + 1, PADDING, **sizes, **{"dropout": 0.0, **settings})


NETWORKS = {
    "decoder": decoder,
    "encoder-decoder": encoder_decoder,
    "normalised first": lambda: encoder_decoder(norm_first=True),
}
LAYERS = {"attention.query": 8, "mlp.0": 20}
GROUPS = {
    "decoder": {
        "project_in": 16,
        # Two of a head's channels have rotary embeddings.
        **{f"blocks.{i}.{name}": width for i in (0, 1) for name, width in (("attention.query", 6), ("mlp.gate", 20))},
    },
    "encoder-decoder": {
        "source_in": 16,
        "target_in": 16,
        **{f"encoder.0.{name}": width for name, width in LAYERS.items()},
        **{f"decoder.0.{name}": width for name, width in {**LAYERS, "source_attention.query": 8}.items()},
    },
}
GROUPS["normalised first"] = GROUPS["encoder-decoder"]


def tokens(seed: int, num_sequences: int = 3) -> Tensor:
    return torch.randint(2, VOCABULARY, (num_sequences, POSITIONS), generator=torch.Generator().manual_seed(seed))


def inputs(name: str, seed: int = 0) -> tuple[Tensor, ...]:
    if name == "decoder":
        return (tokens(seed),)
    source = tokens(seed)
    source[0, -3:] = PADDING
    return source, tokens(seed + 1)[:, :-1]


def made(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[name]().double()


def outputs(network: nn.Module, inputs: tuple[Tensor, ...], training: bool = False) -> Tensor:
    network = copy.deepcopy(network)
    with without_side_effects(network):
        return network.train(training)(*inputs)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "decoder")) for n in NETWORKS])
def test_all_widths_grow_exactly(name: str) -> None:
    network = made(name)
    graph = trace(network, inputs(name))
    assert graph.full_widths == GROUPS[name]
    assert len(graph.attentions) == sum("query" in group for group in graph.groups)
    assert len(graph.channel_norms) == sum(isinstance(m, (nn.LayerNorm, nn.RMSNorm)) for m in network.modules())
    for method in (VarianceTransfer(), Net2Net()):
        check_growth(network, graph, inputs(name), method)


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_do_not_depend_on_later_positions(name: str) -> None:
    network, given = made(name), inputs(name)
    changed = (*given[:-1], given[-1].clone())
    changed[-1][:, 4] = (changed[-1][:, 4] - 1) % (VOCABULARY - 2) + 2
    before, after = outputs(network, given), outputs(network, changed)
    assert torch.equal(after[:, :4], before[:, :4])
    assert (after[:, 4:] != before[:, 4:]).any()


def test_outputs_do_not_depend_on_padding() -> None:
    network, (source, previous) = made("encoder-decoder"), inputs("encoder-decoder")
    shorter = outputs(network, (source[:1, :-3], previous[:1]))
    torch.testing.assert_close(outputs(network, (source[:1], previous[:1])), shorter)


def test_rotary_embeddings_depend_on_relative_positions_only() -> None:
    network = made("decoder")
    rotary = network.blocks[0].attention.rotary
    heads = torch.randn(1, 1, 2, 8, dtype=torch.float64)
    # The same two vectors at all positions: products depend on the distance only.
    query, key = (rotary(heads[:, :, i : i + 1].expand(-1, -1, POSITIONS, -1)) for i in (0, 1))
    products = (query @ key.transpose(2, 3))[0, 0]
    # The table of angles is computed in float32.
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1], rtol=0, atol=1e-5)
    assert products[0, 0] != products[0, 1]
    with pytest.raises(ValueError, match="rotary_dim=3"):
        CausalTransformer(5, 4, rotary_dim=3)


def test_without_side_effects_disables_dropout() -> None:
    network = encoder_decoder(dropout=0.5).double()
    source, previous = inputs("encoder-decoder")
    with without_side_effects(network):
        network.train()
        once, again = network(source, previous), network(source, previous)
    assert torch.equal(once, again)
    network.train()
    assert not torch.equal(network(source, previous), network(source, previous))


def test_tied_and_shared_embeddings_are_one_tensor() -> None:
    network = EncoderDecoder(9, 9, width=4, num_layers=1, num_heads=1, head_dim=4, hidden=4, shared=True)
    assert network.head.weight is network.target_embedding.weight is network.source_embedding.weight
    with pytest.raises(ValueError, match="one vocabulary"):
        EncoderDecoder(9, 8, width=4, shared=True)
