"""Promises of every growth method on every network, in both precisions."""

import copy
import math

import pytest
import torch
from torch import nn

from growlab.growth import (
    FireFly,
    FixedSize,
    GradMax,
    GrowthEvent,
    GrowthMethod,
    HyperCloning,
    Lemon,
    PairGrowth,
    Splitting,
    Tiny,
    VarianceTransfer,
    anneal_norms,
    finish,
)
from growlab.growth.constants import as_applied
from growlab.growth.parity import relative_error
from growlab.widths import resized, tensors_of
from tests.cases import METHODS, NETWORKS, PRESERVING, Growing, differing, graph_of, outputs, train

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}


def pairs(*places: int) -> list[tuple[str, str]]:
    """For each place: every method with a sixth of the networks, and every network with a sixth of the methods."""
    return [
        (method, network)
        for i, method in enumerate(METHODS)
        for j, network in enumerate(NETWORKS)
        if (i + j) % 6 in places
    ]


# Running all pairs in float64 is slow; each fast sample has every method and network once or twice.
SAMPLE, FURTHER, OTHERS = pairs(0), pairs(3), pairs(1, 2, 3, 4, 5)
# From width 1 through odd widths to full width.
PARTS = (0.2, 0.65, 1.0)


class Run(Growing):
    """A network of the table that grows through `PARTS`."""

    def __init__(self, network: str, method: str, dtype: torch.dtype = torch.float64, noise: float = 0.0) -> None:
        self.case = NETWORKS[network]
        inputs, growth_method = self.case.inputs(dtype), METHODS[method].make(noise)
        super().__init__(self.case.make(dtype), inputs, growth_method, PARTS[0], 5, graph_of(network))
        # Samples that its events have not seen.
        self.fresh = self.case.inputs(dtype, seed=9)

    def grow(self, part: float) -> GrowthEvent:
        return super().grow(part, seed=5)

    def outputs(self, training: bool = False) -> torch.Tensor:
        return super().outputs(training, self.fresh)


@pytest.mark.parametrize(
    ("method", "network", "dtype"),
    [
        *((*pair, torch.float64) for pair in SAMPLE),
        *((*pair, torch.float32) for pair in FURTHER),
        *(pytest.param(*pair, torch.float64, marks=pytest.mark.slow) for pair in OTHERS),
    ],
)
def test_growth_keeps_its_promises(method: str, network: str, dtype: torch.dtype) -> None:
    run = Run(network, method, dtype)
    factor = 1.0
    for part in PARTS[1:]:
        before_eval, before_train = run.outputs(), run.outputs(training=True)
        event = run.grow(part)
        # Shapes.
        for name, tensor in tensors_of(run.network, run.graph).items():
            assert tuple(tensor.shape) == run.graph.shape(name, event.widths_after)
            assert tensor.dtype == dtype
        if not METHODS[method].preserves:
            assert event.parity_tolerance_eval is None
            continue
        # Preservation, on samples that the event has not seen.
        after_eval = run.outputs() * event.output_factor
        after_train = run.outputs(training=True) * event.output_factor
        assert relative_error(before_eval, after_eval) <= ROUNDING[dtype]
        assert max(event.parity_error_eval, event.parity_error_train) <= ROUNDING[dtype]
        # Batch normalisation's eps has another relative size if its input is rescaled.
        assert relative_error(before_train, after_train) <= (1e-2 if "ours" in method else ROUNDING[dtype])
        factor *= event.output_factor
    assert run.state.stage == 2
    assert run.state.output_factor == (1.0 if method == "ours literal" else pytest.approx(factor))
    assert run.state.widths == run.graph.full_widths


@pytest.mark.parametrize(("method", "network"), pairs(0))
def test_old_entries_land_where_the_axes_say(method: str, network: str) -> None:
    run = Run(network, method)
    old = {name: tensor.clone() for name, tensor in as_applied(run.graph, tensors_of(run.network, run.graph)).items()}
    widths = dict(run.state.widths)
    event = run.grow(0.65)
    norms = {name for norm in run.graph.norms for name in (norm.weight, norm.running_mean, norm.running_var)}
    for name, tensor in as_applied(run.graph, tensors_of(run.network, run.graph)).items():
        kept = resized(tensor, run.graph.axes[name], event.widths_after, widths)
        for attention in run.graph.attentions:
            multiplied = run.method.layer_multipliers and name.endswith("weight")
            if name in attention.queries and not multiplied:
                # Queries compensate for the changed scale of attention.
                before, after = (attention.axis.length(w) for w in (widths, event.widths_after))
                old[name] = old[name] * math.sqrt(after / before)
        if method in ("pairs", "random"):
            rounding = 1e-14 if name in run.graph.weight_norms or name in run.graph.lengths else 0
            torch.testing.assert_close(kept, old[name], rtol=0, atol=rounding)
        elif method in ("net2net", "hypercloning", "bert2bert"):
            # Columns are divided by a whole number of copies.
            counts = old[name] / kept
            torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-9)
            assert counts.min() >= 1 - 1e-9
        elif method == "lemon":
            # Columns take a share of the old ones.
            shares = kept / old[name]
            assert shares.min() > 0.02 and shares.max() <= 1 + 1e-9
        elif name not in norms:
            ratios = kept / old[name]
            torch.testing.assert_close(ratios, ratios.flatten()[0].expand_as(ratios))


@pytest.mark.parametrize(("method", "network"), pairs(0)[::2])
def test_growing_by_nothing_changes_nothing(method: str, network: str) -> None:
    run = Run(network, method, noise=0.1)
    before = dict(run.network.named_parameters(remove_duplicate=False))
    buffers = dict(run.network.named_buffers())
    content = copy.deepcopy(run.network.state_dict())
    event = run.grow(PARTS[0])
    after = dict(run.network.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(buffer is buffers[name] for name, buffer in run.network.named_buffers())
    assert not differing(run.network.state_dict(), content)
    assert event.replaced == {}
    assert event.output_factor == 1.0
    assert run.state.stage == 1


@pytest.mark.parametrize(("method", "network"), list(zip(METHODS, ["resnet A", "shared", "bare"] * 4, strict=True)))
def test_weights_depend_on_seed_and_stage_alone(method: str, network: str) -> None:
    grown = []
    for global_seed, default in enumerate((torch.float32, torch.float64)):
        torch.manual_seed(global_seed)
        run = Run(network, method, noise=0.1)
        torch.set_default_dtype(default)
        try:
            run.grow(1.0)
        finally:
            torch.set_default_dtype(torch.float32)
        grown.append(run.network.state_dict())
    assert not differing(*grown)
    other = Run(network, method, noise=0.1)
    other.state.stage = 1
    other.grow(1.0)
    assert differing(grown[0], other.network.state_dict())


@pytest.mark.parametrize(("method", "network"), pairs(0))
def test_full_width_loads_into_a_fresh_network(method: str, network: str) -> None:
    run = Run(network, method, noise=0.01)
    run.grow(0.65)
    run.grow(1.0)
    anneal_norms(run.network, run.graph, run.state, 1.0)
    fresh = run.case.make()
    assert repr(fresh) == repr(run.network)
    expected = run.outputs() * run.state.output_factor
    if run.state.multipliers:
        with pytest.raises(RuntimeError, match="unfinished_growth_multipliers"):
            fresh.load_state_dict(run.network.state_dict(), strict=True)
    else:
        fresh.load_state_dict(run.network.state_dict(), strict=True)
        loaded = outputs(fresh, run.fresh, False) * run.state.output_factor
        torch.testing.assert_close(loaded, expected)
    for _ in range(2):  # The second time nothing is left to finish.
        finish(run.network, run.graph, run.method, run.state)
        assert run.state.output_factor == 1.0 and not run.state.multipliers
    fresh.load_state_dict(run.network.state_dict(), strict=True)
    torch.testing.assert_close(outputs(fresh, run.fresh, False), expected)


@pytest.mark.parametrize(
    ("method", "network"),
    [
        (method, network)
        for i, method in enumerate(PRESERVING)
        for j, network in enumerate(("convnet", "mlp", "mlp tanh", "residual", "resnet B"))
        if (i + j) % 5 < 2
    ],
)
def test_twins_diverge_in_training_where_the_method_promises_it(method: str, network: str) -> None:
    run = Run(network, method)
    before = dict(run.state.widths)
    event = run.grow(1.0)
    twins = {name: twins_of(event.replaced, name, before[name]) for name in run.graph.groups}
    assert all(twins.values())
    assert all(gap(run.network, name, a, b) == 0 for name, pairs in twins.items() for a, b in pairs)
    train_one_step(run)
    gaps = {name: max(gap(run.network, name, a, b) for a, b in pairs) for name, pairs in twins.items()}
    if METHODS[method].parts_twins:
        assert min(gaps.values()) > 1e-6
    else:
        assert max(gaps.values()) < 1e-12


def test_noise_separates_replicas_of_net2net() -> None:
    run = Run("mlp", "net2net", noise=0.01)
    run.grow(0.65)
    weight = run.network.get_parameter("hidden.0.weight").detach()
    apart = float(torch.pdist(weight).min())
    assert 0 < apart < 0.1
    for _ in range(20):
        train_one_step(run)
    assert float(torch.pdist(weight).min()) > apart


def twins_of(replaced, group: str, width_before: int) -> list[tuple[int, int]]:
    """Pairs of channels of the group whose incoming weights are equal after the event."""
    rows = replaced[f"{group}.weight"][1].detach().flatten(1)
    pairs = [(a, b) for b in range(width_before, len(rows)) for a in range(b)]
    return [(a, b) for a, b in pairs if torch.equal(rows[a], rows[b])]


def gap(network: nn.Module, group: str, a: int, b: int) -> float:
    weight = network.get_parameter(f"{group}.weight").detach()
    return float((weight[a] - weight[b]).abs().max())


def train_one_step(run: Run) -> None:
    optimizer = torch.optim.SGD(run.network.parameters(), lr=0.1)
    train(run.network.train(), optimizer, run.case.inputs(num_samples=64, seed=4))


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (PairGrowth, {"noise_std": -1.0, "gain": 0.0, "new_weights": "fan"}),
        (VarianceTransfer, {"rule": "theorem", "multipliers": "drop"}),
        (FixedSize, {"initialisation": "He"}),
        (HyperCloning, {"form": "oblique"}),
        (Lemon, {"spread": 1.0}),
        (GradMax, {"batches": 0, "zero": "both", "scale": 0.0, "steps": 0, "fallback": "net2net"}),
        (FireFly, {"new_candidates": -1.0, "steps": -1, "rate": 0.0, "epsilon": 0.0}),
        (Splitting, {"iterations": 0, "epsilon": 0.0, "softplus_beta": -1.0}),
        (Tiny, {"amplitudes": [], "ridge": -1.0, "update_old": 1}),
    ],
)
def test_methods_reject_invalid_arguments(method: type[GrowthMethod], wrong: dict[str, object]) -> None:
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name} must be"):
            method(**{name: value})
