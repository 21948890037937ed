"""Find the width groups of any network from its `torch.export` graph."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn.modules import module as torch_module
from torch.nn.modules import transformer
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from growlab.widths.counterparts import growing_dimensions
from growlab.widths.groups import WidthGraph
from growlab.widths.inputs import Example, by_name_alone, call_with, inputs_of, listed, named_in, values_of
from growlab.widths.meta import corrected_shapes
from growlab.widths.modes import Modes, modes_of
from growlab.widths.narrowing import without, without_what_breaks
from growlab.widths.places import plain_tensors
from growlab.widths.predictions import Call
from growlab.widths.program import (
    UnsupportedOperation,
    depends_on_data,
    name_modules_once,
    operations,
    settle,
    unread_parameters,
)
from growlab.widths.submodules import Alone, inputs_to, path_of
from growlab.widths.tracer import OUTPUT, Tracer
from growlab.widths.trials import (
    FAILS,
    FAILURES,
    OTHERWISE,
    asks_for_numbers,
    named_tensors,
    own_line,
    share_attributes,
    tensors_in,
)
from growlab.widths.unchanged import Snapshot, unchanged

# A reshape into (3, heads, head dimension) has three dimensions of which one may grow.
_PASSES = 3
# Batch sizes to choose from.
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)
# torch logs the traceback of a failing operation here before it raises; growlab's message is one sentence.
_TORCH_LOGS = [
    logging.getLogger(f"torch.{name}")
    for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
]


def trace(
    model: nn.Module,
    example: Example,
    opaque: Sequence[str] = (),
    follow_norms: bool = False,
    submodule: str | nn.Module | None = None,
) -> WidthGraph:
    """Find the width groups of a network.

    A network that reads more parameters or returns more tensors in train mode than in eval mode (auxiliary heads, terms
    of the loss) is traced in train mode, where that can be exported and lets as much grow.

    Args:
        model: the full-width network; not changed, nor are the generators that it draws from.
        example: an input [B, ...] with B >= 2, the tuple of the forward's positional inputs, or inputs by name.
        opaque: names of operations without a channel rule (`my_op` for `torch.ops.any.my_op`) that growth need not
            pass: channels that enter them keep their full width.
        follow_norms: let channels grow whose Euclidean norm is taken, as in isotropic activations: for growth methods
            that allow for it (`GrowthMethod.follows_norms`).
        submodule: name of the part that grows, or the module itself, for a network that cannot be traced as a whole.
            It is traced on the inputs of its first call when the network runs on the example. Its outputs and the rest
            of the network keep their widths.

    Returns:
        The groups, the axes of every parameter and buffer they run through, and the scale classes.

    Raises:
        UnsupportedOperation: the network cannot be exported, an operation has no channel rule, or `opaque` names one
            that the network does not run; or it has no such submodule, or does not call it.
    """
    inputs = inputs_of(example, model)
    if submodule is not None:
        return _traced_alone(model, path_of(model, submodule), inputs, opaque, follow_norms)
    with unchanged(model, copied="nothing"):
        graph = _traced(model, inputs, opaque, follow_norms)
        breaks = any(reason.startswith((FAILS, OTHERWISE)) for reason in graph.fixed.values())
        for others in _other_rows(model, inputs) if breaks else ():
            try:
                other = _traced(model, others, opaque, follow_norms)
            except UnsupportedOperation:
                # The inputs are not a batch, or not all of them have a row per sample.
                continue
            return max(graph, other, key=lambda found: _growing(model, found))
        return graph


def _traced_alone(
    model: nn.Module, path: str, inputs: tuple[Any, ...], opaque: Sequence[str], follow_norms: bool
) -> WidthGraph:
    """Trace a submodule alone, under the names of the network; remove groups whose width the network's code fixes."""
    with unchanged(model):
        own = inputs_to(model, path, inputs)
    graph = trace(Alone(model, path), own, opaque, follow_norms)
    reasons = {OUTPUT: f"{path} puts it out, and is traced alone"}
    outside = f"outside of {path}, which is traced alone"
    graph = replace(
        graph,
        layers=tuple(replace(layer, is_output=False) for layer in graph.layers),
        # Nothing may scale what the rest of the network reads.
        unit_classes=graph.unit_classes | {graph.output_class},
        fixed={
            name: reasons.get(why, why) if f"{name}.".startswith(f"{path}.") else outside
            for name, why in graph.fixed.items()
        },
    )
    with unchanged(model, copied="nothing"):
        return without_what_breaks(model, graph, inputs, (), any_rows=True)


def _other_rows(model: nn.Module, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the inputs with a batch size that divides no width, in up to two variants; [] if theirs divides none.

    Attention over batch times heads, if these are as many as a stream has channels, cannot be distinguished from
    attention over the channels. The first variant changes all inputs with as many rows as the first one, the second
    variant the first input alone: a mask over positions may have the same length.
    """
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor) and value.dim()]
    sizes = {size for _, tensor in model.named_parameters() for size in tensor.shape}
    rows = len(tensors[0]) if tensors else 0
    number = next((n for n in _PRIMES if not any(size % n == 0 for size in sizes)), None)
    if not rows or number is None or not any(size % rows == 0 for size in sizes):
        return []
    index = torch.arange(number) % rows
    alike = [value for value in tensors if len(value) == rows]

    def with_others(chosen: Sequence[Tensor]) -> tuple[Any, ...]:
        return tree_map_only(
            Tensor,
            lambda value: value[index.to(value.device)] if any(value is one for one in chosen) else value,
            inputs,
        )

    return [with_others(chosen) for chosen in ([alike, alike[:1]] if len(alike) > 1 else [alike])]


def _traced(
    model: nn.Module, inputs: tuple[Any, ...], opaque: Sequence[str], follow_norms: bool
) -> WidthGraph:
    """Trace eval mode, and train mode if it differs, and return the graph in which more grows."""
    evaluated = _exported(model, inputs)
    modes = modes_of(model, inputs)
    settings = {"follow_norms": follow_norms, "several_outputs": modes.several, "updated": modes.updated}
    graphs = []
    if modes.apart:
        with suppress(UnsupportedOperation):
            trained = _exported(model, inputs, training=True)
            graphs.append(_traced_program(trained, model, inputs, opaque, {**settings, "training": True}))
        if graphs and set(graphs[0].fixed.values()) <= {OUTPUT}:
            return _without_own_backward(model, graphs[0], modes)
    graphs.append(_traced_program(evaluated, model, inputs, opaque, settings))
    return _without_own_backward(model, max(graphs, key=lambda found: _growing(model, found)), modes)


def _without_own_backward(model: nn.Module, graph: WidthGraph, modes: Modes) -> WidthGraph:
    """Remove groups that are normalised in code whose custom backward pass ignores growth's change of statistics."""
    for norm in graph.channel_norms:
        if apart := modes.own_backward.get(norm.name):
            reason = (
                f"{type(model.get_submodule(norm.name)).__name__} normalises over them inside {apart}, whose backward "
                "pass does not see what growth does to a normalisation"
            )
            graph = without(graph, {name: reason for name in norm.axis.groups if name in graph.groups})
    return replace(graph, recomputed=modes.recomputed)


def _traced_program(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    inputs: tuple[Any, ...],
    opaque: Sequence[str],
    settings: Mapping[str, Any],
) -> WidthGraph:
    if unknown := sorted(set(opaque) - (known := set(operations(program.graph_module)))):
        near = sorted({match for name in unknown for match in get_close_matches(name, known)})
        raise UnsupportedOperation(
            f"opaque=[{', '.join(unknown)}]: {type(model).__name__} runs no operation of that name; "
            + (f"nearest are {', '.join(near)}." if near else f"it runs {', '.join(sorted(known))}.")
        )
    graphs = []

    always = {**settings, "opaque": frozenset(opaque)}
    training = always.pop("training", False)
    always["plain"] = _plain_constants(program, model.train(training), inputs) - always["updated"]

    def find(moved: Mapping[str, int] | None = None, **settings: Any) -> tuple[WidthGraph, Tracer]:
        graph, calls, last = _best_pass(program, model, moved or {}, {**always, **settings})
        graphs.append(without_what_breaks(model, graph, inputs, calls, training))
        return graph, last

    try:
        graph, tracer = find()
    except UnsupportedOperation:
        # With growing streams under layer normalisation, channels reach operations without a channel rule.
        find(weighted_norms=False)
        return graphs[0]
    if len(graphs[0].attentions) < len(graph.attentions):
        # Where a head dimension is hard-coded, whole heads may grow instead.
        find(heads="number")
    if tracer.attending and max(len(found.groups) for found in graphs) < len(graph.groups):
        # Where the code takes the stream's width for that of all heads together, heads may grow with the stream.
        # All layers at once: the stream does not grow before each of them lets it.
        tied = frozenset(tracer.attending)
        find(tracer.moved, heads="number", tied=tied)
        if graph.attentions and len(graphs[-1].groups) < len(graph.groups):
            # The number of heads may be hard-coded: then each head grows with the stream.
            find(tied=tied)
    if tracer.multiplies:
        # Where neither can grow, as with a single hand-written head, its values may.
        with suppress(UnsupportedOperation):
            # They may reach an operation without a channel rule.
            graph, calls, _ = _best_pass(program, model, {}, {**always, "heads": "values"})
            if _growing(model, graph) > max(_growing(model, found) for found in graphs):
                graphs.append(without_what_breaks(model, graph, inputs, calls, training))
    return max(graphs, key=lambda graph: _growing(model, graph))


def _plain_constants(
    program: torch.export.ExportedProgram, model: nn.Module, inputs: tuple[Any, ...]
) -> frozenset[str]:
    """Names of modules' plain tensors that a program reads, unless they are learned or the forward creates them."""
    known, found = plain_tensors(model), set[str]()
    for name in program.graph_signature.inputs_to_lifted_tensor_constants.values():
        if name not in known or not known[name].is_leaf or known[name].requires_grad:
            continue
        with unchanged(model, copied="all but parameters"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            setattr(module, own, None)
            with suppress(*FAILURES):
                call_with(model, inputs)
            # The forward has created a cache again.
            if getattr(module, own, None) is None:
                found.add(name)
    return frozenset(found)


def layouts(
    model: nn.Module,
    example: Example,
    narrower: nn.Module | None = None,
    source: Callable[[str], str] = str,
) -> WidthGraph:
    """Derive the width graph from a network's operations alone, without testing its code at other widths.

    It gives the layout of tensors in networks of the same class that are built at other widths.

    Args:
        model: see `trace`.
        example: see `trace`.
        narrower: one of these, from which it is inferred whether the number of heads or each head becomes larger.
            None: the number of heads.
        source: maps the path of a module of the model to that of its counterpart in the narrower network.

    Raises:
        UnsupportedOperation: see `trace`.
    """
    inputs = inputs_of(example, model)
    settings: dict[str, Any] = {"opaque": frozenset[str](), "follow_norms": False}
    program = _exported(model, inputs)
    if narrower is None:
        return _best_pass(program, model, {}, {**settings, "heads": "number"})[0]
    moved = growing_dimensions(program, _exported(narrower, inputs), source)
    return _best_pass(program, model, moved, {**settings, "heads": "sizes"})[0]


def _exported(
    model: nn.Module, inputs: tuple[Any, ...], training: bool = False
) -> torch.export.ExportedProgram:
    try:
        quiet = warnings.catch_warnings()
        with (
            quiet,
            torch.no_grad(),
            unchanged(model, copied="all but parameters"),
            _masks_as_given(),
            _exportable(model),
            corrected_shapes(),
            _DrawsFromGlobal(),
        ):
            warnings.simplefilter("ignore")
            for log in _TORCH_LOGS:
                log.addFilter(_never)
            _without_caches(model.train(training))
            # torch.export prints an incomplete program there.
            with redirect_stderr(io.StringIO()):
                program = _program(model, inputs)
    except UnsupportedOperation:
        raise
    except Exception as error:
        raise _not_exported(model, inputs, error) from error
    finally:
        for log in _TORCH_LOGS:
            log.removeFilter(_never)
    name_modules_once(program, model)
    return program


def _program(model: nn.Module, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """Export a network; sizes that depend on data become those for the given inputs."""

    def export() -> torch.export.ExportedProgram:
        return torch.export.export(model, tuple(inputs), named_in(inputs), strict=False)

    try:
        program = export()
    except Exception as error:
        if not any("data-dependent" in str(each).lower() for each in _causes(error)):
            raise
        try:
            # As in torch.export.draft_export: real values are propagated for code that reads them.
            with functorch_config.patch(fake_tensor_propagate_real_tensors=True):
                program = export()
        except Exception:
            raise error from None
        if unread := unread_parameters(program, model):
            raise UnsupportedOperation(
                f"{type(model).__name__} chooses by numbers in the data what it computes{_line_of(error)}, and "
                f"does not read {unread[0]} for this example: give one for which it reads all its parameters, or let "
                "only a part of it grow (Grower(..., trace=SUBMODULE))."
            ) from error
    tensors = tensors_in([*named_tensors(model).values(), *values_of(inputs)])
    if depends_on_data(program) and not any(tensor.is_meta for tensor in tensors):
        settle(program, inputs, named_in(inputs))
    return program


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def _exportable(model: nn.Module) -> Iterator[None]:
    """Make a forward exportable that reads attributes of parameters, keeps tensors or returns a dataclass."""
    tensors, kept = named_tensors(model), list[Snapshot]()
    # torch.export records here buffers that a forward replaces, and fails on new ones.
    registered: dict[int, Any] = getattr(torch_module, "_global_buffer_registration_hooks", {})

    def begin(module: nn.Module, inputs: Any) -> None:
        share_attributes(tensors, module)
        kept.append(Snapshot(module, "nothing"))
        registered.clear()

    def end(module: nn.Module, inputs: Any, output: Any) -> Any:
        kept.pop().restore()
        unknown = any(is_dataclass(leaf) for leaf in tree_leaves(output))
        return tuple(tensors_in(output)) if unknown else output

    handles = model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end)
    own = dict(registered)
    try:
        yield
    finally:
        registered.update(own)
        for handle in handles:
            handle.remove()


def _without_caches(model: nn.Module) -> None:
    """Turn off `use_cache` in models of transformers: torch.export does not know the cache objects that they return."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


@contextmanager
def _masks_as_given() -> Iterator[None]:
    """Stop torch's transformers from inspecting whether a mask is causal.

    torch.export cannot follow the inspection, which only chooses a kernel. There is no public switch for it.
    """
    looks = getattr(transformer, "_detect_is_causal_mask", None)
    if looks is None:
        yield
        return
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = looks


def _not_exported(model: nn.Module, inputs: tuple[Any, ...], error: Exception) -> UnsupportedOperation:
    """Return the error for a failed export: the network itself fails on the input, or torch.export cannot follow it."""
    name = type(model).__name__
    for path, module in model.named_modules():
        if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            return UnsupportedOperation(
                f"{path or name} ({type(module).__name__}) has no shape yet; call the network once on an example input."
            )
        if isinstance(module, torch.jit.ScriptModule):
            return UnsupportedOperation(
                f"{path or name} is a torch.jit.ScriptModule, which cannot be traced; script the network at the end."
            )
    empty = next((own for own, tensor in model.named_parameters() if not tensor.numel()), None)
    if empty is not None:
        shape = list(model.get_parameter(empty).shape)
        return UnsupportedOperation(
            f"{empty} of {name} is of the shape {shape}, without entries: give the network widths of at least 1."
        )
    try:
        with torch.no_grad(), unchanged(model), _Packing() as packing:
            call_with(model, inputs)
    except Exception as own:
        if (asked := asks_for_numbers(model, own)) is not None:
            return asked
        if (wanted := by_name_alone(model)) and not set(wanted) <= named_in(inputs).keys():
            return UnsupportedOperation(
                f"{name} takes {', '.join(wanted)} by name alone: give the example as a dictionary of all its inputs "
                "by name; growlab's own runner gives inputs by position, so let the forward take them so there."
            )
        return UnsupportedOperation(
            f"{name} cannot compute an input of {listed(inputs)} ({_told(own)}); choose data that it fits, or another "
            "network."
        )
    if any(isinstance(x, PackedSequence) for x in values_of(inputs)) or packing.seen:
        return UnsupportedOperation(
            f"{name} packs sequences, which torch.export cannot follow: run its recurrent layers on padded sequences "
            "and mask what lies behind the ends, or let a part of it grow that takes plain tensors (Grower(..., "
            "trace=SUBMODULE))."
        )
    return UnsupportedOperation(
        f"torch.export cannot follow {name}{_line_of(error)}: {_told(error)}; let only a part of it grow that does "
        "without (Grower(..., trace=SUBMODULE)), or train it at a fixed size."
    )


def _line_of(error: BaseException) -> str:
    """Return the line of the user's code that raised an error as " at `LINE`" for messages, or ""."""
    line = next(filter(None, map(own_line, _causes(error))), "")
    return f" at `{line}`" if line else ""


class _DrawsFromGlobal(TorchFunctionMode):
    """Drop `generator` arguments, so that torch's global generator is used: torch 2.11 cannot export others."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **{name: x for name, x in (kwargs or {}).items() if name != "generator"})


class _Packing(TorchFunctionMode):
    """Set `seen` when a sequence is packed or a packed one is padded."""

    seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen |= getattr(func, "__name__", "") in ("_pack_padded_sequence", "_pad_packed_sequence")
        return func(*args, **(kwargs or {}))


def _told(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first_line}"


def _never(record: logging.LogRecord) -> bool:
    return False


def _growing(model: nn.Module, graph: WidthGraph) -> tuple[int, int]:
    """Count the parameters in tensors that grow, and the same with each counted once per growing dimension."""
    counts = [
        (p.numel(), sum(bool(axis.groups) for axis in graph.axes.get(name, ())))
        for name, p in model.named_parameters()
    ]
    return sum(n for n, dims in counts if dims), sum(n * dims for n, dims in counts)


def _best_pass(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    moved: Mapping[str, int],
    settings: Mapping[str, Any],
) -> tuple[WidthGraph, list[Call], Tracer]:
    """Interpret a program several times, moving growing dimensions that attention sums over one to the left.

    Returns the graph in which most parameters grow, its operations, and the tracer of the last complete pass.
    """
    settings = dict(settings)
    about = {name: settings.pop(name) for name in ("several_outputs", "updated") if name in settings}
    best: tuple[WidthGraph, list[Call]] | None = None
    most = (-1, -1)
    for _ in range(_PASSES):
        further = Tracer(program, model, moved=moved, **settings)
        try:
            graph = further.run(**about)
        except UnsupportedOperation:
            # A moved dimension has reached an operation without a channel rule.
            if best is None:
                raise
            break
        tracer = further
        growing = _growing(model, graph)
        if growing > most:
            best, most = (graph, tracer.calls), growing
        again = tracer.summed_over()
        if not again:
            break
        moved = {**moved, **{node: moved.get(node, 0) + 1 for node in again}}
    assert best is not None
    return *best, tracer
