"""Variance transfer and pairs: variances, factors and statistics (Yuan et al. 2023, Table 1, Theorem A.1)."""

from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from growlab.growth import PairGrowth, VarianceTransfer
from growlab.growth.constants import as_applied, as_stored
from growlab.growth.rescale import eps_ratio, rescale
from growlab.lab.networks import MLP
from growlab.widths import tensors_of, trace
from tests.cases import NETWORKS, Growing, graph_of, outputs, roughen


class Grown:
    """A network before and after one event; hidden layers are of one width."""

    def __init__(self, network: nn.Module, x: torch.Tensor, before: int, after: int, method) -> None:
        graph = trace(network.double(), x.double())
        self.run = Growing(network, x.double(), method, dict.fromkeys(graph.groups, before), 3, graph, rough=False)
        self.seed = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        roughen(network)
        self.old = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        self.output_before = self.run.outputs()
        self.event = self.run.grow(dict.fromkeys(graph.groups, after), seed=3)
        self.new, self.output_after = network.state_dict(), self.run.outputs()


def narrow(method: VarianceTransfer | PairGrowth, after: int = 6, **settings: object) -> Grown:
    """Hidden layers of 4 units grown to more."""
    torch.manual_seed(0)
    return Grown(MLP(6, [8, 8], 3, **settings), torch.randn(16, 6), 4, after, method)


def variance(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean())


def test_weights_begin_and_grow_by_table_1():
    """Hidden layers of 100 units grown to 160."""
    torch.manual_seed(0)
    method = VarianceTransfer(rescale_layers_without_batch_norm=True)
    wide = Grown(MLP(80, [200, 200], 60), torch.randn(8, 80), 100, 160, method)
    # Sample variances deviate by a factor of sqrt(2 / n); 5 times that is allowed. Twins are left out as copies.
    for rows, expected in (
        (wide.seed["hidden.0.weight"], 2 / 80),
        (wide.seed["hidden.2.weight"], 2 / 100),
        (wide.seed["classifier.weight"], 1 / 100**2),
        (wide.new["hidden.0.weight"][100:130], 2 / 80),
        (wide.new["hidden.2.weight"][100:130, :130], 2 / 160),
        (wide.new["hidden.2.weight"][:100, 100:130], 2 / 160),
        (wide.new["classifier.weight"][:, 100:130], 1 / 160**2),
    ):
        assert variance(rows) == pytest.approx(expected, rel=5 * sqrt(2 / rows.numel()))
        assert abs(float(rows.mean())) < 5 * sqrt(expected / rows.numel())
    assert wide.seed["hidden.0.bias"].count_nonzero() == 0
    hidden, output = sqrt(100 / 160), 100 / 160
    for name, rows, columns, factor in (
        ("hidden.0.weight", 100, 80, 1.0),
        ("hidden.2.weight", 100, 100, hidden),
        ("classifier.weight", 60, 100, output),
    ):
        torch.testing.assert_close(wide.new[name][:rows, :columns], wide.old[name] * factor, rtol=1e-12, atol=0)
    # Without a norm the scale runs on through the biases to the logits.
    for name, size, factor in (
        ("hidden.0.bias", 100, 1.0),
        ("hidden.2.bias", 100, hidden),
        ("classifier.bias", 60, hidden * output),
    ):
        torch.testing.assert_close(wide.new[name][:size], wide.old[name] * factor, rtol=1e-12, atol=0)
    assert wide.event.output_factor == pytest.approx(1 / (hidden * output), rel=1e-12)
    # Pairs have equal rows and opposite columns; new rows see both twins through weights of their own.
    assert torch.equal(wide.new["hidden.0.weight"][100:130], wide.new["hidden.0.weight"][130:160])
    assert torch.equal(wide.new["hidden.2.weight"][:100, 100:130], -wide.new["hidden.2.weight"][:100, 130:160])
    assert torch.equal(wide.new["classifier.weight"][:, 100:130], -wide.new["classifier.weight"][:, 130:160])
    new_rows = wide.new["hidden.2.weight"][100:130]
    assert not torch.equal(new_rows[:, 100:130], -new_rows[:, 130:160])


def test_old_units_do_not_read_a_new_channel_without_a_twin():
    new = narrow(PairGrowth(), after=7).new
    assert new["hidden.0.weight"][6].count_nonzero() == 6
    assert new["hidden.2.weight"][:4, 6].count_nonzero() == 0
    assert new["hidden.2.weight"][4:, 6].count_nonzero() == 3
    assert new["classifier.weight"][:, 6].count_nonzero() == 0


@given(st.floats(0.05, 100), st.floats(0.3, 1))
def test_the_effect_of_eps_is_first_order(v, c):
    eps = 1e-5
    off = float(eps_ratio(torch.tensor(v, dtype=torch.float64), c, eps)) - 1
    assert off == pytest.approx(-eps * (1 / c**2 - 1) / (2 * v), rel=0.01, abs=1e-15)


@pytest.mark.parametrize("name", ["resnet A", "resnet B", "convnet", "mlp batch norm"])
def test_train_mode_is_off_by_eps_alone(name):
    """The error is about 1e-6 where batch variances are near 1."""
    case, graph = NETWORKS[name], graph_of(name)
    half = {n: w // 2 for n, w in graph.full_widths.items()}
    run = Growing(case.make(), case.inputs(num_samples=32), VarianceTransfer(), half, graph=graph, rough=False)
    event = run.grow()
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-12
    # Two channels of a few pixels: some variances are far below 1.
    assert 1e-10 < event.eps_error_train < 2e-4


@pytest.mark.parametrize("name", ["mlp", "mlp batch norm", "convnet", "residual"])
def test_the_literal_rule_shrinks_the_logits_by_exactly_its_factor(name):
    method = VarianceTransfer(output_multiplier=False, rescale_layers_without_batch_norm=True)
    case, graph = NETWORKS[name], graph_of(name)
    run = Growing(case.make(), case.inputs(), method, dict.fromkeys(graph.groups, 2), graph=graph)
    before = run.outputs()
    event = run.grow(dict.fromkeys(graph.groups, 5))
    shrunk = {"mlp": (2 / 5) ** 2, "mlp batch norm": 2 / 5, "convnet": 2 / 5, "residual": 2 / 5 * (2 / 5) ** 0.5}
    torch.testing.assert_close(run.outputs(), before * shrunk[name])
    assert event.output_factor == pytest.approx(1 / shrunk[name])
    assert run.state.output_factor == 1.0


def three(method: VarianceTransfer) -> Grown:
    """Three hidden layers of 8 units grown to 12."""
    torch.manual_seed(0)
    return Grown(MLP(20, [16, 16, 16], 3), torch.randn(8, 20), 8, 12, method)


def test_the_constraint_restores_unit_variance():
    """Theorem A.1: C Var[W] = 1 (times the gain) for old weights, whatever their variance before."""
    grown = three(VarianceTransfer("constraint", rescale_layers_without_batch_norm=True))
    for name, fan_in in (("hidden.0", 20), ("hidden.2", 8), ("hidden.4", 8)):
        variance_before, variance_after = (
            fan_in * float(weights[f"{name}.weight"][:8, :fan_in].var(correction=0))
            for weights in (grown.old, grown.new)
        )
        assert variance_after == pytest.approx(2.0, rel=1e-12)
        assert variance_before != pytest.approx(2.0, rel=1e-3)
    torch.testing.assert_close(grown.new["classifier.weight"][:, :8], grown.old["classifier.weight"] * 8 / 12)
    torch.testing.assert_close(grown.output_after * grown.event.output_factor, grown.output_before)


def test_tanh_keeps_its_input():
    method = VarianceTransfer(layer_multipliers=False, rescale_layers_without_batch_norm=True)
    grown = narrow(method, activation="tanh")
    assert torch.equal(grown.new["hidden.2.weight"][:4, :4], grown.old["hidden.2.weight"])
    assert torch.equal(grown.new["hidden.2.bias"][:4], grown.old["hidden.2.bias"])
    assert grown.event.output_factor == pytest.approx(6 / 4)


@pytest.mark.parametrize("name", NETWORKS)
def test_rescaling_any_classes_multiplies_the_output_alone(name):
    """Each scale class has another factor; the output changes by that of its own class alone."""
    case, graph = NETWORKS[name], graph_of(name)
    network = case.make()
    roughen(network)
    produced = {layer.scale_out for layer in graph.layers} - graph.unit_classes
    factors = {scale: 0.5 + 0.3 * index for index, scale in enumerate(sorted(produced))}
    tensors = tensors_of(network, graph)
    before = outputs(network, case.inputs(), False)
    applied = as_applied(graph, tensors)
    new, _ = rescale(graph, applied, factors)
    for tensor_name, tensor in as_stored(graph, {**applied, **new}).items():
        tensors[tensor_name].copy_(tensor)
    expected = before * factors.get(graph.output_class, 1.0)
    torch.testing.assert_close(outputs(network, case.inputs(), False), expected, rtol=1e-10, atol=1e-10)


def test_hidden_layers_without_a_norm_keep_their_scale_without_multipliers():
    grown = three(VarianceTransfer(layer_multipliers=False))
    for name in ("hidden.0", "hidden.2", "hidden.4"):
        old = grown.old[f"{name}.weight"]
        torch.testing.assert_close(grown.new[f"{name}.weight"][:8, : old.shape[1]], old, rtol=0, atol=0)
    # The logits keep the output layer's factor alone, whatever the depth.
    assert grown.event.output_factor == pytest.approx(12 / 8, rel=1e-12)
