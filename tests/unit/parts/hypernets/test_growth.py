"""Growing a network by widening the hypernetwork that emits its weights."""

import copy
from functools import cache
from itertools import pairwise
from math import prod, sqrt

import pytest
import torch
from torch import nn

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.growth import GrowthState, anneal_norms, finish, grow, make_seed
from growlab.growth.parity import relative_error
from growlab.lab.networks import MLP, CifarResNet
from growlab.optim import SGD, NormRatio, follow, weight_regions
from growlab.parts import Averages, Depth
from growlab.parts.hypernets import Hyperfan, emitted
from growlab.widths import WidthGraph, trace
from tests.cases import NETWORKS, outputs, roughen, tracked, train, widths_at

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = (torch.float64, torch.float32)
# A hypernetwork emits plain weights, each of one layer.
NAMES = [name for name in NETWORKS if name not in ("shared", "weight norms")]
PARTS = (0.2, 0.65, 1.0)
KINDS = {
    "layer": {"sharing": "layer", "embedding_features": 4},
    "layer out": {"new_weights": "hyperfan_out", "embedding_features": 3, "embedding": "fixed"},
    "layer deep": {"sharing": "layer", "embedding_features": 4, "hidden_features": [5], "distribution": "normal"},
    "layer rescaled": {"rescale_layers_without_batch_norm": True, "embedding_features": 3},
    "chunk": {"sharing": "chunk", "embedding_features": 3, "hidden_features": [4], "chunk_channels": 1},
}


def make(name: str, dtype: torch.dtype) -> nn.Module:
    """A network of the table with a tiny eps in its norms, because rescaling cannot compensate eps in train mode."""
    network = NETWORKS[name].make(dtype)
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = 1e-14
    return network


@cache
def exact_graph_of(name: str) -> WidthGraph:
    return trace(make(name, torch.float64), NETWORKS[name].inputs(num_samples=2))


class Run:
    """A network with emitted weights that grows through its widths."""

    def __init__(
        self, network: nn.Module, graph: WidthGraph, x: torch.Tensor, method: Hyperfan, part: float = PARTS[0]
    ) -> None:
        self.network, self.x, self.method = network, x, method
        self.graph = method.prepare(network, graph, 5)
        self.state: GrowthState = make_seed(network, self.graph, method, widths_at(self.graph, part), seed=5)

    @classmethod
    def of(cls, name: str, kind: str, dtype: torch.dtype = torch.float64) -> "Run":
        case = NETWORKS[name]
        run = cls(make(name, dtype), exact_graph_of(name), case.inputs(dtype), Hyperfan(**KINDS[kind]))
        roughen(run.network)
        return run

    def grow(self, part: float):
        widths = widths_at(self.graph, part)
        return grow(self.network, self.graph, self.method, self.state, widths, 5, (self.x,))


def even_mlp(kind: dict, part: float = 0.25) -> Run:
    torch.manual_seed(0)
    network = MLP(6, [16, 8, 24], 4).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    run = Run(network, trace(network, x[:2]), x, Hyperfan(**kind), part)
    # Biases as after some training, because without them all units of such a narrow network may be dead.
    for module in run.network.modules():
        if isinstance(module, nn.Linear):
            nn.init.uniform_(module.bias, -0.4, 0.4)
    return run


def alternating(place: int) -> list[object]:
    """Marks of a pair of cases, of which one or the other is slow."""
    return [pytest.mark.slow if slow else [] for slow in (place == 2, place != 2)]


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    # Each network with one of the kinds by layer, in turn, and with chunks; each kind in both precisions.
    [
        pytest.param(kind, name, DTYPES[(place // 4 + index) % 2], marks=marks)
        for place, name in enumerate(NAMES)
        for index, (kind, marks) in enumerate(
            zip((list(KINDS)[place % 4], "chunk"), alternating(place % 3), strict=True)
        )
    ],
    ids=str,
)
def test_the_function_is_preserved_and_the_plain_network_computes_it(kind: str, name: str, dtype: torch.dtype) -> None:
    run, case = Run.of(name, kind, dtype), NETWORKS[name]
    x = case.inputs(dtype, seed=9)
    for part in PARTS[1:]:
        before, before_train = outputs(run.network, x, False), outputs(run.network, x, True)
        exact_before, noise_before = precise(run.network, run.x)
        event = run.grow(part)
        after = outputs(run.network, x, False) * event.output_factor
        after_train = outputs(run.network, x, True) * event.output_factor
        error, error_train = relative_error(before, after), relative_error(before_train, after_train)
        exact_after, noise_after = precise(run.network, run.x)
        # In exact arithmetic with rounded weights, the rest is growth's error.
        assert relative_error(exact_before, exact_after * event.output_factor) <= ROUNDING[dtype] / 10
        # Arithmetic in float32 rounds too: more if outputs nearly cancel, and differently on other CPUs.
        rounding = 0.0 if dtype == torch.float64 else noise_before + noise_after
        assert error <= ROUNDING[dtype] and event.parity_error_eval <= max(ROUNDING[dtype], rounding)
        assert max(error_train, event.parity_error_train) <= (1e-4 if dtype == torch.float32 else 1e-8)
    anneal_norms(run.network, run.graph, run.state, 1.0)
    expected = outputs(run.network, x, False) * run.state.output_factor
    finish(run.network, run.graph, run.method, run.state)
    fresh = make(name, dtype)
    fresh.load_state_dict(run.network.state_dict(), strict=True)
    assert repr(fresh) == repr(run.network)
    assert relative_error(expected, outputs(fresh, x, False)) <= ROUNDING[dtype]


@pytest.mark.parametrize("kind", ["layer", "chunk"])
def test_an_event_in_emitted_weights(kind: str) -> None:
    """Old entries are multiplied by sqrt(C / C'); new rows are equal, new columns opposite, the new corner free."""
    run = even_mlp({**KINDS[kind], "chunk_channels": 2, "rescale_layers_without_batch_norm": True}, 0.5)
    roughen(run.network)
    names = ("hidden.0", "hidden.2", "hidden.4", "classifier")
    old = {name: run.network.get_submodule(name).weight.detach() for name in names}
    widths = [6, 8, 4, 12, 4]
    assert [w.shape for w in old.values()] == [(b, a) for a, b in pairwise(widths)]
    run.grow(1.0)
    new_widths = [6, 16, 8, 24, 4]
    for index, name in enumerate(names):
        (ins, outs), (new_ins, new_outs) = widths[index : index + 2], new_widths[index : index + 2]
        new = run.network.get_submodule(name).weight.detach()
        assert new.shape == (new_outs, new_ins)
        torch.testing.assert_close(new[:outs, :ins], old[name] * sqrt(ins / new_ins))
        half, half_in = (new_outs - outs) // 2, (new_ins - ins) // 2
        assert torch.equal(new[outs : outs + half], new[outs + half :])
        torch.testing.assert_close(new[:outs, ins : ins + half_in], -new[:outs, ins + half_in :])
        if half and half_in:
            corner = new[outs : outs + half, ins:]
            assert not torch.equal(corner[:, :half_in].abs(), corner[:, half_in:].abs())


@pytest.mark.parametrize("rule", ["hyperfan_in", "hyperfan_out"])
@pytest.mark.parametrize("kind", ["layer", "chunk"])
def test_new_weights_have_the_hyperfan_variance_at_the_new_widths(kind: str, rule: str) -> None:
    ratios = []
    for seed in range(6):
        torch.manual_seed(0)
        network = CifarResNet(1, 10, channels=(16, 32))
        x = torch.randn(4, 3, 8, 8)
        method = Hyperfan(
            rule,
            sharing=kind,
            embedding_features=24,
            hidden_features=[24] if kind == "chunk" else (),
            embedding="fixed",
            chunk_channels=2,
        )
        graph = method.prepare(network, trace(network, x[:2]), seed)
        state = make_seed(network, graph, method, widths_at(graph, 0.5), seed)
        sizes = [(m, m.weight.shape[:2]) for m, _ in emitted(network)]
        grow(network, graph, method, state, graph.full_widths, seed, (x,))
        for module, (rows, columns) in sizes:
            weight = module.weight.detach()
            if weight.dim() == 2:
                expected, new = 1 / weight.shape[1], weight[:, columns:]
            else:
                fans = {"hyperfan_in": prod(weight.shape[1:]), "hyperfan_out": weight.shape[0] * 9}
                expected, new = 2 / fans[rule], weight[rows:]
            ratios.append(float(new.square().mean()) / expected)
    ratios = torch.tensor(ratios)
    assert abs(float(ratios.mean()) - 1) < 4 * float(ratios.std()) / sqrt(len(ratios))
    assert float(ratios.std()) < 0.5


def precise(network: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Outputs in float64 with the same weights, and the error of the network's own outputs."""
    exact = outputs(copy.deepcopy(network).double(), x.double(), False)
    return exact, relative_error(exact, outputs(network, x, False).double())


@pytest.mark.parametrize("kind", ["layer", "chunk"])
def test_regions_of_emitting_weights_have_rates_by_their_norms(kind: str) -> None:
    """Rows and columns of H have birth stages; the embedding's dimension follows like a kernel."""
    run = even_mlp({**KINDS[kind], "chunk_channels": 2}, 0.5)
    optimizer = SGD(run.network.parameters(), lr=0.1, rule=NormRatio())
    before = dict(run.state.widths)
    event = run.grow(1.0)
    follow(optimizer, event.replaced, run.graph, before, run.state.widths, carry=event.carry)
    regions = weight_regions(run.graph, run.state.births)
    named = dict(run.network.named_parameters())
    optimizer.set_regions({p: regions[n] for n, p in named.items() if n in regions})
    part = "output.weight" if kind == "layer" else "weight"
    name = f"hidden.2.parametrizations.weight.0.{part}"
    parameter, old = named[name], named[name].detach().clone()
    train(run.network, optimizer, run.x)
    rows, columns = (4, 8) if kind == "layer" else (2, 8)
    young = torch.ones_like(old, dtype=torch.bool)
    young[:rows, :columns] = False
    assert young.any() and not young.all()
    factor = torch.where(young, old[young].norm() / old[~young].norm(), 1.0)
    torch.testing.assert_close(parameter.detach(), old - 0.1 * factor * parameter.grad)
    assert {id(p) for p in named.values()} == set(tracked(optimizer))


@pytest.mark.parametrize("kind", ["layer", "layer rescaled", "chunk"])
def test_gradients_of_old_entries_follow_the_carry_rule(kind: str) -> None:
    """The carried gradient equals the new gradient at old entries, as optimizer state requires."""
    run = Run.of("mlp batch norm", kind)
    run.network.eval()
    names = [name for name, _ in run.network.named_parameters() if name in run.graph.axes]

    def gradients() -> dict[str, torch.Tensor]:
        run.network.zero_grad()
        (run.network(run.x) * run.state.output_factor).square().mean().backward()
        return {n: p.grad.clone() for n, p in run.network.named_parameters() if n in run.graph.axes}

    before, widths = gradients(), dict(run.state.widths)
    event = run.grow(1.0)
    run.network.eval()
    after = gradients()
    for name in names:
        kept = [axis.kept(widths, run.state.widths) for axis in run.graph.axes[name]]
        carried = event.carry.carried(before[name], name, run.graph, widths, run.state.widths)
        index = torch.meshgrid(*kept, indexing="ij")
        torch.testing.assert_close(after[name][index], carried[index], rtol=1e-6, atol=1e-12)


def test_widths_that_are_not_whole_chunks_raise_an_error() -> None:
    network = MLP(6, [9, 8], 4)
    graph = trace(network, torch.randn(2, 6))
    with pytest.raises(UserError, match="chunks of 2"):
        Hyperfan(sharing="chunk", chunk_channels=2).prepare(network, graph, 0)


def test_new_channels_of_chunks_are_normalised_as_the_others_are() -> None:
    """With running variances of 1, channels emitted by the same layer would grow larger from layer to layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (8, *[16] * 12):
        layers += [nn.Linear(width, 16), nn.BatchNorm1d(16, momentum=1.0), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(16, 4)).double()
    x = torch.randn(32, 8, dtype=torch.float64)
    run = Run(network, trace(network, x[:2]), x, Hyperfan(sharing="chunk"), part=0.25)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("output.weight"):
                parameter *= 30
        network.train()(x)
    network.eval()
    assert network[1].running_var.min() > 30

    def largest() -> float:
        h, found = x, 0.0
        for layer in network[:-1]:
            h = layer(h).detach()
            found = max(found, float(h.abs().max())) if isinstance(layer, nn.BatchNorm1d) else found
        return found

    before = largest()
    event = run.grow(0.5)
    assert event.parity_error_eval < 1e-12
    assert largest() < 10 * before


# With inserted blocks --------------------------------------------------------------------------------------------


def resnet() -> CifarResNet:
    torch.manual_seed(0)
    return CifarResNet(2, 10, 1, (8, 8)).double()


@pytest.mark.parametrize(("sharing", "start"), [("layer", "zero"), ("layer", "stack"), ("chunk", "stack")])
def test_inserted_blocks_get_new_hypernetworks(sharing: str, start: str) -> None:
    grown, x = resnet(), torch.randn(8, 1, 8, 8, dtype=torch.float64)
    parts = [Averages(0.9), Depth("auto", start)]
    method = Hyperfan(sharing=sharing, embedding_features=3)
    grower = Grower(grown, x, method=method, trigger={0: 0.5, 1: 1.0}, parts=parts)
    optimizer = torch.optim.SGD(grown.parameters(), 0.01, momentum=0.9)
    grower.follow(optimizer)
    for epoch in range(2):
        grower.step(epoch=epoch, step=epoch)
        before = [p.detach().clone() for p in grown.parameters()]
        train(grown, optimizer, x, torch.arange(8))
    (event,) = grower.events
    receipt = event.notes
    assert len(receipt["inserted"]) >= 2 and event.parity_error_eval < 1e-12
    assert receipt["ema_parity_error_eval"] < 1e-12
    for block in receipt["inserted"]:
        assert max(block["parity_error_eval"], block["parity_error_train"]) < 1e-12
    # Layers that emit an inserted block's weights are trained; chunks of all layers share an output layer.
    own = "output" if sharing == "layer" else "embedding"
    emitting = [name for name, _ in grown.named_parameters() if "layers.1.1" in name and own in name]
    outputs = {name for name, _ in grown.named_parameters() if "layers.1.1" in name and "output" in name}
    assert bool(outputs) == (sharing == "layer")
    moved = {
        name for old, (name, new) in zip(before, grown.named_parameters(), strict=True) if not torch.equal(old, new)
    }
    assert emitting and any("layers.1.1" in name for name in moved)
    outputs = grown.eval()(x)
    plain = resnet()
    plain.load_state_dict(copy.deepcopy(grower.finish().state_dict()))
    assert torch.allclose(plain.eval()(x), outputs, rtol=1e-12, atol=1e-12)
