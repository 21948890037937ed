"""Input features that arrive during training, such as image channels or table columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any, Literal

from torch import Tensor, nn

from growlab.base import ranks
from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import one_of, whole
from growlab.grower.part import Replaced, WidthPart, numbers_of_stages, open_channels, remove_pre_hooks
from growlab.grower.triggers import GrowingNetwork, Never, Trigger, Widths
from growlab.growth import GrowthEvent, GrowthState, ParityError
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error, rounding
from growlab.widths import Axis, Group, Part, UnsupportedOperation, WidthGraph, trace
from growlab.widths.inputs import listed, named_in

#: Name of the group whose channels are the input's features; no module can have this name.
FEATURES = "input features"
# Names of the network and of the layer before it while they are traced together.
_NETWORK, _SOURCE = "network", "source"


class Features(WidthPart):
    """Add columns to the layers that read the network's input as features arrive from stage to stage.

    Define the network with all features, and give an example that has them all. At each stage the network reads the
    first features of its input. Batches may have all features, or only those that have arrived.

    **Preserves** the outputs exactly if new columns are zero, whatever the values of the new features. Batch
    normalisation of the input starts new features with weight 1, bias 0, mean 0 and variance 1. Buffers with one value
    per feature, such as means, get the full network's values.

    Args:
        counts: number of features at each stage, ascending; or a function that maps the number of stages to that list.
        columns: "zero", or "drawn" as the growth method draws its weights.
        dim: dimension of the features in the input; None: 1 for images [B, C, H, W] and volumes [B, C, D, H, W],
            else the last.
        argument: name of the forward's argument with the features; None: the first floating-point tensor.

    Raises:
        UserError: an argument is invalid.

    Examples:
        >>> import torch
        >>> from growlab import Grower
        >>> network = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> part = Features([4, 6])
        >>> grower = Grower(network, torch.randn(4, 6), trigger={0: 0.5, 10: 1.0}, parts=[part])
        >>> network[0].weight.shape, network(torch.randn(3, 4)).shape
        (torch.Size([4, 4]), torch.Size([3, 2]))
    """

    name = "features"

    def __init__(
        self,
        counts: Sequence[int] | Callable[[int], Sequence[int]],
        columns: Literal["zero", "drawn"] = "zero",
        dim: int | None = None,
        argument: str | None = None,
    ) -> None:
        if not callable(counts) and (isinstance(counts, str) or not isinstance(counts, Sequence) or not counts):
            raise UserError(
                "counts must be a list with a number of features for each stage, such as [4, 10], or a function of "
                f"the number of stages, not {counts!r}."
            )
        with as_user_errors():
            one_of(("zero", "drawn"), columns=columns)
            if dim is not None:
                whole(-(2**64), dim=dim)
        self._counts, self._columns, self._dim, self._argument = counts, columns, dim, argument
        self._number = 0
        self._hook: FirstFeatures | None = None
        self._change = 0.0

    def applies(self, trigger: Trigger) -> bool:
        """Return True if the network grows in stages known in advance; otherwise it has all features from the start."""
        return not isinstance(trigger, Never) and trigger.knows_stages

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int, example: tuple[Any, ...]) -> WidthGraph:
        """Add a width group for the features of the input.

        Raises:
            UserError: the example has no such input, or something besides weights depends on the number of features.
        """
        self.detach(network)
        source = _source(network, example, self._argument, self._dim)
        opened = with_features(network, graph, example, source)
        self.groups, self._number = (FEATURES,), opened.groups[FEATURES].full_width
        self._hook = FirstFeatures(source, _measured(opened))
        return opened

    def shrink_to(self, network: nn.Module, graph: WidthGraph, fraction_grown: float) -> WidthGraph:
        """Let the network read only the first features of its input."""
        self.attach(network)
        return graph

    def attach(self, network: nn.Module) -> None:
        """Let the network, or a copy of it, read only the first features of its input."""
        self.detach(network)
        assert self._hook is not None
        network.register_forward_pre_hook(self._hook, with_kwargs=True)

    def detach(self, network: nn.Module) -> None:
        """Let the network read its whole input."""
        remove_pre_hooks(network, FirstFeatures)

    def stage_widths(self, num_stages: int) -> Mapping[str, Sequence[int]]:
        """Return the number of features at each stage.

        Raises:
            UserError: `counts` does not give one number per stage, ascending and at most the number of features.
        """
        counts = self._counts
        # A network that is only evaluated has a single stage, the last.
        counts = counts(num_stages) if callable(counts) else list(counts)[-1 if num_stages == 1 else 0 :]
        return {FEATURES: numbers_of_stages(counts, num_stages, self._number, "features")}

    def widen(self, grower: GrowingNetwork, network: nn.Module, state: GrowthState, widths: Widths) -> Replaced:
        """Add columns for the features of the next stage.

        Raises:
            ParityError: zero columns change the outputs.
        """
        before, probe, zero = evaluate(network, grower.probe()), grower.probe(), self._columns == "zero"
        count = widths[FEATURES]
        replaced = open_channels(network, grower.graph, grower.method, state, FEATURES, count, grower.seed, zero)
        after = evaluate(network, probe)
        (change,) = ranks.agreed([relative_error(before, after)])
        if zero and change > rounding(network, before):
            raise ParityError(
                f"the outputs change by {change:.0e} as features arrive, though their columns are zero: something "
                "besides weights depends on the number of features."
            )
        if network is grower.network:
            self._change = change
        return replaced

    def after_growth(self, grower: GrowingNetwork, event: GrowthEvent) -> Mapping[str, Any]:
        """Record the largest change of an output by new features, relative to the largest output."""
        arrived = event.widths_after[FEATURES] != event.widths_before[FEATURES]
        return {"features_output_change": self._change} if arrived else {}


@dataclass(frozen=True)
class _Source:
    """Position of the features among a forward's inputs.

    Attributes:
        position: position of the input, if it can be passed by position.
        name: name of the argument, if it can be passed by name.
        dim: dimension of the features in the input.
    """

    position: int | None
    name: str | None
    dim: int

    def changed(
        self, inputs: tuple[Any, ...], named: Mapping[str, Any], change: Callable[[Tensor], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Apply a function to the input that has the features."""
        if self.name is not None and self.name in named:
            return inputs, {**named, self.name: change(named[self.name])}
        if self.position is None or self.position >= len(inputs):
            return inputs, dict(named)
        before, after = inputs[: self.position], inputs[self.position + 1 :]
        return (*before, change(inputs[self.position]), *after), dict(named)


def _source(network: nn.Module, example: tuple[Any, ...], argument: str | None, dim: int | None) -> _Source:
    """Find the input that has the features; raise a UserError if no input has such a dimension."""
    arguments = list(signature(network.forward).parameters.values())
    names = {at: p.name for at, p in enumerate(arguments) if p.kind is p.POSITIONAL_OR_KEYWORD}
    inputs: list[tuple[int | None, str | None, Any]] = [(at, names.get(at), x) for at, x in enumerate(example)]
    inputs += [(None, name, x) for name, x in named_in(example).items()]
    fits = [
        (position, name, x)
        for position, name, x in inputs
        if isinstance(x, Tensor) and x.is_floating_point() and argument in (None, name)
    ]
    if not fits:
        what = "no floating-point tensor" if argument is None else f"no floating-point tensor named {argument!r}"
        raise UserError(f"features arrive in a floating-point input; the example has {what}: {listed(example)}.")
    position, name, x = fits[0]
    feature_dim = (1 if x.dim() in (4, 5) else -1) if dim is None else dim
    if not -x.dim() < feature_dim < x.dim() or feature_dim == 0:
        raise UserError(f"dim={dim} is not a feature dimension of an input of shape {list(x.shape)}.")
    return _Source(position, name, feature_dim)


class FirstFeatures:
    """Forward pre-hook that narrows a network's input to as many features as the network has.

    Args:
        source: position of the features among the inputs.
        graph: width graph of the tensors that determine the number of features.
    """

    def __init__(self, source: _Source, graph: WidthGraph) -> None:
        self.source, self._graph = source, graph

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Narrow the input."""
        shapes = {name: _tensor(module, name).shape for name in self._graph.axes}
        number, full = self._graph.widths_of(shapes)[FEATURES], self._graph.groups[FEATURES].full_width

        def first(x: Tensor) -> Tensor:
            size = x.shape[self.source.dim]
            if not number <= size <= full:
                raise UserError(
                    f"a batch has {size} features in dimension {self.source.dim}, and {type(module).__name__} takes "
                    f"{number} of {full} at this stage."
                )
            return x if size == number else x.narrow(self.source.dim, 0, number)

        return self.source.changed(inputs, named, first)


def _tensor(network: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(network.get_submodule(path), attribute)
    return tensor


def _measured(graph: WidthGraph) -> WidthGraph:
    """Reduce a width graph to a few tensors whose shapes determine the number of features."""
    chosen, groups = dict[str, tuple[Axis, ...]](), [FEATURES]
    for group in groups:
        candidates = [(name, axis) for name, axes in graph.axes.items() for axis in axes if group in axis.groups]
        name, axis = min(candidates, key=lambda candidate: len(candidate[1].groups))
        chosen[name] = graph.axes[name]
        groups += [other for other in axis.groups if other not in groups]
    return WidthGraph(dict(graph.groups), chosen, (), (), frozenset(), 0)


class _Fed(nn.Module):
    """A network after a linear layer whose outputs are the network's input features."""

    source: nn.Linear

    def __init__(self, network: nn.Module, source: _Source, example: tuple[Any, ...]) -> None:
        super().__init__()
        dim = source.dim

        def make_layer(x: Tensor) -> Tensor:
            size, device = x.shape[dim], next(network.parameters(), x).device
            self.source = nn.Linear(size, size, bias=False, device=device, dtype=x.dtype)
            return x

        source.changed(tuple(example), named_in(example), make_layer)
        self.network = network

        def forward(*args: Any, **named: Any) -> Any:
            args, named = source.changed(args, named, lambda x: self.source(x.movedim(dim, -1)).movedim(-1, dim))
            return network(*args, **named)

        # With the signature of the network's forward.
        vars(self)["forward"] = wraps(network.forward)(forward)


def with_features(network: nn.Module, graph: WidthGraph, example: tuple[Any, ...], source: _Source) -> WidthGraph:
    """Add the features of the network's input to its width graph as an additional group.

    Growth methods do not change its width, since a new feature is not a copy of another.

    Raises:
        UserError: something besides weights depends on the number of features.
    """
    cannot = "the features of this network's input cannot arrive in stages: "
    fed = _Fed(network, source, example)
    try:
        traced = trace(fed, example)
    except UnsupportedOperation as error:
        raise UserError(f"{cannot}{str(error).partition(';')[0].rstrip('.')}.") from error
    names = {name: name.removeprefix(f"{_NETWORK}.") for name in traced.axes if name != f"{_SOURCE}.weight"}
    reading = [name for name in names if any(_SOURCE in axis.groups for axis in traced.axes[name])]
    norms = [norm.name.removeprefix(f"{_NETWORK}.") for norm in traced.channel_norms if _SOURCE in norm.axis.groups]
    complete = bool(reading) and traced.groups[_SOURCE].full_width == fed.source.out_features
    if norms or not complete:
        otherwise = "the code distinguishes some of them" if reading else "no weight reads them"
        reason = f"{norms[0]} normalises over them" if norms else traced.fixed.get(_SOURCE, otherwise)
        raise UserError(f"{cannot}{reason}.")
    # Match groups of both graphs by the same channels of the same tensor.
    same_groups = {_SOURCE: FEATURES} | {
        new.group: old.group
        for traced_name, name in names.items()
        for axes in zip(traced.axes[traced_name], graph.axes.get(name, ()), strict=False)
        for new, old in zip(axes[0].parts, axes[1].parts, strict=False)
        if new.group is not None and old.group is not None and new.group != _SOURCE
    }

    def translated(axis: Axis) -> Axis:
        parts = (
            replace(part, group=same_groups[part.group]) if part.group in same_groups else Part(None, part.length(full))
            for part in axis.parts
        )
        return Axis(tuple(parts), axis.role)

    full, axes, constants = traced.full_widths, dict(graph.axes), dict(graph.constants)
    for traced_name in reading:
        name = names[traced_name]
        both = zip(traced.axes[traced_name], graph.axes.get(name, traced.axes[traced_name]), strict=True)
        axes[name] = tuple(translated(new) if _SOURCE in new.groups or name not in axes else old for new, old in both)
        if traced_name not in traced.constants:
            # A frozen weight that gets new columns grows like a trained one.
            constants.pop(name, None)
        else:
            differ = [FEATURES] if _SOURCE in traced.constants[traced_name] else []
            constants[name] = (*graph.constants.get(name, ()), *differ)
    written = {
        replace(place, module=place.module.removeprefix(_NETWORK).removeprefix(".")): translated(axis)
        for place, axis in traced.written.items()
        if _SOURCE in axis.groups
    }
    return replace(
        graph,
        groups={**graph.groups, FEATURES: Group(FEATURES, full[_SOURCE])},
        axes=axes,
        constants=constants,
        written={**graph.written, **written},
    )
