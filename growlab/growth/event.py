"""Functions for custom training loops: make a seed, grow it, anneal its normalisations, finish it."""

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.devices import on_cpu
from growlab.base.errors import UserError
from growlab.base.pieces import device_of_pieces, gathered, set_aside
from growlab.growth import constants
from growlab.growth.constants import add, as_applied, as_stored, padding_kept
from growlab.growth.measurement import Measurement
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod, generator
from growlab.growth.multipliers import carried_multipliers, multiply
from growlab.growth.norm_statistics import eps_follows, statistics_writer
from growlab.growth.outputs import Outputs, empty_caches, evaluate, forget_caches, in_own_precision, observe, positional
from growlab.growth.parity import compare, relative_error, rounding
from growlab.growth.rescale import Folded, can_fold, fold_output_factor, with_attention_scale
from growlab.growth.state import GrowthEvent, GrowthState, ParityError
from growlab.growth.weighted_norms import annealed, carried_weights, weigh, weighted_modules
from growlab.widths import (
    Carry,
    WidthGraph,
    avoid_unsafe_kernels,
    grid,
    replace_tensors,
    resize,
    restore_tensors,
    tensors_of,
)
from growlab.widths.meta import FAILURES
from growlab.widths.resize import note_restored
from growlab.widths.unchanged import Snapshot

log = logging.getLogger(__name__)

# Relative change of a term of the loss that is warned of: more than a normalisation's eps does.
_TERM = 0.01
#: Maps numbers measured by one process to those that all processes use.
Agree = Callable[[list[float]], list[float]]
#: The same of tensors.
Average = Callable[[Tensor], Tensor]
#: Makes a context in which a network's parameters can be replaced.
Rebuilding = Callable[[], contextlib.AbstractContextManager[Any]]


@on_cpu
def make_seed(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, widths: Mapping[str, int], seed: int
) -> GrowthState:
    """Turn a full-width network into the seed that a run starts from, in place.

    Args:
        model: the full-width network that `graph` was traced from. On device meta only its shapes change, and
            `draw_seed` draws its weights later.
        graph: its width graph.
        method: draws the seed's weights. At full width the network's own initialisation is kept, unless the method
            `draws_full_width`.
        widths: width of each group in the seed network.
        seed: the run's random seed.

    Returns:
        The state to hand to `grow`.

    Raises:
        UserError: the method would leave an output factor that `finish` could not fold, or multiply weights where
            their gradients would be wrong. The network is then unchanged.
    """
    avoid_unsafe_kernels(model)
    still = constants.kept(graph, tensors_of(model, graph))
    if dict(widths) != graph.full_widths or method.draws_full_width:
        full = Snapshot(model, "nothing")
        try:
            resize(model, graph, graph.full_widths, widths)
            if not any(parameter.is_meta for parameter in model.parameters()):
                replace_tensors(model, graph, _drawn(model, graph, method, widths, seed, still))
            _rehearse(model, graph, method, widths, seed)
        except BaseException:
            full.restore()
            note_restored((parameter, parameter) for parameter in model.parameters())
            raise
    births = {group: [0] * widths[group] for group in graph.groups}
    return GrowthState(0, dict(widths), births, constants=still)


def _drawn(
    model: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    widths: Mapping[str, int],
    seed: int,
    still: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    # The old tensors serve as the example of how bare parameters are spread.
    old = as_applied(graph, tensors_of(model, graph))
    context = GrowthContext(graph, old, widths, widths, seed, 0, constants=still)
    return as_stored(graph, method.initialise(context))


def draw_seed(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, state: GrowthState, seed: int, rebuilding: Rebuilding
) -> None:
    """Draw a seed's tensors that are on device meta, one at a time; it may have been sharded since `make_seed`.

    Those that the method does not draw, such as embeddings, get the values that their module begins with at these
    widths: by `_init_weights` of transformers, else by `reset_parameters` of the module.

    Args:
        model: the seed, in place.
        graph: its width graph.
        method: draws the weights.
        state: returned by `make_seed`.
        seed: the run's seed.
        rebuilding: see `grow`.

    Raises:
        UserError: a module does not give its tensor values.
    """
    if not any(t.is_meta for t in chain(model.parameters(), model.buffers())):
        return
    device = device_of_pieces(model)
    with rebuilding():
        # By the names without wrappers.
        named = chain(model.named_parameters(), model.named_buffers())
        hollow = [name for name, tensor in named if tensor.is_meta]
        drawn = _drawn(model, graph, method, state.widths, seed, state.constants)
        values = ((n, drawn[n] if n in drawn else _initial(model, n, generator(seed, 0, n))) for n in hollow)
        replace_tensors(model, graph, ((name, tensor.to(device)) for name, tensor in values))


def _initial(model: nn.Module, name: str, source: torch.Generator) -> Tensor:
    """Values that a tensor on device meta begins with, by the initialisation of its module."""
    path, _, own = name.rpartition(".")
    module, above = model.get_submodule(path), [model]
    for step in path.split(".") if path else ():
        above.append(above[-1].get_submodule(step))
    whole: Any = next((each._init_weights for each in above if hasattr(each, "_init_weights")), None)
    twin: Any = copy.copy(module)
    tensors = (*module._parameters.items(), *module._buffers.items())
    empty = {key: torch.full(t.shape, _unset(t), dtype=t.dtype) for key, t in tensors if t is not None}
    twin._parameters = {k: p if p is None else nn.Parameter(empty[k], False) for k, p in module._parameters.items()}
    twin._buffers = {k: empty.get(k) for k in module._buffers}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(source.initial_seed())
        if whole is not None:
            whole(twin)
        elif hasattr(twin, "reset_parameters"):
            twin.reset_parameters()
    tensor: Tensor = getattr(twin, own).detach()
    unset = _unset(tensor)
    if tensor.dtype != torch.bool and bool((tensor.isnan() if isnan(unset) else tensor == unset).any()):
        raise UserError(
            f"{name} is on the meta device, without values, and {type(module).__name__} has no reset_parameters() that "
            "gives it some: add one, or build the network on another device."
        )
    return tensor


def _unset(tensor: Tensor) -> float:
    """Value that no initialisation gives; booleans have no such value."""
    if tensor.is_floating_point() or tensor.is_complex():
        return nan
    return 0 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max


def _rehearse(model: nn.Module, graph: WidthGraph, method: GrowthMethod, widths: Mapping[str, int], seed: int) -> None:
    """Rehearse all growth as one event, where it might leave a factor on the output or on weights that cannot be."""
    may_multiply = method.layer_multipliers and any(
        graph.changes(name, widths, graph.full_widths) for name in graph.recomputed if name in graph.axes
    )
    may_scale = method.output_multiplier and not can_fold(graph)
    if not may_multiply and not may_scale:
        return
    tensors = as_applied(graph, tensors_of(model, graph))
    context = GrowthContext(graph, tensors, widths, graph.full_widths, seed, 1)
    rehearsal = with_attention_scale(context, method.grow(context), method.multiplied(context))
    if name := next((name for name in rehearsal.multipliers if name in graph.recomputed), None):
        raise UserError(
            f"{name} is used inside {graph.recomputed[name]}, whose backward pass does not see the factors by which "
            f"{method.name} multiplies its rows: let the forward call a submodule there that has it, such as "
            "nn.Linear, or set layer_multipliers=False."
        )
    if may_scale and rehearsal.output_factor != 1.0:
        raise UserError(
            f"{method.name} rescales this network's output, whose scale no layer can take up at the end of "
            "training: end the network with a linear layer or a convolution, or set output_multiplier=False."
        )


@in_own_precision
@on_cpu
def grow(
    model: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    state: GrowthState,
    new_widths: Mapping[str, int],
    seed: int,
    probe: Tensor | tuple[Any, ...],
    agree: Agree = list,
    averaged: Mapping[str, Tensor] | None = None,
    gradients: Mapping[str, Tensor] | None = None,
    data: Measurement | None = None,
    averaged_event: "GrowthEvent | None" = None,
    average: Average = lambda tensor: tensor,
    normalised: frozenset[str] = frozenset(),
    rebuilding: Rebuilding = contextlib.nullcontext,
) -> GrowthEvent:
    """Widen a network in place by one stage, or narrow it where the method can; an error leaves all as it was.

    Args:
        model: the network at `state.widths`.
        graph: its width graph.
        method: initialises new entries and rescales old ones.
        state: updated.
        new_widths: width of each group afterwards.
        seed: the run's seed.
        probe: positional inputs that parity is checked on, or the only one.
        agree: maps this process's measured numbers to those that all use, so that all keep or undo the event.
        averaged: if `model` is an average, the averaged network's tensors (`tensors_of`) before its event.
        gradients: running means of gradients by parameter name, for methods that want them.
        data: training batches, for methods that want some.
        averaged_event: if `model` is an average, the event of the averaged network.
        average: maps a tensor of this process's statistics to the mean over all processes; called as `agree` is.
        normalised: parameters whose optimizer normalises gradients, by name.
        rebuilding: makes a context in which parameters are replaced, for networks that are sharded.

    Returns:
        The event, whose `replaced` an optimizer needs to follow.

    Raises:
        ParityError: the outputs changed by more than the method allows.
        ValueError: a group would shrink, and the method cannot.
    """
    for group, width in state.widths.items():
        if new_widths[group] < width and not method.shrinks:
            raise ValueError(f"{group} would shrink from {width} to {new_widths[group]}; {method.name} only widens")
    began, stage, probe = time.perf_counter(), state.stage + 1, positional(probe)
    before = _observed(model, graph, method, stage, probe, agree)
    parity_sec, num_params_before = time.perf_counter() - began, sum(p.numel() for p in model.parameters())
    kept = gathered(tensors_of(model, graph))
    still = constants.unchanged(graph, state.constants, kept if averaged is None else averaged, state.widths)
    old, averaged = as_applied(graph, kept), None if averaged is None else as_applied(graph, averaged)
    about = (graph, old, dict(state.widths), dict(new_widths), seed, stage, averaged, gradients or {})
    known, new = ({}, None) if averaged_event is None else _known(graph, averaged_event)
    seen = (method.observe(model, graph, probe), known, data, new)
    context = GrowthContext(*about, *seen, state.multipliers, normalised, still)
    growth = grown(model, method, context)
    later = _later(state, method, context, growth)
    with _replaced(model, graph, state, _changed(context, growth), rebuilding) as replaced:
        weighted_norms = restore(model, graph, later)
        checking = time.perf_counter()
        parity = _checked(model, method, context, growth, before, probe, agree, average)
    parity_sec += time.perf_counter() - checking
    vars(state).update(vars(later))
    return GrowthEvent(
        stage=stage,
        method=method.name,
        widths_before=dict(context.old_widths),
        widths_after=dict(new_widths),
        num_params_before=num_params_before,
        num_params=sum(p.numel() for p in model.parameters()),
        **parity,
        weighted_norms=weighted_norms,
        report=dict(growth.report),
        seconds=time.perf_counter() - began,
        parity_sec=parity_sec,
        replaced=replaced,
        carry=gradients_follow(method, growth),
        observed=context.observed,
    )


def grown(model: nn.Module, method: GrowthMethod, context: GrowthContext) -> GrownTensors:
    """Compute an event's tensors: the method's, with the scale of attention and padding rows kept."""
    growth = with_attention_scale(context, method.grow(context), method.multiplied(context))
    scales, tensors = dict(growth.carry.scales), padding_kept(model, context.old, growth.tensors)
    for v, (g, dim) in context.graph.weight_norms.items():
        if v in tensors and (context.changes(v) or v in scales):
            old, new = (torch.norm_except_dim(each[v], 2, dim) for each in (context.old, tensors))
            new = new[grid(context.kept(g), new.device)]
            # The new entries' contribution to g dL/dg = <dL/dw, w> cancels, or is unknown.
            scales[g] = torch.where(new == 0, 1.0, old / new)
    return replace(growth, tensors=tensors, carry=replace(growth.carry, scales=scales))


def _changed(context: GrowthContext, growth: GrownTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield names and new tensors of an event, also of weights that only their row multipliers change."""
    stored = as_stored(context.graph, growth.tensors)
    for name in growth.tensors:
        # A length follows its direction.
        other = context.graph.lengths.get(name, name)
        if growth.tensors[other] is not context.old[other] or name in growth.carry.scales:
            yield name, context.constant(name, stored[name]) if name in context.constants else stored[name]


@contextlib.contextmanager
def _replaced(
    model: nn.Module,
    graph: WidthGraph,
    state: GrowthState,
    tensors: Iterable[tuple[str, Tensor]],
    rebuilding: Rebuilding,
) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Put new tensors in the network, and after an error what it had, with the state's norms and multipliers."""
    old = tensors_of(model, graph)

    def new() -> Iterator[tuple[str, Tensor]]:
        for name, content in tensors:
            yield name, content
            set_aside(old[name])

    with rebuilding():
        replaced = replace_tensors(model, graph, new())
    try:
        yield replaced
    except BaseException:
        with rebuilding():
            restore_tensors(model, graph, replaced)
        restore(model, graph, state)
        raise


def _later(state: GrowthState, method: GrowthMethod, context: GrowthContext, growth: GrownTensors) -> GrowthState:
    graph, before, after, carry = context.graph, state.widths, context.new_widths, growth.carry
    past = annealed(state.norm_weights, state.norm_progress)
    kept = {name: rows for name, rows in state.multipliers.items() if name not in growth.folded}
    births = {}
    for group, stages in state.births.items():
        stages = stages[: after[group]]
        if group in carry.bases:
            # Every channel is now made up of old ones: none is younger than another.
            stages = [min(stages)] * len(stages)
        births[group] = stages + [context.stage] * (after[group] - len(stages))
    return replace(
        state,
        stage=context.stage,
        widths=dict(after),
        births=births,
        norm_weights=carried_weights(graph, past, carry, before, after),
        norm_progress=0.0,
        multipliers=carried_multipliers(graph, kept, growth.multipliers, carry, before, after),
        output_factor=state.output_factor * (growth.output_factor if method.output_multiplier else 1.0),
    )


def gradients_follow(method: GrowthMethod, growth: GrownTensors) -> Carry:
    """Return the rule by which optimizers' state follows an event."""
    if method.output_multiplier:
        return growth.carry
    # Outputs z become z' = z / factor for good. To first order the loss has the slope there that it had: dL/dz' of the
    # grown network is dL/dz, not dL/dz * factor as it is where the output is multiplied again.
    return replace(growth.carry, every=growth.carry.every / growth.output_factor)


def _observed(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, stage: int, probe: tuple[Any, ...], agree: Agree
) -> Outputs:
    """Run the network on the probe before the event; raise a ParityError if it puts out NaN already."""
    before = observe(model, probe)
    (diverged,) = agree([float(before.eval.isnan().any() or before.train.isnan().any())])
    if method.preserves and diverged:
        raise ParityError(
            f"the network puts out NaN already before growth to stage {stage}: training has diverged, or its inputs "
            "are not finite; lower the learning rate, or clip gradients."
        )
    with empty_caches(model) as filled:
        return replace(before, forgetful=observe(model, probe)) if filled else before


def _forgetful(model: nn.Module, before: Outputs, emptied: Sequence[str]) -> Outputs:
    """Outputs before the event to compare with where the event has emptied caches; warn if they were no caches."""
    if not emptied or before.forgetful is None:
        return before
    if relative_error(before.eval, before.forgetful.eval) > rounding(model, before.eval):
        log.warning(
            "the forward of %s keeps state between calls (%s), which does not fit the new widths: it is reset at "
            "this growth event; kept in a buffer of the network it would grow too",
            type(model).__name__,
            ", ".join(dict.fromkeys(emptied)),
        )
    return before.forgetful


def _warn_of_terms(before: Outputs, after: Outputs) -> None:
    changes = [
        (float(old), float(new))
        for old, new in zip(before.terms, after.terms, strict=False)
        if relative_error(old, new) > _TERM
    ]
    if changes:
        described = ", ".join(f"{old:.4g} -> {new:.4g}" for old, new in changes)
        log.warning(
            "further training outputs of the network have changed at this growth event (%s): loss terms computed "
            "from growing layers have another weight from now on",
            described,
        )


def _known(graph: WidthGraph, averaged_event: GrowthEvent) -> tuple[Mapping[str, Any], Any]:
    new = {name: new.detach() for name, (_, new) in averaged_event.replaced.items()}
    return averaged_event.observed, (as_applied(graph, new), averaged_event.carry)


def _checked(
    model: nn.Module,
    method: GrowthMethod,
    context: GrowthContext,
    growth: GrownTensors,
    before: Outputs,
    probe: tuple[Any, ...],
    agree: Agree,
    average: Average,
) -> dict[str, Any]:
    """Compare outputs, then add the noise that breaks symmetries; return the parity fields of the event."""
    before = _forgetful(model, before, forget_caches(model, probe, FAILURES))
    tensors = tensors_of(model, context.graph)
    begin = statistics_writer(context, growth, tensors, average)
    setting = eps_follows(model, context, growth, tensors)
    norms = context.graph.norms
    # Where nothing was drawn or normalised by batches, equal bits before the event come from equal operations.
    differ = bool(norms) or before.drawn or not torch.equal(before.eval, before.train)
    after = observe(model, probe, norms, begin, setting, modes_differ=differ)
    allowed = None
    if method.preserves and growth.allowed_error is not None:
        allowed = (growth.allowed_error, growth.allowed_error)
    factor = growth.output_factor
    parity = compare(model, probe, before, after, agree, factor=factor, allowed=allowed, setting=setting)
    eps_error = parity.errors[1]
    if after.plain is not after.train:
        (eps_error,) = agree([relative_error(before.train, after.plain, factor)])
    (error_eval, error_train), (tolerance_eval, tolerance_train) = (parity.errors, parity.tolerances or (None, None))
    if not parity.kept:
        raise ParityError(
            f"growth to stage {context.stage} with {method.name} changed the output by {error_eval:.2e} in "
            f"eval mode and {error_train:.2e} in train mode, more than {tolerance_eval:.2e} and "
            f"{tolerance_train:.2e}; the network was left as it was before the event."
        )
    if method.preserves:
        _warn_of_terms(before, after)
    noise_error, noise = 0.0, method.noise(context)
    if noise:
        with torch.no_grad():
            tensors = tensors_of(model, context.graph)
            add(context.graph, tensors, padding_kept(model, gathered(tensors), noise))
        (noise_error,) = agree([relative_error(after.eval, evaluate(model, probe))])
    return {
        "parity_error_eval": error_eval,
        "parity_error_train": error_train,
        "parity_tolerance_eval": tolerance_eval if tolerance_eval != math.inf else None,
        "parity_tolerance_train": tolerance_train if tolerance_train != math.inf else None,
        "eps_error_train": eps_error,
        "noise_error_eval": noise_error,
        "output_factor": growth.output_factor,
    }


@on_cpu
def anneal_norms(model: nn.Module, graph: WidthGraph, state: GrowthState, progress: float) -> None:
    """Bring weighted normalisations closer to plain ones, which they are from progress 1 on.

    Custom loops call it before each step of the first part of a stage; `finish` refuses a network that has not
    been brought to 1. Networks without layer, RMS or group normalisation of growing channels have nothing to anneal.

    Args:
        model: the network, or an average of it.
        graph: its width graph.
        state: of the network; brought up to date.
        progress: from 0 at a growth event to 1.
    """
    weights = annealed(state.norm_weights, progress)
    if progress >= 1:
        state.norm_weights, progress = {}, 0.0
    state.norm_progress = progress
    weigh(model, graph, state.widths, weights)


@on_cpu
def restore(model: nn.Module, graph: WidthGraph, state: GrowthState) -> list[str]:
    """Apply the weighted norms and multipliers of a state to a network that has its widths and tensors.

    Args:
        model: the network as it is built and resized, or an average of it.
        graph: its width graph.
        state: of a checkpoint.

    Returns:
        Paths of the modules whose statistics over channels are weighted.
    """
    weighted = weigh(model, graph, state.widths, annealed(state.norm_weights, state.norm_progress))
    multiply(model, graph, state.multipliers)
    return weighted


# Its tensors must be trainable even if it is called under inference mode.
@torch.inference_mode(False)
@in_own_precision
@on_cpu
def finish(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, state: GrowthState, averages: Sequence[nn.Module] = ()
) -> dict[str, Folded]:
    """Turn a grown network into an ordinary one, in place; it computes the same function without growlab's hooks.

    The output factor is folded into the last layers, row multipliers into the weights, and the changes of the method's
    `prepare` are undone. Weighted normalisations have no plain equivalent of the same shapes, so they have to be
    annealed while the network still trains (`anneal_norms`). A second call does nothing.

    Args:
        model: the network; its parameters stay the same objects, unless the method stores its weights differently.
        graph: its width graph.
        method: the growth method.
        state: its growth state; `output_factor` is 1 afterwards, and `multipliers` is empty.
        averages: averages of the network's weights, which are finished in the same way.

    Returns:
        Factors on each parameter that folding multiplied and on its gradient, by name, for optimizers that continue
        training: see `growlab.optim.rescale_state`.

    Raises:
        UserError: statistics over channels are still weighted, or the output factor cannot be folded. Network and
            averages are then unchanged.
    """
    networks = (model, *averages)
    weighted = [name for network in networks for name in weighted_modules(network)]
    if weighted:
        more = f" and {len(weighted) - 1} more" if len(weighted) > 1 else ""
        raise UserError(
            f"the growing network cannot be finished: the statistics of {weighted[0]}{more} still weight channels "
            f"by their age (annealed to {state.norm_progress:.3g} of 1), so a plain network would compute something "
            "else; call anneal_norms(network, graph, state, progress) before each training step after a growth "
            "event, with progress rising to 1, and train on."
        )
    folded, *_ = [fold_output_factor(network, graph, state.output_factor) for network in networks]
    for network in networks:
        method.finish(network)
    state.output_factor, state.multipliers = 1.0, {}
    return folded
