"""Narrowing and widening in place."""

import pytest
import torch
from torch import nn

from growlab.lab.networks import CifarResNet, convnet
from growlab.widths import grid, replace_tensors, resize, restore_tensors, trace
from tests.cases import NETWORKS, graph_of, outputs, widths_at


def bookkeeping(network: nn.Module) -> dict[str, tuple]:
    """Sizes according to the attributes of modules, by name."""
    sizes = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            sizes[name] = (module.out_features, module.in_features)
        elif isinstance(module, nn.Conv2d):
            sizes[name] = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            sizes[name] = (module.num_features,)
    return sizes


@pytest.mark.parametrize(("name", "part"), [(name, (0.5, 1.7, 0.01)[place % 3]) for place, name in enumerate(NETWORKS)])
def test_a_resized_network_is_an_ordinary_one(name, part):
    case, graph = NETWORKS[name], graph_of(name)
    network, built = case.make(), case.make()
    widths = widths_at(graph, part)
    resize(network, graph, graph.full_widths, widths)
    for module, sizes in bookkeeping(network).items():
        assert tuple(network.get_submodule(module).weight.shape) == sizes
    assert outputs(network, case.inputs(), training=True).isfinite().all()
    # After resizing back, kept channels have their values and the others are zero.
    resize(network, graph, widths, graph.full_widths)
    assert repr(network) == repr(built)
    for key, tensor in network.state_dict().items():
        original = built.state_dict()[key]
        assert tensor.shape == original.shape
        assert torch.equal(tensor[tensor != 0], original[tensor != 0])


def test_a_narrowed_network_is_the_one_built_narrow():
    network = CifarResNet(2, 5, channels=(8, 16, 32), shortcut="B")
    graph = trace(network, torch.randn(2, 3, 8, 8))
    resize(network, graph, graph.full_widths, {n: w // 2 for n, w in graph.full_widths.items()})
    narrow = CifarResNet(2, 5, channels=(4, 8, 16), shortcut="B")
    assert repr(network) == repr(narrow)
    narrow.load_state_dict(network.state_dict(), strict=True)
    x = torch.randn(3, 3, 8, 8)
    assert torch.equal(outputs(network, x, False), outputs(narrow, x, False))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda w: [nn.Conv1d(2, w, 3), nn.PReLU(w), nn.BatchNorm1d(w), nn.Conv1d(w, 3, 3)], (2, 9)),
        (lambda w: [nn.Conv3d(2, w, 1), nn.GroupNorm(1, w), nn.Conv3d(w, 3, 1)], (2, 4, 4, 4)),
        (lambda w: [nn.ConvTranspose1d(2, w, 3), nn.Tanh(), nn.ConvTranspose1d(w, 3, 3)], (2, 5)),
        (lambda w: [nn.ConvTranspose2d(2, w, 3), nn.InstanceNorm2d(w, affine=True), nn.Conv2d(w, 3, 3)], (2, 5, 5)),
        (lambda w: [nn.Linear(2, w), nn.LayerNorm(w), nn.Linear(w, 3)], (2,)),
        (lambda w: [nn.Conv2d(2, w, 1), nn.BatchNorm2d(w, affine=False), nn.Conv2d(w, 3, 1)], (2, 4, 4)),
    ],
)
@pytest.mark.parametrize("width", [2, 6])
def test_attributes_of_modules_equal_those_of_modules_built_at_that_width(build, shape, width):
    network = nn.Sequential(*build(4))
    graph = trace(network, torch.randn(2, *shape))
    resize(network, graph, graph.full_widths, {"0": width})
    built = nn.Sequential(*build(width))
    assert repr(network) == repr(built)
    built.load_state_dict(network.state_dict(), strict=True)


def test_resize_rejects_a_width_of_0():
    network, graph = NETWORKS["mlp"].make(), graph_of("mlp")
    with pytest.raises(ValueError, match=r"width 0 of hidden\.2 leaves no channel"):
        resize(network, graph, graph.full_widths, graph.full_widths | {"hidden.2": 0})
    assert network.hidden[2].out_features == 7


def test_unchanged_tensors_stay_the_same_objects():
    network, graph = NETWORKS["convnet"].make(), graph_of("convnet")
    before = dict(network.named_parameters())
    resize(network, graph, graph.full_widths, graph.full_widths | {"features.4": 3})
    same = {name for name, parameter in network.named_parameters() if parameter is before[name]}
    assert same == {"features.0.weight", "features.1.weight", "features.1.bias", "classifier.bias"}


def test_shared_tensors_stay_shared():
    network, graph = NETWORKS["shared"].make(), graph_of("shared")
    resize(network, graph, graph.full_widths, widths_at(graph, 0.5))
    assert network.first.weight is network.second.weight
    assert network.second.out_features == network.first.out_features == 3
    assert len(list(network.parameters())) == len(list(NETWORKS["shared"].make().parameters()))


class Undecayed(nn.Parameter):
    """A parameter class by which an optimizer's groups are chosen."""


def test_new_tensors_are_like_the_old_ones():
    network = convnet((3, 8, 8), 4, [6, 8], [2, 2])
    for place, trained in ((0, True), (4, False)):
        network.features[place].weight = Undecayed(network.features[place].weight.detach(), requires_grad=trained)
    graph = trace(network, torch.randn(2, 3, 8, 8))
    network = network.to(torch.bfloat16, memory_format=torch.channels_last)
    network.features[4].weight.group_of_user = "slow"
    resize(network, graph, graph.full_widths, widths_at(graph, 0.5))
    first, weight = network.features[0].weight, network.features[4].weight
    assert all(type(one) is Undecayed and isinstance(one, nn.Parameter) and one.is_leaf for one in (first, weight))
    assert type(network.classifier.weight) is nn.Parameter
    assert weight.dtype == torch.bfloat16
    assert first.requires_grad and not weight.requires_grad
    assert weight.group_of_user == "slow"
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert network.features[5].running_var.dtype == torch.bfloat16
    assert not isinstance(network.features[5].running_var, nn.Parameter)


def test_restoring_brings_the_same_objects_back():
    network, graph = NETWORKS["depthwise"].make(), graph_of("depthwise")
    before = [*network.named_parameters(), *network.named_buffers()]
    representation = repr(network)
    new = {
        name: tensor.new_ones(graph.shape(name, dict.fromkeys(graph.groups, 3)))
        for name, tensor in before
        if name in graph.axes
    }
    replaced = replace_tensors(network, graph, new)
    assert repr(network) != representation
    restore_tensors(network, graph, replaced)
    after = [*network.named_parameters(), *network.named_buffers()]
    assert all(a is b for (_, a), (_, b) in zip(before, after, strict=True))
    assert repr(network) == representation


def test_new_content_is_copied():
    network, graph = NETWORKS["mlp"].make(), graph_of("mlp")
    content = torch.zeros(9, 12, dtype=torch.float64)
    replace_tensors(network, graph, {"hidden.0.weight": content})
    content += 1
    assert network.hidden[0].weight.count_nonzero() == 0
    with pytest.raises(KeyError):
        replace_tensors(network, graph, {"hidden.9.weight": content})


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(([0, 1, 2], [1, 2]), id="runs"),
        pytest.param(([0, 3], [1, 2]), id="one apart"),
        pytest.param(([0, 3], [2, 0]), id="both apart"),
        pytest.param(([], [1, 2]), id="nothing"),
        pytest.param(([1, 0], [0, 1, 2]), id="backwards"),
        pytest.param(([0, 2, 1, 3], [0, 1]), id="out of order between first and last"),
    ],
)
def test_grid_takes_the_rows_and_columns_named(positions):
    tensor = torch.arange(24.0).reshape(4, 3, 2)
    chosen = [torch.tensor(p, dtype=torch.long) for p in (*positions, [0, 1])]
    expected = tensor[positions[0]][:, positions[1]]
    assert torch.equal(tensor[grid(chosen)], expected)
    target = torch.zeros_like(tensor)
    target[grid(chosen)] = expected
    for row, entries in enumerate(target):
        for column, entry in enumerate(entries):
            taken = row in positions[0] and column in positions[1]
            assert torch.equal(entry, tensor[row, column] if taken else torch.zeros(2))


def test_hooks_on_parameters_follow_and_are_removed_by_their_handles():
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    graph = trace(network, torch.randn(2, 3))
    frozen, called = network[0].weight.detach().clone(), []

    def keep_the_second_row(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[1] = 0.0
        return gradient

    masks = network[0].weight.register_hook(keep_the_second_row)
    notes = network[0].weight.register_post_accumulate_grad_hook(lambda weight: called.append(weight.shape))
    for width in (4, 6):
        resize(network, graph, {n: len(network[0].weight) for n in graph.groups}, {n: width for n in graph.groups})
        network.zero_grad()
        network(torch.ones(2, 3)).square().sum().backward()
        torch.optim.SGD(network.parameters(), lr=0.1).step()
        assert torch.equal(network[0].weight[1], frozen[1])
        assert network[0].weight[0].ne(frozen[0]).any()
    assert called == [(4, 3), (6, 3)]
    masks.remove()
    notes.remove()
    network.zero_grad()
    network(torch.ones(2, 3)).square().sum().backward()
    assert network[0].weight.grad[1].any()
    assert len(called) == 2


def test_volumes_keep_their_memory_format():
    network = nn.Sequential(nn.Conv3d(2, 8, 3), nn.ReLU(), nn.Conv3d(8, 6, 3), nn.Flatten(), nn.Linear(6, 3))
    graph = trace(network, torch.randn(2, 2, 5, 5, 5))
    network = network.to(memory_format=torch.channels_last_3d)
    for before, after in ((1.0, 0.5), (0.5, 1.0)):
        resize(network, graph, widths_at(graph, before), widths_at(graph, after))
        weight = network[2].weight
        assert weight.is_contiguous(memory_format=torch.channels_last_3d) and not weight.is_contiguous()
