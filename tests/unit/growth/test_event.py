"""A growth event as a whole: receipts, noise, rollback, and everything that it must leave alone."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.growth import (
    GrownTensors,
    GrowthContext,
    GrowthState,
    HyperCloning,
    Net2Net,
    PairGrowth,
    ParityError,
    RandomGrowth,
    VarianceTransfer,
)
from growlab.growth import outputs as growth_outputs
from growlab.growth.method import generator
from growlab.growth.outputs import main_output, observe, without_side_effects
from growlab.growth.parity import relative_error
from growlab.growth.rescale import fold_output_factor
from growlab.lab.training.build import make_network
from growlab.widths import UnsupportedOperation, trace
from tests.cases import NETWORKS, Around, Growing, differing, outputs, planted


class Broken(PairGrowth):
    """Promises to preserve the function, but changes the classifier's weight."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def grow(self, context: GrowthContext) -> GrownTensors:
        tensors = super().grow(context).tensors
        tensors["classifier.weight"] = self.change(tensors["classifier.weight"])
        return GrownTensors(tensors)


def depthwise(method=None) -> Growing:
    return planted("depthwise", method or PairGrowth())


def everything(network: nn.Module) -> list:
    return [*network.named_parameters(), *network.named_buffers()]


class Noisy(PairGrowth):
    """Adds noise of a wrong shape."""

    def noise(self, context):
        return {"pointwise.weight": torch.zeros(1, 2, 3)}


@pytest.mark.parametrize(
    ("method", "error"),
    [
        pytest.param(Broken(lambda w: w * 1.01), "growth to stage 1 with Broken changed the output by", id="off"),
        pytest.param(Broken(lambda w: w * math.nan), "changed the output", id="not a number"),
        pytest.param(Broken(lambda w: w * math.inf), "changed the output", id="infinite"),
        pytest.param(Broken(lambda w: w[:, :-1]), "shape", id="of a wrong shape"),
        pytest.param(Noisy(), "broadcast shape", id="noise"),
    ],
)
def test_an_event_that_breaks_its_promise_is_undone(method, error):
    run = depthwise(method)
    before, representation, state = everything(run.network), repr(run.network), run.state.as_dict()
    content, output = copy.deepcopy(run.network.state_dict()), run.outputs()
    with pytest.raises(RuntimeError, match=error):
        run.grow()
    assert all(a is b for (_, a), (_, b) in zip(before, everything(run.network), strict=True))
    assert not differing(run.network.state_dict(), content)
    assert repr(run.network) == representation
    assert run.state.as_dict() == state
    assert torch.equal(run.outputs(), output)
    # And it can still grow.
    run.method = PairGrowth()
    run.grow()


def test_a_network_that_has_become_nan_does_not_grow_and_none_shrinks():
    run = depthwise()
    with pytest.raises(ValueError, match=r"stem would shrink from 4 to 2"):
        run.grow({"stem": 2})
    with torch.no_grad():
        run.network.classifier.bias.fill_(math.nan)
    with pytest.raises(ParityError, match="output contains NaN before growth to stage 1"):
        run.grow()


@pytest.mark.parametrize("method", [PairGrowth(0.1), Net2Net(0.1), VarianceTransfer(noise_std=0.1), RandomGrowth()])
def test_an_event_leaves_generators_modes_statistics_and_hooks_alone(method):
    run, seen = depthwise(method), []
    network = run.network.train()
    network.norm.eval()
    network.depthwise.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    counted = network.norm2.num_batches_tracked.clone()
    modes = {name: module.training for name, module in network.named_modules()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run.grow()
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: module.training for name, module in network.named_modules()} == modes
    assert torch.equal(network.norm2.num_batches_tracked, counted)
    assert all(p.grad is None for p in network.parameters())
    assert torch.get_float32_matmul_precision() == "highest"
    seen.clear()
    network(*run.x)
    assert seen == [8] and not network.norm._forward_pre_hooks


@pytest.mark.parametrize("training", [True, False])
def test_a_network_is_observed_in_both_modes_without_dropout_and_stays_as_it_is(training):
    run = depthwise()
    network = run.network.train(training)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    expected = [run.outputs(mode) for mode in (True, False)]
    assert not torch.allclose(*expected)
    found, inputs = {}, []
    seen = observe(network, run.x, run.graph.norms, found.update)
    torch.testing.assert_close([seen.train, seen.eval], expected)
    assert all(module.training == training for module in network.modules())
    handle = network.classifier.register_forward_pre_hook(lambda module, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        observe(network, run.x)
    handle.remove()
    assert not differing(dict(network.named_buffers()), before)
    network.norm.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    network.train()(*run.x)
    mean, variance = found["norm"]
    torch.testing.assert_close(mean, inputs[0].mean((0, 2, 3)))
    torch.testing.assert_close(variance, inputs[0].var((0, 2, 3)))
    x, functional = torch.randn(4, 4), Around(lambda net, x: F.dropout(x, 0.5, net.training))
    assert torch.equal(observe(functional, (x,)).train, x)


def test_a_cast_takes_no_precision_from_a_network_in_float64():
    """Networks for half precision cast to float32 and back."""
    network = Around(lambda net, x: net.layer(x.float().to(x.dtype)), layer=[3, 2]).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(observe(network, (x,)).eval, network.layer(x).detach())


def test_attention_without_its_dropout_keeps_its_mask():
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x, future = torch.randn(3, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    with without_side_effects(attention):
        found, weights = attention.train()(x, x, x, attn_mask=future)
    expected, those = attention.eval()(x, x, x, attn_mask=future)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(weights, those)


def test_the_receipt():
    run = planted("mlp", PairGrowth(0.05))
    num_before = sum(p.numel() for p in run.network.parameters())
    event = run.grow()
    receipt = event.as_dict()
    assert "replaced" not in receipt
    assert receipt["method"] == "PairGrowth"
    assert receipt["widths_before"] == {"hidden.0": 4, "hidden.2": 3, "hidden.4": 4}
    assert receipt["widths_after"] == run.graph.full_widths
    assert receipt["num_params_before"] == num_before
    assert receipt["num_params"] == sum(p.numel() for p in NETWORKS["mlp"].make().parameters())
    assert receipt["parity_error_eval"] < 1e-12 < receipt["noise_error_eval"] < 0.5
    assert receipt["seconds"] > event.parity_sec > 0
    births = {"hidden.0": [0] * 4 + [1] * 5, "hidden.2": [0] * 3 + [1] * 4, "hidden.4": [0] * 4 + [1] * 4}
    assert run.state.births == births
    assert GrowthState.from_dict(run.state.as_dict()) == run.state


def test_replaced_holds_exactly_the_tensors_that_changed():
    run = planted("mlp", PairGrowth())
    before = dict(run.network.named_parameters())
    event = run.grow({"hidden.2": 7})
    assert set(event.replaced) == {"hidden.2.weight", "hidden.2.bias", "hidden.4.weight"}
    for name, parameter in run.network.named_parameters():
        old, new = event.replaced.get(name, (before[name], before[name]))
        assert old is before[name]
        assert new is parameter


def test_noise_is_relative_to_the_initialisation_and_spares_old_entries():
    grown = []
    for std in (0.0, 0.1):
        run = planted("mlp", PairGrowth(std))
        run.grow(dict.fromkeys(run.graph.groups, 200))
        grown.append(run.network.state_dict())
    difference = grown[1]["hidden.2.weight"] - grown[0]["hidden.2.weight"]
    assert difference[:3, :4].count_nonzero() == 0
    assert float(difference[3:].std()) == pytest.approx(0.1 * math.sqrt(2 / 200), rel=0.03)
    assert torch.equal(grown[0]["hidden.2.bias"], grown[1]["hidden.2.bias"])


def test_a_network_grows_past_its_full_width():
    run = planted("resnet A", PairGrowth())
    before = run.outputs(training=True)
    run.grow({n: 2 * w for n, w in run.graph.full_widths.items()})
    torch.testing.assert_close(run.outputs(training=True), before)
    assert run.network.classifier.in_features == 2 * 13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduced_precision_grows_within_its_rounding(dtype):
    run = planted("mlp batch norm", PairGrowth(), dtype=dtype)
    assert run.grow().parity_tolerance_eval > 1e-3
    assert {p.dtype for p in run.network.parameters()} == {dtype}
    assert run.network.hidden[1].running_var.dtype == dtype


def test_numbers_depend_on_seed_stage_and_name():
    def draw(*key):
        return torch.rand(3, generator=generator(*key)).tolist()

    assert draw(0, 1, "a") == draw(0, 1, "a")
    assert len({tuple(draw(*key)) for key in [(0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b"), (0, 11, "")]}) == 5


def test_an_output_without_a_tensor_raises_an_error():
    with pytest.raises(UserError, match="output, a dict, has no tensor"):
        main_output({"loss": None, "rows": []})


def test_relative_error():
    before = torch.tensor([1.0, -4.0])
    assert relative_error(before, before) == 0
    assert relative_error(before, before / 2, factor=2.0) == 0
    assert relative_error(before, torch.tensor([1.0, -3.0])) == 0.25
    assert math.isnan(relative_error(before, torch.tensor([1.0, math.nan])))
    ruled_out = torch.tensor([2.0, -math.inf])
    assert relative_error(ruled_out, torch.tensor([1.0, -math.inf])) == 0.5
    assert relative_error(ruled_out, torch.tensor([2.0, 0.0])) == math.inf
    assert relative_error(torch.tensor([1.0 + 2j]), torch.tensor([1.0 + 1j])) == 0.5
    assert relative_error(torch.tensor([1.0 + 2j]).conj(), torch.tensor([1.0 - 1j])) == 0.5
    zeros = torch.zeros(2)
    assert relative_error(zeros, before) == 4 and relative_error(zeros, zeros) == 0
    assert math.isnan(relative_error(zeros, torch.tensor([0.0, math.nan])))


@pytest.mark.parametrize("place", [0, 8, 2**18 - 1, 2**18, 2**19 + 36])
def test_relative_error_of_an_output_of_many_pieces(place: int) -> None:
    """The difference, the scale and NaN are found in every piece, and in outputs that are not contiguous."""
    before = torch.ones(2**19 + 37)
    before[place] = -4.0
    after = before.clone()
    after[-1 - place] += 3.0
    assert relative_error(before, after) == 0.75
    assert relative_error(before, after / 3, factor=3.0) == pytest.approx(0.75, rel=1e-6)
    assert relative_error(before.expand(2, -1).T, after.expand(2, -1).T) == 0.75
    after[place] = math.nan
    assert math.isnan(relative_error(before, after))


@pytest.mark.parametrize("method", [PairGrowth(), VarianceTransfer()])
def test_a_head_that_starts_at_zero_grows(method):
    """Outputs are 0 before the event and rounding after it, so there is no scale for a relative error."""
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4)), torch.randn(8, 6)
    run = Growing(network, x, method, 0.25, rough=False)
    nn.init.zeros_(network[2].weight)
    nn.init.zeros_(network[2].bias)
    event = run.grow()
    assert 0 < network(x).abs().max() < 1e-6
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-6


def test_folding_the_factor_through_a_residual_output():
    """The second layer reads what its output is added to, so only its bias is scaled."""
    torch.manual_seed(0)
    network = Around(lambda net, x: (h := F.relu(net.first(x))) + net.second(h), first=[4, 6], second=[6, 6])
    x = torch.randn(3, 4)
    graph = trace(network, x)
    expected = outputs(network, x, False) * 3
    parameters = list(network.parameters())
    fold_output_factor(network, graph, 3.0)
    torch.testing.assert_close(outputs(network, x, False), expected)
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))


def test_a_factor_that_no_layer_can_absorb_raises_an_error():
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    graph = trace(network, torch.randn(2, 4))
    fold_output_factor(network, graph, 1.0)
    with pytest.raises(UserError, match="cannot be folded"):
        fold_output_factor(network, graph, 2.0)


@pytest.mark.parametrize("method", [PairGrowth, VarianceTransfer, RandomGrowth])
def test_new_entries_of_bare_parameters_are_within_the_range_of_old_ones(method):
    """A variance per channel under a square root, as in hand-written normalisations."""
    x = torch.randn(8, 5)
    for seed in range(5):
        network = Around(
            lambda net, x: net.classifier(F.relu(net.a(x)) * torch.rsqrt(net.variance + 1e-9)),
            **{"a": [5, 16], "classifier": [16, 3], "variance": nn.Parameter(torch.linspace(0.01, 1.0, 16) ** 3)},
        )
        run = Growing(network, x, method(), seed=seed, rough=False)
        old = network.variance.clone()
        run.grow(seed=seed)
        assert len(old) == 8 and torch.equal(network.variance[:8], old)
        assert old.min() <= network.variance.min() and network.variance.max() <= old.max()
        assert network(x).isfinite().all()


@pytest.mark.parametrize(
    ("method", "kind", "tied"),
    [
        *((VarianceTransfer(noise_std=0.1), nn.Embedding, True), (RandomGrowth(), nn.Embedding, False)),
        *((PairGrowth(noise_std=0.1), nn.EmbeddingBag, False), (Net2Net(), nn.EmbeddingBag, True)),
    ],
)
def test_padding_that_no_gradient_reaches_stays_zero(method, kind, tied) -> None:
    torch.manual_seed(0)
    table = kind(11, 8, padding_idx=3)
    last = nn.Linear(8, 11, bias=False)
    if tied:
        last.weight = table.weight
    network = nn.Sequential(table, nn.Linear(8, 8), nn.ReLU(), last)
    run = Growing(network, torch.tensor([[1, 3, 4], [9, 3, 3]]), method, rough=False)
    if tied:
        with torch.no_grad():
            table.weight[3] += 1.0
    run.grow()
    assert not table.weight.detach().eq(0).all(1)[[1, 9]].any()
    assert bool(table.weight[3].any()) == tied
    # A padding row that has been trained has no zeros.
    assert not tied or bool(table.weight[3].ne(0).all())


@pytest.mark.parametrize("method", [VarianceTransfer(), HyperCloning()], ids=lambda method: method.name)
def test_inside_autocast_an_event_is_as_exact_as_outside(method) -> None:
    found = []
    for enabled in (False, True):
        run = planted("transformer", method, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            event = run.grow()
        assert max(event.parity_error_eval, event.parity_error_train) < 1e-5
        found.append(run.network.state_dict())
    assert not differing(*found)


def test_autocast_in_a_forward_does_not_count_as_an_error() -> None:
    """A forward may need autocast for a product of two types."""

    def entering(net: Around, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.relu(net.a(x))
            return net.b(x.to(torch.bfloat16) if net.casts else x).float()

    torch.manual_seed(0)
    network, mixed = (Around(entering, a=[6, 16], b=[16, 3], casts=casts) for casts in (False, True))
    x = torch.randn(8, 6)
    grower = Grower(network, x, method=Net2Net(), trigger={0: 0.25, 1: 0.5, 2: 1.0})
    for epoch in (1, 2):
        (event,) = grower.step(epoch=epoch)
        assert event.parity_error_eval <= 1e-6
    torch.testing.assert_close(observe(mixed, x).eval, mixed(x), rtol=0.05, atol=0.02)


def test_weights_of_several_types_may_need_autocast() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    run = Growing(network, torch.randn(4, 5), PairGrowth(), rough=False)
    network[0].to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert run.grow().parity_error_eval < 0.1
    assert [network[n].weight.dtype for n in (0, 2)] == [torch.bfloat16, torch.float32]


def test_eval_mode_is_run_again_only_where_it_may_differ_from_train_mode(monkeypatch) -> None:
    modes, call = [], growth_outputs.call_with
    # Patched here, because an event restores lists that hooks of the network append to.
    monkeypatch.setattr(growth_outputs, "call_with", lambda n, x: (modes.append(n.training), call(n, x))[1])
    passes = {}
    for norm in (nn.LayerNorm, nn.BatchNorm1d):
        network = nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 3))
        run = Growing(network, torch.randn(4, 6), PairGrowth(), rough=False)
        modes.clear()
        event = run.grow()
        passes[norm] = modes[2:]
        assert event.parity_error_eval < 1e-5 and event.parity_error_train < 1e-5
    assert passes[nn.LayerNorm] == [True] and False in passes[nn.BatchNorm1d]


@pytest.mark.parametrize("target", ["resnet20", "mlp5", "convnet4"])
def test_a_network_without_channels_is_named_by_its_setting(target: str) -> None:
    model = OmegaConf.load(f"conf/model/{target}.yaml")
    model.width = 0
    images = SimpleNamespace(network_arguments={"image_shape": (1, 32, 32), "num_classes": 10})
    with pytest.raises(UserError, match=r"without entries, with model\.width=0.*at least 1") as raised:
        make_network(model, images)
    assert "data" not in str(raised.value)


def test_a_trace_names_the_layer_without_channels() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        network = nn.Sequential(nn.Conv2d(4, 0, 3), nn.Conv2d(0, 2, 3))
    with pytest.raises(UnsupportedOperation, match=r"0\.weight .* is empty \(\[0, 4, 3, 3\]\)"):
        trace(network, torch.ones(2, 4, 9, 9))
