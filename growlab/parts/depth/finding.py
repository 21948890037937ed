"""Find the blocks of a network that can be left out at first: repeated modules that pass on their input.

Found by structure and shapes, not by names: siblings of one kind of which each takes the output of the one before and
keeps its shape. The autograd graph of one forward pass shows how each uses its input, which is then measured.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from growlab.growth.outputs import main_output, without_side_effects
from growlab.parts.depth.branches import Branches, Consumers, Edge, ancestors, edge_of, operation
from growlab.widths import tensors_in
from growlab.widths.inputs import call_with, changed
from growlab.widths.meta import copied


class _SameDraws(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Make every random operation draw the same numbers for the same shape.

    Otherwise an inserted block would shift the draws of the blocks behind it, such as those of stochastic depth in
    train mode, and outputs before and after could not be compared. Generators are restored.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), _SameDraws():
        yield


#: Output of a placeholder: the block's input ("stream"), or zeros for the network to add ("branch").
Kind = Literal["stream", "branch"]


class SkippedBlock(nn.Module):
    """Placeholder for a block that is not inserted yet; see `Kind`.

    Plain attributes of the block, which the network's code may read, are copied to it. `pass_through` composes its
    output from its inputs; None if it maps its first input to one tensor.
    """

    def __init__(self, block: nn.Module, kind: Kind = "stream", pass_through: "PassThrough | None" = None) -> None:
        super().__init__()
        own = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        vars(self).update({name: value for name, value in own.items() if not isinstance(value, Tensor)})
        self._kind, self._pass_through = kind, pass_through

    def forward(self, *args: Any, **named: Any) -> Any:
        """Map the block's inputs to an output of the block's structure."""
        if self._pass_through is None:
            return args[0] if self._kind == "stream" else torch.zeros_like(args[0])
        return self._pass_through.output((args, named), zeros=self._kind == "branch")


class PassThrough:
    """Composes a block's output from its (positional, named) inputs and constants, as observed in one call.

    `problem` is the reason why the output cannot be composed without the block, or "". Raise a ValueError if the block
    has no tensor among its inputs or outputs.
    """

    def __init__(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], output: Any) -> None:
        given, _ = pytree.tree_flatten_with_path(inputs)
        tensors = [(place, value) for place, value in given if isinstance(value, Tensor)]
        made, spec = pytree.tree_flatten(output)
        mains = [index for index, value in enumerate(made) if isinstance(value, Tensor)]
        if not tensors or not mains:
            raise ValueError("it maps no tensor to a tensor")
        self.place, self.main = tensors[0]
        self.main_output: Tensor = made[mains[0]]
        self.problem = ""
        # Paths of inputs (True), and constants (False).
        self._spec, self._entries = spec, list[tuple[bool, Any]]()
        for index, value in enumerate(made):
            if index == mains[0]:
                self._entries.append((True, self.place))
                continue
            same = [place for place, x in given if x is value and isinstance(x, Tensor)]
            if isinstance(value, Tensor) and not same:
                self.problem = "it outputs more than one new tensor"
            self._entries.append((True, same[0]) if same else (False, value))
        self._index = mains[0]

    @property
    def plain(self) -> bool:
        """True if the block maps its first input to one tensor."""
        first: tuple[Any, ...] = (pytree.SequenceKey(0), pytree.SequenceKey(0))
        return self._spec.is_leaf() and tuple(self.place) == first

    def taken(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        """Return the main tensor among the block's (positional, named) inputs."""
        main: Tensor = pytree.key_get(inputs, self.place)
        return main

    def released(self) -> "PassThrough":
        """Release the tensors of the call, and return self."""
        del self.main, self.main_output
        return self

    def output(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], zeros: bool) -> Any:
        """Compose the block's output from its (positional, named) inputs, with zeros as main output if so asked."""
        values = [pytree.key_get(inputs, entry) if taken else entry for taken, entry in self._entries]
        if zeros:
            values[self._index] = torch.zeros_like(values[self._index])
        return pytree.tree_unflatten(values, self._spec)


# Containers: two modules of such a class may differ in their contents.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: Exceptions that a network may raise if it does not run without a block.
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError)


@dataclass(frozen=True)
class Span:
    """Paths of modules that run directly one after the other, and the output of their placeholders."""

    paths: tuple[str, ...]
    kind: Kind


@dataclass(frozen=True)
class Block:
    """Neighbouring modules that are inserted together.

    Attributes:
        name: path of a module, or `path.i:j` for the modules i to j - 1 of a sequence.
        zeroed: names of the parameters to zero so that it adds nothing; None if there are none (see `obstacle`).
        pass_throughs: by path, compositions of the placeholder's output, for modules that do not take and return a
            single tensor.
    """

    name: str
    spans: tuple[Span, ...]
    zeroed: tuple[str, ...] | None = None
    obstacle: str = ""
    pass_throughs: Mapping[str, PassThrough] = field(default_factory=dict, compare=False)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all its modules."""
        return tuple(path for span in self.spans for path in span.paths)

    def contains(self, name: str) -> bool:
        """Return True if a module, parameter or buffer belongs to the block."""
        return any(name == path or name.startswith(f"{path}.") for path in self.paths)

    def leave_out(self, network: nn.Module) -> None:
        """Replace the block by placeholders in a network, in place."""
        for span in self.spans:
            for path in span.paths:
                absent = SkippedBlock(network.get_submodule(path), span.kind, self.pass_throughs.get(path))
                network.set_submodule(path, absent)


@dataclass(frozen=True)
class Run:
    """Sequence of sibling modules of a class `kind`: the name and module paths of each; `order` is its index."""

    order: int
    units: tuple[tuple[str, tuple[str, ...]], ...]
    kind: str


@dataclass
class _Call:
    source: Edge | None
    result: Edge | None
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    pass_through: PassThrough


class Forward:
    """Records inputs and outputs of every module in one forward pass of a copy of a network."""

    def __init__(self, network: nn.Module, example: tuple[Any, ...]) -> None:
        self.network = copied(network)
        self.calls: dict[str, list[_Call | str]] = {}
        self._paths = {id(module): path for path, module in self.network.named_modules()}
        for parameter in self.network.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        self._sources: dict[str, list[dict[int, Edge | None]]] = {}
        with contextlib.ExitStack() as hooks:
            for path, module in self.network.named_modules():
                before, after = self._record_inputs(path), self._record_call(path)
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
            output = traced_output(self.network, example)
        self.shape = output.shape
        self.output = edge_of(output)
        self.consumers = None if self.output is None else Consumers(self.output)
        self.reached = learnt_parameters(self.network, self.output)
        self._ancestors: dict[str, set[Any]] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in self.network.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.names = {key: known[0] for key, known in names.items()}
        self.shared = [known for known in names.values() if len(known) > 1]

    def call(self, path: str) -> _Call | str:
        """Return the single call of a module, or the reason why there is not exactly one."""
        # A module may have several paths.
        first = self._paths[id(self.network.get_submodule(path))]
        calls = self.calls.get(first, [])
        if len(calls) != 1:
            return f"it runs {len(calls)} times in a forward pass" if calls else "the forward does not run it"
        return calls[0]

    def follows(self, path: str, before: str) -> bool:
        """Return True if a module's input depends on another module's output."""
        call, earlier = self.call(path), self.call(before)
        if isinstance(call, str) or isinstance(earlier, str) or call.source is None:
            return False
        return earlier.result is not None and earlier.result[0] in self.behind(path, call.source)

    def behind(self, path: str, source: Edge) -> set[Any]:
        """Return the operations that a module's input depends on."""
        if path not in self._ancestors:
            self._ancestors[path] = ancestors(source[0])
        return self._ancestors[path]

    def _record_inputs(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, named: Any) -> None:
            # Before the module runs, which may change its inputs in place.
            edges = {id(x): edge_of(x) for x in tensors_in((args, named))}
            self._sources.setdefault(path, []).append(edges)

        return hook

    def _record_call(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, named: Any, output: Any) -> None:
            edges = self._sources[path].pop()
            calls = self.calls.setdefault(path, [])
            try:
                pass_through = PassThrough((args, named), output)
            except ValueError as error:
                calls.append(str(error))
                return
            taken, made = pass_through.main, pass_through.main_output
            shapes = tuple(taken.shape), tuple(made.shape)
            calls.append(_Call(edges.get(id(taken)), edge_of(made), *shapes, pass_through.released()))

        return hook


def traced_output(network: nn.Module, example: tuple[Any, ...]) -> Tensor:
    """Return the main output in eval mode, with its autograd graph."""

    def followed(x: Any) -> Any:
        # Not a leaf tensor: networks may change their input in place.
        real = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().clone().requires_grad_().clone() if real else x

    with without_side_effects(network), torch.enable_grad():
        network.eval()
        return main_output(call_with(network, changed(followed, example)))


def learnt_parameters(network: nn.Module, output: Edge | None) -> set[str]:
    """Names of the parameters that an output depends on."""
    nodes = set() if output is None else ancestors(output[0])
    found = {id(getattr(node, "variable", None)) for node in nodes}
    return {name for name, parameter in network.named_parameters() if id(parameter) in found}


def signature(network: nn.Module, paths: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters and buffers of some modules."""
    modules = [network.get_submodule(path) for path in paths]
    return [
        (f"{index}.{name}", tuple(tensor.shape))
        for index, module in enumerate(modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    ]


def runs_of_units(forward: Forward, bare: bool) -> list[Run]:
    """Find sequences of sibling modules of one kind that have parameters.

    With `bare`, also plain layers, and segments of `nn.Sequential` from one layer up to the next, such as a convolution
    with its normalisation and ReLU.
    """
    found: list[Run] = []
    for path, parent in forward.network.named_modules():
        groups = list(_siblings(forward.network, path, parent, bare))
        if bare and isinstance(parent, nn.Sequential):
            groups += _segments(forward, path, parent)
        for group in groups:
            units = [(name, called(forward, paths)) for name, paths in group]
            units = [(name, paths) for name, paths in units if paths]
            if len(units) > 1:
                kind = type(forward.network.get_submodule(units[0][1][0])).__name__
                found.append(Run(len(found), tuple(units), kind))
    return found


def analysed(forward: Forward, name: str, paths: tuple[str, ...]) -> Block | str:
    """Return the block of these modules, or the reason why it cannot be left out."""
    calls = [forward.call(path) for path in paths]
    for call in calls:
        if isinstance(call, str):
            return call
    known = [call for call in calls if not isinstance(call, str)]
    for names in forward.shared:
        inside = [any(one.startswith(f"{path}.") for path in paths) for one in names]
        # The first module keeps a shared tensor while others are left out.
        if inside[0] and not all(inside):
            return f"other modules share its {names[0]}"
    for call in known:
        if call.pass_through.problem:
            return call.pass_through.problem
    joined = all(one.result == other.source for one, other in pairwise(known))
    pass_throughs = {
        path: c.pass_through for path, c in zip(paths, known, strict=True) if not c.pass_through.plain and not joined
    }
    if joined and len(known) == 1:
        pass_throughs = {} if known[0].pass_through.plain else {paths[0]: known[0].pass_through}
    whole = _Call(known[0].source, known[-1].result, known[0].shape_in, known[-1].shape_out, known[0].pass_through)
    if joined and whole.shape_in == whole.shape_out:
        zeroed, obstacle = _kept(forward, whole)
        if zeroed is not None or not _is_branch(forward, paths[0], whole):
            return Block(name, (Span(paths, "stream"),), zeroed, obstacle, pass_throughs)
    elif joined and len(known) == 1:
        return f"it puts out {list(whole.shape_out)} where {list(whole.shape_in)} goes in"
    spans, every = list[Span](), list[str]()
    for path, call in zip(paths, known, strict=True):
        if call.shape_in != call.shape_out:
            return f"{path} puts out {list(call.shape_out)} where {list(call.shape_in)} goes in"
        kept, obstacle = _kept(forward, call)
        branch = kept is None and _is_branch(forward, path, call)
        added = _silenced(forward, call) if branch else kept
        if added is None:
            return f"{path}: {obstacle}" if len(paths) > 1 else obstacle
        spans.append(Span((path,), "branch" if branch else "stream"))
        every += added
    return Block(name, tuple(spans), tuple(every), "", pass_throughs)


def _kept(forward: Forward, call: _Call) -> tuple[tuple[str, ...] | None, str]:
    if call.source is None or call.result is None:
        return None, "nothing is learnt in it"
    walk = Branches(call.source, forward.names)
    zeroed = walk.kept(call.result)
    if zeroed is None:
        last = walk.obstacle or operation(call.result[0])
        return None, f"no sum at its end hands its input on: its output comes out of {last}"
    return (tuple(zeroed), "") if zeroed else (None, "it does nothing but hand its input on")


def _silenced(forward: Forward, call: _Call) -> tuple[str, ...] | None:
    assert call.source is not None
    zeroed = Branches(call.source, forward.names).silenced(call.result)
    return tuple(zeroed) if zeroed else None


def _is_branch(forward: Forward, path: str, call: _Call) -> bool:
    """Return True if the network adds the block's output to a value that the block's input depends on."""
    if call.source is None or call.result is None or forward.consumers is None:
        return False
    if not _silenced(forward, call):
        return False
    other = forward.consumers.added_to(call.result)
    return other is not None and other[0] in forward.behind(path, call.source)


def called(forward: Forward, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Replace containers that the forward does not call, such as lists, by the modules inside."""
    found: list[str] = []
    for path in paths:
        module = forward.network.get_submodule(path)
        if path in forward.calls or not isinstance(module, _CONTAINERS):
            found.append(path)
        else:
            found += called(forward, tuple(f"{path}.{name}" for name, _ in module.named_children()))
    return tuple(found)


Named = tuple[str, tuple[str, ...]]


def _siblings(network: nn.Module, path: str, parent: nn.Module, bare: bool) -> Iterator[list[Named]]:
    children = [(name, child) for name, child in parent._modules.items() if child is not None]
    group: list[Named] = []
    last: nn.Module | None = None
    for name, child in children:
        own = f"{path}.{name}".lstrip(".")
        if not _may_be_block(child, bare and isinstance(parent, nn.ModuleList)):
            continue
        if last is not None and not _same_structure(network, (group[-1][1], (own,)), last, child):
            yield group
            group = []
        group.append((own, (own,)))
        last = child
    yield group


def _segments(forward: Forward, path: str, sequence: nn.Sequential) -> list[list[Named]]:
    """Split a sequence into layers, each with shape-preserving modules behind it, grouped by their classes."""
    segments: list[list[str]] = []
    kinds: dict[tuple[type, ...], list[Named]] = {}
    if list(sequence._modules) != [str(index) for index in range(len(sequence))]:
        return []
    for index, child in enumerate(sequence):
        own = f"{path}.{index}".lstrip(".")
        call = forward.call(own)
        if _is_layer(child):
            segments.append([own])
        elif any(True for _ in child.children()) or isinstance(call, str):
            segments.append([])
        elif segments and segments[-1] and call.shape_in == call.shape_out:
            segments[-1].append(own)
        else:
            segments.append([])
    for paths in filter(None, segments):
        kind = tuple(type(forward.network.get_submodule(one)) for one in paths)
        end = int(paths[-1].rpartition(".")[2]) + 1
        kinds.setdefault(kind, []).append((f"{paths[0]}:{end}", tuple(paths)))
    return list(kinds.values())


def _is_layer(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() > 1


def _may_be_block(module: nn.Module, bare: bool) -> bool:
    if not any(True for _ in module.parameters()):
        return False
    composed = any(True for _ in module.children())
    return composed or not type(module).__module__.startswith("torch.nn.") or (bare and _is_layer(module))


def _same_structure(
    network: nn.Module, paths: tuple[tuple[str, ...], tuple[str, ...]], one: nn.Module, other: nn.Module
) -> bool:
    if type(one) is not type(other):
        return False
    return not isinstance(one, _CONTAINERS) or signature(network, paths[0]) == signature(network, paths[1])
