"""Expressivity bottleneck: the functional gradient that a layer cannot follow (Verbockhaven et al. 2024), for TINY."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.devices import on_cpu
from growlab.growth.constants import as_applied
from growlab.growth.data_driven import Candidates, DataDriven
from growlab.growth.fans import ChannelView, GroupTensors, group_tensors
from growlab.growth.measurement import IdentityNorms, Measurement, Pass, Seen, right_derivatives
from growlab.growth.method import GrowthContext
from growlab.growth.outputs import arithmetic
from growlab.widths import Layer, WidthGraph, as_run, tensors_of

# Singular values of S below this fraction of the largest count as zero, as in GroMo.
RANK = 1e-6


@dataclass(frozen=True)
class Bottleneck:
    """Expressivity bottleneck of the layer that consumes a group's channels, per sample.

    Attributes:
        wanted: E|V|^2 with V = -dL/dz at the layer's output z: the change of the output that lowers the loss.
        missing: min over dW of E|V - dW b|^2 with the layer's input b: the part that no change of its weights achieves.
    """

    wanted: float
    missing: float


@on_cpu
def bottlenecks(
    graph: WidthGraph, widths: Mapping[str, int], data: Measurement, seed: int = 0
) -> dict[str, Bottleneck]:
    """Measure the bottleneck of every growing group for which TINY is defined (Def. 2.3, with dW of Prop. 3.1).

    A layer with more inputs than the batches have output positions can fit any change: use enough batches.

    Args:
        graph: the network's width graph.
        widths: width of each group now.
        data: training batches; costs one forward and one backward pass over them.
        seed: the run's seed.

    Returns:
        Bottlenecks by group, without groups at full width and groups with several producers or consumers.
    """
    tensors = as_applied(graph, tensors_of(data.model, graph))
    context = GrowthContext(graph, tensors, widths, widths, seed, 0, data=data)
    growing = [fans for fans in measurable(graph, data.model) if widths[fans.group] < graph.full_widths[fans.group]]
    if not growing:
        return {}
    measured = moments(context, data, growing, dict(data.model.named_modules()))
    return {
        fans.group: _bottleneck(measured, fans.group)
        for fans in growing
        if float(measured[f"calls {fans.consumers[0].name}"]) == 1.0
    }


def out_of_reach(found: Mapping[str, Bottleneck]) -> float:
    """Return sum(missing) / sum(wanted) over all layers; 1 if nothing is wanted."""
    wanted = sum(bottleneck.wanted for bottleneck in found.values())
    return sum(bottleneck.missing for bottleneck in found.values()) / wanted if wanted else 1.0


def measurable(graph: WidthGraph, model: nn.Module) -> list[GroupTensors]:
    """Groups for which a bottleneck is defined: one producer and one consumer, both linear or plain Conv2d."""
    modules = dict(model.named_modules())
    every = (group_tensors(graph, group) for group in graph.groups)
    return [
        fans
        for fans in every
        if refuses_bottleneck(fans) is None
        and all(usual(modules.get(layer.name)) for layer in (fans.producers[0], fans.consumers[0]))
    ]


def _bottleneck(measured: Mapping[str, Tensor], group: str) -> Bottleneck:
    goal, wanted = measured[f"goal {group}"], float(measured[f"wanted {group}"])
    possible = float(torch.sum(goal * solved(measured[f"square {group}"], goal)))
    return Bottleneck(wanted, max(0.0, wanted - possible))


def refuses_bottleneck(fans: GroupTensors) -> str | None:
    """Return why a bottleneck is not defined for channels, or None: one producer and one consumer, not depthwise."""
    for layers, verb in ((fans.producers, "produced"), (fans.consumers, "consumed")):
        if len({layer.weight for layer in layers}) != 1:
            names = ", ".join(layer.name for layer in layers[:2]) or "no layer"
            return f"its channels are {verb} by {names}{' and others' if len(layers) > 2 else ''}, not by one layer"
    if fans.depthwise:
        return f"{fans.depthwise[0].name} maps each channel by its own filter"
    if len(fans.incoming) > 2 or len(fans.outgoing) > 1:
        return f"{fans.producers[0].name} has its channels on several axes"
    if fans.producers[0].transposed or fans.consumers[0].transposed:
        return f"{fans.producers[0].name} or {fans.consumers[0].name} is a transposed convolution"
    return None


def solved(square: Tensor, product: Tensor, ridge: float = 0.0) -> Tensor:
    """Solve (S + ridge) X = M for X, [I, O], without directions that the batches do not determine."""
    factor = cholesky(square, ridge)
    if factor is not None:
        return torch.cholesky_solve(product.double(), factor)
    inverse = torch.linalg.pinv(square.double(), hermitian=True, rtol=RANK)
    return inverse @ product.double()


def cholesky(square: Tensor, ridge: float) -> Tensor | None:
    """Cholesky factor of S + ridge * mean of the diagonal of S * I; None if that is singular or ill-conditioned."""
    square = square.double()
    amount = ridge * square.diagonal().mean()
    factor, failed = torch.linalg.cholesky_ex(square + amount * torch.eye(len(square)).to(square))
    # The largest eigenvalue is at most the trace.
    well_conditioned = float(amount) > RANK * float(square.trace())
    return factor if well_conditioned and not bool(failed) else None


def usual(module: nn.Module | None) -> bool:
    """Return True for layers whose inputs can be unfolded: Linear, or Conv2d without groups, with zero padding."""
    if isinstance(module, nn.Linear):
        return True
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def moments(
    context: GrowthContext, data: Measurement, groups: Sequence[GroupTensors], modules: Mapping[str, nn.Module]
) -> dict[str, Tensor]:
    """Measure moments of producers' inputs h and consumers' inputs b: E[h h^T], E[b b^T], E[b V^T] and E|V|^2."""
    view = ChannelView(context.graph, context.old_widths, context.old_widths)
    names = list(dict.fromkeys(layer.name for fans in groups for layer in (fans.producers[0], fans.consumers[0])))
    consumers = list(dict.fromkeys(fans.consumers[0].name for fans in groups))
    read = {layer.name: _inputs(layer, view) for fans in groups for layer in (fans.producers[0], fans.consumers[0])}

    def visit(one: Pass) -> dict[str, Tensor]:
        loss, seen = one.loss, one.seen
        gradients = torch.autograd.grad(loss, [seen[name].output for name in consumers], materialize_grads=True)
        slopes = dict(zip(consumers, gradients, strict=True))
        with arithmetic():
            means = {f"calls {name}": torch.tensor(float(seen[name].calls)).to(loss) for name in names}
            for fans in groups:
                producer, consumer = fans.producers[0], fans.consumers[0]
                h = _patches(modules[producer.name], producer, seen[producer.name], read[producer.name])
                b = _patches(modules[consumer.name], consumer, seen[consumer.name], read[consumer.name])
                v = -len(b) * _rows(modules[consumer.name], slopes[consumer.name]).double()
                reads = _reads(modules[consumer.name], seen[consumer.name], seen[producer.name])
                weighted = h if reads is None else h * reads[:, None].to(h)
                means[f"input {fans.group}"] = _product(weighted, h)
                means[f"square {fans.group}"] = _product(b, b)
                means[f"goal {fans.group}"] = _product(b, v)
                means[f"wanted {fans.group}"] = v.square().sum() / len(b)
        return means

    # The mode's activations are out of place; others could overwrite the layer's output.
    return data.run(context.old, visit, [right_derivatives()], names, work="moments")


def bottleneck(
    method: DataDriven,
    context: GrowthContext,
    data: Measurement,
    groups: Sequence[GroupTensors],
    updates: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
) -> dict[str, Tensor]:
    """Measure TINY's matrix N of each group, [incoming entries, outgoing entries], float64."""
    graph, old = context.graph, context.old_widths
    columns: dict[str, list[Tensor]] = {fans.group: [] for fans in groups}
    names = list(dict.fromkeys(fans.consumers[0].name for fans in groups))
    for number, candidates in enumerate(Candidates.of_each_entry(method, context, groups, {})):
        view, new = candidates.view, candidates.new
        layers = [fans.consumers[0] for fans in groups]
        read = {layer.name: _inputs(layer, view) for layer in layers}
        rows = {layer.name: as_run(graph.axes[layer.weight][0].kept(old, view.widths)) for layer in layers}

        def visit(one: Pass, new: Any = new, read: Any = read, rows: Any = rows) -> dict[str, Tensor]:
            parameters, loss, seen = one
            outputs = [seen[name].output for name in names]
            found = torch.autograd.grad(loss, outputs, retain_graph=True, materialize_grads=True)
            slopes = dict(zip(names, found, strict=True))
            gradients_of_incoming = {}
            for fans in groups:
                if not len(new[fans.group]):
                    continue
                consumer = fans.consumers[0]
                module, output = modules[consumer.name], seen[consumer.name].output
                with arithmetic():
                    patches = _patches(module, consumer, seen[consumer.name], read[consumer.name])
                    goal = -len(patches) * _rows(module, slopes[consumer.name]).double()
                    old_rows = rows[consumer.name]
                    rest = torch.zeros_like(goal)
                    rest[..., old_rows] = goal[..., old_rows] - patches @ updates[fans.group]
                    if isinstance(module, nn.Conv2d):
                        rest = rest.mT
                    rest = rest.reshape(output.shape).to(output) / len(patches)
                weights = [parameters[slot.name] for slot in fans.incoming]
                gradients = torch.autograd.grad(output, weights, rest, retain_graph=True, materialize_grads=True)
                for slot, gradient in zip(fans.incoming, gradients, strict=True):
                    gradients_of_incoming[f"{fans.group} {slot.name}"] = gradient.double()
            return gradients_of_incoming

        norms = IdentityNorms(_new_channels(data.model, graph, view, groups))
        modes = [right_derivatives(), norms]
        measured = data.run(candidates.tensors, visit, modes, names, work=("bottleneck", number))
        for fans in groups:
            if len(new[fans.group]):
                gradients = {slot.name: measured[f"{fans.group} {slot.name}"] for slot in fans.incoming}
                columns[fans.group].append(view.read(gradients, fans.incoming, fans.group, new[fans.group]).T)
    return {group: torch.cat(pieces, 1) for group, pieces in columns.items()}


def _inputs(layer: Layer, view: ChannelView) -> Tensor | slice:
    """Positions of a layer's inputs from old channels."""
    return as_run(view.graph.axes[layer.weight][1].kept(view.among, view.widths))


def _patches(module: nn.Module, layer: Layer, seen: Seen, read: Tensor | slice) -> Tensor:
    """Inputs `read` at each output position, with a 1 for the bias: [B, positions, entries], float64."""
    if isinstance(module, nn.Conv2d):
        x = seen.x[:, read]
        patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
    else:
        patches = _rows(module, seen.x[..., read])
    if layer.bias is not None:
        patches = torch.cat([patches, torch.ones_like(patches[..., :1])], -1)
    return patches.double()


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Products of [B, positions, I] and [B, positions, J], summed over positions, as the mean over samples: [I, J]."""
    return one.flatten(0, 1).T @ other.flatten(0, 1) / len(one)


def _reads(module: nn.Module, consumer: Seen, producer: Seen) -> Tensor | None:
    """Number of times a consumer reads each position of its producer's output, [positions]; None if all are equal.

    With pooling in between, a position counts as the one that it is pooled into.
    """
    if not isinstance(module, nn.Conv2d) or producer.output.dim() != 4:
        return None
    kernel, geometry = module.kernel_size, (module.dilation, module.padding, module.stride)
    once = torch.ones_like(F.unfold(consumer.x[:1, :1], kernel, *geometry))  # type: ignore[arg-type]
    counts = F.fold(once, consumer.x.shape[2:], kernel, *geometry)  # type: ignore[arg-type]
    return F.interpolate(counts, producer.output.shape[2:], mode="nearest").flatten()


def _rows(module: nn.Module, tensor: Tensor) -> Tensor:
    """Reshape a layer's output, or its gradient, to [B, positions, rows]."""
    if isinstance(module, nn.Conv2d):
        return tensor.flatten(2).mT
    return tensor[:, None, :] if tensor.dim() == 2 else tensor.flatten(1, -2)


def _new_channels(model: nn.Module, graph: WidthGraph, view: ChannelView, groups: Sequence[GroupTensors]):
    """Return the function for `IdentityNorms` that finds the mask of a norm's new channels by the norm's tensors."""
    names = {
        name: [fans.group for fans in groups if norm in fans.norms]
        for fans in groups
        for norm in fans.norms
        for name in (norm.weight, norm.running_mean)
        if name is not None
    }

    def new(mean: Tensor | None, weight: Tensor | None) -> Tensor | None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name in names:
            if name in tensors and (tensors[name] is mean or tensors[name] is weight):
                axis = graph.axes[name][0]
                is_new = torch.ones(axis.length(view.widths), dtype=torch.bool)
                is_new[axis.kept(view.among, view.widths)] = False
                return is_new
        return None

    return new
