"""Add tokens or experts to a model of transformers: rows of tensors outside of width groups."""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import whole
from growlab.grower.transaction import Seconds, transaction
from growlab.growth.method import generator
from growlab.growth.multipliers import carried_multipliers, multiply
from growlab.growth.outputs import evaluate
from growlab.growth.parity import exact_rounding, relative_error
from growlab.growth.state import GrowthEvent
from growlab.widths import Axis, Carry, Group, Part, WidthGraph, replace_tensors, tensors_of

log = logging.getLogger(__name__)

#: The groups whose channels are tokens or experts while their number changes.
TOKENS, EXPERTS = "tokens", "experts"
#: Largest relative change of the outputs with more experts: routers of transformers compute in float32.
EXACT = 1e-6
# Attributes of configurations and modules: the number of experts, and of those that compute each token.
_NUMBERS = ("num_local_experts", "num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k")


def with_rows(graph: WidthGraph, names: Iterable[str], part: Part) -> WidthGraph:
    """Return a width graph in which the rows of these tensors are a fixed number, or the channels of a group."""
    axes = {name: graph.axes[name] for name in names if name in graph.axes}
    rows = {n: Axis((part,), own[0].role if part.group is None else "out") for n, own in axes.items()}
    return replace(graph, axes={**graph.axes, **{n: (rows[n], *own[1:]) for n, own in axes.items()}})


def change_rows(
    grower: Any,
    group: str,
    names: Sequence[str],
    numbers: tuple[int, int],
    new: Callable[[str, Tensor], Tensor],
    adapt: Callable[[Any], None],
    carry: Carry | None = None,
) -> tuple[Mapping[str, tuple[Tensor, Tensor]], dict[str, int], dict[str, int], Carry, WidthGraph]:
    """Change the number of rows of tensors, in place, in a grower's network and its averages.

    Args:
        grower: a grower of a model of transformers.
        group: name of the group whose channels the rows are for optimizers.
        names: names of the tensors.
        numbers: numbers of rows before and after.
        new: function of a tensor's name and its old value that returns the new one.
        adapt: writes the number into a network's modules and configuration.
        carry: rule for gradients; None keeps those of old rows.

    Returns:
        Arguments of `Followers.carry`.
    """
    graph, state, carry = grower.graph, grower.state, carry or Carry()
    with_group = with_rows(graph, names, Part(group))
    with_group = replace(with_group, groups={**graph.groups, group: Group(group, numbers[1])})
    before, after = ({**state.widths, group: number} for number in numbers)
    state.multipliers = carried_multipliers(with_group, state.multipliers, {}, carry, before, after)
    replaced: Mapping[str, tuple[Tensor, Tensor]] = {}
    for network in (*grower.copies().values(), grower.network):
        tensors = tensors_of(network, graph)
        with torch.no_grad():
            contents = {name: new(name, tensors[name].detach()) for name in names}
        replaced = replace_tensors(network, graph, contents)
        multiply(network, graph, state.multipliers)
        adapt(network)
    grower.set_rows(names, numbers[1])
    return replaced, before, after, carry, with_group


def _grow_rows(
    grower: Any, group: str, numbers: tuple[int, int], change: Callable[[], tuple[Any, ...]], exact: float, wrong: str
) -> GrowthEvent:
    """Begin a stage that changes a number of rows, and check that the outputs stay the same; an error undoes it.

    `change` changes the rows and returns the arguments of `Followers.carry`. `exact` is the least tolerance of relative
    errors, and `wrong` the predicate of the message about a larger error.
    """
    seconds, state, network = Seconds(), grower.state, grower.network
    num_params = sum(p.numel() for p in network.parameters())
    with transaction(grower, grower.parts):
        state.stage, state.unscheduled = state.stage + 1, state.unscheduled + 1
        expected = evaluate(network, grower.probe())
        size = expected.shape[-1]
        grower.followers.carry(*change())
        output = evaluate(network, grower.probe())
        error = relative_error(expected, output[..., :size])
        tolerance = max(exact, exact_rounding(network, output))
        if output.shape[-1] not in (size, numbers[1]) or error > tolerance:
            raise UserError(f"{type(network).__name__} {wrong} (the output differs by {error:.0e}).")
        event = GrowthEvent(
            stage=state.stage,
            method=group,
            widths_before=dict(state.widths),
            widths_after=dict(state.widths),
            num_params_before=num_params,
            num_params=sum(p.numel() for p in network.parameters()),
            parity_error_eval=error,
            parity_error_train=error,
            parity_tolerance_eval=tolerance,
            parity_tolerance_train=tolerance,
            seconds=seconds.total,
            notes={f"{group}_before": numbers[0], group: numbers[1]},
            **asdict(grower.clock),
        )
        for part in grower.parts:
            event.notes.update(part.after_growth(grower, event))
    torch.compiler.reset()
    grower.events.append(event)
    return event


# Tokens ------------------------------------------------------------------------------------------------------


def vocabulary(network: nn.Module) -> int | None:
    """Number of tokens of a model of transformers; None for other networks."""
    size = getattr(getattr(network, "config", None), "vocab_size", None)
    return size if isinstance(size, int) and hasattr(network, "resize_token_embeddings") else None


def check_vocabulary(network: nn.Module, before: int | None) -> None:
    """Raise a UserError if a model of transformers does not have as many tokens as before."""
    if before is not None and (now := vocabulary(network)) != before:
        raise UserError(
            f"the vocabulary was resized from {before} to {now} tokens without the Grower, so optimizers could not "
            "follow: call Grower.resize_vocabulary instead."
        )


def rows_of_tokens(network: nn.Module, graph: WidthGraph) -> list[str]:
    """Names of tensors with one row per token, those of the embeddings first; empty unless all were traced."""
    model: Any = network
    try:
        modules = (model.get_input_embeddings(), model.get_output_embeddings())
    except (AttributeError, NotImplementedError):
        return []
    parameters = [p for module in modules if module is not None for p in module.parameters(recurse=False)]
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    by_token = list(dict.fromkeys(names.get(id(parameter), "") for parameter in parameters))
    return by_token if graph.axes.keys() >= {*by_token} else []


def set_tokens(grower: Any, size: int) -> tuple[Any, ...]:
    """Change the number of tokens in place; new rows are the mean of the old ones. See `change_rows`."""
    names = rows_of_tokens(grower.network, grower.graph)
    before, grower._vocabulary = len(grower.network.get_parameter(names[0])), size

    def resized(name: str, old: Tensor) -> Tensor:
        rest = old.mean(0, keepdim=True).expand(max(0, size - len(old)), *old.shape[1:])
        return torch.cat([old[:size], rest])

    def adapt(model: Any) -> None:
        model.config.get_text_config().vocab_size = size
        if hasattr(model, "vocab_size"):
            model.vocab_size = size

    return change_rows(grower, TOKENS, names, (before, size), resized, adapt)


def fit_vocabulary(grower: Any, size: int) -> None:
    """Resize the vocabulary of a grower's network and averages to a checkpoint's, whose state has the rows' ages."""
    if size != grower._vocabulary:
        past = dict(grower.network.named_parameters())
        set_tokens(grower, size)
        grower.state.tokens = []
        grower.followers.exchange(past)


def tokens_since(grower: Any) -> dict[str, list[int]]:
    """Birth stages of tokens, by the name of each tensor with a row per token; empty if all are from the start."""
    born = grower.state.tokens
    return dict.fromkeys(rows_of_tokens(grower.network, grower.graph), born) if born else {}


def resize_vocabulary(grower: Any, size: int, multiple_of: int) -> GrowthEvent:
    """Implement `Grower.resize_vocabulary`."""
    with as_user_errors():
        whole(1, size=size, multiple_of=multiple_of)
    size = -(-size // multiple_of) * multiple_of
    network, before = grower.network, vocabulary(grower.network)
    if before is None or not rows_of_tokens(network, grower.graph):
        raise UserError(
            f"{type(network).__name__} is not a language model of transformers whose embeddings growlab has traced."
        )
    if grower.sharding is not None or size <= before:
        reason = f"{size} tokens are not more than {before}" if size <= before else "the network is sharded"
        raise UserError(f"the vocabulary cannot be resized: {reason}.")

    def change() -> tuple[Any, ...]:
        state = grower.state
        state.tokens = [*(state.tokens or [0] * before), *[state.stage] * (size - before)]
        return set_tokens(grower, size)

    wrong = f"cannot take {size} tokens: more than its embeddings and its output layer depends on their number"
    return _grow_rows(grower, TOKENS, (before, size), change, 0.0, wrong)


# Experts -----------------------------------------------------------------------------------------------------


def number_of_experts(config: Any) -> int | None:
    """Number of experts of each layer in a model's configuration; None for a model without experts."""
    number = next((getattr(config, name, None) for name in _NUMBERS if getattr(config, name, None)), None)
    return number if getattr(config, "num_experts_per_tok", None) else None


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
    """Repeat each entry along the first dimension of a tensor [experts, ...] `by` times.

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
    paths = {path for path, module in network.named_modules() if vars(module).get("num_experts") == number}
    return [
        name
        for name, axes in graph.axes.items()
        if name.rpartition(".")[0] in paths and not axes[0].groups and axes[0].length({}) == number
    ]


def _set_experts(grower: Any, names: Sequence[str], by: int, noise: float = 0.0) -> tuple[Any, ...]:
    """Multiply the experts in place, in tensors, modules and configurations; see `change_rows`.

    The copies of an expert share its routing weight, so gradients of each are those of the expert over `by`.
    """
    network, seed, stage = grower.network, grower.seed, grower.state.stage
    number, chosen = len(network.get_parameter(names[0])), network.config.num_experts_per_tok
    carry = Carry({EXPERTS: torch.arange(number).repeat_interleave(by)}, scales=dict.fromkeys(names, 1.0 / by))

    def adapt(model: Any) -> None:
        for holder in (model.config, *model.modules()):
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
        reason = "the network is sharded" if grower.sharding is not None else "layers are still to be inserted"
        raise UserError(
            f"the experts of {type(network).__name__} cannot be multiplied: "
            f"{reason if names else 'growlab has traced none of their tensors'}."
        )
    number = len(network.get_parameter(names[0]))
    wrong = "does not route to copies of experts as it does to the experts"
    return _grow_rows(
        grower, EXPERTS, (number, by * number), lambda: _set_experts(grower, names, by, noise), EXACT, wrong
    )


def fit_experts(grower: Any, number: int) -> None:
    """Multiply the experts of a grower's network and averages to a checkpoint's number."""
    names = tensors_of_experts(grower.network, grower.graph)
    now, past = len(grower.network.get_parameter(names[0])), dict(grower.network.named_parameters())
    if number % now:
        raise UserError(f"the checkpoint has {number} experts, which is not a multiple of the network's {now}.")
    _set_experts(grower, names, number // now)
    grower.followers.exchange(past)
