"""Find the blocks of a network that can be left out at first: repeated modules that pass on their input.

Blocks are found by structure and shapes, not by names: siblings of one kind, each of which takes the output of the one
before and keeps its shape. The autograd graph of one forward pass shows how each uses its input; this is then measured.
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

    Otherwise an inserted block would shift the draws of later blocks, such as those of stochastic depth in train mode,
    and outputs before and after could not be compared. Generators are restored.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), _SameDraws():
        yield


#: Output of a placeholder: the block's input ("stream"), or zeros for the network to add ("branch").
Kind = Literal["stream", "branch"]


class SkippedBlock(nn.Module):
    """Placeholder for a block that is not inserted yet; see `Kind`.

    It has the block's plain attributes, which the network's code may read. `pass_through` composes its output from its
    inputs; None if it maps its first input to one tensor.
    """

    def __init__(self, block: nn.Module, kind: Kind = "stream", pass_through: "PassThrough | None" = None) -> None:
        super().__init__()
        public = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        vars(self).update({name: value for name, value in public.items() if not isinstance(value, Tensor)})
        self._kind, self._pass_through = kind, pass_through

    def forward(self, *args: Any, **named: Any) -> Any:
        """Map the block's inputs to an output of the block's structure."""
        if self._pass_through is None:
            return args[0] if self._kind == "stream" else torch.zeros_like(args[0])
        return self._pass_through.output((args, named), zeros=self._kind == "branch")


class PassThrough:
    """Composes a block's output from its (positional, named) inputs and constants, as observed in one call.

    Attributes:
        drops: the block outputs further new tensors, such as attention weights; they are None in the composed output.

    Raises:
        ValueError: there is no tensor among the inputs or the outputs.
    """

    def __init__(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], output: Any) -> None:
        leaves, _ = pytree.tree_flatten_with_path(inputs)
        tensors = [(path, value) for path, value in leaves if isinstance(value, Tensor)]
        outputs, self._spec = pytree.tree_flatten(output)
        self._index = next((index for index, value in enumerate(outputs) if isinstance(value, Tensor)), -1)
        if not tensors or self._index < 0:
            raise ValueError("it maps no tensor to a tensor")
        self.place, self.main = tensors[0]
        self.main_output: Tensor = outputs[self._index]
        self.drops = False
        # Paths of inputs (True), and constants (False).
        self._entries = list[tuple[bool, Any]]()
        for index, value in enumerate(outputs):
            if index == self._index:
                self._entries.append((True, self.place))
                continue
            same = [path for path, x in tensors if x is value]
            dropped = isinstance(value, Tensor) and not same
            self.drops |= dropped
            self._entries.append((True, same[0]) if same else (False, None if dropped else value))

    @property
    def plain(self) -> bool:
        """True if the block maps its first input to one tensor."""
        first: tuple[Any, ...] = (pytree.SequenceKey(0), pytree.SequenceKey(0))
        return self._spec.is_leaf() and tuple(self.place) == first

    def taken(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        """Return the main tensor among the block's (positional, named) inputs."""
        main: Tensor = pytree.key_get(inputs, self.place)
        return main

    def main_only(self, output: Any) -> Any:
        """Replace tensors that the block's composed output does not have by None in an output of the block."""
        values, spec = pytree.tree_flatten(output)
        kept = [value if taken else entry for (taken, entry), value in zip(self._entries, values, strict=True)]
        return pytree.tree_unflatten(kept, spec)

    def released(self) -> "PassThrough":
        """Release the tensors of the call, and return self."""
        del self.main, self.main_output
        return self

    def output(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], zeros: bool) -> Any:
        """Compose the block's output from its (positional, named) inputs, with the main output zero if `zeros`."""
        values = [pytree.key_get(inputs, entry) if taken else entry for taken, entry in self._entries]
        if zeros:
            values[self._index] = torch.zeros_like(values[self._index])
        return pytree.tree_unflatten(values, self._spec)


# Classes whose modules may differ in their contents.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: Exceptions that a network may raise if it does not run without a block.
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError)


@dataclass(frozen=True)
class Span:
    """Paths of modules that run directly one after another, and the kind of their placeholders."""

    paths: tuple[str, ...]
    kind: Kind


@dataclass(frozen=True)
class Block:
    """Neighbouring modules that are inserted together.

    Attributes:
        name: path of a module, or `path.i:j` for the modules i to j - 1 of a sequence.
        zeroed: names of the parameters to zero so that it adds nothing; None if there are none (see `obstacle`).
        pass_throughs: composition of the placeholder's output by path, for modules that do not map one tensor to one
            tensor.
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
    """A sequence of sibling modules of class `kind`, with the name and module paths of each; `order` is its index."""

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
        self.names = {key: aliases[0] for key, aliases in names.items()}
        self.shared = [aliases for aliases in names.values() if len(aliases) > 1]

    def call(self, path: str) -> _Call | str:
        """Return the only call of a module, or the reason why there is not exactly one."""
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
            # Before the module runs, since it may change its inputs in place.
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
            main, result = pass_through.main, pass_through.main_output
            shapes = tuple(main.shape), tuple(result.shape)
            calls.append(_Call(edges.get(id(main)), edge_of(result), *shapes, pass_through.released()))

        return hook


def traced_output(network: nn.Module, example: tuple[Any, ...]) -> Tensor:
    """Return the main output in eval mode, with its autograd graph."""

    def tracked(x: Any) -> Any:
        # Not a leaf tensor, since networks may change their input in place.
        real = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().clone().requires_grad_().clone() if real else x

    with without_side_effects(network), torch.enable_grad():
        network.eval()
        return main_output(call_with(network, changed(tracked, example)))


def learnt_parameters(network: nn.Module, output: Edge | None) -> set[str]:
    """Names of the parameters that an output depends on."""
    nodes = set() if output is None else ancestors(output[0])
    reached = {id(getattr(node, "variable", None)) for node in nodes}
    return {name for name, parameter in network.named_parameters() if id(parameter) in reached}


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
    runs: list[Run] = []
    for path, parent in forward.network.named_modules():
        groups = list(_siblings(forward.network, path, parent, bare))
        if bare and isinstance(parent, nn.Sequential):
            groups += _segments(forward, path, parent)
        for group in groups:
            units = [(name, modules) for name, paths in group if (modules := called(forward, paths))]
            if len(units) > 1:
                kind = type(forward.network.get_submodule(units[0][1][0])).__name__
                runs.append(Run(len(runs), tuple(units), kind))
    return runs


def analysed(forward: Forward, name: str, paths: tuple[str, ...]) -> Block | str:
    """Return the block of these modules, or the reason why it cannot be left out."""
    calls: list[_Call] = []
    for path in paths:
        if isinstance(call := forward.call(path), str):
            return call
        calls.append(call)
    for names in forward.shared:
        inside = [any(other.startswith(f"{path}.") for path in paths) for other in names]
        # The first module keeps a shared tensor while others are left out.
        if inside[0] and not all(inside):
            return f"other modules share its {names[0]}"
    if len(calls) > 1 and any(call.pass_through.drops for call in calls):
        return "it outputs more than one new tensor"
    joined = all(earlier.result == later.source for earlier, later in pairwise(calls))
    pass_throughs = {}
    if not joined or len(calls) == 1:
        composed = zip(paths, (call.pass_through for call in calls), strict=True)
        pass_throughs = {path: pass_through for path, pass_through in composed if not pass_through.plain}
    whole = _Call(calls[0].source, calls[-1].result, calls[0].shape_in, calls[-1].shape_out, calls[0].pass_through)
    if joined and whole.shape_in == whole.shape_out:
        zeroed, obstacle = _kept(forward, whole)
        if zeroed is not None or not _is_branch(forward, paths[0], whole):
            return Block(name, (Span(paths, "stream"),), zeroed, obstacle, pass_throughs)
    elif joined and len(calls) == 1:
        return f"it maps shape {list(whole.shape_in)} to {list(whole.shape_out)}"
    spans, all_zeroed = list[Span](), list[str]()
    for path, call in zip(paths, calls, strict=True):
        if call.shape_in != call.shape_out:
            return f"{path} maps shape {list(call.shape_in)} to {list(call.shape_out)}"
        kept, obstacle = _kept(forward, call)
        branch = kept is None and _is_branch(forward, path, call)
        zeroed = _silenced(forward, call) if branch else kept
        if zeroed is None:
            return f"{path}: {obstacle}" if len(paths) > 1 else obstacle
        spans.append(Span((path,), "branch" if branch else "stream"))
        all_zeroed += zeroed
    return Block(name, tuple(spans), tuple(all_zeroed), "", pass_throughs)


def _kept(forward: Forward, call: _Call) -> tuple[tuple[str, ...] | None, str]:
    if call.source is None or call.result is None:
        return None, "nothing is learnt in it"
    walk = Branches(call.source, forward.names)
    zeroed = walk.kept(call.result)
    if zeroed is None:
        last = walk.obstacle or operation(call.result[0])
        return None, f"no sum at its end passes its input on: its output is that of {last}"
    return (tuple(zeroed), "") if zeroed else (None, "it only passes its input on")


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
    modules: list[str] = []
    for path in paths:
        module = forward.network.get_submodule(path)
        if path in forward.calls or not isinstance(module, _CONTAINERS):
            modules.append(path)
        else:
            modules += called(forward, tuple(f"{path}.{name}" for name, _ in module.named_children()))
    return tuple(modules)


Named = tuple[str, tuple[str, ...]]


def _siblings(network: nn.Module, path: str, parent: nn.Module, bare: bool) -> Iterator[list[Named]]:
    """Yield the children of a module that may be blocks, in runs of the same structure."""
    group: list[Named] = []
    last: nn.Module | None = None
    for name, child in parent._modules.items():
        full_path = f"{path}.{name}".lstrip(".")
        if child is None or not _may_be_block(child, bare and isinstance(parent, nn.ModuleList)):
            continue
        if last is not None and not _same_structure(network, (group[-1][1], (full_path,)), last, child):
            yield group
            group = []
        group.append((full_path, (full_path,)))
        last = child
    yield group


def _segments(forward: Forward, path: str, sequence: nn.Sequential) -> list[list[Named]]:
    """Split a sequence into layers, each with the shape-preserving modules after it, grouped by their classes."""
    segments: list[list[str]] = []
    kinds: dict[tuple[type, ...], list[Named]] = {}
    if list(sequence._modules) != [str(index) for index in range(len(sequence))]:
        return []
    for index, child in enumerate(sequence):
        full_path = f"{path}.{index}".lstrip(".")
        call = forward.call(full_path)
        if _is_layer(child):
            segments.append([full_path])
        elif any(True for _ in child.children()) or isinstance(call, str):
            segments.append([])
        elif segments and segments[-1] and call.shape_in == call.shape_out:
            segments[-1].append(full_path)
        else:
            segments.append([])
    for paths in filter(None, segments):
        kind = tuple(type(forward.network.get_submodule(path)) for path in paths)
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
    network: nn.Module, paths: tuple[tuple[str, ...], tuple[str, ...]], first: nn.Module, second: nn.Module
) -> bool:
    if type(first) is not type(second):
        return False
    return not isinstance(first, _CONTAINERS) or signature(network, paths[0]) == signature(network, paths[1])
