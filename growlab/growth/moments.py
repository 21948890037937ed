"""Second moments of layers' inputs and of the functional gradient, for TINY."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.growth.data_driven import DataDriven, padded
from growlab.growth.fans import Fans, View
from growlab.growth.measurement import Measurement, Seen
from growlab.growth.method import Expansion
from growlab.growth.outputs import arithmetic
from growlab.growth.surrogates import IdentityNorms, right_derivatives
from growlab.widths import Layer, WidthGraph

# Outgoing entries measured in one pass, in multiples of the width; and their least number.
_AT_ONCE, _FEW = 2, 32


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
    expansion: Expansion, data: Measurement, groups: Sequence[Fans], modules: Mapping[str, nn.Module]
) -> dict[str, Tensor]:
    """Measure second moments per sample: of producers' and consumers' inputs, and of the latter with the goal V."""
    view = View(expansion.graph, expansion.old_widths, expansion.old_widths)
    names = list(
        dict.fromkeys(layer.name for fans in groups for layer in (fans.producers[0], fans.consumers[0]))
    )
    consumers = list(dict.fromkeys(fans.consumers[0].name for fans in groups))

    def visit(parameters: Mapping[str, Tensor], loss: Tensor, seen: Mapping[str, Seen]) -> dict[str, Tensor]:
        slopes = torch.autograd.grad(loss, [seen[name].output for name in consumers])
        goal = dict(zip(consumers, slopes, strict=True))
        with arithmetic():
            found = {f"calls {name}": torch.tensor(float(seen[name].calls)).to(loss) for name in names}
            for fans in groups:
                producer, consumer = fans.producers[0], fans.consumers[0]
                h = _patches(modules[producer.name], producer, expansion.graph, seen[producer.name], view)
                b = _patches(modules[consumer.name], consumer, expansion.graph, seen[consumer.name], view)
                v = -len(b) * _rows(modules[consumer.name], goal[consumer.name]).double()
                reads = _reads(modules[consumer.name], seen[consumer.name], seen[producer.name])
                weighted = h if reads is None else h * reads[:, None].to(h)
                found[f"input {fans.group}"] = _product(weighted, h)
                found[f"square {fans.group}"] = _product(b, b)
                found[f"goal {fans.group}"] = _product(b, v)
                found[f"wanted {fans.group}"] = v.square().sum() / len(b)
        return found

    # Out of place: an in-place activation would overwrite the layer's output.
    return data.run(expansion.old, visit, [right_derivatives()], names, work="moments")


def bottleneck(
    method: DataDriven,
    expansion: Expansion,
    data: Measurement,
    groups: Sequence[Fans],
    updates: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
) -> dict[str, Tensor]:
    """Measure N of each group, [incoming entries, outgoing entries], float64."""
    graph, old = expansion.graph, expansion.old_widths
    total = {fans.group: View(graph, old, old).size(fans.out, fans.group) for fans in groups}
    share = {group: min(count, max(_AT_ONCE * old[group], _FEW)) for group, count in total.items()}
    columns: dict[str, list[Tensor]] = {group: [] for group in total}
    names = list(dict.fromkeys(fans.consumers[0].name for fans in groups))
    for number in range(max(-(-total[group] // share[group]) for group in total)):
        parts = {
            group: torch.arange(count)[number * share[group] : (number + 1) * share[group]]
            for group, count in total.items()
        }
        widths = {**old, **{group: old[group] + len(part) for group, part in parts.items()}}
        view = View(graph, widths, old)
        tensors = padded(method, replace(expansion, new_widths=widths))
        for fans in groups:
            part = parts[fans.group]
            ones = torch.zeros(len(part), total[fans.group])
            ones[torch.arange(len(part)), part] = 1.0
            view.write(tensors, fans.out, fans.group, old[fans.group] + torch.arange(len(part)), ones)

        def visit(
            parameters: Mapping[str, Tensor],
            loss: Tensor,
            seen: Mapping[str, Seen],
            view: View = view,
            parts: Mapping[str, Tensor] = parts,
        ) -> dict[str, Tensor]:
            outputs = [seen[name].output for name in names]
            slopes = dict(zip(names, torch.autograd.grad(loss, outputs, retain_graph=True), strict=True))
            found = {}
            for fans in groups:
                if not len(parts[fans.group]):
                    continue
                consumer = fans.consumers[0]
                module, output = modules[consumer.name], seen[consumer.name].output
                with arithmetic():
                    patches = _patches(module, consumer, graph, seen[consumer.name], view)
                    goal = -len(patches) * _rows(module, slopes[consumer.name]).double()
                    rows = graph.axes[consumer.weight][0].kept(old, view.widths).to(goal.device)
                    rest = torch.zeros_like(goal)
                    rest[..., rows] = goal[..., rows] - patches @ updates[fans.group]
                    if isinstance(module, nn.Conv2d):
                        rest = rest.mT
                    rest = rest.reshape(output.shape).to(output) / len(patches)
                asked = [parameters[slot.name] for slot in fans.into]
                taken = torch.autograd.grad(output, asked, rest, retain_graph=True, materialize_grads=True)
                for slot, tensor in zip(fans.into, taken, strict=True):
                    found[f"{fans.group} {slot.name}"] = tensor.double()
            return found

        norms = IdentityNorms(_new_channels(data.model, graph, view, groups))
        found = data.run(tensors, visit, [right_derivatives(), norms], names, work=("bottleneck", number))
        for fans in groups:
            if not len(parts[fans.group]):
                continue
            taken = {slot.name: found[f"{fans.group} {slot.name}"] for slot in fans.into}
            new = old[fans.group] + torch.arange(len(parts[fans.group]))
            columns[fans.group].append(view.read(taken, fans.into, fans.group, new).T)
    return {group: torch.cat(pieces, 1) for group, pieces in columns.items()}


def _patches(module: nn.Module, layer: Layer, graph: WidthGraph, seen: Seen, view: View) -> Tensor:
    """Inputs from old channels at each output position, with a 1 for the bias: [B, positions, entries], float64."""
    positions = graph.axes[layer.weight][1].kept(view.among, view.widths).to(seen.x.device)
    if isinstance(module, nn.Conv2d):
        x = seen.x.index_select(1, positions)
        patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
    else:
        patches = _rows(module, seen.x.index_select(-1, positions))
    if layer.bias is not None:
        patches = torch.cat([patches, torch.ones_like(patches[..., :1])], -1)
    return patches.double()


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Products of [B, positions, I] and [B, positions, J], summed over positions, as the mean over samples: [I, J]."""
    return one.flatten(0, 1).T @ other.flatten(0, 1) / len(one)


def _reads(consumer: nn.Module, read: Seen, made: Seen) -> Tensor | None:
    """Number of times a consumer reads each position of its producer's output, [positions]; None if all are equal.

    With pooling in between, a position counts as the one that it is pooled into.
    """
    if not isinstance(consumer, nn.Conv2d) or made.output.dim() != 4:
        return None
    kernel, geometry = consumer.kernel_size, (consumer.dilation, consumer.padding, consumer.stride)
    once = torch.ones_like(F.unfold(read.x[:1, :1], kernel, *geometry))  # type: ignore[arg-type]
    counts = F.fold(once, read.x.shape[2:], kernel, *geometry)  # type: ignore[arg-type]
    return F.interpolate(counts, made.output.shape[2:], mode="nearest").flatten()


def _rows(module: nn.Module, tensor: Tensor) -> Tensor:
    """Reshape a layer's output, or its gradient, to [B, positions, rows]."""
    if isinstance(module, nn.Conv2d):
        return tensor.flatten(2).mT
    return tensor[:, None, :] if tensor.dim() == 2 else tensor.flatten(1, -2)


def _new_channels(model: nn.Module, graph: WidthGraph, view: View, groups: Sequence[Fans]):
    """Return the function for `IdentityNorms` that masks a norm's new channels, from its tensors."""
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
            if name in tensors and any(tensors[name] is one for one in (mean, weight)):
                axis = graph.axes[name][0]
                kept = torch.ones(axis.length(view.widths), dtype=torch.bool)
                kept[axis.kept(view.among, view.widths)] = False
                return kept
        return None

    return new
