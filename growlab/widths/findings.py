"""Collect what tracing finds (axes of parameters, layers, norms), and build the width graph from it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from growlab.widths.atoms import Atoms, Run, Runs, ScaleClasses
from growlab.widths.groups import Attention, ChannelNorm, Group, Layer, Norm, Radius, WidthGraph
from growlab.widths.layout import Axis, Part, Role
from growlab.widths.places import module_of, written_sizes
from growlab.widths.program import canonical_names
from growlab.widths.rules.registry import Value
from growlab.widths.rules.rotation import GAIN_CHANNEL, LENGTHS

# Roles of the dimensions of an embedding's table.
_TABLE = [None, "out"]


def layer_name(weight: str) -> str:
    """Return the path of the module that a weight belongs to; for a bare parameter its name."""
    path, _, own = weight.rpartition(".")
    return path if path and (own.endswith("weight") or ".parametrizations." in weight) else weight


@dataclass(frozen=True)
class NormCall:
    """A call that takes statistics over channels.

    Attributes:
        path: path of the module that calls it.
        operation: name of the operation.
        axis: the channels; None: growth does not reweight its statistics.
        names: tensor names of weight and bias.
        mean_over: see `ChannelNorm`.
        summed: see `ChannelNorm`.
    """

    path: str
    operation: str
    axis: Runs | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)
    mean_over: int | None = None
    summed: bool = False


class Findings:
    """Axes of parameters, layers and norms, in terms of atoms; `Tracer` fills it.

    Args:
        model: the network at full width.
    """

    def __init__(self, model: nn.Module) -> None:
        self.atoms = Atoms()
        self.scales = ScaleClasses()
        self._model = model
        #: Names of tensors that are not learned: buffers, and plain tensors of modules that the forward does not write.
        self.buffers = {name for name, _ in model.named_buffers()}
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        # Tensors that training does not change; in a network that is frozen as a whole, only the buffers.
        self._still = self.buffers | {n for n, t in trained.items() if not t and any(trained.values())}
        self._parameters: dict[str, list[Runs]] = {}
        # Names of those that any operation reads.
        self._used: set[str] = set()
        self._roles: dict[str, list[Role | None]] = {}
        self._layers: list[Layer] = []
        # Paths of the modules that apply each weight; weights that another layer follows; weights that the output
        # depends on with no other layer in between.
        self._callers: dict[str, dict[str, None]] = {}
        self._followed: set[str] = set()
        self._reaching: set[str] = set()
        self._norms: list[Norm] = []
        self._channel_norms: list[NormCall] = []
        self._offsets: dict[str, float] = {}
        self._attentions: list[tuple[Runs, Attention]] = []
        self._radii: dict[str, Runs] = {}
        self._individuated: list[tuple[Runs, str]] = []
        self._sizes: list[tuple[str, int, Runs]] = []

        self._groups_by_atom: Mapping[int, str] = {}

    def is_table(self, weight: Value) -> bool:
        """Return True if a weight [V, C] is an embedding's table, whose columns produce the channels."""
        return weight.name is not None and self._roles[weight.name] == _TABLE

    def consume(self, name: str, dimension: int | None = None) -> None:
        """Turn role "out" of a parameter into "in", along one dimension or all: it consumes the channels."""
        roles = self._roles[name]
        chosen = range(len(roles)) if dimension is None else [dimension % len(roles)]
        self._roles[name] = ["in" if role == "out" and i in chosen else role for i, role in enumerate(roles)]

    def note_offset(self, value: Value, offset: float) -> None:
        """Record a constant that the forward adds to a parameter [C] before applying it, as the 1 of a gain 1 + w."""
        if value.name is not None and value.name not in self.buffers and len(value.shape) == 1:
            self._offsets[value.name] = offset

    def follow(self, x: Value, weight: Value, result: Value) -> Value:
        """Record a layer that is not part of the graph and return its output: layers before it are not last ones."""
        assert weight.name is not None
        self._followed |= x.made_by | {weight.name}
        return replace(result, made_by=frozenset((weight.name,)))

    def has_no_parts(self, node: Any) -> bool:
        """Return True if a module without submodules runs the node, so that growth can reweight its statistics."""
        path = module_of(node)
        return bool(path) and not any(self._model.get_submodule(path).children())

    def _named(self, axis: Runs, role: Role) -> Axis:
        """Express an axis in terms of groups."""
        return Axis(tuple(_part(run, self._groups_by_atom) for run in self.atoms.resolve(axis)), role)

    def _is_nameless(self, axis: Runs) -> bool:
        """Return True if some channels of an axis are not produced by any parameter."""
        atoms = (run.atom for run in self.atoms.resolve(axis))
        return any(atom is not None and atom not in self._groups_by_atom for atom in atoms)

    def _grows(self, axis: Runs) -> bool:
        return any(run.atom is not None for run in self.atoms.resolve(axis))

    def _collect(self, output_class: int) -> WidthGraph:
        self.atoms.settle()
        self._freeze_norms_that_need_several_weights()
        self._freeze_what_no_rule_placed()
        self._freeze_what_constants_consume()
        self.atoms.freeze_single()
        still = self._kept_constants()
        self._groups_by_atom = names = self._group_names()
        groups = {
            name: Group(name, self.atoms.sizes[atom], self.atoms.below[atom]) for atom, name in names.items()
        }
        axes, fixed_because = {}, {}
        scaled = {name for x in self._layers for name in (x.weight, x.bias)}
        scaled |= {name for x in self._norms for name in (x.weight, x.bias, x.running_mean, x.running_var)}
        for name, runs in self._parameters.items():
            resolved = [self.atoms.resolve(axis) for axis in runs]
            grows = any(run.atom is not None for axis in resolved for run in axis)
            if grows or name in scaled:
                axes[name] = tuple(
                    Axis(tuple(_part(run, names) for run in axis), self._role(name, index, axis))
                    for index, axis in enumerate(resolved)
                )
            rows_grow = any(run.atom is not None for axis in resolved[:1] for run in axis)
            if not rows_grow and name.endswith("weight") and self._roles[name][:1] == ["out"]:
                fixed_because[name.rpartition(".")[0]] = self._why(runs[0]) or "a single channel"
        for name, runs in self._parameters.items():
            # Weights that are not called `weight`: those of recurrent layers, and bare parameters.
            path = name.rpartition(".")[0] if "weight" in name and name not in self.buffers else name
            # Channels that it produces come first: their reason explains more than that of its inputs.
            made = sorted(zip(self._roles[name], runs, strict=True), key=lambda entry: entry[0] != "out")
            reason = next(filter(None, (self._why(axis) for _, axis in made)), "") if len(runs) > 1 else ""
            if reason and path not in fixed_because and not any(a.groups for a in axes.get(name, ())):
                fixed_because[path] = reason
        layers = [
            replace(
                x,
                scale_in=self._scale(x.scale_in),
                scale_out=self._scale(x.scale_out),
                is_output=x.weight in self._reaching - self._followed,
                callers=tuple(self._callers.get(x.weight, ())),
            )
            for x in self._layers
        ]
        norms = [replace(norm, scale_in=self._scale(norm.scale_in)) for norm in self._norms]
        radii = [self._radius(name, axis, names) for name, axis in self._radii.items()]
        axes |= {radius.length: () for radius in radii if radius.length is not None}
        constants = {name: self._told_apart_by(name, axes[name]) for name in still}
        individuated_by = dict.fromkeys(
            (group for told in constants.values() for group in told), "is constant"
        )
        for axis, where in self._individuated:
            for group in self._groups_on(axis, names):
                individuated_by.setdefault(group, where)
        inputs = [
            (layer_name(layer.weight), self.atoms.length(axis), axis)
            for layer in self._layers
            for axis in self._parameters[layer.weight][1:2]
        ]
        written = written_sizes(self._model, *(self._in_parts(s, names) for s in (self._sizes, inputs)))
        return WidthGraph(
            groups,
            axes,
            tuple(layers),
            tuple(norms),
            self.scales.units(),
            self._scale(output_class),
            fixed_because,
            tuple(radius for radius in radii if radius.groups),
            individuated_by,
            written=written,
            channel_norms=self._norms_over_channels(names),
            attentions=self._attentions_that_grow(names),
            tied_outputs=tuple(sorted(name for name in self._reaching if self._roles[name] == _TABLE)),
            offsets={name: offset for name, offset in self._offsets.items() if name in axes},
            constants=constants,
        )

    def _why(self, axis: Runs) -> str:
        """Return the reason why an axis was frozen, followed by that of the axis which caused it."""
        reason, root = self.atoms.why_fixed(axis), self.atoms.root(axis)
        if root is None or isinstance(root, str):
            return f"{reason}: {root}" if root else reason
        why = self.atoms.frozen_because[root]
        return f"{reason}: {self._owners[root]} ({why})" if root in self._owners else f"{reason}: {why}"

    @cached_property
    def _owners(self) -> dict[int, str]:
        """Layer by each atom that its tensors were ever made of, once the whole program has been visited."""
        named = [(layer_name(name), axis) for name, runs in self._parameters.items() for axis in runs]
        return {atom: name for name, axis in reversed(named) for atom in self.atoms.parts(axis)}

    def _in_parts(
        self, sizes: Iterable[tuple[str, int, Runs]], names: Mapping[int, str]
    ) -> list[tuple[str, int, tuple[Part, ...]]]:
        """Select the sizes that grow and whose channels parameters produce, with their axes in terms of groups."""
        resolved = [(module, size, self.atoms.resolve(axis)) for module, size, axis in sizes]
        return [
            (module, size, tuple(_part(run, names) for run in axis))
            for module, size, axis in resolved
            if self._grows(axis) and all(run.atom is None or run.atom in names for run in axis)
        ]

    def _pin_what_is_more_than_an_output(self, output_class: int) -> None:
        """Pin the scale of the outputs unless it can be changed at the modules that produce them.

        It cannot for a bare parameter, nor if another layer or norm reads them: a factor would reach its output twice.
        """
        read = [*(layer.scale_in for layer in self._layers), *(norm.scale_in for norm in self._norms)]
        if self._scale(output_class) in set(map(self._scale, read)):
            self.scales.pin(output_class)
            return
        modules = dict(self._model.named_modules())
        names = canonical_names(self._model)
        for layer in self._layers:
            if self._scale(layer.scale_out) != self._scale(output_class):
                continue
            for path in self._callers[layer.weight]:
                own = {
                    names[f"{path}.{name}" if path else name] for name, _ in modules[path].named_parameters()
                }
                if not own <= {layer.weight, layer.bias}:
                    self.scales.pin(output_class)

    def _attentions_that_grow(self, names: Mapping[int, str]) -> tuple[Attention, ...]:
        axes = [(self.atoms.resolve(axis), attention) for axis, attention in self._attentions]
        return tuple(
            replace(attention, axis=Axis(tuple(_part(run, names) for run in axis), "out"))
            for axis, attention in axes
            if self._grows(axis)
        )

    def _freeze_norms_that_need_several_weights(self) -> None:
        """Freeze channels whose statistics growth cannot reweight.

        It applies the same weights to all statistics that a module and its submodules take, so these must run over the
        same channels.
        """
        for call in self._channel_norms:
            inside = f"{call.path}." if call.path else ""
            for other in self._channel_norms:
                same = other.path == call.path
                if not same and not other.path.startswith(inside):
                    continue
                if self._alike(call, other):
                    continue
                told = f"{call.operation} is called outside of a module of its own"
                for one in (call, other) if same else (call,):
                    if one.axis is not None:
                        several = f"{call.path or 'the network'} normalises several streams of channels"
                        self.atoms.freeze(one.axis, several if same else told)

    def _alike(self, one: NormCall, other: NormCall) -> bool:
        if one.axis is None or other.axis is None:
            return one.axis is other.axis
        axes = [self.atoms.resolve(call.axis) for call in (one, other) if call.axis is not None]
        # A mean over another dimension, which does not grow, needs no weights.
        apart = None not in (one.mean_over, other.mean_over) and one.mean_over != other.mean_over
        return axes[0] == axes[1] or (apart and not all(map(self._grows, axes)))

    def _norms_over_channels(self, names: Mapping[int, str]) -> tuple[ChannelNorm, ...]:
        found: dict[ChannelNorm, None] = {}
        for call in self._channel_norms:
            parts = tuple(_part(run, names) for run in self.atoms.resolve(call.axis or ()))
            if any(part.group for part in parts):
                axis = Axis(parts, "out")
                norm = ChannelNorm(call.path, axis, call.names["weight"], call.names["bias"])
                found[replace(norm, mean_over=call.mean_over, summed=call.summed)] = None
        return tuple(found)

    def _radius(self, module: str, axis: Runs, names: Mapping[int, str]) -> Radius:
        names_of_length = (f"{module}.{name}" if module else name for name in LENGTHS)
        length = next((name for name in names_of_length if self._parameters.get(name) == []), None)
        has_gain = bool(getattr(self._model.get_submodule(module), GAIN_CHANNEL, False))
        return Radius(module, self._groups_on(axis, names), length, has_gain)

    def _groups_on(self, axis: Runs, names: Mapping[int, str]) -> tuple[str, ...]:
        atoms = (run.atom for run in self.atoms.resolve(axis))
        return tuple(dict.fromkeys(names[atom] for atom in atoms if atom is not None and atom in names))

    def _freeze_what_no_rule_placed(self) -> None:
        for name, runs in self._parameters.items():
            for axis, role in zip(runs, self._roles[name], strict=True):
                if role is None:
                    unclear = "is used in a way that growlab has no rule for"
                    told = unclear if name in self._used else "is not used in the forward on this example"
                    self.atoms.freeze(axis, f"{name} {told}")
        produced = {
            run.atom
            for name, runs in self._parameters.items()
            for axis, role in zip(runs, self._roles[name], strict=True)
            if role == "out" and name not in self.buffers
            for run in self.atoms.resolve(axis)
        }
        for name, runs in self._parameters.items():
            for axis in runs:
                for run in self.atoms.resolve(axis):
                    if run.atom is not None and run.atom not in produced:
                        self.atoms.freeze((run,), f"{name} consumes channels that no layer produces")

    def _freeze_what_constants_consume(self) -> None:
        """Freeze channels that untrained tensors outside of layers consume: new columns could not start at zero."""
        for name in self._still & self._parameters.keys() - {layer.weight for layer in self._layers}:
            for axis, role in zip(self._parameters[name], self._roles[name], strict=True):
                if role == "in":
                    self.atoms.freeze(axis, f"{name} takes these channels and is not trained")

    def _kept_constants(self) -> list[str]:
        """Return tensors that grow but are not trained and only accompany channels; pin the scale of what they scale.

        Running statistics do not count, nor does a frozen layer whose inputs grow.
        """
        consumes = {
            name
            for name, runs in self._parameters.items()
            if any(r == "in" and self._grows(a) for r, a in zip(self._roles[name], runs, strict=True))
        }
        grown = {
            name for x in self._layers if x.weight in consumes & self._still for name in (x.weight, x.bias)
        }
        statistics = {
            name
            for norm in self._norms
            if not {norm.weight, norm.bias} & self._still
            for name in (norm.running_mean, norm.running_var)
        }
        found = [
            name
            for name, runs in self._parameters.items()
            if name in self._still - grown - statistics and any(map(self._grows, runs))
        ]
        for layer in self._layers:
            if {layer.weight, layer.bias} & set(found):
                self.scales.pin(layer.scale_out)
        for norm in self._norms:
            if {norm.weight, norm.bias} & set(found):
                self.scales.pin(norm.scale_in)
        return found

    def _told_apart_by(self, name: str, axes: Sequence[Axis]) -> tuple[str, ...]:
        """Return the groups along whose channels the entries of a tensor differ; all of its groups on device meta."""
        path, _, own = name.rpartition(".")
        tensor, found = getattr(self._model.get_submodule(path), own), dict[str, None]()
        for dim, axis in enumerate(axes):
            if axis.groups and (tensor.is_meta or bool((tensor != tensor.narrow(dim, 0, 1)).any())):
                found.update(dict.fromkeys(axis.groups))
        return tuple(found)

    def _group_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        # Layers in forward order, then other tensors that produce channels.
        order = dict.fromkeys([layer.weight for layer in self._layers] + list(self._parameters))
        for name in order:
            for axis, role in zip(self._parameters[name], self._roles[name], strict=True):
                if role != "out":
                    continue
                for run in self.atoms.resolve(axis):
                    if run.atom is not None and run.atom not in names:
                        base = name.rpartition(".")[0] or name
                        taken = sum(other == base or other.startswith(f"{base}#") for other in names.values())
                        names[run.atom] = base if not taken else f"{base}#{taken + 1}"
        return names

    def _role(self, name: str, index: int, axis: Runs) -> Role:
        grows = any(run.atom is not None for run in axis)
        return (self._roles[name][index] or "fixed") if grows else "fixed"

    def _scale(self, scale: int) -> int:
        return self.scales.find(scale)


def _part(run: Run, names: Mapping[int, str]) -> Part:
    return (
        Part(None, run.outer * run.inner) if run.atom is None else Part(names[run.atom], run.outer, run.inner)
    )
