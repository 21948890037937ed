"""Methods that copy channels (Net2Net, HyperCloning, LEMON, bert2BERT) against formulas and plain matrices."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.growth import Bert2Bert, GrowthMethod, HyperCloning, Lemon, Net2Net, grow, make_seed
from growlab.widths import WidthGraph, resize, trace
from tests.cases import NETWORKS, Growing, differing, graph_of, planted


def replicated_from(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    """Index of the old bias that each new one copies."""
    return [before.tolist().index(one) for one in after.tolist()]


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_copied_and_columns_divided(seed):
    """Chen et al. 2016, Algorithm 1, on a multi-layer perceptron."""
    before = {"hidden.0": 4, "hidden.2": 3, "hidden.4": 5}
    case, graph = NETWORKS["mlp"], graph_of("mlp")
    run = Growing(case.make(), case.inputs(), Net2Net(), before, graph=graph)
    old = {name: tensor.clone() for name, tensor in run.network.state_dict().items()}
    run.grow(seed=seed)
    new, previous = run.network.state_dict(), list(range(12))
    for name in ("hidden.0", "hidden.2", "hidden.4", "classifier"):
        weight, bias = old[f"{name}.weight"], old[f"{name}.bias"]
        # Biases are all different, so they identify the source.
        source = replicated_from(bias, new[f"{name}.bias"])
        assert source[: len(bias)] == list(range(len(bias)))
        for i, c in enumerate(source):
            for j, d in enumerate(previous):
                assert new[f"{name}.weight"][i, j] == weight[c, d] / previous.count(d)
        previous = source


def test_replicas_are_drawn_from_all_channels():
    drawn = set()
    for seed in range(40):
        run = planted("mlp", Net2Net(), 1.0)
        old = run.network.hidden[0].bias.detach().clone()
        run.grow({"hidden.0": 10}, seed=seed)
        drawn |= set(replicated_from(old, run.network.hidden[0].bias.detach()[9:]))
    assert drawn == set(range(9))


HEAD = 3


class Block(nn.Module):
    """Attention with heads of three channels and an MLP, each after a layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 12), nn.Linear(8, 12, bias=False), nn.Linear(8, 12)
        self.out = nn.Linear(12, 8)
        self.fc1, self.fc2 = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm1(x)
        q, k, v = (
            layer(read).unflatten(2, (self.num_heads, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Small(nn.Module):
    """Two blocks on a stream of 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def full_width() -> tuple[nn.Module, WidthGraph]:
    """The full-width network with fixed, perturbed weights, and its width graph."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Small().double()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape).double())
    return network, trace(network, X[:2])


class Grown:
    """The network grown from half its widths: tensors and outputs before and after, the event and the width graph."""

    def __init__(self, method: GrowthMethod, equal_blocks: bool = False) -> None:
        network, self.graph = full_width()
        if equal_blocks:
            network.blocks[0].load_state_dict(network.blocks[1].state_dict())
        full = self.graph.full_widths
        state = make_seed(network, self.graph, method, full, seed=0)
        widths = {name: width // 2 for name, width in full.items()}
        resize(network, self.graph, full, widths)
        state.widths, state.births = widths, {group: [0] * width for group, width in widths.items()}
        self.old, self.before = {n: p.detach().clone() for n, p in network.named_parameters()}, network(X)
        self.event = grow(network, self.graph, method, state, full, 3, (X[:2],))
        self.new, self.after = {n: p.detach() for n, p in network.named_parameters()}, network(X)


def plain(tensors: Mapping[str, Tensor]) -> Tensor:
    """Outputs of an ordinary network of these tensors, whose normalisations weight no channels."""
    network, _ = full_width()
    network.load_state_dict(tensors)
    return network(X)


def doubled(name: str, old: Tensor, diagonal: bool) -> Tensor:
    """HyperCloning's blocks for n = 2, by hand."""
    if name == "embed.weight":
        return torch.cat([old, old])
    if name == "head.weight":
        return torch.cat([old, old], 1) / 2
    if name == "head.bias":
        return old
    if old.dim() == 1:
        return torch.cat([old, old])
    if diagonal:
        return torch.block_diag(old, old)
    return torch.cat([torch.cat([old, old], 1), torch.cat([old, old], 1)]) / 2


@pytest.mark.parametrize("form", ["symmetric", "diagonal"])
def test_hypercloning_doubles_by_blocks(form: str) -> None:
    run = Grown(HyperCloning(form))
    for name, tensor in run.old.items():
        expected = doubled(name, tensor, form == "diagonal")
        torch.testing.assert_close(run.new[name], expected, rtol=1e-15, atol=0, msg=name)
    for outputs in (run.after, plain(run.new)):
        torch.testing.assert_close(outputs, run.before, rtol=1e-12, atol=1e-12)
    assert run.event.weighted_norms == []  # statistics are plain ones already


@pytest.mark.parametrize("network", ["shared", "grouped", "gated", "transformer", "channel norms", "decoder"])
def test_the_diagonal_form_is_exact_on_other_networks_and_at_odd_widths(network: str) -> None:
    case, graph, method = NETWORKS[network], graph_of(network), HyperCloning("diagonal", noise_std=0.2)
    halves = {name: (group.full_width + 1) // 2 for name, group in graph.groups.items()}
    run = Growing(case.make(), case.inputs(), method, halves, graph=graph)
    small = run.outputs()
    event = run.grow()
    torch.testing.assert_close(run.outputs(), small, rtol=1e-9, atol=1e-9)
    assert max(event.parity_error_eval, event.noise_error_eval) < 1e-11


def test_hypercloning_noise_separates_clones_and_preserves_outputs() -> None:
    run = Grown(HyperCloning(noise_std=0.3))
    weight, width = run.new["blocks.1.fc1.weight"], 4
    first, second = weight[:, :width], weight[:, width:]
    torch.testing.assert_close(first + second, torch.cat([run.old["blocks.1.fc1.weight"]] * 2))
    assert float((first - second).norm() / first.norm()) > 0.05
    torch.testing.assert_close(plain(run.new), run.before, rtol=1e-11, atol=1e-11)
    assert run.event.noise_error_eval < 1e-12


def test_lemon_splits_columns_unevenly() -> None:
    run = Grown(Lemon(spread=0.6))
    old, new, event, graph = run.old, run.new, run.event, run.graph
    (group,) = graph.axes["head.weight"][1].groups
    shares = event.carry.rows[group]
    assert ((shares[:4] + shares[4:]) - 1).abs().max() < 1e-14
    assert (shares[:4] - shares[4:]).abs().min() > 1e-3
    torch.testing.assert_close(new["head.weight"], torch.cat([old["head.weight"]] * 2, 1) * shares)
    inner = new["blocks.0.fc2.weight"]
    torch.testing.assert_close(inner[:4], inner[4:])
    torch.testing.assert_close(inner[:, :5] + inner[:, 5:], torch.cat([old["blocks.0.fc2.weight"]] * 2))
    # Statistics weighted by the shares equal plain ones, because copies are equal.
    for outputs in (run.after, plain(new)):
        torch.testing.assert_close(outputs, run.before, rtol=1e-12, atol=1e-12)


def test_new_rows_of_bert2bert_are_those_of_the_next_block() -> None:
    run = Grown(Bert2Bert())
    old, new, event, graph = run.old, run.new, run.event, run.graph
    stream, hidden = event.carry.sources["embed"], event.carry.sources["blocks.0.fc1"]
    assert stream.bincount().tolist() == [2] * 4

    def read(block: int) -> Tensor:
        return old[f"blocks.{block}.fc1.weight"][:, stream] / 2

    torch.testing.assert_close(new["blocks.0.fc1.weight"][:5], read(0))
    torch.testing.assert_close(new["blocks.0.fc1.weight"][5:], read(1)[hidden[5:]])
    torch.testing.assert_close(new["blocks.0.fc1.bias"][5:], old["blocks.1.fc1.bias"][hidden[5:]], rtol=0, atol=0)
    heads = event.carry.sources[graph.axes["blocks.0.k.weight"][0].groups[0]]
    for place, head in enumerate(heads.tolist()):
        block = 0 if place < 2 else 1
        mine = old[f"blocks.{block}.k.weight"][HEAD * head : HEAD * (head + 1)][:, stream] / 2
        torch.testing.assert_close(new["blocks.0.k.weight"][HEAD * place : HEAD * (place + 1)], mine)
    # The last block, norms and the embedding have no next block, so FPI copies them.
    last = event.carry.sources["blocks.1.fc1"]
    torch.testing.assert_close(new["blocks.1.fc1.weight"], read(1)[last])
    torch.testing.assert_close(new["blocks.0.norm1.bias"], old["blocks.0.norm1.bias"][stream], rtol=0, atol=0)
    torch.testing.assert_close(new["embed.weight"], old["embed.weight"][stream], rtol=0, atol=0)
    assert event.report["rows_of_the_next_block"]["blocks.0.q.weight"] == "blocks.1.q.weight"
    assert event.parity_tolerance_eval is None and event.parity_error_eval > 1e-6


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)),
        (nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2)),
        # Biases of one shape that belong to weights of different shapes.
        (nn.Linear(4, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)),
        # Weights of one shape in different kinds of layers.
        (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 16, 1), nn.Conv2d(16, 16, 1, groups=16), nn.Flatten()),
    ],
)
def test_without_a_matching_layer_in_the_next_block_bert2bert_equals_net2net(layers: tuple[nn.Module, ...]) -> None:
    tail = [nn.Linear(64, 2)] if isinstance(layers[-1], nn.Flatten) else []
    grown, x = [], torch.randn(8, 4, dtype=torch.float64)
    for method in (Bert2Bert(), Net2Net()):
        run = Growing(copy.deepcopy(nn.Sequential(*layers, *tail)).double(), x, method)
        event = run.grow()
        assert event.report == {} and event.parity_error_eval < 1e-12
        grown.append(run.network.state_dict())
    assert not differing(*grown)


def test_equal_blocks_make_bert2bert_exact() -> None:
    """If the next block has the same weights, AKI adds the units that FPI would copy."""
    event = Grown(Bert2Bert(), equal_blocks=True).event
    assert event.report["rows_of_the_next_block"] and event.parity_error_eval < 1e-12
