"""Adding neurons of isotropic layers changes nothing; removing them changes outputs by about their singular value."""

import copy
from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn

from growlab.growth import GrowthState, ParityError, grow
from growlab.optim import LARS, SGD, exempt_from_decay, follow
from growlab.parts.isotropic import Choices, IntrinsicLength, Isotropic, IsotropicCNN, IsotropicMLP, change_width
from growlab.parts.isotropic.resize import COLUMNS, IMPORTANCES, watch
from growlab.parts.isotropic.spectrum import decompose, producers, weights_of
from growlab.widths import WidthGraph, replace_tensors, rotate, tensors_of, trace
from tests.cases import differing, outputs, roughen, train
from tests.unit.parts.isotropic.test_networks import OneByOne, rotation


class Flattened(nn.Module):
    """Flattened convolutions: each channel is read at several positions."""

    def __init__(self, gain: bool = False) -> None:
        super().__init__()
        self.features = IsotropicCNN(2, [4, 5], [1, 2], 3, chi_norm=False, gain_channel=gain).features
        self.classifier = nn.Linear((6 if gain else 5) * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


NETWORKS = {
    "mlp": (lambda: IsotropicMLP(6, [5, 8, 4], 3), (6,)),
    "mlp chi": (lambda: IsotropicMLP(6, [9, 5], 3, "leaky", chi_norm=True), (6,)),
    "cnn chi": (lambda: IsotropicCNN(2, [4, 6], [2, 1], 3), (2, 4, 4)),
    "flattened": (Flattened, (2, 4, 4)),
    "residual": (OneByOne, (2, 4, 4)),
    "mlp gain": (lambda: IsotropicMLP(6, [5, 8, 4], 3, gain_channel=True), (6,)),
    "cnn gain": (lambda: IsotropicCNN(2, [4, 6], [2, 1], 3, "leaky", 0.3, False, True), (2, 4, 4)),
    "flattened gain": (lambda: Flattened(gain=True), (2, 4, 4)),
    "chi gain": (lambda: IsotropicMLP(6, [5, 4], 3, chi_norm=True, gain_channel=True), (6,)),
}


@cache
def traced(name: str) -> tuple[nn.Module, WidthGraph, Tensor]:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = build().double()
    roughen(network)
    x = torch.randn(16, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return network, trace(network, x[:2], follow_norms=True), x


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, WidthGraph, Tensor]:
    network, graph, x = traced(name)
    return copy.deepcopy(network).to(dtype), graph, x.to(dtype)


def fresh_state(graph: WidthGraph) -> GrowthState:
    return GrowthState(0, graph.full_widths, {group: [0] * width for group, width in graph.full_widths.items()})


def changed(network: nn.Module, graph: WidthGraph, group: str, width: int, x: Tensor, **options) -> nn.Module:
    """A copy of the network with another width of one group."""
    copied = copy.deepcopy(network)
    observed = watch(network, graph, (x,))
    change = change_width(
        graph, tensors_of(copied, graph), graph.full_widths, group, width, observed=observed, **options
    )
    replace_tensors(copied, graph, change.tensors)
    return copied


def silence(network: nn.Module, graph: WidthGraph, group: str, size: float, direction: int = 0) -> None:
    """Set the smallest singular value (or that at `direction`) of the weights that produce a group to `size`."""
    (layer,) = producers(graph, group)
    weight = dict(network.named_parameters())[layer.weight]
    left, values, right = decompose(weights_of(graph, group, tensors_of(network, graph), graph.full_widths))
    values[len(values) - 1 if direction == 0 else direction] = size
    with torch.no_grad():
        weight.copy_((left @ torch.diag(values) @ right.T).view_as(weight))


SINGLE = [("mlp", "hidden.0"), ("mlp", "hidden.2"), ("mlp", "hidden.4"), ("mlp chi", "hidden.0")]
SINGLE += [("mlp chi", "hidden.3"), ("cnn chi", "features.0"), ("flattened", "features.0")]
SINGLE += [("flattened", "features.2"), ("residual", "branch")]
WITH_GAIN = [("mlp gain", "hidden.0"), ("mlp gain", "hidden.2"), ("mlp gain", "hidden.4")]
WITH_GAIN += [("cnn gain", "features.0"), ("cnn gain", "features.3"), ("flattened gain", "features.0")]
WITH_GAIN += [("flattened gain", "features.2")]
LAYERS = [*SINGLE, *WITH_GAIN, ("residual", "cnn.3"), ("chi gain", "hidden.3")]


CHANGES = [
    *((*layer, 3, Choices(columns=columns)) for layer, columns in zip(LAYERS, cycle(COLUMNS), strict=False)),
    *(("flattened", "features.2", 3, Choices(columns=columns)) for columns in COLUMNS),
    *((*layer, 2, Choices("random", bias)) for layer, bias in zip(WITH_GAIN, cycle([0.6, -0.9]), strict=False)),
    *(
        ("mlp", "hidden.0", 2, Choices("zero", 0.7, direction="backward")),
        ("flattened", "features.2", 2, Choices("zero", 0.7)),
    ),
    *(
        (*layer, -1, Choices(removal_compensation=one))
        for layer, one in zip(SINGLE + WITH_GAIN, cycle(["bias", "batch"]), strict=False)
    ),
]


@pytest.mark.parametrize(("name", "group", "more", "choices"), CHANGES, ids=str)
def test_exact_changes(name: str, group: str, more: int, choices: Choices) -> None:
    """Adding neurons (with a bias if columns are zero or a gain is read), and removing neurons with only a bias."""
    network, graph, x = made(name)
    modes = [False, True]
    if more < 0:
        silence(network, graph, group, 0.0)
        layer = network.get_submodule(group)
        into = decompose(layer.weight.flatten(1))[0][:, -1]
        with torch.no_grad():
            # Only a gain channel absorbs the bias exactly; a subtracted mean removes it.
            layer.bias.add_(((2.0 if "gain" in name else 0.0) - into @ layer.bias) * into)
        modes = [True] if "chi" in name else [False]
        choices = Choices() if "chi" in name else choices
    new = changed(network, graph, group, graph.full_widths[group] + more, x, choices=choices)
    for training in modes:
        inputs = x if training else 3 * x
        assert torch.allclose(outputs(new, inputs, training), outputs(network, inputs, training), rtol=1e-9, atol=1e-10)
    if more == 3:
        weight = new.get_submodule(producers(graph, group)[0].name).weight
        assert weight.shape[0] == graph.full_widths[group] + 3 and weight[-3:].count_nonzero() == 0


def test_a_removed_bias_is_compensated_on_average_without_a_gain_channel() -> None:
    """An error remains, because the next biases contain only E[g]."""
    network, graph, x = made("mlp gain")
    silence(network, graph, "hidden.0", 0.0)
    into = decompose(network.hidden[0].weight)[0][:, -1]
    with torch.no_grad():
        network.hidden[0].bias.add_(2.0 * into)
    unread = replace(graph, radii=tuple(replace(radius, gain_channel=False) for radius in graph.radii))
    approximate = changed(network, unread, "hidden.0", 4, x)
    assert (outputs(approximate, 3 * x, False) - outputs(network, 3 * x, False)).abs().max() > 1e-3


def test_new_columns_are_as_chosen() -> None:
    network, graph, x = made("mlp")
    old = network.hidden[2].weight.norm()
    small = changed(network, graph, "hidden.0", 7, x, choices=Choices(columns="small")).hidden[2].weight
    assert torch.allclose(small[:, 5:].square().mean(0).sqrt(), torch.tensor(0.01).double())
    for columns in ("orthogonal", "random", "copy"):
        weight = changed(network, graph, "hidden.0", 7, x, choices=Choices(columns=columns)).hidden[2].weight
        gram = weight.T @ weight
        if columns == "orthogonal":
            assert gram[5:, :5].abs().max() < 1e-12 and gram[5, 6].abs() < 1e-12
        if columns == "copy":
            assert torch.equal(weight[:, 5:], weight[:, :2])
        else:
            assert torch.allclose(gram.diagonal()[5:].sqrt(), old / 5**0.5)
    # Three logits leave no room for a fifth orthogonal column, so it is random.
    weight = changed(network, graph, "hidden.4", 6, x).classifier.weight
    assert torch.isfinite(weight).all() and (weight.norm(dim=0) > 0).all()


@pytest.mark.parametrize("bias", [0.6, -0.9])
@pytest.mark.parametrize(("name", "group"), [("mlp", "hidden.2"), ("flattened", "features.2")])
def test_a_new_bias_is_taken_from_the_intrinsic_length(name: str, group: str, bias: float) -> None:
    """Exactly with zero columns; with others up to E[g], by which the next bias is corrected."""
    network, graph, x = made(name)
    width, expected = graph.full_widths[group], outputs(network, x, False)
    exact = changed(network, graph, group, width + 2, x, choices=Choices("zero", bias))
    assert torch.allclose(outputs(exact, x, False), expected, rtol=1e-10, atol=1e-10)
    layer = exact.get_submodule(group)
    (radius,) = (r for r in graph.radii if r.groups == (group,))
    lengths = [dict(net.named_parameters())[radius.length].exp() for net in (network, exact)]
    assert torch.allclose(lengths[0], lengths[1] + layer.bias[width:].square().sum())
    assert torch.allclose(layer.bias[width].abs(), abs(bias) * lengths[0].sqrt())
    near = outputs(changed(network, graph, group, width + 2, x, choices=Choices("random", bias)), x, False)
    uncorrected = changed(network, graph, group, width + 2, x, choices=Choices("random", bias))
    consumer = next(one for one in graph.layers if graph.axes[one.weight][1].groups == (group,))
    with torch.no_grad():
        tensors_of(uncorrected, graph)[consumer.bias].copy_(tensors_of(network, graph)[consumer.bias])
    far = outputs(uncorrected, x, False)
    assert 0 < (near - expected).norm() < 0.5 * (far - expected).norm()


@pytest.mark.parametrize(("correction", "dtype"), [("bias", torch.float32), ("batch", torch.float64)])
def test_one_of_several_neurons_that_carry_nothing_keeps_their_biases(correction: str, dtype: torch.dtype) -> None:
    """Nine neurons on four inputs: of five singular values of 0, four are removed exactly; of nine, all but one."""
    torch.manual_seed(0)
    for scale, smallest in ((1.0, 5), (0.0, 1)):
        network = IsotropicMLP(4, [9], 3).to(dtype)
        with torch.no_grad():
            network.hidden[0].weight.mul_(scale)
            network.hidden[0].bias.mul_(4)
        x = torch.randn(16, 4, dtype=dtype)
        graph = trace(network, x, follow_norms=True)
        expected = outputs(network, 3 * x, False)
        errors = {}
        for width in range(8, 0, -1):
            pruned = changed(network, graph, "hidden.0", width, x, choices=Choices(removal_compensation=correction))
            errors[width] = float((outputs(pruned, 3 * x, False) - expected).abs().max())
        limit = 1e-13 if dtype is torch.float64 else 2e-6
        assert all(error < limit for width, error in errors.items() if width >= smallest), errors
        assert smallest == 1 or errors[4] > 1e-3


@pytest.mark.parametrize(("seed", "size"), [*((seed, 0.0) for seed in range(3)), (0, 1e-16), (1, 1e-12), (2, 1e-8)])
def test_rounding_in_the_batchs_mean_squares_makes_no_nan(size: float, seed: int) -> None:
    """The mean square of a neuron without a bias is about 0, and below 0 by rounding as often as above."""
    network, graph, x = made("mlp")
    silence(network, graph, "hidden.2", size)
    turned = rotation(seed, 8)
    rotate(network, graph, {"hidden.2": turned})
    left, _, _ = decompose(network.hidden[2].weight)
    with torch.no_grad():
        network.hidden[2].bias.sub_(left[:, -1] * (left[:, -1] @ network.hidden[2].bias))
    for least_squares in (False, True):
        choices = Choices(removal_compensation="batch", least_squares=least_squares)
        pruned = changed(network, graph, "hidden.2", 7, x, choices=choices)
        assert all(torch.isfinite(tensor).all() for tensor in pruned.state_dict().values())
        expected = outputs(network, x, False)
        assert torch.allclose(outputs(pruned, x, False), expected, rtol=1e-10, atol=1e-10 + 10 * size)


@pytest.mark.parametrize(("name", "group"), [("mlp", "hidden.0"), ("flattened", "features.2")])
def test_the_intrinsic_length_takes_up_a_removed_bias(name: str, group: str) -> None:
    """With outgoing weights of zero only the norm could be wrong, and it is right."""
    network, graph, x = made(name)
    silence(network, graph, group, 0.0)
    (radius,) = (r for r in graph.radii if r.groups == (group,))
    activation = network.get_submodule(radius.name)
    left, _, _ = decompose(network.get_submodule(group).weight.flatten(1))
    consumer = next(one for one in graph.layers if graph.axes[one.weight][1].groups == (group,))
    weight, into = tensors_of(network, graph)[consumer.weight], left[:, -1]
    with torch.no_grad():
        by_channel = weight.view(len(weight), len(into), -1)
        by_channel.sub_(torch.einsum("ocp,c,d->odp", by_channel.clone(), into, into))
        network.get_submodule(group).bias.add_(2.0 * into)
    expected, before = outputs(network, x, False), float(activation.log_length.detach().exp())
    pruned = changed(network, graph, group, graph.full_widths[group] - 1, x)
    assert torch.allclose(outputs(pruned, x, False), expected, rtol=1e-10, atol=1e-10)
    b = float(into @ network.get_submodule(group).bias.detach())
    assert float(pruned.get_submodule(radius.name).log_length.detach().exp()) == pytest.approx(before + b * b)
    lost = changed(network, graph, group, graph.full_widths[group] - 1, x, choices=Choices(removal_compensation="none"))
    assert (outputs(lost, x, False) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("start", [-2.0, 0.0, 0.3])
def test_a_signed_length_takes_up_and_gives_away_biases_below_0_too(start: float) -> None:
    """o' = o + b*^2 on removal, o - b*^2 on growth, for any sign of o; all is exact with a gain channel."""
    torch.manual_seed(0)
    network = IsotropicMLP(6, [5], 3, length=IntrinsicLength(start, "signed"), gain_channel=True).double()
    roughen(network)
    with torch.no_grad():
        network.hidden[1].length.fill_(start)
    x = torch.randn(16, 6, dtype=torch.float64)
    graph = trace(network, x[:2], follow_norms=True)
    assert graph.radii[0].length == "hidden.1.length"
    grown = changed(network, graph, "hidden.0", 7, x, choices=Choices("random", 0.9))
    assert torch.allclose(outputs(grown, 2 * x, False), outputs(network, 2 * x, False), rtol=1e-10)
    taken = grown.hidden[0].bias[5:].square().sum()
    assert torch.allclose(grown.hidden[1].length + taken, network.hidden[1].length, rtol=1e-12, atol=1e-12)
    assert start == 0 or taken > 0
    silence(network, graph, "hidden.0", 0.0)
    left = decompose(network.hidden[0].weight)[0]
    with torch.no_grad():
        network.hidden[0].bias.add_(2.0 * left[:, -1])
    bias = left[:, -1] @ network.hidden[0].bias
    pruned = changed(network, graph, "hidden.0", 4, x)
    assert torch.allclose(outputs(pruned, 2 * x, False), outputs(network, 2 * x, False), rtol=1e-10)
    assert torch.allclose(pruned.hidden[1].length, start + bias.square())


def test_a_constant_length_follows_removed_biases_and_no_optimizer() -> None:
    torch.manual_seed(0)
    network = IsotropicMLP(6, [5], 3, length=IntrinsicLength(0.2, "constant")).double()
    x = torch.randn(16, 6, dtype=torch.float64)
    graph = trace(network, x[:2], follow_norms=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, weight_decay=0.5)
    train(network, optimizer, x, steps=3)
    assert float(network.hidden[1].intrinsic_length) == pytest.approx(0.2)
    pruned = changed(network, graph, "hidden.0", 4, x)
    left = decompose(network.hidden[0].weight)[0]
    bias = float((left[:, -1] @ network.hidden[0].bias).detach())
    assert float(pruned.hidden[1].intrinsic_length) == pytest.approx(0.2 + bias**2)
    assert not pruned.hidden[1].log_length.requires_grad


@pytest.mark.parametrize(
    ("name", "group"), [("mlp", "hidden.0"), ("flattened", "features.2"), ("cnn gain", "features.0")]
)
def test_backwards_a_neuron_that_nothing_reads_leaves_its_mean_square_in_the_norm(name: str, group: str) -> None:
    """Without outgoing weights the linear part is unchanged, and the norm is right on average."""
    network, graph, x = made(name)
    (reader,) = (one for one in graph.layers if group in graph.axes[one.weight][1].groups)
    weight, width = tensors_of(network, graph)[reader.weight], graph.full_widths[group]
    by_channel = weight.detach()[:, : weight.shape[1] - name.endswith("gain")]
    by_channel = by_channel.reshape(len(weight), width, -1)
    into = rotation(3, width)[0]
    by_channel.sub_(torch.einsum("ocp,c,d->odp", by_channel.clone(), into, into))
    backward = Choices(direction="backward")
    observed, expected = watch(network, graph, (x,)), outputs(network, x, False)
    (radius,) = (r for r in graph.radii if r.groups == (group,))
    pruned = changed(network, graph, group, width - 1, x, choices=backward)
    before, after = (net.get_submodule(radius.name).intrinsic_length for net in (network, pruned))
    assert torch.allclose(after - before, into @ observed[radius.name].square @ into)
    assert (outputs(pruned, x, False) - expected).abs().max() > 1e-6
    # A part that is the same for all samples is compensated exactly.
    (producer,) = producers(graph, group)
    row = tensors_of(network, graph)[producer.weight].detach()
    row.sub_(torch.einsum("c,d,d...->c...", into, into, row.clone()))
    pruned = changed(network, graph, group, width - 1, x, choices=backward)
    assert torch.allclose(outputs(pruned, 2 * x, False), outputs(network, 2 * x, False), rtol=1e-10)


def test_backwards_the_smallest_unread_direction_is_removed_first() -> None:
    network, graph, x = made("mlp")
    # Three logits read four neurons, so one direction is free; without two logits, three are.
    with torch.no_grad():
        network.classifier.weight[1:].zero_()
    expected = outputs(network, x, False)
    errors = []
    for width in (3, 2, 1):
        pruned = changed(network, graph, "hidden.4", width, x, choices=Choices(direction="backward"))
        errors.append(float((outputs(pruned, x, False) - expected).norm()))
    assert errors == sorted(errors) and errors[0] < 0.5 * errors[-1], errors


def test_each_compensation_reduces_the_error_of_removal() -> None:
    """The removed neuron contributes to the output; the error is measured on other data."""
    network, graph, _ = made("mlp")
    fresh = torch.randn(256, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.5
    seen = torch.randn(256, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64) + 0.5
    silence(network, graph, "hidden.4", 0.3)
    with torch.no_grad():
        network.hidden[4].bias.add_(1.0)
    expected = outputs(network, fresh, False)
    errors = {}
    for name, choices in {
        "none": Choices(removal_compensation="none"),
        "bias": Choices(),
        "batch": Choices(removal_compensation="batch"),
        "least squares": Choices(removal_compensation="batch", least_squares=True),
    }.items():
        pruned = changed(network, graph, "hidden.4", 3, seen, choices=choices)
        errors[name] = float((outputs(pruned, fresh, False) - expected).square().mean())
    assert errors["least squares"] <= errors["batch"] < errors["none"], errors
    assert errors["bias"] < errors["none"], errors


def test_equation_30_is_the_deletion_of_a_column() -> None:
    """Y = W S S'^T (S' S'^T)^-1 for the smallest singular value, as the paper remarks."""
    network, graph, x = made("mlp")
    left, values, _ = decompose(network.hidden[0].weight)
    following = network.hidden[2].weight @ left
    full, kept = torch.diag(values), torch.diag(values)[:4]
    updated = following @ full @ kept.T @ torch.linalg.inv(kept @ kept.T)
    pruned = changed(network, graph, "hidden.0", 4, x)
    assert torch.allclose(pruned.hidden[2].weight, updated)


def test_gradient_importance_is_the_derivative_by_the_singular_value() -> None:
    """Against autograd through U diag(s) V^T."""
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, generator=source, dtype=torch.float64)
    left, values, right = decompose(weight)
    target = torch.randn(4, 6, generator=source, dtype=torch.float64)
    s = values.clone().requires_grad_()
    (derivative,) = torch.autograd.grad((torch.tanh(left @ torch.diag(s) @ right.T) * target).sum(), s)
    w = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((torch.tanh(w) * target).sum(), w)
    scores = IMPORTANCES["gradient"](left, values, right, gradient)
    assert torch.allclose(scores, (values * derivative).abs())
    assert torch.equal(IMPORTANCES["singular_value"](left, values, right, None), values)


def test_the_neuron_with_the_lowest_score_goes() -> None:
    network, graph, x = made("mlp")
    left, values, right = decompose(network.hidden[0].weight)
    # The gradient is nearly zero in the second direction.
    slopes = torch.tensor([1.0, 1e-6, 2.0, 3.0, 4.0], dtype=torch.float64)
    gradient = left @ torch.diag(slopes) @ right.T
    pruned = changed(
        *(network, graph, "hidden.0", 4, x),
        choices=Choices(importance="gradient"),
        gradients={"hidden.0.weight": gradient},
    )
    assert torch.allclose(pruned.hidden[0].weight.norm(dim=1), values[[0, 2, 3, 4]])


# As a growth method --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), list(zip(NETWORKS, 5 * [torch.float64, torch.float32], strict=False)))
def test_events_leave_receipts(name: str, dtype: torch.dtype) -> None:
    """Growth in every layer at once is exact; removal is declared, measured and, beyond a limit, undone."""
    network, graph, x = made(name, dtype)
    state = fresh_state(graph)
    wider = {group: width + 2 for group, width in graph.full_widths.items()}
    event = grow(network, graph, Isotropic(), state, wider, 0, (x,))
    limit = 1e-10 if dtype is torch.float64 else 1e-5
    assert event.parity_error_eval < limit and event.parity_error_train < limit
    assert event.parity_tolerance_eval is not None
    assert all(births[-2:] == [1, 1] and births[0] == 0 for births in state.births.values())
    assert all(len(entry["singular_values"]) == wider[g] - 2 for g, entry in event.report.items())
    # Combinations of all old channels are as old as the oldest.
    again = {group: width + 1 for group, width in wider.items()}
    grow(network, graph, Isotropic(), state, again, 0, (x,))
    assert all(births == [0] * wider[group] + [2] for group, births in state.births.items())
    wider = again
    narrower = {group: width - 5 for group, width in wider.items()}
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ParityError, match="was left as it was"):
        grow(network, graph, Isotropic(max_pruning_error=1e-9), state, narrower, 0, (x,))
    assert not differing(before, network.state_dict())
    event = grow(network, graph, Isotropic(), state, narrower, 0, (x,))
    assert event.parity_tolerance_eval is None and event.parity_error_eval > 0
    for group, entry in event.report.items():
        kept = torch.tensor(entry["singular_values"][: narrower[group]])
        gone = torch.tensor(entry["removed"])
        part = gone.norm() / torch.cat([kept, gone]).norm()
        assert len(gone) == 5 and entry["removed_part"] == pytest.approx(float(part), rel=1e-5)
    assert state.widths == narrower and {g: len(b) for g, b in state.births.items()} == narrower
    receipt = event.as_dict()
    assert receipt["widths_before"] == wider and receipt["report"] == event.report


@pytest.mark.parametrize(("name", "cls"), [("cnn chi", torch.optim.SGD), ("mlp", SGD), ("cnn chi", SGD), ("mlp", LARS)])
def test_training_with_momentum_continues_unchanged(name: str, cls: type) -> None:
    """Gradient descent does not depend on the basis, nor does it with rotated momentum (Appendix D)."""
    alone, graph, x = made(name)
    method, state = Isotropic(columns="zero"), fresh_state(graph)
    grown, events = copy.deepcopy(alone), []
    for network in (alone, grown):
        optimizer = cls(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        exempt_from_decay(optimizer, network)
        for step in range(9):
            if network is grown and step in (3, 6):
                # New neurons without weights on either side; then the same ones are removed.
                after = {g: w + (2 if step == 3 else 0) for g, w in graph.full_widths.items()}
                events.append(grow(network, graph, method, state, after, 0, (x,)))
                widths = events[-1].widths_before, events[-1].widths_after
                follow(optimizer, events[-1].replaced, graph, *widths, carry=events[-1].carry)
            train(network, optimizer, x)
    assert len(events) == 2 and optimizer.param_groups[1]["weight_decay"] == 0
    for training in (False, True):
        error = (outputs(grown, x, training) - outputs(alone, x, training)).abs().max()
        assert error < 1e-10 * outputs(alone, x, training).abs().max()


def test_second_moments_are_what_uncorrelated_gradients_would_have() -> None:
    """Var(U^T g) = U^2 Var(g); a new channel starts at the mean, so that its first steps have the usual length."""
    network, graph, x = made("mlp")
    state = fresh_state(graph)
    before = dict(graph.full_widths)
    wider = {**before, "hidden.0": 6}
    event = grow(network, graph, Isotropic(), state, wider, 0, (x,))
    v = torch.rand(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = event.carry.carried(v, "hidden.0.weight", graph, before, wider, 2)
    basis = event.carry.bases["hidden.0"][:5]
    assert torch.allclose(moved[:5], basis.square() @ v) and torch.allclose(moved[5], v.mean(0))


@pytest.mark.parametrize("start", [2, 9])
def test_scaffold_mode_keeps_as_many_below_the_threshold(start: int) -> None:
    network, graph, x = made("mlp")
    method = Isotropic(reserve_neurons=2, threshold=0.5, relative=False)
    state = fresh_state(graph)
    for _ in range(2):
        widths = method.decide(graph, tensors_of(network, graph), state.widths, {})
        grow(network, graph, method, state, widths, 0, (x,))
    for group in graph.isotropic:
        values = decompose(weights_of(graph, group, tensors_of(network, graph), state.widths))[1]
        assert int((values < 0.5).sum()) == 2
    assert method.decide(graph, tensors_of(network, graph), state.widths, {}) == state.widths


def test_scheduled_mode_moves_one_neuron_at_a_time() -> None:
    _, graph, _ = made("mlp")
    method = Isotropic("scheduled", target_width=6, neurons_per_event=1)
    widths = graph.full_widths
    seen = []
    for _ in range(4):
        widths = method.decide(graph, {}, widths, {})
        seen.append(tuple(widths.values()))
    assert seen == [(6, 7, 5), (6, 6, 6), (6, 6, 6), (6, 6, 6)]


def test_boundaries() -> None:
    by_epoch = Isotropic(every_n_epochs=3, first=2, last=9)
    assert [by_epoch.boundary(epoch, 0) for epoch in range(12)] == [*(None, None, 2, 2, 2, 5, 5, 5, 8, 8, None, None)]
    by_step = Isotropic(every_n_steps=4)
    assert [by_step.boundary(0, step) for step in (0, 3, 4, 7, 8)] == [None, None, 4, 4, 8]


def test_a_network_without_isotropic_layers_raises_an_error() -> None:
    network = IsotropicMLP(6, [5], 3, "elementwise_tanh").double()
    graph = trace(network, torch.randn(2, 6, dtype=torch.float64), follow_norms=True)
    with pytest.raises(ValueError, match=r"needs a layer whose channels .* \(classifier: .*; hidden\.0: tanh"):
        Isotropic().decide(graph, tensors_of(network, graph), graph.full_widths, {})
    network, graph, x = made("mlp")
    with pytest.raises(ValueError, match="needs an optimizer that keeps a running mean"):
        Isotropic(importance="gradient").decide(graph, tensors_of(network, graph), graph.full_widths, {})
    chi, graph, x = made("mlp chi")
    with pytest.raises(ValueError, match="needs an intrinsic length and a bias that reaches it"):
        changed(chi, graph, "hidden.0", 10, x, choices=Choices("zero", 0.5))
