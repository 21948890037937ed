"""Groups, axes and scale classes that tracing finds, and its errors."""

import copy
import gc
import logging
import random
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.widths import Part, UnsupportedOperation, trace
from tests.cases import NETWORKS, Around, differing, graph_of


@pytest.mark.parametrize("name", NETWORKS)
def test_groups_of_small_networks(name):
    assert graph_of(name).full_widths == NETWORKS[name].groups


def test_axes_consist_of_parts():
    """Padded shortcuts, a flattened image, concatenated tensors."""
    graph, added = graph_of("resnet A"), ("layers.1.0.conv2", "layers.2.0.conv2")
    assert {name: group.below for name, group in graph.groups.items() if group.below} == dict(
        zip(added, (5, 8), strict=True)
    )
    stream = tuple(map(Part, ("conv1", *added)))
    assert graph.axes["classifier.weight"][1].parts == graph.axes["layers.2.0.conv2.weight"][0].parts == stream
    assert graph.axes["layers.2.0.conv1.weight"][1].parts == stream[:2]
    assert graph.axes["layers.1.0.bn2.running_var"][0].parts == stream[:2]
    assert (len(graph.layers), len(graph.norms)) == (8, 7)
    assert graph.fixed == {"classifier": "the network's output"}
    assert graph_of("flatten").axes["hidden.weight"][1].parts == (Part("conv", 1, 3 * 2),)
    assert graph_of("flatten").shape("hidden.weight", {"conv": 3, "hidden": 2}) == (2, 18)
    axes = graph_of("dense").axes
    assert axes["classifier.weight"][1].parts == (Part("stem"), Part("conv1"), Part("conv2"))
    assert axes["norm2.running_mean"][0].parts == (Part("stem"), Part("conv1"))
    assert graph_of("bare").fixed["single"] == "a single channel"


def test_shared_tensors_have_one_name_and_one_scale():
    graph = graph_of("shared")
    assert "second.weight" not in graph.axes
    first, second = [layer for layer in graph.layers if layer.weight == "first.weight"]
    assert (first.bias, second.bias) == ("first.bias", "second.bias")
    assert (first.scale_in, first.scale_out) == (second.scale_in, second.scale_out)
    (twice,) = [layer for layer in graph.layers if layer.weight == "twice.weight"]
    assert twice.scale_in == twice.scale_out
    assert len(graph.norms) == 1


def test_scales_stop_at_functions_that_are_not_homogeneous():
    graph = graph_of("mlp tanh")
    assert all(layer.scale_out in graph.unit_classes for layer in graph.layers[:-1])
    graph = graph_of("mlp")
    assert not any(layer.scale_out in graph.unit_classes for layer in graph.layers)
    assert [a.scale_out == b.scale_in for a, b in zip(graph.layers, graph.layers[1:], strict=False)] == [True] * 3
    residual = {layer.name: layer for layer in graph_of("residual").layers}
    assert residual["stem"].scale_out == residual["conv2"].scale_out != residual["conv1"].scale_out
    assert residual["projection"].scale_out == residual["conv3"].scale_out


def odd(function) -> nn.Module:
    """Two linear layers on [B, L, C] around any function."""
    return Around(lambda net, x: net.outside(function(net.inside(x))), inside=[4, 8], outside=[8, 3])


@pytest.mark.parametrize("persistent", [True, False])
def test_a_weight_that_is_a_buffer_or_computed_does_not_grow(persistent):
    blur = Around(
        lambda net, x: net.out(F.conv2d(net.conv(x), net.kernel, groups=6)),
        **{"conv": nn.Conv2d(3, 6, 1), "out": nn.Conv2d(6, 2, 1)},
        kernel=nn.Buffer(torch.ones(6, 1, 3, 3), persistent=persistent),
    )
    graph = trace(blur, torch.randn(2, 3, 5, 5))
    assert graph.full_widths == {}
    assert graph.fixed["conv"] == "depthwise convolution: kernel (a weight that is no parameter)"
    standardised = Around(
        lambda net, x: net.out(F.linear(x, net.inside.weight * 2, net.inside.bias)), inside=[3, 6], out=[6, 2]
    )
    assert trace(standardised, torch.randn(2, 3)).full_widths == {}


def test_an_unknown_operation_raises_an_error_with_its_name_and_line():
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.put(torch.tensor([0]), x.new_zeros(1))  # named in the message

    network = nn.Sequential(nn.Linear(4, 8), nn.Sequential(Inner()), nn.Linear(8, 2))
    with pytest.raises(UnsupportedOperation) as caught:
        trace(network, torch.randn(2, 4))
    line = Inner.forward.__code__.co_firstlineno + 1
    message = str(caught.value)
    assert "aten.put.default" in message
    assert "module 1.0" in message
    assert f'{__file__}", line {line}' in message
    # The message shows the line that makes it work.
    assert "keep_full=['put']" in message
    graph = trace(network, torch.randn(2, 4), keep_full=["put"])
    assert graph.full_widths == {}
    assert graph.fixed["0"] == "used by put"


def test_code_that_leaves_torch_raises_an_error_with_its_line(capfd):
    leaving = Around(lambda net, x: x if x.detach().numpy().sum() > 0 else -x)
    with pytest.raises(UnsupportedOperation, match=r"cannot follow Around at `.*x if x\..*trace=SUBMODULE"):
        trace(leaving, torch.randn(2, 4))
    trace(Around(lambda net, x: x if x.amax()[None][0] == 1 else -x), torch.randn(2, 4))
    # torch itself would print the exported program.
    assert capfd.readouterr().err == ""


class TrainedOnLargeImages(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.shape[-1] < 2:
            raise ValueError("images of at least 6 pixels are needed")
        return x


@pytest.mark.parametrize(
    ("layers", "example", "message"),
    [
        (
            [nn.Conv2d(3, 4, 5), TrainedOnLargeImages(), nn.ReLU(), nn.Flatten(), nn.Linear(4, 6), nn.Linear(6, 2)],
            *(torch.randn(2, 3, 5, 5), "Sequential does not run in train mode on its example inputs"),
        ),
        (
            [nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 2)],
            *(torch.randn(1, 4), r"in train mode .*more than 1 value.*; take larger inputs"),
        ),
        (
            [nn.Linear(4, 8), nn.Linear(8, 2)],
            *(torch.ones(2, 4, dtype=torch.int64), r"in eval mode .*dtype.*; give it tensors of the type"),
        ),
        (
            [nn.Conv2d(1, 4, 3), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(4, 2)],
            *(torch.randn(2, 1, 5, 5), r"Sequential cannot compute an input of \[2, 1, 5, 5\] \(Runtime"),
        ),
    ],
)
def test_trace_rejects_examples_that_the_network_cannot_run_or_train_on(
    layers: list[nn.Module], example: Tensor, message: str, caplog: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    network = nn.Sequential(*layers)
    with pytest.raises(UnsupportedOperation, match=message):
        trace(network, example)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "Traceback" not in capfd.readouterr().err
    assert network.training


@pytest.mark.parametrize(
    "function", [lambda x: x[x[..., 0] > 0], lambda x: x[:, x[0, :, 0].nonzero()[:, 0]]], ids=["mask", "nonzero"]
)
def test_data_dependent_sizes_raise_an_error_without_data(function):
    with pytest.raises(UnsupportedOperation, match=r"reads numbers from a tensor \(.*x\[.* trace it on a device"):
        trace(odd(function).to("meta"), torch.randn(2, 6, 4, device="meta"))


def test_an_operation_that_the_network_does_not_run_is_named():
    with pytest.raises(UnsupportedOperation, match=r"keep_full=\[reluu\]: Around runs no .* nearest are relu\.$"):
        trace(odd(F.relu), torch.randn(2, 6, 4), keep_full=["reluu", "linear"])
    with pytest.raises(UnsupportedOperation, match=r"runs no .* it runs linear, relu\.$"):
        trace(odd(F.relu), torch.randn(2, 6, 4), keep_full=["nothing"])


def test_bare_weights_are_layers_by_their_own_names():
    """Two bare weights, followed by a matrix that is not learned."""
    bare = Around(
        lambda net, x: F.relu(x @ net.first) @ net.second @ net.codes,
        **{"first": nn.Parameter(torch.randn(4, 8)), "second": nn.Parameter(torch.randn(8, 5))},
        codes=nn.Buffer(torch.randn(5, 3)),
    )
    for network, prefix in ((bare, ""), (nn.Sequential(bare), "0.")):
        graph = trace(network, torch.randn(2, 4))
        assert [layer.name for layer in graph.layers] == [f"{prefix}first", f"{prefix}second"]
        assert graph.last_layers == {f"{prefix}second": True}


def test_keys_that_are_written_over_are_linear_in_nothing():
    """Otherwise queries and keys are linear in their layers, and their head dimension may grow."""

    def attention(net, x: Tensor) -> Tensor:
        q, k, v = net.q(x), net.k(x), net.v(x)
        if net.written:
            k.chunk(2, 1)[0][:, 1:].tanh_()
        return net.out(F.scaled_dot_product_attention(q, k, v))

    for written, groups in ((False, {"q": 8}), (True, {})):
        network = Around(attention, q=[4, 8], k=[4, 8], v=[4, 8], out=[8, 2], written=written)
        assert trace(network, torch.randn(2, 6, 4)).full_widths == groups


def attending() -> nn.Module:
    """A stream of 16 channels with four heads of four channels."""

    def attend(net, x, mask=None):
        x = net.a(x)
        return net.b((x + net.attend(x, x, x, attn_mask=mask)[0]).mean(1))

    return Around(attend, a=[5, 16], attend=nn.MultiheadAttention(16, 4, batch_first=True), b=[16, 3])


@pytest.mark.parametrize(
    ("rows", "masks"),
    [(3, []), (4, []), (16, []), *((rows, [torch.ones(4, 4, dtype=torch.bool).triu(1)]) for rows in (4, 6))],
)
def test_the_batch_size_may_be_that_of_another_dimension(rows: int, masks: list[Tensor]) -> None:
    """torch's attention works on batch times heads; a mask over positions keeps its shape in other batches."""
    graph = trace(attending(), (torch.randn(rows, 4, 5), *masks))
    assert list(graph.groups) == ["a"] and graph.fixed.keys() == {"b"}


def test_lazy_and_scripted_layers_raise_errors():
    lazy = nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(8), nn.Linear(8, 2))
    with pytest.raises(UnsupportedOperation, match=r"1 \(LazyLinear\) has no shape yet; call the network once"):
        trace(lazy, torch.randn(2, 4))
    lazy(torch.randn(2, 4))
    assert trace(lazy, torch.randn(2, 4)).full_widths == {"0": 8, "1": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = nn.Sequential(nn.Linear(4, 8), torch.jit.script(nn.Linear(8, 2)))
    with pytest.raises(UnsupportedOperation, match=r"1 is a torch\.jit\.ScriptModule"):
        trace(scripted, torch.randn(2, 4))


@pytest.mark.parametrize("of_images", [False, True])
def test_what_is_tried_otherwise_refuses_no_network(of_images):
    """Channels that could grow reach an operation without a channel rule: values, or the rows of an image."""

    def accumulated(net, x: Tensor) -> Tensor:
        mixed = (x @ x.mT).softmax(-1) @ net.v(x)
        if of_images:
            mixed = F.avg_pool2d(mixed.view(len(x), -1, 2, 2), 1)
        return net.o(torch.relu(net.a(mixed.put(torch.tensor([0]), torch.zeros(1)))))

    network = Around(accumulated, o=[6, 2], v=[5, 8], a=[2 if of_images else 8, 6])
    assert trace(network, torch.randn(3, 4, 5)).full_widths == {"a": 6}


def test_tracing_changes_nothing_in_the_network() -> None:
    def noisy(net, x: Tensor) -> Tensor:
        x = net.norm(net.first(x)).relu()
        if net.training:
            x = x * (random.random() + float(np.random.rand())) + torch.normal(0.0, 0.1, x.shape)
        return net.last(x)

    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    network, x = Around(noisy, first=[6, 16], norm=nn.BatchNorm1d(16).eval(), last=[16, 3]), torch.randn(4, 6)
    content = copy.deepcopy(network.state_dict())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = drawn()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert trace(network, x).groups
    assert drawn() == expected
    assert network.training and network.last.training and not network.norm.training
    assert not differing(network.state_dict(), content)


def test_a_trace_leaves_old_objects_out_of_garbage_collection(monkeypatch):
    module, seen = sys.modules["growlab.widths.trace"], list[tuple[int, ...]]()
    traced, thresholds = module._traced, gc.get_threshold()
    monkeypatch.setattr(module, "_traced", lambda *given: seen.append(gc.get_threshold()) or traced(*given))
    assert trace(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(2, 4)).groups
    assert seen[0][:2] == thresholds[:2] and seen[0][2] > 100_000 and gc.get_threshold() == thresholds
