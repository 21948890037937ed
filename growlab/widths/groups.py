"""What tracing finds: width groups, the tensors they run through, and how activation scales depend on weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from growlab.widths.layout import Axis


@dataclass(frozen=True)
class Group:
    """Channels that must grow together.

    Attributes:
        name: module path of the first layer that produces the channels.
        full_width: number of channels in the network as the user wrote it.
        below: channels that lie beneath this group in the stream it completes. Zero-padding a stream of 16
            channels to 32 (an option-A shortcut) gives a group of 16 with `below = 16`: at any stage its
            width is what the wider stream has and the narrower one lacks.
    """

    name: str
    full_width: int
    below: int = 0


#: Of weights that make gates, relative to the gain over the fan-in: torch draws them with variance 1 / (3 H), and a
#: gain of 2, which suits ReLU, would saturate gates.
VARIANCE_OF_GATES = 1 / 6


@dataclass(frozen=True)
class Layer:
    """An affine map: a linear layer, a convolution, or what a recurrent layer makes its gates of.

    Attributes:
        name: module path, or the name of a weight that is a bare parameter.
        weight: name of the weight, [out, in, ...]; for a depthwise convolution [channels, 1, ...]. A weight
            that several layers share occurs under one name, once for each bias that goes with it, and all
            its uses are in the same scale classes.
        bias: name of the bias, or None.
        depthwise: each channel is mapped by its own filter.
        scale_in: scale class of the input.
        scale_out: scale class of the output.
        offset: name of a tensor of the weight's axes that is added to what the weight emits, or None. Like the
            following, only for weights that are computed from others.
        emitters: names of tensors with the weight's leading axes that say what an entry emits, not how large.
        inputs_per_entry: inputs that one entry of a row of `weight` stands for; 1/d if d of them emit one.
        outputs_per_entry: likewise outputs, for an entry of a column.
        variance_per_entry: variance of a drawn entry relative to that of what it emits, or to gain over fan-in.
        transposed: the weight is [in, out, ...] instead: a transposed convolution.
        is_output: the network's output depends on it, and no other affine layer does: a last layer, such as the
            classifier, whatever functions stand behind it.
        callers: paths of the modules whose forwards apply the weight.
        gates: gates of a recurrent layer that the rows are for, one gate behind the other; 0: it is none.
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
class Written:
    """An integer, or an entry of a tuple, list or dict of them, that a module's forward takes a size from.

    Attributes:
        module: module path.
        attribute: name of the attribute, with dots where objects hold it (`config.num_heads`).
        index: index or key of the entry, or None where the attribute is the integer itself.
    """

    module: str
    attribute: str
    index: int | str | None = None


@dataclass(frozen=True)
class Norm:
    """A normalisation by statistics of each channel's own: batch normalisation, or instance normalisation.

    Attributes:
        name: module path.
        weight: name of the tensor, or None where the module has none.
        bias: likewise.
        running_mean: likewise.
        running_var: likewise.
        eps: added to the variance.
        scale_in: scale class of the input. The output's scale never depends on it.
        per_sample: statistics are of each sample, as those of instance normalisation; else they are of the batch.
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
        weight: name of the tensor, or None where the module has none.
        bias: likewise.
        mean_over: the dimension that a normalisation takes means, variances or deviations over which is written out,
            -1 for the last; None: it calls torch's.
        summed: over that dimension it takes a Euclidean norm or a sum of squares instead.
        counted: the forward multiplies that by a power of the number of channels, which follows their width.
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
    """Scaled dot-product attention that takes 1 / sqrt(d) of a head dimension d which grows.

    Attributes:
        axis: the head dimension.
        queries: names of the tensors that the queries are linear in.
        fused: where one layer puts out queries and keys, the names of its tensors; `queries` is empty then.
        query_rows: rows of these that queries are made by, at full width.
        key_rows: those that keys are made by.
    """

    axis: Axis
    queries: tuple[str, ...]
    fused: tuple[str, ...] = ()
    query_rows: tuple[int, ...] = ()
    key_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Radius:
    """A Euclidean norm over channels, as isotropic activations take it.

    Attributes:
        name: path of the module that takes it.
        groups: the groups whose channels it runs over.
        length: name of the parameter that holds ln o (`log_length`) or o (`length`), where the module adds an
            intrinsic length o to the square of the norm; or None.
        gain_channel: whether the module puts out what it multiplies vectors by as one more channel, behind them.
    """

    name: str
    groups: tuple[str, ...]
    length: str | None = None
    gain_channel: bool = False


@dataclass(frozen=True)
class WidthGraph:
    """How a network's tensors depend on its widths.

    Two activations are in one scale class if multiplying one by a constant multiplies the other by the same
    constant (through ReLU, pooling, addition). Layers and norms lead from class to class.

    Attributes:
        groups: every width group that can grow, in forward order.
        axes: one Axis a dimension for each parameter and buffer that has a growing axis or belongs to a layer
            or norm.
        layers: affine maps in forward order.
        norms: batch and instance normalisations in forward order.
        unit_classes: scale classes that must keep their scale (inputs, outputs of norms, operands of
            functions that are not positively homogeneous).
        output_class: scale class of the network's output.
        fixed: why the channels that a layer or norm puts out do not grow: module path -> reason.
        radii: norms over channels, where `trace` was told to follow them.
        individuated: groups whose channels something tells apart -> what; the others may be rotated.
        written: sizes that modules keep in attributes of their own (`num_heads`), by what they count.
        channel_norms: normalisations whose statistics run over channels that grow.
        tied_outputs: weights that end the network and are embeddings' tables too. None of `layers`: growth leaves the
            scale of their rows alone, and rates of output layers are not theirs.
        attentions: attention whose head dimension grows. What produces the keys has there the role "in": products
            of queries and keys are sums over the head dimension, in which the keys are like the weights.
        offsets: constants that the forward adds to parameters [C] before it applies them, by the parameter's name: 1
            where it multiplies channels by 1 + w.
        recomputed: code with a backward pass of its own that takes a parameter in a module's forward, by the
            parameter's name: a `torch.autograd.Function` of the user's, or activation checkpointing.
        constants: buffers, frozen parameters and plain tensors of modules that only stand beside channels, such as a
            table of positions -> the groups whose channels their entries tell apart. Training does not change them,
            so growth must not.
    """

    groups: Mapping[str, Group]
    axes: Mapping[str, tuple[Axis, ...]]
    layers: tuple[Layer, ...]
    norms: tuple[Norm, ...]
    unit_classes: frozenset[int]
    output_class: int
    fixed: Mapping[str, str] = field(default_factory=dict)
    radii: tuple[Radius, ...] = ()
    individuated: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[Written, Axis] = field(default_factory=dict)
    channel_norms: tuple[ChannelNorm, ...] = ()
    attentions: tuple[Attention, ...] = ()
    tied_outputs: tuple[str, ...] = ()
    offsets: Mapping[str, float] = field(default_factory=dict)
    recomputed: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def emitters(self) -> frozenset[str]:
        """Tensors that say what is emitted, not how large: see `Layer.emitters`."""
        return frozenset(name for layer in self.layers for name in layer.emitters)

    @property
    def last_layers(self) -> dict[str, bool]:
        """Module paths of the last affine layers -> whether the scale of what they put out may change."""
        return {x.name: x.scale_out not in self.unit_classes for x in self.layers if x.is_output}

    def fan_in(self, layer: Layer, widths: Mapping[str, int]) -> int:
        """Number of inputs that one output of the layer sums, the receptive field included."""
        shape = self.shape(layer.weight, widths)
        entries = shape[0] if layer.transposed else shape[1]
        for length in shape[2:]:
            entries *= length
        return round(entries * layer.inputs_per_entry)

    def fan_out(self, layer: Layer, widths: Mapping[str, int]) -> int:
        """Number of outputs that one input of the layer enters, the receptive field included."""
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
        """Groups whose channels may be rotated, and whose norm is taken somewhere: in forward order."""
        measured = {group for radius in self.radii for group in radius.groups}
        return tuple(name for name in self.groups if name in measured and name not in self.individuated)

    def grows(self, name: str) -> bool:
        """Whether a tensor changes shape with the widths."""
        return any(axis.groups for axis in self.axes.get(name, ()))

    def changes(self, name: str, widths: Mapping[str, int], new_widths: Mapping[str, int]) -> bool:
        """Whether a tensor is another one at the new widths."""
        return any(widths[group] != new_widths[group] for axis in self.axes[name] for group in axis.groups)

    def shape(self, name: str, widths: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of a parameter or buffer at the given widths."""
        return tuple(axis.length(widths) for axis in self.axes[name])

    def widths_of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Width of each group, read off the shapes of tensors.

        Args:
            shapes: of tensors in `axes`, by name.
        """
        widths: dict[str, int] = {}
        known = (name for name in self.axes if name in shapes)
        axes = [(axis, shapes[name][dim]) for name in known for dim, axis in enumerate(self.axes[name])]
        while axes:
            unsolved = []
            for axis, length in axes:
                unknown = [group for group in axis.groups if group not in widths]
                if len(unknown) == 1:
                    # The length is linear in the one width that is missing.
                    none, one = (axis.length({**widths, unknown[0]: width}) for width in (0, 1))
                    widths[unknown[0]] = (length - none) // (one - none)
                elif unknown:
                    unsolved.append((axis, length))
            if len(unsolved) == len(axes):
                break
            axes = unsolved
        return widths
