"""Find the width groups of a network from its `torch.export` graph."""

import gc
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn.modules import module as torch_module
from torch.nn.modules import transformer
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from growlab.base.devices import as_given, on_cpu
from growlab.base.errors import first_line
from growlab.widths.groups import WidthGraph
from growlab.widths.inputs import (
    Alone,
    Example,
    call_with,
    inputs_of,
    inputs_to,
    keyword_only,
    listed,
    named_in,
    path_of,
    tensors_in,
    values_of,
)
from growlab.widths.meta import (
    FAILURES,
    Lightened,
    asks_for_numbers,
    corrected_shapes,
    named_tensors,
    other_types,
    own_line,
    share_attributes,
    unwarned,
)
from growlab.widths.places import plain_tensors
from growlab.widths.program import (
    UnsupportedOperation,
    depends_on_data,
    growing_dimensions,
    name_modules_once,
    operations,
    settle,
    unread_parameters,
)
from growlab.widths.trials import FAILS, OTHERWISE, freeze_failing_groups, without
from growlab.widths.unchanged import Snapshot, unchanged
from growlab.widths.walk import OUTPUT, Walk

# Candidates for the growing dimension of a reshape: into (3, heads, head dimension) there are three.
_PASSES = 3
# Candidates for a batch size that divides no width.
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)
# torch logs a traceback here before it raises; growlab's message is one sentence.
_TORCH_LOGS = [
    logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
]


@on_cpu
def trace(
    model: nn.Module,
    example: Example,
    keep_full: Sequence[str] = (),
    follow_norms: bool = False,
    submodule: str | nn.Module | None = None,
) -> WidthGraph:
    """Find the width groups of a network.

    A network that reads more parameters or returns more tensors in train mode than in eval mode (auxiliary heads, terms
    of the loss) is traced in train mode, where that can be exported and lets as much grow.

    Args:
        model: the full-width network; not changed, nor are the generators that it draws from.
        example: an input [B, ...] with B >= 2, the tuple of the forward's positional inputs, or inputs by name.
        keep_full: names of operations without a channel rule (`my_op` for `torch.ops.any.my_op`). Channels that enter
            them keep their full width.
        follow_norms: let channels grow whose Euclidean norm is taken, as in isotropic activations: for growth methods
            that support it (`GrowthMethod.follows_norms`).
        submodule: name of the part that grows, or the module itself, for a network that cannot be traced as a whole.
            It is traced on the inputs of its first call when the network runs on the example. Its outputs and the rest
            of the network keep their widths.

    Returns:
        The groups, the axes of every parameter and buffer they run through, and the scale classes.

    Raises:
        UnsupportedOperation: the network cannot be exported, an operation has no channel rule, or `keep_full` names one
            that the network does not run; or it has no such submodule, or does not call it.
    """
    inputs = inputs_of(example, model)
    if submodule is not None:
        return _traced_alone(model, path_of(model, submodule), inputs, keep_full, follow_norms)
    with unchanged(model, copied="all but parameters") as whole, _no_full_collections():
        graph, light = _traced(model, inputs, keep_full, follow_norms, whole)
        breaks = any(reason.startswith((FAILS, OTHERWISE)) for reason in graph.fixed.values())
        for others in _other_batch_sizes(model, inputs) if breaks else ():
            if light.rows_stay_apart(others):
                continue
            try:
                other, _ = _traced(model, others, keep_full, follow_norms, whole)
            except UnsupportedOperation:
                # The inputs are not a batch, or not all of them have a row per sample.
                continue
            return _most_growing(model, [graph, other])
        return graph


@contextmanager
def _no_full_collections() -> Iterator[None]:
    """Suspend garbage collection of the oldest generation, which the many objects of torch.export would trigger."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _traced_alone(
    model: nn.Module, path: str, inputs: tuple[Any, ...], keep_full: Sequence[str], follow_norms: bool
) -> WidthGraph:
    """Trace a submodule alone, under the names of the network; remove groups whose width the network's code fixes."""
    with unchanged(model):
        submodule_inputs = inputs_to(model, path, inputs)
    graph = trace(Alone(model, path), submodule_inputs, keep_full, follow_norms)
    reasons = {OUTPUT: f"{path} puts it out, and is traced alone"}
    outside = f"outside of {path}, which is traced alone"
    graph = replace(
        graph,
        layers=tuple(replace(layer, is_output=False) for layer in graph.layers),
        # The rest of the network reads the output, so its scale must not change.
        unit_classes=graph.unit_classes | {graph.output_class},
        fixed={
            name: reasons.get(why, why) if f"{name}.".startswith(f"{path}.") else outside
            for name, why in graph.fixed.items()
        },
    )
    with unchanged(model, copied="nothing") as whole:
        return freeze_failing_groups(Lightened(model, inputs, whole), graph, (), any_rows=True)


def _other_batch_sizes(model: nn.Module, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the inputs at a batch size that divides no width, in up to two variants; [] if their own divides none.

    If batch size times heads equals the width of a stream, attention over both cannot be distinguished from attention
    over the channels. The first variant changes all inputs with as many rows as the first one, the second variant the
    first input alone: another one, such as a mask over positions, may have as many rows by chance.
    """
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor) and value.dim()]
    sizes = {size for _, tensor in model.named_parameters() for size in tensor.shape}
    rows = len(tensors[0]) if tensors else 0
    number = next((n for n in _PRIMES if not any(size % n == 0 for size in sizes)), None)
    if not rows or number is None or not any(size % rows == 0 for size in sizes):
        return []
    index = torch.arange(number) % rows
    same_rows = [value for value in tensors if len(value) == rows]

    def resized(batched: Sequence[Tensor]) -> tuple[Any, ...]:
        ids = {*map(id, batched)}
        return tree_map_only(Tensor, lambda x: x[index.to(x.device)] if id(x) in ids else x, inputs)

    return [resized(batched) for batched in ([same_rows, same_rows[:1]] if len(same_rows) > 1 else [same_rows])]


def _traced(
    model: nn.Module, inputs: tuple[Any, ...], keep_full: Sequence[str], follow_norms: bool, whole: Snapshot
) -> tuple[WidthGraph, Lightened]:
    """Trace eval mode, and train mode if it differs, and return the graph in which more grows."""
    evaluated = _exported(model, inputs, whole)
    light = Lightened(model, inputs, whole)
    modes = light.modes
    settings = {"follow_norms": follow_norms, "several_outputs": modes.several, "updated": modes.updated}
    graphs = []
    if modes.differ:
        with suppress(UnsupportedOperation):
            trained = _exported(model, inputs, whole, training=True)
            graphs.append(_traced_program(trained, light, inputs, keep_full, {**settings, "training": True}))
    if not graphs or not set(graphs[0].fixed.values()) <= {OUTPUT}:
        graphs.append(_traced_program(evaluated, light, inputs, keep_full, settings))
    graph = _most_growing(model, graphs)
    # A custom backward pass ignores that growth reweights the statistics.
    for norm in graph.channel_norms:
        if function := modes.own_backward.get(norm.name):
            reason = (
                f"{type(model.get_submodule(norm.name)).__name__} normalises over them inside {function}, whose "
                "backward pass does not see what growth does to a normalisation"
            )
            graph = without(graph, {name: reason for name in norm.axis.groups if name in graph.groups})
    return replace(graph, recomputed=modes.recomputed), light


def _traced_program(
    program: torch.export.ExportedProgram,
    light: Lightened,
    inputs: tuple[Any, ...],
    keep_full: Sequence[str],
    settings: Mapping[str, Any],
) -> WidthGraph:
    model = light.model
    if unknown := sorted(set(keep_full) - (known := set(operations(program.graph_module)))):
        near = sorted({match for name in unknown for match in get_close_matches(name, known)})
        raise UnsupportedOperation(
            f"keep_full=[{', '.join(unknown)}]: {type(model).__name__} runs no operation of that name; "
            + (f"nearest are {', '.join(near)}." if near else f"it runs {', '.join(sorted(known))}.")
        )
    always = {**settings, "keep_full": frozenset(keep_full)}
    training = always.pop("training", False)
    always["plain"] = _plain_constants(program, model.train(training), inputs) - always["updated"]

    def walked(moved: Mapping[str, int] | None = None, **settings: Any) -> tuple[WidthGraph, Walk, Walk]:
        return _best_pass(program, model, moved or {}, {**always, **settings})

    def tried(graph: WidthGraph, best: Walk, _: Walk, all_or_none: bool = False) -> WidthGraph:
        return freeze_failing_groups(light, graph, best.calls, training, all_or_none=all_or_none)

    try:
        first = graph, _, walk = walked()
    except UnsupportedOperation:
        # With growing streams under layer normalisation, channels reach operations without a channel rule.
        return tried(*walked(weighted_norms=False))
    # Where the code uses the stream's width as that of all heads together, heads may grow with the stream: in all
    # layers or in none, because the stream grows only if every layer lets it.
    tied = frozenset(walk.record.attending)
    either = bool(tied) and not graph.attentions
    graphs = [tried(*first, all_or_none=either)]
    if len(graphs[0].attentions) < len(graph.attentions):
        # Where a head dimension is hard-coded, whole heads may grow instead.
        graphs.append(tried(*walked(heads="number")))
    if tied and max(len(candidate.groups) for candidate in graphs) < len(graph.groups):
        graphs.append(tried(*walked(walk.record.moved, heads="number", tied=tied)))
        if graph.attentions and len(graphs[-1].groups) < len(graph.groups):
            # The number of heads may be hard-coded: then each head grows with the stream.
            graphs.append(tried(*walked(tied=tied)))
        if either and _growing(model, graphs[-1]) < _growing(model, graph):
            # Done only now, because finding out which groups fail takes longest.
            graphs[0] = tried(*first)
    if walk.record.multiplies:
        # Where neither can grow, as with a single hand-written head, the channels of its values may.
        with suppress(UnsupportedOperation):
            # These may reach an operation without a channel rule.
            by_values = walked(heads="values")
            if _growing(model, by_values[0]) > _growing(model, _most_growing(model, graphs)):
                graphs.append(tried(*by_values))
    return _most_growing(model, graphs)


def _plain_constants(
    program: torch.export.ExportedProgram, model: nn.Module, inputs: tuple[Any, ...]
) -> frozenset[str]:
    """Names of modules' plain tensors that a program reads, unless they are learned or the forward creates them."""
    tensors, constants = plain_tensors(model), set[str]()
    for name in program.graph_signature.inputs_to_lifted_tensor_constants.values():
        if name not in tensors or not tensors[name].is_leaf or tensors[name].requires_grad:
            continue
        with unchanged(model, copied="all but parameters"), torch.no_grad(), unwarned():
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            setattr(module, attribute, None)
            with suppress(*FAILURES):
                call_with(model, inputs)
            # Otherwise it is a cache, which the forward has created again.
            if getattr(module, attribute, None) is None:
                constants.add(name)
    return frozenset(constants)


@on_cpu
def layouts(
    model: nn.Module, example: Example, narrower: nn.Module | None = None, source: Callable[[str], str] = str
) -> WidthGraph:
    """Derive the width graph from a network's operations alone, without testing its code at other widths.

    The graph describes the layout of tensors in networks of the same class that are built at other widths.

    Args:
        model: see `trace`.
        example: see `trace`.
        narrower: such a network, which shows whether the number of heads grows or each head. None: the number of heads.
        source: maps the path of a module of the model to that of its counterpart in the narrower network.

    Raises:
        UnsupportedOperation: see `trace`.
    """
    inputs = inputs_of(example, model)
    settings: dict[str, Any] = {"keep_full": frozenset[str](), "follow_norms": False}
    with unchanged(model, copied="all but parameters") as whole:
        program = _exported(model, inputs, whole)
    if narrower is None:
        return _best_pass(program, model, {}, {**settings, "heads": "number"})[0]
    with unchanged(narrower, copied="all but parameters") as whole:
        moved = growing_dimensions(program, _exported(narrower, inputs, whole), source)
    return _best_pass(program, model, moved, {**settings, "heads": "sizes"})[0]


def _exported(
    model: nn.Module, inputs: tuple[Any, ...], whole: Snapshot, training: bool = False
) -> torch.export.ExportedProgram:
    try:
        with unwarned(), torch.no_grad(), _masks_as_given(), _exportable(model, whole), corrected_shapes():
            for log in _TORCH_LOGS:
                log.addFilter(_never)
            _without_caches(model.train(training))
            # torch.export prints incomplete programs to stderr.
            with _draws(), redirect_stderr(io.StringIO()):
                program = _program(model, inputs)
    except UnsupportedOperation:
        raise
    except Exception as error:
        raise UnsupportedOperation(_why_not_exported(model, inputs, error)) from error
    finally:
        for log in _TORCH_LOGS:
            log.removeFilter(_never)
    name_modules_once(program, model)
    return program


def _program(model: nn.Module, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """Export a network; sizes that depend on data are specialised to the given inputs."""

    def export() -> torch.export.ExportedProgram:
        with as_given():
            return torch.export.export(model, tuple(inputs), named_in(inputs), strict=False)

    try:
        program = export()
    except Exception as error:
        if not _by_numbers(error):
            raise
        try:
            # As in torch.export.draft_export: real values are propagated for code that reads them.
            with functorch_config.patch(fake_tensor_propagate_real_tensors=True):
                program = export()
        except Exception:
            raise error from None
        if unread := unread_parameters(program, model):
            raise UnsupportedOperation(
                f"{type(model).__name__} branches on numbers in the data{_line_of(error)}, and does not read "
                f"{unread[0]} for this example: give one for which it reads all its parameters, or let only a part of "
                "it grow (Grower(..., trace=SUBMODULE))."
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
def _exportable(model: nn.Module, whole: Snapshot) -> Iterator[None]:
    """Make a forward exportable that reads attributes of parameters, stores tensors or returns a dataclass.

    The network is restored to the snapshot `whole` at the end.
    """
    tensors, kept = named_tensors(model), list[Snapshot]()
    # torch.export registers the buffers that a forward replaces here, and fails on new ones.
    registered: dict[int, Any] = getattr(torch_module, "_global_buffer_registration_hooks", {})

    def begin(module: nn.Module, inputs: Any) -> None:
        # torch.export's mode would trace every access to a tensor.
        with torch._C.DisableTorchFunction():
            share_attributes(tensors, module)
            kept.append(Snapshot(module, "nothing"))
        registered.clear()

    def end(module: nn.Module, inputs: Any, output: Any) -> Any:
        with torch._C.DisableTorchFunction():
            kept.pop().restore()
        unknown = any(is_dataclass(leaf) for leaf in tree_leaves(output))
        return tuple(tensors_in(output)) if unknown else output

    handles = model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end)
    hooks = dict(registered)
    try:
        yield
    finally:
        registered.update(hooks)
        for handle in handles:
            handle.remove()
        whole.restore()


def _without_caches(model: nn.Module) -> None:
    """Turn off `use_cache` in models of transformers: torch.export does not support the cache objects they return."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


def _masks_as_given() -> AbstractContextManager[Any]:
    """Stop torch's transformers from checking whether a mask is causal.

    torch.export cannot follow that check, which only chooses a kernel. There is no public switch for it.
    """

    def as_given(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    return patch.object(transformer, "_detect_is_causal_mask", as_given, create=True)


def _why_not_exported(model: nn.Module, inputs: tuple[Any, ...], error: Exception) -> str:
    """Explain a failed export: the network itself fails on the input, or torch.export cannot follow it."""
    name = type(model).__name__
    for path, module in model.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            kind = type(module).__name__
            return f"{path or name} ({kind}) has no shape yet; call the network once on an example input."
        if isinstance(module, torch.jit.ScriptModule):
            return f"{path or name} is a torch.jit.ScriptModule, which cannot be traced; script the network at the end."
    for parameter, tensor in model.named_parameters():
        if not tensor.numel():
            return f"{parameter} of {name} is empty ({list(tensor.shape)}): give the network widths of at least 1."
    try:
        with torch.no_grad(), unchanged(model), _Packing() as packing:
            call_with(model, inputs)
    except Exception as failure:
        if reads_values := asks_for_numbers(model, failure):
            return reads_values
        if (keywords := keyword_only(model)) and not set(keywords) <= named_in(inputs).keys():
            return (
                f"{name} takes {', '.join(keywords)} by keyword only: give the example as a dictionary of all inputs "
                "by name; growlab's own runner passes inputs by position, so make them positional there."
            )
        remedy = other_types(model, first_line(failure)) or "choose data that it fits, or another network"
        return f"{name} cannot compute an input of {listed(inputs)} ({_first_line(failure)}); {remedy}."
    if any(isinstance(x, PackedSequence) for x in values_of(inputs)) or packing.seen:
        return (
            f"{name} packs sequences, which torch.export cannot follow: run its recurrent layers on padded sequences "
            "and mask the padding, or let a part of it grow that takes plain tensors (Grower(..., trace=SUBMODULE))."
        )
    why = "the code branches on numbers in a tensor" if _by_numbers(error) else _first_line(error)
    return (
        f"torch.export cannot follow {name}{_line_of(error)}: {why}; let only a part of it without this code grow "
        "(Grower(..., trace=SUBMODULE)), or train it at a fixed size."
    )


def _by_numbers(error: BaseException) -> bool:
    """Return True if torch.export has failed at code that depends on numbers in tensors."""
    return any("data-dependent" in str(each).lower() for each in _causes(error))


def _line_of(error: BaseException) -> str:
    """Return the line of the user's code that raised an error as " at `LINE`" for messages, or ""."""
    line = next(filter(None, map(own_line, _causes(error))), "")
    return f" at `{line}`" if line else ""


def _draws() -> AbstractContextManager[Any]:
    """Make random draws exportable: older versions of torch (2.11) can only export those from the global generator."""
    return nullcontext() if torch.__version__ >= "2.15" else _DrawsFromGlobal()


class _DrawsFromGlobal(TorchFunctionMode):
    """Drop `generator` arguments, so that torch's global generator is used."""

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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _never(record: logging.LogRecord) -> bool:
    return False


def _most_growing(model: nn.Module, graphs: Sequence[WidthGraph]) -> WidthGraph:
    return max(graphs, key=lambda graph: _growing(model, graph))


def _growing(model: nn.Module, graph: WidthGraph) -> tuple[int, int]:
    """Count the parameters in tensors that grow, and the same with each counted once per growing dimension."""
    counts = [
        (p.numel(), sum(bool(axis.groups) for axis in graph.axes.get(name, ()))) for name, p in model.named_parameters()
    ]
    return sum(n for n, dims in counts if dims), sum(n * dims for n, dims in counts)


def _best_pass(
    program: torch.export.ExportedProgram, model: nn.Module, moved: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[WidthGraph, Walk, Walk]:
    """Walk a program several times, moving growing dimensions that attention sums over one to the left.

    Returns the graph in which most parameters grow, its walk, and the last complete walk.
    """
    walks: list[tuple[WidthGraph, Walk]] = []
    for _ in range(_PASSES):
        walk = Walk(program, model, moved=moved, **settings)
        try:
            walks.append((walk.run(), walk))
        except UnsupportedOperation:
            # A moved dimension has reached an operation without a channel rule.
            if not walks:
                raise
            break
        if not (again := walk.record.summed_over()):
            break
        moved = {**moved, **{node: moved.get(node, 0) + 1 for node in again}}
    graph, best = max(walks, key=lambda entry: _growing(model, entry[0]))
    return graph, best, walks[-1][1]
