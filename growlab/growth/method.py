"""What a growth method sees of a growth event, and what it gives back."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from growlab.base.settings import above, at_least, one_of
from growlab.growth.constants import at_widths
from growlab.growth.measurement import Measurement
from growlab.widths import Axis, Carry, Layer, WidthGraph, grid

WeightRule = Literal["fan_in", "hyperfan_in", "hyperfan_out"]
# Size of the embedding behind hyperfan's weights (Chang et al. 2020, Appendix B.1).
_EMBEDDING = 50
_Found = TypeVar("_Found")


def generator(seed: int, stage: int, name: str) -> torch.Generator:
    """A CPU generator that depends on the run's seed, the stage and a name alone.

    Every rank and every resumed run therefore draws the same numbers, in whatever order it draws them.
    """
    digest = hashlib.sha256(f"{seed}/{stage}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class Expansion:
    """One growth event, or the drawing of the seed.

    Attributes:
        graph: the network's width graph.
        old: parameters and buffers of the graph's axes before the event, by name; for the seed, the
            narrowed full-width ones.
        old_widths: width of each group before.
        new_widths: width of each group after.
        seed: the run's seed.
        stage: the stage that begins.
        leader: the tensors of the network that this one, its average, follows; None: it is its own.
        gradients: running means of gradients by parameter name, where the method asked for them.
        observed: what the method's `observe` has found.
        leader_observed: the same of the leader, where it is known.
        data: training batches, where the method asked for some.
        leading: what the event of the network that this one is an average of came to: its new tensors by name, and
            how gradients followed. For methods that must not look at data twice.
        multipliers: what the forward multiplies the rows of weights by before the event, by the weight's name.
        normalised: parameters whose optimizer normalises gradients (Adam), by name, as far as is known.
        constants: tensors at full width, by name, of which the network has a part at any width: whatever a method says
            of them, their new entries are those of the full ones.
    """

    graph: WidthGraph
    old: Mapping[str, Tensor]
    old_widths: Mapping[str, int]
    new_widths: Mapping[str, int]
    seed: int
    stage: int
    leader: Mapping[str, Tensor] | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    observed: Mapping[str, Any] = field(default_factory=dict)
    leader_observed: Mapping[str, Any] = field(default_factory=dict)
    data: Measurement | None = None
    leading: tuple[Mapping[str, Tensor], Carry] | None = None
    multipliers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    normalised: frozenset[str] = frozenset()
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def unlike(self) -> frozenset[str]:
        """Groups whose channels constants tell apart: none equals another, so nothing may read new ones at first."""
        return frozenset(group for name in self.constants for group in self.graph.constants[name])

    def constant(self, name: str, new: Tensor) -> Tensor:
        """A constant after the event; entries beyond full width are those of `new`."""
        return at_widths(self.graph, name, self.constants[name], self.new_widths, new)

    @property
    def deciding(self) -> Mapping[str, Tensor]:
        """The tensors that a method may look at to decide by how much it scales and draws; else only map `old`."""
        return self.old if self.leader is None else self.leader

    def generator(self, name: str) -> torch.Generator:
        """The generator for a tensor's or a group's draws at this event."""
        return generator(self.seed, self.stage, name)

    def new_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor after the event."""
        return self.graph.shape(name, self.new_widths)

    def axes(self, name: str) -> tuple[Axis, ...]:
        """The axes of a tensor, one a dimension."""
        return self.graph.axes[name]

    def kept(self, name: str) -> list[Tensor]:
        """New position of every old position, for each dimension of a tensor."""
        return [self.of_axis(_kept, axis) for axis in self.axes(name)]

    def of_axis(self, find: Callable[[Axis, "Expansion"], _Found], axis: Axis) -> _Found:
        """What a function finds on an axis at this event; once, as many tensors lie on the same axes."""
        key = (find, axis)
        if key not in self._found:
            self._found[key] = find(axis, self)
        found: _Found = self._found[key]
        return found

    @cached_property
    def _found(self) -> dict[tuple[Any, Axis], Any]:
        return {}

    def changes(self, name: str) -> bool:
        """Whether the event adds entries to a tensor."""
        return self.graph.changes(name, self.old_widths, self.new_widths)

    def fan_in(self, layer: Layer, widths: Mapping[str, int]) -> int:
        """Number of inputs that one output of the layer sums, the receptive field included."""
        return self.graph.fan_in(layer, widths)

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Layers whose weight changes shape, by the name of the weight."""
        changing = (x for x in self.graph.layers if x.weight not in self.constants)
        return {layer.weight: layer for layer in changing if self.graph.grows(layer.weight)}

    @cached_property
    def norm_defaults(self) -> dict[str, float]:
        """What a new channel's entry is in each tensor of a normalisation."""
        defaults: dict[str, float] = {}
        for norm in self.graph.norms:
            for name, value in (
                (norm.weight, 1.0),
                (norm.bias, 0.0),
                (norm.running_mean, 0.0),
                (norm.running_var, 1.0),
            ):
                if name is not None:
                    defaults[name] = value
        for channel_norm in self.graph.channel_norms:
            for name, value in ((channel_norm.weight, 1.0), (channel_norm.bias, 0.0)):
                if name is not None:
                    defaults[name] = value
        return defaults

    @cached_property
    def gates_of_biases(self) -> dict[str, int]:
        """Number of gates of recurrent layers, by the name of their biases."""
        layers = self.graph.layers
        return {layer.bias: layer.gates for layer in layers if layer.gates and layer.bias is not None}

    @cached_property
    def output_layers(self) -> frozenset[str]:
        """Weights of the last affine layers, such as the classifier."""
        return frozenset(layer.weight for layer in self.graph.layers if layer.is_output)


def _kept(axis: Axis, expansion: Expansion) -> Tensor:
    return axis.kept(expansion.old_widths, expansion.new_widths)


@dataclass(frozen=True)
class NewWeights:
    """Scale and distribution of weights that are drawn at random, with mean 0.

    Weights of a recurrent layer's gates have a sixth of the variance: 1 / (3 fan_in) at a gain of 2, which is torch's.

    Attributes:
        gain: hidden layers have variance gain / fan_in; 2 suits ReLU (He et al. 2015).
        output_power: output layers have variance 1 / fan_in ** output_power; 1 is usual, 2 is variance
            transfer's (Yuan et al. 2023, Table 1).
        rule: "fan_in" draws from a normal distribution. "hyperfan_in" and "hyperfan_out" take what a hypernetwork
            of hyperfan initialisation emits (Chang et al. 2020, Table 1): W = sum_k H_k e_k with H and e uniform;
            the latter with variance gain / fan_out in hidden layers.

    Raises:
        ValueError: there is no such rule.
    """

    gain: float = 2.0
    output_power: int = 1
    rule: WeightRule = "fan_in"

    def __post_init__(self) -> None:
        one_of(get_args(WeightRule), new_weights=self.rule)

    def std(self, expansion: Expansion, layer: Layer) -> float:
        """Standard deviation of the layer's new weights after the event."""
        fan_in = expansion.fan_in(layer, expansion.new_widths)
        if layer.weight in expansion.output_layers:
            variance = 1.0 / fan_in**self.output_power
        elif self.rule == "hyperfan_out":
            variance = self.gain / expansion.graph.fan_out(layer, expansion.new_widths)
        else:
            variance = self.gain / fan_in
        return sqrt(variance * layer.variance_per_entry)

    def draw(self, expansion: Expansion, name: str) -> Tensor:
        """A tensor of the new shape, every entry as a new one: drawn, or a norm's or bias's default.

        New biases of a recurrent layer's gate take the mean of the gate's old ones: that of a forget gate is often 1.
        Tensors of other kinds (bare parameters and buffers) are drawn with the mean and deviation of their old entries,
        between the smallest and the largest of them: a forward may take their root. Of complex numbers that holds for
        real and imaginary parts.
        """
        shape, source = expansion.new_shape(name), expansion.generator(name)
        if name in expansion.layers:
            drawn = _normal(shape, source) if self.rule == "fan_in" else _emitted(shape, source)
            return drawn * self.std(expansion, expansion.layers[name])
        if name in expansion.norm_defaults:
            return torch.full(shape, expansion.norm_defaults[name])
        old = expansion.deciding.get(name)
        if old is not None and (gates := expansion.gates_of_biases.get(name)):
            return old.view(gates, -1).mean(1).repeat_interleave(shape[0] // gates)
        if old is None or any(name in (layer.bias, layer.offset) for layer in expansion.graph.layers):
            return torch.zeros(shape)
        if old.is_complex():
            return torch.complex(_like(old.real, shape, source), _like(old.imag, shape, source))
        return _like(old, shape, source)


def _like(old: Tensor, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Numbers of the mean and the deviation of others, between the smallest and the largest of them."""
    old = old.detach().float().cpu()
    spread = float(old.std()) if old.numel() > 1 else 0.0
    drawn = _normal(shape, source) * spread + float(old.mean())
    return drawn.clamp_(float(old.min()), float(old.max())) if old.numel() else drawn


def _emitted(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Weights of variance 1, as a linear layer over an embedding emits them."""
    embedding = (2 * torch.rand(_EMBEDDING, generator=source, dtype=torch.float32) - 1) * sqrt(3)
    weights = torch.zeros(shape)
    # One number of the embedding after the other: the emitting layer has that many times the weight's entries.
    for number in embedding.tolist():
        weights += (2 * torch.rand(shape, generator=source, dtype=torch.float32) - 1) * number
    return weights * sqrt(3 / _EMBEDDING)


def _normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    # The same numbers whatever torch's default dtype is.
    return torch.randn(shape, generator=source, dtype=torch.float32)


@dataclass(frozen=True)
class GrownTensors:
    """All tensors of a network after a growth event, as a method computes them, and what follows from them.

    Attributes:
        tensors: every tensor of `Expansion.old` at the new widths; the old object itself where nothing changed.
        output_factor: the network's outputs must be multiplied by this to be what they were.
        norm_scale: for each batch normalisation whose input was rescaled, by how much.
        carry: how gradients after the event follow from those before, for optimizer state.
        allowed_error: relative output error beyond rounding that the event may make; None: any. Only a method
            that `preserves` is held to it.
        report: more of the event for its receipt, in plain containers.
        multipliers: for each weight whose old rows the forward has to multiply anew, by how much; see `multipliers`.
        folded: weights whose multipliers before the event are written into `tensors`.
    """

    tensors: dict[str, Tensor]
    output_factor: float = 1.0
    norm_scale: Mapping[str, float] = field(default_factory=dict)
    carry: Carry = field(default_factory=Carry)
    allowed_error: float | None = 0.0
    report: Mapping[str, Any] = field(default_factory=dict)
    multipliers: Mapping[str, float] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()


class GrowthMethod(ABC):
    """Says what new entries are and how old ones are rescaled.

    Attributes:
        preserves: the network computes the same function after an event, up to float rounding and the
            `output_factor`; an event that breaks the promise is rolled back.
        new_weights: scale of the weights it draws.
        noise_std: deviation of the noise that breaks symmetries among new entries, relative to the
            initialisation's own.
        output_multiplier: whether the run multiplies the output by `output_factor`.
        layer_multipliers: whether the forward may multiply rows of weights, see `growlab.growth.multipliers`.
        compensates: whether steps of optimizers that normalise gradients are divided by the multipliers.
        shrinks: events may narrow groups too.
        follows_norms: knows what to do with channels whose norm is taken; see `trace`.
        wants_gradients: wants the optimizer's running means of gradients.
        batches: training batches that it wants to see at an event.
        draws_full_width: a seed of full width is drawn as any other, in place of keeping the network's own weights.
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
        """How growth events and tables call the method."""
        return type(self).__name__

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int) -> WidthGraph:
        """Change how the full-width network holds its weights, before it is planted; most methods do not.

        Args:
            network: changed in place.
            graph: its width graph.
            seed: the run's seed.

        Returns:
            The width graph to grow by.
        """
        return graph

    def check(self, graph: WidthGraph, stages: Sequence[Mapping[str, int]]) -> None:  # noqa: B027 - most have no limits
        """Refuse widths of stages that it cannot grow through, where that is known before training."""

    @property
    def holds_otherwise(self) -> bool:
        """Whether the network holds its weights in another way until `finish`."""
        return type(self).finish is not GrowthMethod.finish

    def finish(self, network: nn.Module) -> None:  # noqa: B027 - most methods have nothing to undo
        """Undo what `prepare` did, once the network is trained: it is then an ordinary one again."""

    def observe(self, model: nn.Module, graph: WidthGraph, probe: tuple[Any, ...]) -> Mapping[str, Any]:
        """What the method needs to see of the network before an event; most need nothing.

        Args:
            model: left as it is.
            graph: its width graph.
            probe: its positional inputs.
        """
        return {}

    def multiplied(self, expansion: Expansion) -> frozenset[str]:
        """Weights whose rows the forward may multiply from this event on; others take up the factors themselves."""
        layers = expansion.graph.layers if self.layer_multipliers else ()
        return frozenset(layer.weight for layer in layers)

    @abstractmethod
    def grow(self, expansion: Expansion) -> GrownTensors:
        """Compute every tensor at the new widths."""

    def initialise(self, expansion: Expansion) -> dict[str, Tensor]:
        """Draw the seed's weights at its own fan-in; norms and biases take their defaults.

        Only tensors of layers and norms are drawn: bare parameters keep what the network gave them, and so do biases of
        recurrent layers.
        """
        names = {*expansion.layers, *expansion.norm_defaults}
        names |= {name for layer in expansion.graph.layers for name in (layer.bias, layer.offset) if name}
        names -= expansion.gates_of_biases.keys()
        names = (names | expansion.graph.emitters) - expansion.constants.keys()
        growing = [name for name in expansion.graph.axes if name in names and expansion.graph.grows(name)]
        return {name: self.new_weights.draw(expansion, name) for name in growing}

    def noise(self, expansion: Expansion) -> dict[str, Tensor]:
        """Noise to add to the new weights, zero at old ones; empty without noise."""
        if self.noise_std == 0:
            return {}
        noises = {}
        for name, layer in expansion.layers.items():
            if not expansion.changes(name):
                continue
            noise = _normal(expansion.new_shape(name), expansion.generator(f"noise of {name}"))
            noise *= self.noise_std * self.new_weights.std(expansion, layer)
            noise[grid(expansion.kept(name))] = 0.0
            noises[name] = noise
        return noises


class WidthDecision(ABC):
    """What a growth method also is that decides widths by itself while a network trains, instead of a schedule.

    A run then asks it at its boundaries. What it says must be a function of its arguments alone: ranks agree on
    rank 0's answer, and a resumed run asks again.
    """

    @abstractmethod
    def boundary(self, epoch: int, step: int) -> int | None:
        """Number of the boundary that lies before this batch, ascending over a run; None if there is none.

        Args:
            epoch: the current epoch.
            step: optimizer steps done.
        """

    @abstractmethod
    def decide(
        self,
        graph: WidthGraph,
        tensors: Mapping[str, Tensor],
        widths: Mapping[str, int],
        gradients: Mapping[str, Tensor],
    ) -> dict[str, int]:
        """Width of each group from here on.

        Args:
            graph: the network's width graph.
            tensors: its parameters and buffers by name.
            widths: width of each group now.
            gradients: running means of gradients by name, where the method wants them.
        """
