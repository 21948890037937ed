"""One growth event as a plain function: widen a network in anyone's training loop."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from growlab.errors import UserError
from growlab.growth.attention_scale import with_attention_scale
from growlab.growth.measurement import Measurement
from growlab.growth.method import Expansion, GrowthMethod
from growlab.growth.multipliers import carried_multipliers, multiply
from growlab.growth.observation import Observation, watch
from growlab.growth.parity import eps_bounds, evaluate, observe, positional, relative_error, rounding
from growlab.growth.rescale import can_fold
from growlab.growth.weighted_norms import annealed, carried_weights, weigh
from growlab.widths import (
    Carry,
    WidthGraph,
    avoid_unsafe_kernels,
    replace_tensors,
    resize,
    restore_tensors,
    tensors_of,
)

_NOT_IN_RECEIPT = ("parity_sec", "replaced", "carry", "observed")


class ParityError(RuntimeError):
    """A growth event changed what the network computes by more than its method allows; it was undone."""


@dataclass
class GrowthState:
    """What of a growing network its tensors do not tell.

    Attributes:
        stage: the stage it is in.
        widths: width of each group.
        births: for each group, the stage that each channel came with.
        output_factor: what the network's output has to be multiplied by.
        asked: the last boundary at which a method that decides widths was asked; -1 for none.
        norm_weights: weights of channels in the statistics of normalisations, as the last event left them, of groups
            where they are not all 1: see `weighted_norms`.
        norm_progress: how far they have gone from there to 1; `anneal_norms` moves it.
        blocks: the stage that each block came with which was left out at first.
        multipliers: what the forward multiplies the rows of weights by, by the weight's name, where they are not all 1:
            see `growlab.growth.multipliers`.
    """

    stage: int
    widths: dict[str, int]
    births: dict[str, list[int]]
    output_factor: float = 1.0
    asked: int = -1
    norm_weights: dict[str, list[float]] = field(default_factory=dict)
    norm_progress: float = 0.0
    blocks: dict[str, int] = field(default_factory=dict)
    multipliers: dict[str, list[float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, for a checkpoint."""
        return {
            "stage": self.stage,
            "widths": dict(self.widths),
            "births": {group: list(births) for group, births in self.births.items()},
            "output_factor": self.output_factor,
            "asked": self.asked,
            "norm_weights": {group: list(weights) for group, weights in self.norm_weights.items()},
            "norm_progress": self.norm_progress,
            "blocks": dict(self.blocks),
            "multipliers": {name: list(rows) for name, rows in self.multipliers.items()},
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "GrowthState":
        """Read what `as_dict` wrote."""
        return cls(
            int(content["stage"]),
            dict(content["widths"]),
            {group: list(births) for group, births in content["births"].items()},
            float(content["output_factor"]),
            int(content["asked"]),
            {group: list(weights) for group, weights in content["norm_weights"].items()},
            float(content["norm_progress"]),
            dict(content.get("blocks", {})),
            {name: list(rows) for name, rows in content.get("multipliers", {}).items()},
        )


@dataclass(frozen=True)
class GrowthEvent:
    """What happened, with its parity receipt.

    Attributes:
        stage: the stage that began.
        method: name of the growth method.
        widths_before, widths_after: width of each group.
        num_params_before, num_params: number of parameters.
        parity_error_eval, parity_error_train: relative output error on the probe batch, before noise.
        parity_tolerance_eval, parity_tolerance_train: what the method allows; None if it promises nothing.
        noise_error_eval: relative change of the output that symmetry-breaking noise then made.
        output_factor: what this event multiplied the output's multiplier by.
        weighted_norms: modules whose statistics over channels are weighted until `anneal_norms` has brought the
            weights to 1.
        report: what else the method has to say.
        seconds: wall time of the event, checks included.
        parity_sec: of that, the checks (not part of the receipt).
        replaced: old and new tensor by name (not part of the receipt).
        carry: how gradients follow, for optimizer state (not part of the receipt).
        observed: what isotropic activations did before the event, if the method asked (not part of the receipt).
    """

    stage: int
    method: str
    widths_before: dict[str, int]
    widths_after: dict[str, int]
    num_params_before: int
    num_params: int
    parity_error_eval: float
    parity_error_train: float
    parity_tolerance_eval: float | None
    parity_tolerance_train: float | None
    noise_error_eval: float
    output_factor: float
    weighted_norms: list[str]
    report: dict[str, Any]
    seconds: float
    parity_sec: float = field(compare=False)
    replaced: dict[str, tuple[Tensor, Tensor]] = field(repr=False, compare=False)
    carry: Carry = field(repr=False, compare=False)
    observed: Mapping[str, Observation] = field(repr=False, compare=False)

    def receipt(self) -> dict[str, Any]:
        """Everything but the tensors, in plain containers."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_IN_RECEIPT}


def plant(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, widths: Mapping[str, int], seed: int
) -> GrowthState:
    """Turn a full-width network into the seed that a run starts from, in place.

    Args:
        model: the full-width network that `graph` was traced from.
        graph: its width graph.
        method: draws the seed's weights. At full width the network's own initialisation stays, unless the method
            `draws_full_width`.
        widths: width of each group in the seed.
        seed: the run's seed.

    Returns:
        The state to hand to `grow`.

    Raises:
        UserError: the method would leave a factor on the output that `finish` could not fold.
    """
    avoid_unsafe_kernels(model)
    if dict(widths) != graph.full_widths or method.draws_full_width:
        resize(model, graph, graph.full_widths, widths)
        # The old tensors serve as the example of how bare parameters are spread.
        expansion = Expansion(graph, tensors_of(model, graph), widths, widths, seed, 0)
        replace_tensors(model, graph, method.initialise(expansion))
        _check_output_scale(model, graph, method, widths, seed)
    return GrowthState(0, dict(widths), {group: [0] * widths[group] for group in graph.groups})


def _check_output_scale(
    model: nn.Module, graph: WidthGraph, method: GrowthMethod, widths: Mapping[str, int], seed: int
) -> None:
    """Rehearse all growth as one event, where a factor on the output could not be folded at the end."""
    if not method.output_multiplier or can_fold(graph):
        return
    rehearsal = method.grow(Expansion(graph, tensors_of(model, graph), widths, graph.full_widths, seed, 1))
    if rehearsal.output_factor != 1.0:
        raise UserError(
            f"{method.name} rescales this network's output, whose scale no layer can take up at the end of "
            "training: end the network with a linear layer or a convolution, or set growth.output_multiplier=false."
        )


def grow(
    model: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    state: GrowthState,
    new_widths: Mapping[str, int],
    seed: int,
    probe: Tensor | tuple[Any, ...],
    agree: Callable[[list[float]], list[float]] = list,
    leader: Mapping[str, Tensor] | None = None,
    gradients: Mapping[str, Tensor] | None = None,
    data: Measurement | None = None,
    leading: "GrowthEvent | None" = None,
) -> GrowthEvent:
    """Widen a network in place by one stage, or narrow it where the method can.

    Args:
        model: the network at `state.widths`.
        graph: its width graph.
        method: what new entries are and how old ones are rescaled.
        state: brought up to date.
        new_widths: width of each group afterwards.
        seed: the run's seed.
        probe: positional inputs that parity is checked on, or the only one.
        agree: maps numbers that this process has measured to those that all processes go by, so that all keep or
            undo the event alike; called the same number of times in each.
        leader: the tensors before its event (`tensors_of`) of the network that `model` is an average of. Both then
            go through the same affine map, so the average of grown networks is the grown average.
        gradients: running means of gradients by parameter name, for methods that want them.
        data: training batches, for methods that want some.
        leading: the event of the network that `model` is an average of.

    Returns:
        The event, whose `replaced` an optimizer needs to follow.

    Raises:
        ParityError: the outputs changed by more than the method allows.
        ValueError: a group would shrink, and the method cannot.

    Whatever is raised, network and state are then as before: the same parameters, the same buffers.
    """
    for group, width in state.widths.items():
        if new_widths[group] < width and not method.shrinks:
            raise ValueError(
                f"{group} would shrink from {width} to {new_widths[group]}; {method.name} only widens"
            )
    began = time.perf_counter()
    stage = state.stage + 1
    probe = positional(probe)
    before = observe(model, probe, graph.norms)
    (diverged,) = agree([float(before.eval.isnan().any() or before.train.isnan().any())])
    if method.preserves and diverged:
        raise ParityError(
            f"the network puts out NaN already before growth to stage {stage}: training has diverged, or its inputs "
            "are not finite; lower the learning rate, or clip gradients."
        )
    parity_sec = time.perf_counter() - began
    num_params_before = sum(p.numel() for p in model.parameters())
    expansion = Expansion(
        graph,
        tensors_of(model, graph),
        dict(state.widths),
        dict(new_widths),
        seed,
        stage,
        leader,
        gradients or {},
        watch(model, graph, probe) if method.observes else {},
        {} if leading is None else leading.observed,
        data,
        None
        if leading is None
        else ({name: new.detach() for name, (_, new) in leading.replaced.items()}, leading.carry),
    )
    growth = with_attention_scale(expansion, method.grow(expansion), method.layer_multipliers)
    weights_before = annealed(state.norm_weights, state.norm_progress)
    norm_weights = carried_weights(graph, weights_before, growth.carry, state.widths, new_widths)
    multipliers = carried_multipliers(
        graph, state.multipliers, growth.multipliers, growth.carry, state.widths, new_widths
    )
    changed = {name: new for name, new in growth.tensors.items() if new is not expansion.old[name]}
    replaced = replace_tensors(model, graph, changed)
    weighted_norms = weigh(model, graph, new_widths, norm_weights)
    multiply(model, graph, multipliers)
    checking = time.perf_counter()
    try:
        after = observe(model, probe)
        error_eval, error_train = agree(
            [
                relative_error(before.eval, after.eval, growth.output_factor),
                relative_error(before.train, after.train, growth.output_factor),
            ]
        )
        tolerance_eval = tolerance_train = None
        if method.preserves and growth.allowed_error is not None:
            bound_eval, bound_train = eps_bounds(
                graph.norms, growth.norm_scale, before.variances, expansion.old
            )
            allowed = rounding(model, before.eval) + growth.allowed_error
            tolerance_eval, tolerance_train = agree([allowed + bound_eval, allowed + bound_train])
            # Written so that NaN fails too.
            if not (error_eval <= tolerance_eval and error_train <= tolerance_train):
                raise ParityError(
                    f"growth to stage {stage} with {method.name} changed the output by {error_eval:.2e} in "
                    f"eval mode and {error_train:.2e} in train mode, more than {tolerance_eval:.2e} and "
                    f"{tolerance_train:.2e}; the network was left as it was before the event."
                )
        noise_error = 0.0
        noise = method.noise(expansion)
        if noise:
            with torch.no_grad():
                for name, amount in noise.items():
                    new = replaced[name][1]
                    new.add_(amount.to(new))
            (noise_error,) = agree([relative_error(after.eval, evaluate(model, probe))])
    except BaseException:
        restore_tensors(model, graph, replaced)
        weigh(model, graph, state.widths, weights_before)
        multiply(model, graph, state.multipliers)
        raise
    parity_sec += time.perf_counter() - checking
    widths_before = dict(state.widths)
    state.stage, state.widths = stage, dict(new_widths)
    state.norm_weights, state.norm_progress = norm_weights, 0.0
    state.multipliers = multipliers
    for group, births in state.births.items():
        del births[new_widths[group] :]
        if group in growth.carry.bases:
            # Every channel is now made up of old ones: none is younger than another.
            births[:] = [min(births)] * len(births)
        births.extend([stage] * (new_widths[group] - len(births)))
    carry = growth.carry
    if method.output_multiplier:
        state.output_factor *= growth.output_factor
    else:
        # Outputs z become z' = z / factor for good. To first order the loss has the slope there that it had: dL/dz'
        # of the grown network is dL/dz, not dL/dz * factor as it is where the output is multiplied again.
        carry = replace(carry, every=carry.every / growth.output_factor)
    return GrowthEvent(
        stage=stage,
        method=method.name,
        widths_before=widths_before,
        widths_after=dict(new_widths),
        num_params_before=num_params_before,
        num_params=sum(p.numel() for p in model.parameters()),
        parity_error_eval=error_eval,
        parity_error_train=error_train,
        parity_tolerance_eval=tolerance_eval,
        parity_tolerance_train=tolerance_train,
        noise_error_eval=noise_error,
        output_factor=growth.output_factor,
        weighted_norms=weighted_norms,
        report=dict(growth.report),
        seconds=time.perf_counter() - began,
        parity_sec=parity_sec,
        replaced=replaced,
        carry=carry,
        observed=expansion.observed,
    )


def anneal_norms(model: nn.Module, graph: WidthGraph, state: GrowthState, progress: float) -> None:
    """Bring weighted normalisations closer to plain ones, which they are from progress 1 on.

    A loop of one's own calls it before each step of a stage's first part; `finish` refuses a network that has not
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


def restore(model: nn.Module, graph: WidthGraph, state: GrowthState) -> None:
    """Let a network that has a state's widths and tensors compute what it computed: weighted norms and multipliers.

    Args:
        model: the network as it is built and resized, or an average of it.
        graph: its width graph.
        state: of a checkpoint.
    """
    weigh(model, graph, state.widths, annealed(state.norm_weights, state.norm_progress))
    multiply(model, graph, state.multipliers)
