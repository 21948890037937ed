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

# Relative change of a loss term that causes a warning: more than a normalisation's eps can cause.
_TERM = 0.01
#: Maps numbers measured by one process to those that all processes use.
Agree = Callable[[list[float]], list[float]]
#: Maps a tensor of one process to the mean over all processes.
Average = Callable[[Tensor], Tensor]
#: Makes a context in which a network's parameters can be replaced.
Rebuilding = Callable[[], contextlib.AbstractContextManager[Any]]


@on_cpu
def make_seed(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, widths: Mapping[str, int], seed: int
) -> GrowthState:
    """Turn a full-width network into the seed that a run starts from, in place.

    Args:
        model: the full-width network that `graph` was traced from. On the meta device only its shapes change, and
            `draw_seed` draws its weights later.
        graph: its width graph.
        method: draws the seed's weights. At full width the network's own initialisation is kept, unless the method
            `draws_full_width`.
        widths: width of each group in the seed network.
        seed: the run's random seed.

    Returns:
        The state to hand to `grow`.

    Raises:
        UserError: the method would leave an output factor that `finish` cannot fold, or multiply weights whose
            gradients would then be wrong. The network is then unchanged.
    """
    avoid_unsafe_kernels(model)
    constant_tensors = constants.kept(graph, tensors_of(model, graph))
    if dict(widths) != graph.full_widths or method.draws_full_width:
        full = Snapshot(model, "nothing")
        try:
            resize(model, graph, graph.full_widths, widths)
            if not any(parameter.is_meta for parameter in model.parameters()):
                replace_tensors(model, graph, _drawn(model, graph, method, widths, seed, constant_tensors))
            _rehearse(model, graph, method, widths, seed)
        except BaseException:
            full.restore()
            note_restored((parameter, parameter) for parameter in model.parameters())
            raise
    births = {group: [0] * widths[group] for group in graph.groups}
    return GrowthState(0, dict(widths), births, constants=constant_tensors)


def _drawn(
    model: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    widths: Mapping[str, int],
    seed: int,
    constant_tensors: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    # Bare parameters are drawn with the mean and deviation of the old tensors.
    old = as_applied(graph, tensors_of(model, graph))
    context = GrowthContext(graph, old, widths, widths, seed, 0, constants=constant_tensors)
    return as_stored(graph, method.initialise(context))


def draw_seed(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, state: GrowthState, seed: int, rebuilding: Rebuilding
) -> None:
    """Draw the seed's tensors that are on the meta device, one at a time; it may have been sharded since `make_seed`.

    Tensors that the method does not draw, such as embeddings, are initialised by `_init_weights` of transformers, else
    by `reset_parameters` of their module.

    Args:
        model: the seed, in place.
        graph: its width graph.
        method: draws the weights.
        state: returned by `make_seed`.
        seed: the run's seed.
        rebuilding: see `grow`.

    Raises:
        UserError: a module does not initialise its tensor.
    """
    if not any(t.is_meta for t in chain(model.parameters(), model.buffers())):
        return
    device = device_of_pieces(model)
    with rebuilding():
        # Only in this context do names lack the wrappers' prefixes.
        named = chain(model.named_parameters(), model.named_buffers())
        names = [name for name, tensor in named if tensor.is_meta]
        drawn = _drawn(model, graph, method, state.widths, seed, state.constants)
        values = ((n, drawn[n] if n in drawn else _initial(model, n, generator(seed, 0, n))) for n in names)
        replace_tensors(model, graph, ((name, tensor.to(device)) for name, tensor in values))


def _initial(model: nn.Module, name: str, source: torch.Generator) -> Tensor:
    """Return initial values of a tensor on the meta device, by the initialisation of its module."""
    path, _, attribute = name.rpartition(".")
    module, ancestors = model.get_submodule(path), [model]
    for step in path.split(".") if path else ():
        ancestors.append(ancestors[-1].get_submodule(step))
    init_weights: Any = next((m._init_weights for m in ancestors if hasattr(m, "_init_weights")), None)
    twin: Any = copy.copy(module)
    tensors = (*module._parameters.items(), *module._buffers.items())
    empty = {key: torch.full(t.shape, _unset(t), dtype=t.dtype) for key, t in tensors if t is not None}
    twin._parameters = {k: p if p is None else nn.Parameter(empty[k], False) for k, p in module._parameters.items()}
    twin._buffers = {k: empty.get(k) for k in module._buffers}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(source.initial_seed())
        if init_weights is not None:
            init_weights(twin)
        elif hasattr(twin, "reset_parameters"):
            twin.reset_parameters()
    tensor: Tensor = getattr(twin, attribute).detach()
    unset = _unset(tensor)
    if tensor.dtype != torch.bool and bool((tensor.isnan() if isnan(unset) else tensor == unset).any()):
        raise UserError(
            f"{name} is on the meta device, without values, and {type(module).__name__} has no reset_parameters() that "
            "gives it some: add one, or build the network on another device."
        )
    return tensor


def _unset(tensor: Tensor) -> float:
    """Value that marks an entry as not initialised; booleans have no such value."""
    if tensor.is_floating_point() or tensor.is_complex():
        return nan
    return 0 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max


def _rehearse(model: nn.Module, graph: WidthGraph, method: GrowthMethod, widths: Mapping[str, int], seed: int) -> None:
    """Rehearse all growth as one event; refuse an output factor that cannot be folded, and unsafe multipliers."""
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
    """Widen a network in place by one stage, or narrow it if the method can; an error leaves everything unchanged.

    Args:
        model: the network at `state.widths`.
        graph: its width graph.
        method: initialises new entries and rescales old ones.
        state: the network's growth state; updated.
        new_widths: width of each group afterwards.
        seed: the run's seed.
        probe: positional inputs, or a single one, on which outputs before and after are compared.
        agree: maps this process's measured numbers to those that all processes use, so that all keep or undo the event.
        averaged: if `model` is an average, the averaged network's tensors (`tensors_of`) before its event.
        gradients: running means of gradients by parameter name, for methods with `wants_gradients`.
        data: training batches, for methods with `batches`.
        averaged_event: if `model` is an average, the event of the averaged network.
        average: maps a tensor of this process's statistics to the mean over all processes.
        normalised: names of parameters whose optimizer normalises gradients.
        rebuilding: makes a context in which parameters can be replaced, for sharded networks.

    Returns:
        The event; optimizers follow by its `replaced` and `carry`.

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
    given = {"gradients": gradients or {}, "data": data, "normalised": normalised}
    given["observed"] = method.observe(model, graph, probe)
    stored = gathered(tensors_of(model, graph))
    context = _context(graph, state, new_widths, seed, stored, averaged, averaged_event, **given)
    growth = grown(model, method, context)
    next_state = _next_state(state, method, context, growth)
    with _replaced(model, graph, state, _changed(context, growth), rebuilding) as replaced:
        weighted_norms = restore(model, graph, next_state)
        checking = time.perf_counter()
        parity = _checked(model, method, context, growth, before, probe, agree, average)
    parity_sec += time.perf_counter() - checking
    vars(state).update(vars(next_state))
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


def _context(
    graph: WidthGraph,
    state: GrowthState,
    new_widths: Mapping[str, int],
    seed: int,
    stored: Mapping[str, Tensor],
    averaged: Mapping[str, Tensor] | None,
    averaged_event: GrowthEvent | None,
    **given: Any,
) -> GrowthContext:
    """Make the growth method's input from the network's tensors and, for an average, from the averaged network's."""
    still_constant = constants.unchanged(graph, state.constants, stored if averaged is None else averaged, state.widths)
    given |= {"multipliers": state.multipliers, "constants": still_constant}
    if averaged is not None:
        given["averaged"] = as_applied(graph, averaged)
    if averaged_event is not None:
        new = {name: new.detach() for name, (_, new) in averaged_event.replaced.items()}
        given["averaged_event"] = as_applied(graph, new), averaged_event.carry
        given["averaged_observed"] = averaged_event.observed
    widths = dict(state.widths), dict(new_widths)
    return GrowthContext(graph, as_applied(graph, stored), *widths, seed, state.stage + 1, **given)


def grown(model: nn.Module, method: GrowthMethod, context: GrowthContext) -> GrownTensors:
    """Compute an event's tensors: the method's, with attention's scale and padding rows preserved."""
    growth = with_attention_scale(context, method.grow(context), method.multiplied(context))
    scales, tensors = dict(growth.carry.scales), padding_kept(model, context.old, growth.tensors)
    for v, (g, dim) in context.graph.weight_norms.items():
        if v in tensors and (context.changes(v) or v in scales):
            old, new = (torch.norm_except_dim(weights[v], 2, dim) for weights in (context.old, tensors))
            new = new[grid(context.kept(g), new.device)]
            # The contribution of new entries to g dL/dg = <dL/dw, w> cancels or is unknown.
            scales[g] = torch.where(new == 0, 1.0, old / new)
    return replace(growth, tensors=tensors, carry=replace(growth.carry, scales=scales))


def _changed(context: GrowthContext, growth: GrownTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield names and new tensors of an event, also of weights that only their row multipliers change."""
    stored = as_stored(context.graph, growth.tensors)
    for name in growth.tensors:
        # In a normalised weight g v / |v|, g changes with v.
        direction = context.graph.lengths.get(name, name)
        if growth.tensors[direction] is not context.old[direction] or name in growth.carry.scales:
            yield name, context.constant(name, stored[name]) if name in context.constants else stored[name]


@contextlib.contextmanager
def _replaced(
    model: nn.Module,
    graph: WidthGraph,
    state: GrowthState,
    tensors: Iterable[tuple[str, Tensor]],
    rebuilding: Rebuilding,
) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Replace the network's tensors; after an error restore them, and the state's norms and multipliers."""
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


def _next_state(state: GrowthState, method: GrowthMethod, context: GrowthContext, growth: GrownTensors) -> GrowthState:
    graph, before, after, carry = context.graph, state.widths, context.new_widths, growth.carry
    norm_weights = annealed(state.norm_weights, state.norm_progress)
    multipliers = {name: rows for name, rows in state.multipliers.items() if name not in growth.folded}
    births = {}
    for group, stages in state.births.items():
        stages = stages[: after[group]]
        if group in carry.bases:
            # The basis was rotated: every channel now mixes all old ones, so all have the same age.
            stages = [min(stages)] * len(stages)
        births[group] = stages + [context.stage] * (after[group] - len(stages))
    return replace(
        state,
        stage=context.stage,
        widths=dict(after),
        births=births,
        norm_weights=carried_weights(graph, norm_weights, carry, before, after),
        norm_progress=0.0,
        multipliers=carried_multipliers(graph, multipliers, growth.multipliers, carry, before, after),
        output_factor=state.output_factor * (growth.output_factor if method.output_multiplier else 1.0),
    )


def gradients_follow(method: GrowthMethod, growth: GrownTensors) -> Carry:
    """Return the rule by which optimizers' state follows an event."""
    if method.output_multiplier:
        return growth.carry
    # Outputs z stay at z' = z / factor. To first order the loss has the same slope there: dL/dz' is dL/dz, and not
    # dL/dz * factor as with an output multiplier.
    return replace(growth.carry, every=growth.carry.every / growth.output_factor)


def _observed(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, stage: int, probe: tuple[Any, ...], agree: Agree
) -> Outputs:
    """Run the network on the probe before the event; raise a ParityError if its output contains NaN."""
    before = observe(model, probe)
    (diverged,) = agree([float(before.eval.isnan().any() or before.train.isnan().any())])
    if method.preserves and diverged:
        raise ParityError(
            f"the network's output contains NaN before growth to stage {stage}: training has diverged, or the inputs "
            "are not finite; lower the learning rate, or clip gradients."
        )
    with empty_caches(model) as filled:
        return replace(before, forgetful=observe(model, probe)) if filled else before


def _without_caches(model: nn.Module, before: Outputs, emptied: Sequence[str]) -> Outputs:
    """Return the old outputs to compare with if the event has emptied caches; warn if that changed the outputs."""
    if not emptied or before.forgetful is None:
        return before
    if relative_error(before.eval, before.forgetful.eval) > rounding(model, before.eval):
        log.warning(
            "the forward of %s keeps state between calls (%s), which does not fit the new widths: it is reset at "
            "this growth event; in a buffer of the network it would grow instead",
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
            "from growing layers are weighted differently from now on",
            described,
        )


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
    before = _without_caches(model, before, forget_caches(model, probe, FAILURES))
    tensors = tensors_of(model, context.graph)
    write_statistics = statistics_writer(context, growth, tensors, average)
    setting = eps_follows(model, context, growth, tensors)
    norms = context.graph.norms
    # Without random draws and batch statistics, equal bits before the event mean that both modes compute the same.
    differ = bool(norms) or before.drawn or not torch.equal(before.eval, before.train)
    after = observe(model, probe, norms, write_statistics, setting, modes_differ=differ)
    allowed, factor = growth.allowed_error if method.preserves else None, growth.output_factor
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
    """Bring weighted normalisations closer to plain ones; at progress 1 they are plain.

    Custom loops call it before each step of the first part of a stage; `finish` refuses a network that has not
    been brought to 1. Networks without layer, RMS or group normalisation of growing channels have nothing to anneal.

    Args:
        model: the network, or an average of it.
        graph: its width graph.
        state: the network's growth state; updated.
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
        state: growth state of a checkpoint.

    Returns:
        Paths of the modules whose statistics over channels are weighted.
    """
    weighted = weigh(model, graph, state.widths, annealed(state.norm_weights, state.norm_progress))
    multiply(model, graph, state.multipliers)
    return weighted


# Tensors made in inference mode could not be trained.
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
