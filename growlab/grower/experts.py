"""More experts for a growing mixture of experts of transformers: copies of each expert and of its router's row."""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import whole
from growlab.grower.rows import change_rows, stage_of_rows
from growlab.growth.method import generator
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.growth.state import GrowthEvent
from growlab.widths import Carry, WidthGraph

log = logging.getLogger(__name__)

#: The group whose channels are experts while their number changes.
EXPERTS = "experts"
#: Largest relative change of the outputs: routers of transformers compute in float32.
EXACT = 1e-6
# Attributes of configurations and modules.
_NUMBERS = ("num_local_experts", "num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k")


def number_of_experts(config: Any) -> int | None:
    """Number of experts of each layer by a model's configuration; None if it names none."""
    found = next((getattr(config, name, None) for name in _NUMBERS if getattr(config, name, None)), None)
    return found if getattr(config, "num_experts_per_tok", None) else None


def multiplied(config: Any, by: int, noise: float) -> Any:
    """Return the configuration of a mixture with `by` times as many experts in total and per token.

    Log a warning if no noise separates copies. Raise a UserError if the configuration has no experts or routes tokens
    to groups of experts.
    """
    number = number_of_experts(config)
    if number is None:
        raise UserError(f"{getattr(config, 'model_type', 'this network')} has no experts that growlab can multiply.")
    if getattr(config, "n_group", None) or getattr(config, "topk_group", None):
        raise UserError(f"{config.model_type} routes tokens to groups of experts; copies would change the groups.")
    if not noise:
        log.warning(
            "more experts without noise: copies of an expert get equal gradients and stay equal throughout training; "
            "give noise (--noise), e.g. 0.1"
        )
    target = copy.deepcopy(config)
    _set(target, by * number, by * config.num_experts_per_tok)
    return target


def _set(holder: Any, experts: int, chosen: int) -> None:
    for names, value in ((_NUMBERS, experts), (_CHOSEN, chosen)):
        for name in names:
            if type(vars(holder).get(name)) is int:
                setattr(holder, name, value)


def copies(name: str, old: Tensor, by: int, noise: float, seed: int, stage: int = 0) -> Tensor:
    """Repeat the first dimension of a tensor [experts, ...], each entry `by` times in a row.

    Noise, relative to the tensor's standard deviation, sums to zero over the copies of an expert's last layer.
    """
    new = old.repeat_interleave(by, 0)
    if name.endswith("experts.down_proj") and noise:
        shape, std = (len(old), by, *old.shape[1:]), noise * float(old.detach().float().std())
        drawn = torch.randn(shape, generator=generator(seed, stage, name), dtype=torch.float64) * std
        drawn = (drawn - drawn.mean(1, keepdim=True)).flatten(0, 1)
        new = (new.double() + drawn.to(new.device)).to(old.dtype)
    return new


def tensors_of_experts(network: nn.Module, graph: WidthGraph) -> list[str]:
    """Names of tensors with one entry per expert along the first dimension."""
    if (number := number_of_experts(getattr(network, "config", None))) is None:
        return []
    own = {path for path, module in network.named_modules() if vars(module).get("num_experts") == number}
    return [
        name
        for name, axes in graph.axes.items()
        if name.rpartition(".")[0] in own and not axes[0].groups and axes[0].length({}) == number
    ]


def _set_experts(grower: Any, names: Sequence[str], by: int, noise: float = 0.0) -> tuple[Any, ...]:
    """Multiply the experts in place, in tensors, modules and configurations; see `change_rows`.

    The copies of an expert share its routing weight, so gradients of each are those of the expert over `by`.
    """
    network, seed, stage = grower.network, grower.seed, grower.state.stage
    number, chosen = len(network.get_parameter(names[0])), network.config.num_experts_per_tok
    carry = Carry({EXPERTS: torch.arange(number).repeat_interleave(by)}, scales=dict.fromkeys(names, 1.0 / by))

    def adapt(one: Any) -> None:
        for holder in (one.config, *one.modules()):
            _set(holder, by * number, by * chosen)

    def new(name: str, old: Tensor) -> Tensor:
        return copies(name, old, by, noise, seed, stage)

    return change_rows(grower, EXPERTS, names, (number, by * number), new, adapt, carry)


def multiply_experts(grower: Any, by: int, noise: float) -> GrowthEvent:
    """Implement `Grower.multiply_experts`."""
    with as_user_errors():
        whole(2, by=by)
    network: Any = grower.network
    multiplied(getattr(network, "config", None), by, noise)
    names = tensors_of_experts(network, grower.graph)
    present = {name for name, _ in network.named_parameters()} | {name for name, _ in network.named_buffers()}
    if not names or grower.sharding is not None or grower.full_graph.axes.keys() - present:
        reason = "the network is sharded" if grower.sharding is not None else "layers are still to come"
        raise UserError(
            f"the experts of {type(network).__name__} cannot be multiplied: "
            f"{reason if names else 'growlab has traced none of their tensors'}."
        )
    number = len(network.get_parameter(names[0]))
    with stage_of_rows(grower, EXPERTS, {"experts_before": number, "experts": by * number}) as parity:
        expected = evaluate(network, grower.probe())
        grower.followers.carry(*_set_experts(grower, names, by, noise))
        found = evaluate(network, grower.probe())
        parity += relative_error(expected, found), max(EXACT, 1e3 * torch.finfo(found.dtype).eps)
        if parity[0] > parity[1]:
            raise UserError(
                f"{type(network).__name__} does not route to copies of experts as to the experts: its output would "
                f"change by {parity[0]:.0e}."
            )
    event: GrowthEvent = grower.events[-1]
    return event


def fit_experts(grower: Any, number: int) -> None:
    """Give a grower's network and its averages as many experts as a checkpoint has."""
    names = tensors_of_experts(grower.network, grower.graph)
    now, past = len(grower.network.get_parameter(names[0])), dict(grower.network.named_parameters())
    if number % now:
        raise UserError(f"the checkpoint has {number} experts, which is no multiple of {now}.")
    _set_experts(grower, names, number // now)
    grower.followers.exchange(past)
