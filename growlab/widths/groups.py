"""The width graph that tracing returns: width groups, axes of tensors, layers, norms, and scale classes.

Its axes are layouts: the order of width groups' channels along one dimension of a tensor, for any width. An axis is a
concatenation of parts. A growing part repeats the channels of one group: position `(o * width + c) * inner + i` belongs
to channel `c`, for `o < outer` and `i < inner`. A flattened image of C channels and 4x4 positions is one part with
`inner = 16`; a fused qkv projection is three parts. A fixed part has no group and a size that never changes.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Role = Literal["out", "in", "fixed"]


@dataclass(frozen=True)
class Part:
    """A run of positions: `outer x width(group) x inner`, or `outer` fixed positions where group is None."""

    group: str | None
    outer: int = 1
    inner: int = 1

    def length(self, widths: Mapping[str, int]) -> int:
        """Number of positions at the given widths."""
        width = 1 if self.group is None else widths[self.group]
        return self.outer * width * self.inner


@dataclass(frozen=True)
class Axis:
    """One dimension of a parameter or buffer.

    Attributes:
        parts: the concatenation of parts.
        role: "out" where the tensor produces or accompanies the channels (rows of a weight, biases, norm
            parameters), "in" where it consumes them (columns of a weight), "fixed" where nothing grows.
    """

    parts: tuple[Part, ...]
    role: Role

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups with channels on this axis, each once, in order."""
        return tuple(dict.fromkeys(part.group for part in self.parts if part.group is not None))

    def length(self, widths: Mapping[str, int]) -> int:
        """Number of positions at the given widths."""
        return sum(part.length(widths) for part in self.parts)

    def spread(self, values: Mapping[str, Tensor], widths: Mapping[str, int], fixed: float) -> Tensor:
        """Give every position its channel's value: a tensor [length].

        Args:
            values: one value per channel for each group on the axis, [width].
            widths: width of each group.
            fixed: the value at fixed positions.
        """
        pieces = []
        for part in self.parts:
            if part.group is None:
                dtype = next(iter(values.values())).dtype if values else torch.get_default_dtype()
                pieces.append(torch.full((part.length(widths),), fixed, dtype=dtype))
            else:
                pieces.append(values[part.group].repeat_interleave(part.inner).repeat(part.outer))
        return torch.cat(pieces) if pieces else torch.empty(0)

    def lift(self, maps: Mapping[str, Tensor], widths: Mapping[str, int], target_widths: Mapping[str, int]) -> Tensor:
        """Turn maps between channels into the map between positions.

        Args:
            maps: for each group, the channel at `target_widths` that each channel at `widths` maps to, int64 [width],
                or -1 for none.
            widths: widths of the positions that are mapped.
            target_widths: widths of the positions that they map to.

        Returns:
            int64 [length at widths]: positions at `target_widths`, -1 for none. Fixed positions map to themselves.
        """
        match self.parts:
            case (Part(group=str(group), outer=1, inner=1),):
                # One position per channel, as on nearly all axes.
                return maps[group].clone()
        pieces, start = [], 0
        for part in self.parts:
            if part.group is None:
                pieces.append(start + torch.arange(part.length(widths)))
            else:
                channel = maps[part.group]
                outer = torch.arange(part.outer)[:, None, None]
                inner = torch.arange(part.inner)
                position = (outer * target_widths[part.group] + channel[:, None]) * part.inner + inner
                position = torch.where(channel[:, None] < 0, -1, start + position)
                pieces.append(position.flatten())
            start += part.length(target_widths)
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)

    def kept(self, widths: Mapping[str, int], new_widths: Mapping[str, int]) -> Tensor:
        """Map each position to its new one when groups keep their first channels: int64 [length], -1 for dropped."""
        channels = {group: torch.arange(widths[group]) for group in self.groups}
        maps = {group: torch.where(index < new_widths[group], index, -1) for group, index in channels.items()}
        return self.lift(maps, widths, new_widths)


@dataclass(frozen=True)
class Group:
    """Channels that must grow together.

    Attributes:
        name: module path of the first layer that produces the channels.
        full_width: number of channels in the network as the user wrote it.
        below: number of channels in front of this group in the stream that it completes. Zero-padding a stream of 16
            channels to 32 (an option-A shortcut) gives a group of 16 with `below = 16`: its width is always the
            difference between the wider and the narrower stream.
    """

    name: str
    full_width: int
    below: int = 0


# Most groups in a graph's `repr`, and most similar names in its report.
_SHOWN_GROUPS = _SHOWN_NAMES = 3
#: Variance of a recurrent layer's weights relative to gain over fan-in: torch draws them with variance 1 / (3 H), and a
#: gain of 2, which suits ReLU, would saturate the gates.
VARIANCE_OF_GATES = 1 / 6


@dataclass(frozen=True)
class Layer:
    """An affine map: a linear layer, a convolution, or the part of a recurrent layer that computes its gates.

    Attributes:
        name: module path, or the name of a weight that is a bare parameter.
        weight: name of the weight, [out, in, ...]; for a depthwise convolution [channels, 1, ...]. A weight that
            several layers share has one name, a Layer for each bias that it is used with, and the same scale classes
            in all uses.
        bias: name of the bias, or None.
        depthwise: True if each channel has a separate filter.
        scale_in: scale class of the input.
        scale_out: scale class of the output.
        offset: name of a tensor with the weight's axes that is added to what the weight emits, or None. Like the next
            four attributes, only for weights that are computed from other tensors.
        emitters: names of tensors with the weight's leading axes that determine what an entry emits, not its scale.
        inputs_per_entry: number of inputs that one entry of a row of `weight` stands for; 1/d if d of them emit one.
        outputs_per_entry: number of outputs that one entry of a column stands for.
        variance_per_entry: variance of a drawn entry relative to that of what it emits, or to gain over fan-in.
        transposed: True if the weight is [in, out, ...], as in a transposed convolution.
        is_output: True if the output depends on it with no other affine layer in between: a last layer, such as the
            classifier, whatever functions follow it.
        callers: paths of the modules whose forwards apply the weight.
        gates: number of gates whose rows are stacked in the weight of a recurrent layer; 0 for other layers.
    """

    name: str
    weight: str
    bias: str | None
    depthwise: bool
    scale_in: int
    scale_out: int
    offset: str | None = None
    emitters: tuple[str, ...] = ()
    inputs_per_entry: float = 1.0
    outputs_per_entry: float = 1.0
    variance_per_entry: float = 1.0
    transposed: bool = False
    is_output: bool = False
    callers: tuple[str, ...] = ()
    gates: int = 0


@dataclass(frozen=True)
class HardcodedSize:
    """A module's attribute (an integer, or an entry of a tuple, list or dict) from which its forward takes a size.

    Attributes:
        module: module path.
        attribute: name of the attribute, with dots for attributes of objects (`config.num_heads`).
        index: index or key of the entry, or None where the attribute is the integer itself.
    """

    module: str
    attribute: str
    index: int | str | None = None


@dataclass(frozen=True)
class Norm:
    """A normalisation with statistics per channel: batch normalisation, or instance normalisation.

    Attributes:
        name: module path.
        weight: name of the weight, or None if the module has none.
        bias: name of the bias, or None.
        running_mean: name of the running mean, or None.
        running_var: name of the running variance, or None.
        eps: added to the variance.
        scale_in: scale class of the input. The output's scale never depends on it.
        per_sample: True if statistics are taken per sample, as in instance normalisation; False: over the batch.
    """

    name: str
    weight: str | None
    bias: str | None
    running_mean: str | None
    running_var: str | None
    eps: float
    scale_in: int
    per_sample: bool = False


@dataclass(frozen=True)
class ChannelNorm:
    """A normalisation whose statistics run over channels: layer, RMS or group normalisation.

    Attributes:
        name: path of the module that normalises, and takes statistics over no other channels.
        axis: the channels.
        weight: name of the weight, or None if the module has none.
        bias: name of the bias, or None.
        mean_over: dimension over which a hand-written normalisation takes means, variances or standard deviations, -1
            for the last; None: it calls torch's function.
        summed: True if it takes a Euclidean norm or a sum of squares over that dimension instead.
        counted: True if the forward multiplies that by a power of the number of channels, which follows their width.
    """

    name: str
    axis: Axis
    weight: str | None
    bias: str | None
    mean_over: int | None = None
    summed: bool = False
    counted: bool = False


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention whose head dimension d grows, and with it the scale 1 / sqrt(d).

    Attributes:
        axis: the head dimension.
        queries: names of the tensors that the queries are linear in.
        fused: names of the tensors of a layer that computes both queries and keys; `queries` is empty then.
        query_rows: rows of these that produce queries, at full width.
        key_rows: rows of these that produce keys.
    """

    axis: Axis
    queries: tuple[str, ...]
    fused: tuple[str, ...] = ()
    query_rows: tuple[int, ...] = ()
    key_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChannelLength:
    """A Euclidean norm over channels, as taken by isotropic activations.

    Attributes:
        name: path of the module that takes it.
        groups: the groups whose channels it runs over.
        length: name of the parameter for the intrinsic length o that the module adds to the square of the norm:
            ln o (`log_length`) or o (`length`); or None.
        gain_channel: True if the module appends the factor that it multiplies vectors by as one more channel.
    """

    name: str
    groups: tuple[str, ...]
    length: str | None = None
    gain_channel: bool = False


@dataclass(frozen=True, repr=False)
class WidthGraph:
    """Width groups of a network, and how its tensors depend on their widths; `print` lists what grows and what stays.

    Two activations are in one scale class if multiplying one by a constant multiplies the other by the same constant
    (through ReLU, pooling, addition). Layers and norms map one class to another.

    Attributes:
        groups: width groups that can grow, in forward order.
        axes: one Axis per dimension of each parameter and buffer that has a growing axis or belongs to a layer or norm.
        layers: affine maps in forward order.
        norms: batch and instance normalisations in forward order.
        unit_classes: scale classes that must keep their scale (inputs, outputs of norms, operands of
            functions that are not positively homogeneous).
        output_class: scale class of the network's output.
        fixed: module path of a layer or norm -> reason why its output channels do not grow.
        radii: norms over channels, if traced with `follow_norms`.
        basis_dependent: groups whose channels an operation distinguishes -> that operation; the others may be rotated.
        written: sizes stored in modules' attributes (`num_heads`) -> the axis that has this length.
        channel_norms: normalisations whose statistics run over channels that grow.
        tied_outputs: weights of output layers that are also embedding tables. They are not in `layers`: growth does
            not change the scale of their rows, and learning rates of output layers do not apply to them.
        attentions: attention whose head dimension grows. Tensors that produce the keys have role "in" there: products
            of queries and keys are sums over the head dimension, in which the keys act as the weights.
        offsets: constants that the forward adds to parameters [C] before it applies them, by the parameter's name: 1
            if it multiplies channels by 1 + w.
        recomputed: parameter's name -> code with a custom backward pass that reads it in a module's forward: a
            user's `torch.autograd.Function`, or activation checkpointing.
        constants: untrained tensors that accompany channels, such as position tables (buffers, frozen parameters, plain
            tensors of modules) -> the groups along whose channels their entries differ. Growth must not change them.
        weight_norms: v of a weight normalisation g v / |v| -> the name of g, and the dimension that g runs over, or -1
            if g is a single number. `layers` and `axes` have v in the place of the weight.
    """

    groups: Mapping[str, Group]
    axes: Mapping[str, tuple[Axis, ...]]
    layers: tuple[Layer, ...]
    norms: tuple[Norm, ...]
    unit_classes: frozenset[int]
    output_class: int
    fixed: Mapping[str, str] = field(default_factory=dict)
    radii: tuple[ChannelLength, ...] = ()
    basis_dependent: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[HardcodedSize, Axis] = field(default_factory=dict)
    channel_norms: tuple[ChannelNorm, ...] = ()
    attentions: tuple[Attention, ...] = ()
    tied_outputs: tuple[str, ...] = ()
    offsets: Mapping[str, float] = field(default_factory=dict)
    recomputed: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weight_norms: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def __repr__(self) -> str:
        widths = ", ".join(f"{name}: {width}" for name, width in list(self.full_widths.items())[:_SHOWN_GROUPS])
        more = ", ..." if len(self.groups) > _SHOWN_GROUPS else ""
        return (
            f"WidthGraph({len(self.groups)} groups {{{widths}{more}}}, {len(self.layers)} layers, "
            f"{sum(map(self.grows, self.axes))} tensors that grow, {len(self.fixed)} modules that stay)"
        )

    def __str__(self) -> str:
        steps = {name: self.channels_per_unit(name) for name in self.groups}
        tied = [layer_name(weight) for weight in self.tied_outputs]
        lines = report_lines(self.full_widths, steps, self.last_layers, tied, self.fixed)
        return "\n".join([count_groups(self.groups), *lines])

    def channels_per_unit(self, name: str) -> int:
        """Number of channels that a group's first layer gains when the group's width grows by one."""
        # A recurrent layer has a row for each gate of a channel.
        gates = {layer.weight: max(1, layer.gates) for layer in self.layers}
        base = name.partition("#")[0]
        for tensor in (tensor for tensor in self.axes if owner_of(tensor) == base):
            for axis in self.axes[tensor]:
                if axis.role == "out" and name in axis.groups:
                    channels = sum(part.outer * part.inner for part in axis.parts if part.group == name)
                    return channels // gates.get(tensor, 1)
        return 0

    @cached_property
    def lengths(self) -> dict[str, str]:
        """Map g of a weight normalisation to its v; see `weight_norms`."""
        return {length: name for name, (length, _) in self.weight_norms.items()}

    @cached_property
    def emitters(self) -> frozenset[str]:
        """Tensors that determine emitted weights apart from their scale (`Layer.emitters`), and g of weight norms."""
        return frozenset(name for layer in self.layers for name in layer.emitters) | self.lengths.keys()

    @property
    def last_layers(self) -> dict[str, bool]:
        """Module paths of the last affine layers -> True if the scale of their output may change."""
        return {x.name: x.scale_out not in self.unit_classes for x in self.layers if x.is_output}

    def fan_in(self, layer: Layer, widths: Mapping[str, int]) -> int:
        """Number of inputs that one output of the layer sums, including the receptive field."""
        shape = self.shape(layer.weight, widths)
        entries = shape[0] if layer.transposed else shape[1]
        for length in shape[2:]:
            entries *= length
        return round(entries * layer.inputs_per_entry)

    def fan_out(self, layer: Layer, widths: Mapping[str, int]) -> int:
        """Number of outputs that one input of the layer contributes to, including the receptive field."""
        shape = self.shape(layer.weight, widths)
        entries = 1 if layer.depthwise else shape[1] if layer.transposed else shape[0]
        for length in shape[2:]:
            entries *= length
        return round(entries * layer.outputs_per_entry)

    @property
    def full_widths(self) -> dict[str, int]:
        """Width of each group in the network as the user wrote it."""
        return {name: group.full_width for name, group in self.groups.items()}

    @property
    def isotropic(self) -> tuple[str, ...]:
        """Groups whose channels may be rotated and whose norm some module takes, in forward order."""
        measured = {group for radius in self.radii for group in radius.groups}
        return tuple(name for name in self.groups if name in measured and name not in self.basis_dependent)

    def grows(self, name: str) -> bool:
        """Return True if the shape of a tensor depends on any width."""
        return any(axis.groups for axis in self.axes.get(name, ()))

    def changes(self, name: str, widths: Mapping[str, int], new_widths: Mapping[str, int]) -> bool:
        """Return True if any group on a tensor's axes has another width in `new_widths`."""
        return any(widths[group] != new_widths[group] for axis in self.axes[name] for group in axis.groups)

    def shape(self, name: str, widths: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of a parameter or buffer at the given widths."""
        return tuple(axis.length(widths) for axis in self.axes[name])

    def widths_of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Infer the width of each group from the shapes of tensors.

        Args:
            shapes: shape by tensor name; names that are not in `axes` are ignored.

        Returns:
            Width by group. Groups that the shapes do not determine are missing.
        """
        widths: dict[str, int] = {}
        names = (name for name in self.axes if name in shapes)
        axes = [(axis, shapes[name][dim]) for name in names for dim, axis in enumerate(self.axes[name])]
        while axes:
            unsolved = []
            for axis, length in axes:
                unknown = [group for group in axis.groups if group not in widths]
                if len(unknown) == 1:
                    # The length is linear in the missing width.
                    at_0, at_1 = (axis.length({**widths, unknown[0]: width}) for width in (0, 1))
                    widths[unknown[0]] = (length - at_0) // (at_1 - at_0)
                elif unknown:
                    unsolved.append((axis, length))
            if len(unsolved) == len(axes):
                break
            axes = unsolved
        return widths


def layer_name(weight: str) -> str:
    """Return the path of the module that a weight belongs to; for a bare parameter its name."""
    computed = ".parametrizations." in weight or weight.removesuffix("_v").endswith("weight")
    return owner_of(weight) if computed and "." in weight else weight


def owner_of(tensor: str) -> str:
    """Path of the module that a tensor belongs to, directly or by a parametrization; the tensor's name if none."""
    path, parametrized, _ = tensor.partition(".parametrizations.")
    return path if parametrized else path.rpartition(".")[0] or tensor


def count_groups(groups: Collection[str]) -> str:
    """Format the number of groups, with the term's meaning."""
    plural = "" if len(groups) == 1 else "s"
    return f"{len(groups)} width group{plural} (sets of channels that grow together)"


def report_lines(
    widths: Mapping[str, int],
    steps: Mapping[str, int],
    last: Mapping[str, bool],
    tied: Sequence[str],
    fixed: Mapping[str, str],
) -> list[str]:
    """Format the groups that grow, the last layers, and the modules that keep their full width with the reasons.

    `steps` are channels per unit by group (1 if missing), `tied` modules of embeddings whose tables are output layers
    too; the others are as in `WidthGraph`.
    """
    lines = ["  grows       (layer that makes the channels: full width)"] if widths else []
    shown = []
    for name, width in widths.items():
        step = steps.get(name, 1)
        units = f"{width * step} = {width} x {step} (heads or groups of channels)"
        shown.append((name, str(width) if step == 1 else units))
    lines += [f"    {names}: {width}" for names, width in _grouped(shown)]
    if last:
        pinned = " (something behind it fixes its scale)"
        named = _grouped((name, "" if free else pinned) for name, free in last.items())
        lines.append("  last        affine layers: " + ", ".join(f"{names}{why}" for names, why in named))
    if tied:
        why = "(neither rescaled nor given an output layer's rate)"
        lines.append(f"  last        tables of embeddings: {', '.join(tied)} {why}")
    lines += ["  stays       at full width, because"] if fixed else []
    return lines + [f"    {names}: {reason}" for names, reason in _grouped(fixed.items())]


def _grouped(named: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge names that differ only in numbers and have the same content: `layer1.*.conv2 (3 times)`."""
    similar: dict[tuple[str, str], list[str]] = {}
    for name, content in named:
        similar.setdefault((re.sub(r"\d+(?=\.|#|$)", "*", name), content), []).append(name)
    return [
        (", ".join(names) if len(names) <= _SHOWN_NAMES else f"{pattern} ({len(names)} times)", content)
        for (pattern, content), names in similar.items()
    ]
