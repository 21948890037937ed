"""Interface of growth methods: their input (`GrowthContext`), and the tensors that they return (`GrownTensors`)."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import sqrt
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.base.pieces import OneByOne, dtype_of
from growlab.base.settings import Described, above, at_least, one_of
from growlab.growth.constants import at_widths
from growlab.growth.measurement import Measurement
from growlab.widths import Axis, Carry, Layer, WidthGraph, as_run, grid

WeightRule = Literal["fan_in", "as_network", "hyperfan_in", "hyperfan_out"]
# Size of the embedding that hyperfan weights are emitted from (Chang et al. 2020, Appendix B.1).
_EMBEDDING = 50
_DRAWN_AT_ONCE = 1 << 22
_Result = TypeVar("_Result")


def generator(seed: int, stage: int, name: str) -> torch.Generator:
    """Return a CPU generator seeded by the run's seed, the stage and a name, equal on all ranks and in resumed runs."""
    digest = hashlib.sha256(f"{seed}/{stage}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class GrowthContext:
    """Input of a growth method: one growth event, or the initialisation of the seed network.

    Attributes:
        graph: the network's width graph.
        old: parameters and buffers with axes in the graph, before the event, by name; for the seed network, those of
            the full-width network, narrowed.
        old_widths: width of each group before.
        new_widths: width of each group after.
        seed: the run's seed.
        stage: the stage that begins.
        averaged: if the model is an average of a network, that network's tensors before its event; else None.
        gradients: running means of gradients by parameter name, if the method has `wants_gradients`.
        observed: result of the method's `observe`.
        averaged_observed: the same for the averaged network, if known.
        data: training batches, if the method has `batches`.
        averaged_event: if the model is an average of a network, that network's new tensors, by name, and its `Carry`,
            for methods that must not measure twice.
        multipliers: multipliers of rows that the forward applies before the event, by the weight's name.
        normalised: names of parameters whose optimizer is known to normalise gradients (Adam).
        constants: untrained tensors at full width, by name; they get their entries back, whatever the method returns.
    """

    graph: WidthGraph
    old: Mapping[str, Tensor]
    old_widths: Mapping[str, int]
    new_widths: Mapping[str, int]
    seed: int
    stage: int
    averaged: Mapping[str, Tensor] | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    observed: Mapping[str, Any] = field(default_factory=dict)
    averaged_observed: Mapping[str, Any] = field(default_factory=dict)
    data: Measurement | None = None
    averaged_event: tuple[Mapping[str, Tensor], Carry] | None = None
    multipliers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    normalised: frozenset[str] = frozenset()
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def unlike(self) -> frozenset[str]:
        """Groups whose channels differ by constants: none can copy another; new ones get zero outgoing weights."""
        return frozenset(group for name in self.constants for group in self.graph.constants[name])

    def constant(self, name: str, new: Tensor) -> Tensor:
        """Return a constant at the new widths; entries beyond full width are taken from `new`."""
        return at_widths(self.graph, name, self.constants[name], self.new_widths, new)

    @property
    def reference(self) -> Mapping[str, Tensor]:
        """Tensors to derive scales and draws from: those of the averaged network, if any, else `old`."""
        return self.old if self.averaged is None else self.averaged

    def generator(self, name: str) -> torch.Generator:
        """Return the generator for draws of a tensor or group at this event."""
        return generator(self.seed, self.stage, name)

    def new_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor after the event."""
        return self.graph.shape(name, self.new_widths)

    def axes(self, name: str) -> tuple[Axis, ...]:
        """Axes of a tensor, one per dimension."""
        return self.graph.axes[name]

    def kept(self, name: str) -> list[Tensor]:
        """New position of every old position, for each dimension of a tensor."""
        return [self.of_axis(_kept, axis) for axis in self.axes(name)]

    def kept_runs(self, name: str) -> list[Tensor | slice]:
        """Return `kept`, with slices where positions are consecutive: for `growlab.widths.grid`."""
        return [self.of_axis(_kept_run, axis) for axis in self.axes(name)]

    def of_axis(self, find: Callable[[Axis, "GrowthContext"], _Result], axis: Axis) -> _Result:
        """Return `find(axis, self)`, cached, since many tensors share the same axes."""
        key = (find, axis)
        if key not in self._by_axis:
            self._by_axis[key] = find(axis, self)
        return self._by_axis[key]

    @cached_property
    def _by_axis(self) -> dict[tuple[Any, Axis], Any]:
        return {}

    def changes(self, name: str) -> bool:
        """Return True if the event changes the tensor's shape."""
        return self.graph.changes(name, self.old_widths, self.new_widths)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Layers whose weight changes shape, by the name of the weight."""
        changing = (x for x in self.graph.layers if x.weight not in self.constants)
        return {layer.weight: layer for layer in changing if self.graph.grows(layer.weight)}

    @cached_property
    def norm_defaults(self) -> dict[str, float]:
        """Default of a new channel in each tensor of a normalisation: weight and variance 1, bias and mean 0.

        For a new row of a normalised weight, |v| / g is 1.
        """
        defaults = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
        norms = (*self.graph.norms, *self.graph.channel_norms)
        pairs = ((getattr(norm, kind, None), value) for norm in norms for kind, value in defaults.items())
        return {name: value for name, value in pairs if name is not None} | dict.fromkeys(self.graph.lengths, 1.0)

    @cached_property
    def gates_of_biases(self) -> dict[str, int]:
        """Number of gates of recurrent layers, by the name of their biases."""
        layers = self.graph.layers
        return {layer.bias: layer.gates for layer in layers if layer.gates and layer.bias is not None}

    @cached_property
    def output_layers(self) -> frozenset[str]:
        """Weights of the last affine layers, such as the classifier."""
        return frozenset(layer.weight for layer in self.graph.layers if layer.is_output)


def _kept(axis: Axis, context: GrowthContext) -> Tensor:
    return axis.kept(context.old_widths, context.new_widths)


def _kept_run(axis: Axis, context: GrowthContext) -> Tensor | slice:
    return as_run(context.of_axis(_kept, axis))


@dataclass(frozen=True)
class NewWeights:
    """Scale and distribution of weights that are drawn at random, with mean 0.

    Weights of a recurrent layer's gates have a sixth of the variance: 1 / (3 fan_in) at a gain of 2, which is torch's.

    Attributes:
        gain: hidden layers have variance gain / fan_in; 2 suits ReLU (He et al. 2015).
        output_power: output layers have variance 1 / fan_in ** output_power; 1 is usual, 2 is variance
            transfer's (Yuan et al. 2023, Table 1).
        rule: "fan_in" draws from a normal distribution. "as_network" does too, but replaces the gain by each layer's
            variance times fan-in: for the seed that of the network as built, at an event that of the old weights.
            "hyperfan_in" and "hyperfan_out" draw weights as emitted by a hypernetwork with hyperfan initialisation
            (Chang et al. 2020, Table 1): W = sum_k H_k e_k with H and e uniform; the latter has variance
            gain / fan_out in hidden layers.

    Raises:
        ValueError: the rule is unknown.
    """

    gain: float = 2.0
    output_power: int = 1
    rule: WeightRule = "fan_in"

    def __post_init__(self) -> None:
        one_of(get_args(WeightRule), new_weights=self.rule)

    def std(self, context: GrowthContext, layer: Layer) -> float:
        """Standard deviation of the layer's new weights after the event."""
        fan_in = context.graph.fan_in(layer, context.new_widths)
        is_output = layer.weight in context.output_layers
        if self.rule == "as_network":
            # The seed's old tensors are those of the full-width network, narrowed.
            before = context.graph.fan_in(layer, context.old_widths if context.stage else context.graph.full_widths)
            return _spread(context, layer) * sqrt(before / fan_in) ** (self.output_power if is_output else 1)
        if is_output:
            variance = 1.0 / fan_in**self.output_power
        elif self.rule == "hyperfan_out":
            variance = self.gain / context.graph.fan_out(layer, context.new_widths)
        else:
            variance = self.gain / fan_in
        return sqrt(variance * layer.variance_per_entry)

    def draw(self, context: GrowthContext, name: str) -> Tensor:
        """Return a tensor of the new shape with every entry initialised as new: drawn, or a norm's or bias's default.

        New biases of a recurrent layer's gate are the mean of its old ones: a forget gate's bias is often 1. Tensors of
        other kinds (bare parameters and buffers) are drawn with the mean and deviation of their old entries and clamped
        to their range, since a forward may take their root. For complex numbers this is done for real and imaginary
        parts separately; in weights each has half the variance (Trabelsi et al. 2018, Section 3.6).
        """
        shape, source = context.new_shape(name), context.generator(name)
        if name in context.layers:
            draw = _emitted if self.rule.startswith("hyperfan") else normal
            std = self.std(context, context.layers[name])
            if dtype_of(context.reference, name).is_complex:
                return torch.complex(draw(shape, source), draw(shape, source)).mul_(std / sqrt(2))
            return draw(shape, source).mul_(std)
        if name in context.norm_defaults:
            return torch.full(shape, context.norm_defaults[name])
        old = context.reference.get(name)
        if old is not None and (gates := context.gates_of_biases.get(name)):
            return old.view(gates, -1).mean(1).repeat_interleave(shape[0] // gates)
        if old is None or any(name in (layer.bias, layer.offset) for layer in context.graph.layers):
            return torch.zeros(shape)
        if old.is_complex():
            return torch.complex(_like(old.real, shape, source), _like(old.imag, shape, source))
        return _like(old, shape, source)


def _spread(context: GrowthContext, layer: Layer) -> float:
    """Return the standard deviation of the layer's old weight, its row multipliers included."""
    old = in_double(context.reference[layer.weight].detach())
    if old.is_meta:
        raise UserError(
            f'new_weights="as_network" reads the spread of the weights, but {layer.weight} is on the meta device, '
            'without values: build the network on another device, or choose new_weights="fan_in".'
        )
    if rows := context.multipliers.get(layer.weight):
        dim = 1 if layer.transposed else 0
        old = old.movedim(dim, -1) * torch.tensor(rows, dtype=old.dtype, device=old.device)
    return float(old.std(correction=0))


def in_double(tensor: Tensor) -> Tensor:
    """Convert real numbers to float64, complex ones to complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _like(old: Tensor, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Draw numbers with the mean and deviation of `old`, clamped to its range."""
    old = old.detach().float().cpu()
    spread = float(old.std()) if old.numel() > 1 else 0.0
    drawn = normal(shape, source) * spread + float(old.mean())
    return drawn.clamp_(float(old.min()), float(old.max())) if old.numel() else drawn


def _emitted(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Draw weights of variance 1 as the product of a linear layer and a random embedding (hyperfan)."""
    embedding = (2 * torch.rand(_EMBEDDING, generator=source, dtype=torch.float32) - 1) * sqrt(3)
    weights = torch.zeros(shape)
    # One entry of the embedding at a time, since the emitting layer has _EMBEDDING times as many entries as the weight.
    for number in embedding.tolist():
        weights += (2 * torch.rand(shape, generator=source, dtype=torch.float32) - 1) * number
    return weights * sqrt(3 / _EMBEDDING)


def normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Draw standard normal numbers in float32, in threads for large tensors; independent of the number of threads."""
    drawn = torch.empty(shape, dtype=torch.float32)
    chunks = drawn.view(-1).split(_DRAWN_AT_ONCE)
    if len(chunks) < 2:
        return drawn.normal_(generator=source)
    seeds = torch.randint(2**63 - 1, (len(chunks),), generator=source).tolist()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's, on this machine
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // processes)) as threads:
        list(
            threads.map(lambda chunk, seed: chunk.normal_(generator=torch.Generator().manual_seed(seed)), chunks, seeds)
        )
    return drawn


@dataclass(frozen=True)
class GrownTensors:
    """Result of a growth method: all tensors after the event, and the factors that the caller has to apply.

    Attributes:
        tensors: every tensor of `GrowthContext.old` at the new widths; the old object itself if nothing changed. A
            method that computes each from few others returns a `OneByOne`, which keeps an event's memory low.
        output_factor: factor on the network's outputs that restores their previous values.
        norm_scale: factor on the input of each batch normalisation whose input was rescaled, by its name.
        carry: how gradients after the event follow from those before, for optimizer state.
        allowed_error: relative output error beyond rounding that the event may make; None: any. Enforced only for a
            method that `preserves`.
        report: further details for the event's receipt, in plain containers.
        multipliers: factor by which the forward multiplies the old rows of a weight from now on, by the weight's name;
            see `growlab.growth.multipliers`.
        folded: names of weights whose previous multipliers are folded into `tensors`.
    """

    tensors: Mapping[str, Tensor]
    output_factor: float = 1.0
    norm_scale: Mapping[str, float] = field(default_factory=dict)
    carry: Carry = field(default_factory=Carry)
    allowed_error: float | None = 0.0
    report: Mapping[str, Any] = field(default_factory=dict)
    multipliers: Mapping[str, float] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()


class GrowthMethod(Described, ABC):
    """Base class of growth methods: computes new entries and the rescaling of old ones.

    Attributes:
        preserves: the network computes the same function after an event, up to float rounding and the `output_factor`;
            an event that violates this is rolled back.
        new_weights: scale of the weights it draws.
        noise_std: standard deviation of the noise that breaks symmetries among new entries, relative to that of the
            initialisation.
        output_multiplier: the network's output is multiplied by `output_factor` during training.
        layer_multipliers: the forward may multiply rows of weights, see `growlab.growth.multipliers`.
        compensates: steps of optimizers that normalise gradients are divided by the multipliers.
        shrinks: events may narrow groups too.
        follows_norms: supports channels whose norm is computed; see `trace`.
        wants_gradients: `GrowthContext.gradients` are the optimizer's running means of gradients.
        batches: number of training batches needed at an event.
        draws_full_width: draw a full-width seed like any other, instead of keeping the network's weights.
    """

    preserves: bool = True
    output_multiplier: bool = True
    layer_multipliers: bool = False
    compensates: bool = False
    shrinks: bool = False
    follows_norms: bool = False
    wants_gradients: bool = False
    batches: int = 0
    draws_full_width: bool = False

    def __init__(self, noise_std: float = 0.0, gain: float = 2.0, new_weights: WeightRule = "fan_in") -> None:
        at_least(0, noise_std=noise_std)
        above(0, gain=gain)
        self.noise_std = noise_std
        self.new_weights = NewWeights(gain, rule=new_weights)

    @property
    def name(self) -> str:
        """Name of the method in growth events and tables."""
        return type(self).__name__

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int) -> WidthGraph:
        """Change how the full-width network stores its weights, before it is planted; by default nothing.

        Args:
            network: the network; changed in place.
            graph: its width graph.
            seed: the run's seed.

        Returns:
            The width graph to grow with.
        """
        return graph

    def check(self, graph: WidthGraph, stages: Sequence[Mapping[str, int]]) -> None:
        """Raise a UserError for widths that the method cannot grow through, if they are known before training."""

    @property
    def changes_storage(self) -> bool:
        """True if the network stores its weights differently until `finish`."""
        return type(self).finish is not GrowthMethod.finish

    def finish(self, network: nn.Module) -> None:
        """Undo the changes of `prepare` on the trained network, so that it is an ordinary one again."""

    def observe(self, model: nn.Module, graph: WidthGraph, probe: tuple[Any, ...]) -> Mapping[str, Any]:
        """Measure the network before an event; the result is `GrowthContext.observed`. By default nothing.

        Args:
            model: the network; left unchanged.
            graph: its width graph.
            probe: its positional inputs.
        """
        return {}

    def multiplied(self, context: GrowthContext) -> frozenset[str]:
        """Names of weights whose rows the forward may multiply from now on; into others factors are folded."""
        layers = context.graph.layers if self.layer_multipliers else ()
        return frozenset(layer.weight for layer in layers) - context.graph.weight_norms.keys()

    @abstractmethod
    def grow(self, context: GrowthContext) -> GrownTensors:
        """Compute every tensor at the new widths."""

    def initialise(self, context: GrowthContext) -> Mapping[str, Tensor]:
        """Draw the seed network's weights at its fan-in, one at a time; norms and biases take their defaults.

        Only tensors of layers and norms are drawn: bare parameters and biases of recurrent layers keep their values.
        With `new_weights="as_network"` norms and other biases keep theirs too.
        """
        names = set(context.layers)
        if self.new_weights.rule != "as_network":
            names |= context.norm_defaults.keys()
            names |= {name for layer in context.graph.layers for name in (layer.bias, layer.offset) if name}
            names -= context.gates_of_biases.keys()
        names = (names | context.graph.emitters) - context.constants.keys()
        lengths = context.graph.lengths
        growing = [n for n in context.graph.axes if n in names and context.graph.grows(lengths.get(n, n))]
        return OneByOne(growing, partial(self.new_weights.draw, context))

    def noise(self, context: GrowthContext) -> Mapping[str, Tensor]:
        """Noise to add to the tensors, by name: zero at old entries; empty if `noise_std` is 0."""
        if self.noise_std == 0:
            return {}

        def noise(name: str) -> Tensor:
            noise = normal(context.new_shape(name), context.generator(f"noise of {name}"))
            noise *= self.noise_std * self.new_weights.std(context, context.layers[name])
            noise[grid(context.kept_runs(name))] = 0.0
            return noise

        return OneByOne(filter(context.changes, context.layers), noise)


class WidthDecision(ABC):
    """Mixin of growth methods that choose widths themselves during training, instead of a schedule.

    A run calls it at its boundaries. Its decision must depend on its arguments alone: ranks use rank 0's decision, and
    a resumed run calls it again.
    """

    @abstractmethod
    def boundary(self, epoch: int, step: int) -> int | None:
        """Number of the boundary directly before this batch, ascending over a run, or None.

        Args:
            epoch: the current epoch.
            step: number of optimizer steps done.
        """

    @abstractmethod
    def decide(
        self,
        graph: WidthGraph,
        tensors: Mapping[str, Tensor],
        widths: Mapping[str, int],
        gradients: Mapping[str, Tensor],
    ) -> dict[str, int]:
        """Decide the width of each group from now on.

        Args:
            graph: the network's width graph.
            tensors: its parameters and buffers by name.
            widths: width of each group now.
            gradients: running means of gradients by name, if the method has `wants_gradients`.
        """
