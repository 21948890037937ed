"""Grow trained networks: a small network becomes the first stage of a larger one."""

import importlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from growlab.base.errors import UserError
from growlab.base.pieces import is_piece, placed
from growlab.grower.forecast import Forecast
from growlab.grower.network import trace_for_growth
from growlab.grower.part import Part
from growlab.grower.triggers import GrowingNetwork, Trigger, Widths, as_trigger
from growlab.growth import GrowthMethod, HyperCloning, Net2Net
from growlab.growth.outputs import evaluate, network_inputs
from growlab.growth.parity import ROUNDING, exact_rounding, relative_error
from growlab.optim.carry import rescale_state
from growlab.optim.followers import replace_parameters
from growlab.widths import Example, WidthGraph

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Newborn:
    """Parameters, and entries of parameters, that growth has added since a stage.

    Attributes:
        parameters: parameters with only new entries, such as those of inserted layers, by name.
        masks: for each parameter that grew, a bool tensor of its shape that is True at new entries, by name.
        num_entries: number of new entries in all of them.
    """

    parameters: Mapping[str, nn.Parameter]
    masks: Mapping[str, Tensor]
    num_entries: int


def newborn(grower: Any, since: int) -> Newborn:
    """Implement `Grower.newborn`."""
    whole, masks, number = dict[str, nn.Parameter](), dict[str, Tensor](), 0
    regions, inserted = grower.regions(), grower.births()
    for name, parameter in grower.network.named_parameters():
        if name not in regions:
            # Without channels, such as scalars.
            if inserted.get(name, -1) >= since:
                whole[name], number = parameter, number + parameter.numel()
            continue
        rows, columns, shape = regions[name].rows_O, regions[name].columns_I, regions[name].column_shape
        if not bool((rows >= since).any()) and not bool((columns >= since).any()):
            continue
        mask = torch.maximum(rows[:, None], columns[None, :]) >= since
        if parameter.dim() > 1:
            # Columns do not include the dimensions of a kernel.
            mask = mask.reshape(len(rows), *(shape or columns.shape))
            mask = mask[(..., *[None] * (parameter.dim() - mask.dim()))]
        mask = mask.expand(parameter.shape) if parameter.dim() > 1 else mask.reshape(parameter.shape)
        number += int(mask.sum())
        if bool(mask.all()):
            whole[name] = parameter
        else:
            masks[name] = mask.to(parameter.device)
    return Newborn(whole, masks, number)


# Prefixes that DistributedDataParallel and torch.compile add to names.
_WRAPPED = re.compile(r"^((module|_orig_mod)\.)+|_orig_mod\.")


def unwrapped(state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return a state_dict without the prefixes of torch's wrappers, except those in the network's own names.

    Raises:
        UserError: a value is no tensor.
    """
    if nested := next((name for name, tensor in state.items() if not isinstance(tensor, Tensor)), None):
        raise UserError(f"{nested!r} of the trained network's state_dict is no tensor: give the state_dict itself.")
    names = network.state_dict()
    return {name if name in names else _WRAPPED.sub("", name): tensor for name, tensor in state.items()}


#: Order of a deeper network's layers: "interleave" (copies follow their originals), "end" (copies come last), or the
#: index of each small network's layer in the deeper one.
Layers = str | Sequence[int]


class Once(Trigger):
    """Grow from given widths (by default full width) to full width at the first call of `Grower.step`."""

    knows_stages = True

    def __init__(self, widths: Mapping[str, int]) -> None:
        self._first = dict(widths)

    def forecast(self, graph: WidthGraph) -> list[Widths]:
        """Width of each group before and after."""
        return [{**graph.full_widths, **self._first}, graph.full_widths]

    def fraction_grown(self, stage: int, widths: Widths) -> float:
        """Return 0 before growth and 1 after it."""
        return float(stage > 0)

    def next(self, grower: GrowingNetwork) -> Widths | None:
        """Return full widths, once."""
        return grower.graph.full_widths if grower.state.scheduled_stage == 0 else None


def is_adapted(model: nn.Module | None) -> bool:
    """Return True for models of peft, such as those with LoRA adapters."""
    return isinstance(getattr(model, "peft_config", None), dict)


def warn_of_equal_copies(method: GrowthMethod) -> None:
    """Log a warning if a method's copies never separate."""
    if isinstance(method, HyperCloning | Net2Net) and not method.noise_std:
        log.warning(
            "%s without noise: copies of a channel get equal gradients and stay equal throughout training; give "
            "noise_std (--noise of growlab widen), e.g. 0.1",
            type(method).__name__,
        )


def layers_to_come(names: Iterable[str], state: str) -> Part:
    """Return a part that inserts these layers as copies of the previous ones, with their state unless that is reset."""
    moments = "zero" if state == "reset_new" else "copy"
    # Not at the top, since parts are built on this package.
    part: Part = importlib.import_module("growlab.parts").Depth(list(names), start="stack", state=moments)
    return part


def with_small(trigger: Mapping[float, Any], small: Any) -> dict[float, Any]:
    """Replace "small" in a trigger's stages; insert it as the first stage if none begins at 0."""
    stages = {at: small if width == "small" else width for at, width in trigger.items()}
    return stages if 0 in stages else {0: small, **stages}


def trigger_from(
    trigger: Trigger | Mapping[float, Any] | None, widths: Mapping[str, int], graph: WidthGraph, parts: Sequence[Part]
) -> Trigger:
    """Make a trigger whose first stage has the small network's widths, written as "small" in a dict.

    Raises:
        UserError: the trigger or a part begins with other widths.
    """
    if isinstance(trigger, Mapping):
        trigger = with_small(trigger, dict(widths))
    chosen = Once(widths) if trigger is None else as_trigger(trigger)
    first = {**graph.full_widths, **Forecast(chosen, graph, parts).seed}
    if wrong := next((group for group, width in widths.items() if first[group] != width), None):
        of_part = any(wrong in part.groups for part in parts)
        asker, remedy = ("a part", "") if of_part else ("the trigger", ': let it begin with {0: "small", ...}')
        raise UserError(
            f"{asker} begins with {first[wrong]} channels of {wrong!r}, and the trained network has {widths[wrong]}"
            f"{remedy}."
        )
    return chosen


def renamed(state: Mapping[str, Tensor], wide: nn.Module, layers: Layers) -> tuple[dict[str, str], dict[str, str]]:
    """Map the names of a small network's tensors to those of a deeper network of its kind.

    Returns:
        The deeper network's name of each tensor, and the path of the original for each additional layer's path.

    Raises:
        UserError: `layers` does not fit.
    """
    names, missing = {name: name for name in state}, dict[str, str]()
    for path, stack in wide.named_modules():
        if not isinstance(stack, (nn.ModuleList, nn.Sequential)) or not len(stack):
            continue
        pattern = re.compile(rf"{re.escape(path)}\.(\d+)\." if path else r"(\d+)\.")
        before = len({match[1] for name in state if (match := pattern.match(name))})
        if not 0 < before < len(stack) or any(type(m) is not type(stack[0]) for m in stack):
            continue
        places = _places(layers, before, len(stack), _leading(stack, before))
        prefix = f"{path}." if path else ""
        for place in range(len(stack)):
            if place not in places:
                missing[f"{prefix}{place}"] = f"{prefix}{max(p for p in places if p < place)}"
        for name, new in names.items():
            if match := pattern.match(new):
                names[name] = f"{prefix}{places[int(match[1])]}.{new[match.end() :]}"
    return names, missing


def _leading(stack: nn.ModuleList | nn.Sequential, before: int) -> int:
    """Number of layers at the start of a stack, such as strided ones, that the last layer cannot be a copy of."""
    shapes = [{name: tensor.shape for name, tensor in layer.state_dict().items()} for layer in stack]
    others = [place for place in range(before) if shapes[place] != shapes[-1]]
    return others[-1] + 1 if others and others[-1] + 1 < before else 0


def _places(layers: Layers, before: int, after: int, leading: int) -> list[int]:
    if layers == "interleave":
        rest = before - leading
        return [*range(leading), *(leading - (-place * (after - leading) // rest) for place in range(rest))]
    if layers == "end":
        return list(range(before))
    places = list(layers) if not isinstance(layers, str) else []
    if len(places) != before or places[:1] != [0] or any(a >= b for a, b in pairwise([*places, after])):
        raise UserError(
            f'layers={layers!r} must be "interleave", "end", or ascending indices of the {before} trained layers among '
            f"{after}, the first at 0, since a new layer copies the one before it."
        )
    return places


def prepared(
    small: nn.Module | Mapping[str, Tensor],
    wide: nn.Module,
    example: Example,
    method: GrowthMethod,
    parts: Sequence[Any],
    seed: int,
    trace: str | nn.Module | None,
    names: Mapping[str, str],
    copied: Mapping[str, str],
) -> tuple[WidthGraph, dict[str, int]]:
    """Trace the large network, and infer the small one's widths from the shapes of its tensors.

    Raises:
        UserError: the small network is not a narrower network of this kind.
    """
    graph = trace_for_growth(wide, example, method, parts, seed, submodule=trace)
    state = small if isinstance(small, Mapping) else small.state_dict()
    shapes = {names[name]: tuple(tensor.shape) for name, tensor in state.items()}
    own = wide.state_dict(keep_vars=True)
    # Layers to be inserted have the widths of their originals; behind a strided layer some dimensions differ.
    like = {
        name: tuple(
            length if full == original else full
            for length, full, original in zip(shapes[source], own[name].shape, own[source].shape, strict=True)
        )
        for new, old in copied.items()
        for name in own
        if name.startswith(f"{new}.") and (source := old + name.removeprefix(new)) in shapes
    }
    widths = {**graph.full_widths, **graph.widths_of(like), **graph.widths_of(shapes)}
    first: dict[int, str] = {}
    for name, tensor in own.items():
        # Tied tensors have one name in the graph.
        traced = first.setdefault(id(tensor), name)
        shape = graph.shape(traced, widths) if traced in graph.axes else tuple(tensor.shape)
        if name in shapes and shapes[name] != shape:
            reason = graph.fixed.get(name.rpartition(".")[0], "no width group explains it")
            raise UserError(
                f"{name} of the trained network has the shape {list(shapes[name])}, which no widths of "
                f"{type(wide).__name__} give: it is {list(tensor.shape)} at full width ({reason})."
            )
    if larger := next((group for group, full in graph.full_widths.items() if widths[group] > full), None):
        raise UserError(f"the trained network is wider than {type(wide).__name__} in {larger!r}.")
    return graph, widths


def adopt(
    grower: Any,
    small: nn.Module | Mapping[str, Tensor],
    names: Mapping[str, str],
    optimizers: Sequence[Optimizer],
    state: Any,
) -> None:
    """Load a small network and its optimizers into a grower's network of the same widths and layers.

    `names` maps the small network's tensor names to the large network's; `state` is as in `Grower.follow`.

    Raises:
        UserError: tensors are missing, or the outputs differ.
    """
    network: nn.Module = grower.network
    tensors, own = small if isinstance(small, Mapping) else small.state_dict(), network.state_dict()
    given = {names[name]: tensor for name, tensor in tensors.items()}
    sharded = {name: placed(t, own[name]) if is_piece(own.get(name)) else t for name, t in given.items()}
    missing, unexpected = network.load_state_dict(sharded, strict=False)
    if missing or unexpected:
        what = f"lacks {missing[0]}" if missing else f"has {unexpected[0]}, which the large one lacks"
        raise UserError(f"the trained network {what}: it is no smaller {type(network).__name__}.")
    if isinstance(small, nn.Module):
        grower.moved_factors = factors = _match_outputs(grower, small)
        new = dict(network.named_parameters())
        old = {id(parameter): new[names[name]] for name, parameter in small.named_parameters() if names[name] in new}
        known = old.keys() | {id(parameter) for parameter in network.parameters()}
        for optimizer in optimizers:
            if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
                raise UserError(
                    f"{type(optimizer).__name__} has no parameter of the trained network, nor of the large one: give "
                    "the optimizer that trained it."
                )
            replace_parameters(optimizer, old)
            for parameter in filter(is_piece, old.values()):
                entries = optimizer.state.get(parameter, {})
                moments = {k: t for k, t in entries.items() if getattr(t, "shape", None) == parameter.shape}
                entries |= {key: placed(tensor, parameter) for key, tensor in moments.items()}
            rescale_state(optimizer, {new[name]: factor for name, factor in factors.items()})
    else:
        _warn_of_unknown_outputs(network, grower.graph, grower.seed_widths)
    grower.follow(*optimizers, state=state)


def _match_outputs(grower: Any, small: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Compare outputs with those of the small network, whose weights were loaded; rescale embeddings if they differ.

    Code may multiply embeddings by a number computed from the width, such as its root in Gemma. If that number is
    larger by a ratio, tables of embeddings are divided by it, and the normalisation in front of a tied table is
    multiplied.

    Returns:
        For each rescaled parameter, by name, the factor on it and the factor on its gradient.
    """
    network, graph, probe = grower.network, grower.graph, grower.probe()
    for part in grower.parts:
        part.attach(small)
    expected = evaluate(small, network_inputs(probe, small))
    for part in grower.parts:
        part.detach(small)

    def error() -> float:
        output = evaluate(network, probe)
        return relative_error(expected.to(output), output) if output.shape == expected.shape else float("inf")

    least = error()
    tolerance = max(exact_rounding(network, expected), exact_rounding(small, expected))
    # In low precision a wrong factor may change less than rounding in a deep network does: take the best one.
    close, best, chosen = min(tolerance, ROUNDING[torch.float32]), least, dict[str, tuple[Tensor, Tensor]]()
    for ratio in _computed_ratios(network, small, graph, grower.state.widths):
        if best <= close:
            break
        factors = dict[str, tuple[Tensor, Tensor]]()
        weights = {layer.weight for layer in graph.layers}
        for name, parameter in network.named_parameters():
            roles = [axis.role for axis in graph.axes.get(name, ())]
            # The role of the gain in front of a tied table is "in".
            if roles == ["in"] or (roles == ["fixed", "out"] and name not in weights):
                factor = parameter.new_tensor(ratio if roles == ["in"] else 1 / ratio)
                factors[name] = (factor, 1 / factor)
        originals = _rescaled(network, graph, factors)
        if (found := error()) < best:
            best, chosen = found, factors
        with torch.no_grad():
            for parameter, original in originals.items():
                parameter.copy_(original)
    if best <= tolerance:
        _rescaled(network, graph, chosen)
        return chosen
    raise UserError(
        f"the trained network's weights fit {type(network).__name__}, but its output differs by {least:.0e}: the two "
        "differ in more than widths and layers, such as the head dimension or a factor that the code computes from "
        "its width."
    )


def _rescaled(
    network: nn.Module, graph: WidthGraph, factors: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[nn.Parameter, Tensor]:
    """Multiply parameters by the first factor of each, and return their original values."""
    named, originals = dict(network.named_parameters()), dict[nn.Parameter, Tensor]()
    with torch.no_grad():
        for name, (factor, _) in factors.items():
            parameter, offset = named[name], graph.offsets.get(name, 0.0)
            originals[parameter] = parameter.detach().clone()
            parameter.add_(offset).mul_(factor).sub_(offset)
    return originals


def _warn_of_unknown_outputs(network: nn.Module, graph: WidthGraph, widths: Widths) -> None:
    """Warn that outputs are not compared; raise a UserError for a number that is the root of a growing width."""
    numbers = {
        f"{path}.{name}".lstrip("."): number
        for path, module in network.named_modules()
        for name, number in vars(module).items()
        # torch's own modules compute no number from a width; nn.Embedding's norm_type of 2.0 could be taken for one.
        if type(number) is float and not type(module).__module__.startswith("torch.")
    }
    buffers = ((name, b) for name, b in network.named_buffers() if not b.dim() and b.is_floating_point())
    numbers |= {name: float(buffer) for name, buffer in buffers}
    roots = [full**0.5 for group, full in graph.full_widths.items() if full != widths[group]]
    for name, number in numbers.items():
        # Numbers below 1 could be dropout rates; buffers may be rounded to bfloat16.
        if number > 1 and any(isclose(number, root, rel_tol=2**-8) for root in roots):
            raise UserError(
                f"{name} of {type(network).__name__} is {number:g}, the root of a width that grows, so the trained "
                "network uses another number: give that network, or a folder that its save_pretrained wrote, instead "
                "of its tensors."
            )
    log.warning(
        "the trained network was given as tensors alone, so its outputs are not compared with those of %s, which would "
        "differ with another head dimension, for example: give the network itself to compare them",
        type(network).__name__,
    )


def _computed_ratios(network: nn.Module, small: nn.Module, graph: WidthGraph, widths: Widths) -> dict[float, None]:
    """Unique ratios, of the large network to the small one, of numbers that code may compute from the width."""
    old_buffers = dict(small.named_buffers())
    pairs = ((old_buffers[n], new) for n, new in network.named_buffers() if n in old_buffers and not new.dim())
    buffers = [float(new / old) for old, new in pairs if old.is_floating_point() and old != 0]
    roots = [(full / widths[group]) ** 0.5 for group, full in graph.full_widths.items()]
    return dict.fromkeys(ratio for ratio in (*buffers, *roots) if ratio != 1.0)


def anneal_if_uniform(grower: Any) -> bool:
    """Make normalisations plain if channels have equal weights, as after whole factors, and outputs do not change.

    Return True if normalisations are plain.
    """
    state = grower.state
    weights, progress = state.norm_weights, state.norm_progress
    if not weights or any(len(set(each)) > 1 for each in weights.values()):
        return not weights
    expected = evaluate(grower.network, grower.probe())
    grower.anneal(1.0)
    if relative_error(expected, evaluate(grower.network, grower.probe())) > exact_rounding(grower.network, expected):
        # Equal weights still change sums and norms over channels.
        state.norm_weights, state.norm_progress = weights, progress
        grower.anneal(progress)
    return not state.norm_weights


def anneal_at_once(grower: Any, method: GrowthMethod) -> None:
    """Make the normalisations of a trained network plain; raise a UserError if that changes its outputs."""
    expected = evaluate(grower.network, grower.probe())
    grower.anneal(1.0)
    error = relative_error(expected, evaluate(grower.network, grower.probe()))
    if error > exact_rounding(grower.network, expected):
        raise UserError(
            f"{method.name} widens a trained stream under layer or RMS normalisation so that plain normalisations "
            f"would change the output by {error:.0e}: grow it by a whole factor with HyperCloning or Net2Net, or use "
            "growlab widen, which takes any factor."
        )
