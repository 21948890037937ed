"""More tokens for a growing model of transformers: rows of its embeddings and of its output layer."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import whole
from growlab.grower.transaction import Seconds, transaction
from growlab.growth.hooks import state_of
from growlab.growth.multipliers import carried_multipliers, multiply
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.growth.state import GrowthEvent
from growlab.widths import Axis, Carry, Group, Part, WidthGraph, replace_tensors, tensors_of

#: The group whose channels are tokens while their number changes.
TOKENS = "tokens"
# Largest change of the outputs, in units of rounding.
EXACT = 1e3


def vocabulary(network: nn.Module) -> int | None:
    """Number of tokens of a model of transformers; None for other networks."""
    size = getattr(getattr(network, "config", None), "vocab_size", None)
    return size if isinstance(size, int) and hasattr(network, "resize_token_embeddings") else None


def check_vocabulary(network: nn.Module, before: int | None) -> None:
    """Raise a UserError if a model of transformers does not have as many tokens as before."""
    if (now := vocabulary(network)) != before:
        raise UserError(
            f"the vocabulary was resized from {before} to {now} tokens under the Grower, whose optimizers cannot "
            "follow that: call Grower.resize_vocabulary."
        )


def rows_of_tokens(network: nn.Module, graph: WidthGraph) -> list[str]:
    """Names of tensors with one row per token, those of the embeddings first; empty if growlab traced none."""
    model: Any = network
    try:
        modules = (model.get_input_embeddings(), model.get_output_embeddings())
    except (AttributeError, NotImplementedError):
        return []
    own = [t for module in modules if module is not None for t in module.parameters(recurse=False)]
    names = {id(tensor): name for name, tensor in network.named_parameters()}
    found = list(dict.fromkeys(names.get(id(tensor), "") for tensor in own))
    return found if graph.axes.keys() >= {*found} else []


def with_group(graph: WidthGraph, names: Iterable[str], group: str, size: int) -> WidthGraph:
    """Make the rows of tensors, such as tokens, channels of a width group."""
    axes = {name: (Axis((Part(group),), "out"), *graph.axes[name][1:]) for name in names}
    return replace(graph, groups={**graph.groups, group: Group(group, size)}, axes={**graph.axes, **axes})


def with_rows(graph: WidthGraph, names: Iterable[str], size: int) -> WidthGraph:
    """Set the number of rows of tensors, which does not grow with a group."""
    axes = {
        name: (Axis((Part(None, size),), graph.axes[name][0].role), *graph.axes[name][1:])
        for name in names
        if name in graph.axes
    }
    return replace(graph, axes={**graph.axes, **axes})


def set_tokens(
    network: nn.Module, graph: WidthGraph, names: Sequence[str], size: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Change the number of rows in place; new rows are the mean of the old ones.

    Args:
        network: a growing model of transformers, or an average of it.
        graph: its width graph.
        names: tensors with rows of tokens.
        size: new number of tokens.

    Returns:
        Old and new tensors by name.
    """
    tensors, new, state = tensors_of(network, graph), dict[str, Tensor](), state_of(network)
    assert state is not None
    for name in names:
        old = tensors[name]
        rest = old.mean(0, keepdim=True).expand(max(0, size - len(old)), *old.shape[1:])
        new[name] = torch.cat([old[:size], rest])
    widths = [{**state.widths, TOKENS: count} for count in (len(tensors[names[0]]), size)]
    opened = with_group(graph, names, TOKENS, size)
    state.multipliers = carried_multipliers(opened, state.multipliers, {}, Carry(), *widths)
    replaced = replace_tensors(network, graph, new)
    multiply(network, graph, state.multipliers)
    return replaced


def note_tokens(network: Any, size: int) -> None:
    """Write the number of tokens into a model's configuration."""
    network.config.get_text_config().vocab_size = size
    if hasattr(network, "vocab_size"):
        network.vocab_size = size


def tokens_since(grower: Any) -> dict[str, list[int]]:
    """Birth stage of each token, by the name of each tensor with a row for it; empty if all are from the start."""
    born = grower.state.tokens
    return dict.fromkeys(rows_of_tokens(grower.network, grower.graph), born) if born else {}


def resize_vocabulary(grower: Any, size: int, multiple_of: int) -> GrowthEvent:
    """Implement `Grower.resize_vocabulary`."""
    with as_user_errors():
        whole(1, size=size, multiple_of=multiple_of)
    size = -(-size // multiple_of) * multiple_of
    network, before = grower.network, vocabulary(grower.network)
    names = rows_of_tokens(network, grower.graph)
    if before is None or not names:
        raise UserError(
            f"{type(network).__name__} is no language model of transformers whose embeddings growlab has traced."
        )
    if grower.sharding is not None or size <= before:
        reason = f"{size} tokens are not more than {before}" if size <= before else "the network is sharded"
        raise UserError(f"the vocabulary cannot be resized: {reason}.")
    seconds, num_params = Seconds(), sum(p.numel() for p in network.parameters())
    with transaction(grower, grower.parts):
        expected = evaluate(network, grower.probe())
        for copy in grower.copies().values():
            set_tokens(copy, grower.graph, names, size)
        replaced = set_tokens(network, grower.graph, names, size)
        opened = with_group(grower.graph, names, TOKENS, size)
        state = grower.state
        state.stage, state.unscheduled = state.stage + 1, state.unscheduled + 1
        state.tokens = [*(state.tokens or [0] * before), *[state.stage] * (size - before)]
        grower.set_rows(names, size)
        grower._vocabulary = size
        widths = [{**grower.state.widths, TOKENS: count} for count in (before, size)]
        grower.followers.carry(replaced, *widths, Carry(), opened)
        found = evaluate(network, grower.probe())
        error = relative_error(expected, found[..., :before])
        tolerance = EXACT * torch.finfo(found.dtype).eps
        if found.shape[-1] not in (expected.shape[-1], size) or error > tolerance:
            raise UserError(
                f"{type(network).__name__} cannot take {size} tokens: something else than its embeddings and its "
                f"output layer depends on their number (the output differs by {error:.0e})."
            )
        notes = {"tokens_before": before, "tokens": size}
        event = receipt(grower, TOKENS, (error, tolerance), num_params, seconds, notes)
    for one in (network, *grower.copies().values()):
        note_tokens(one, size)
    torch.compiler.reset()
    grower.events.append(event)
    return event


def receipt(
    grower: Any, method: str, parity: tuple[float, float], num_params: int, seconds: Seconds, notes: dict[str, Any]
) -> GrowthEvent:
    """Let parts follow an event that keeps the width of all groups, and return its receipt.

    Args:
        grower: of the network, at its new stage.
        method: kind of the event.
        parity: relative output error on the probe batch, and the largest one that is allowed.
        num_params: number of parameters before.
        seconds: begun with the event.
        notes: further entries.
    """
    state = grower.state
    event = GrowthEvent(
        stage=state.stage,
        method=method,
        widths_before=dict(state.widths),
        widths_after=dict(state.widths),
        num_params_before=num_params,
        num_params=sum(p.numel() for p in grower.network.parameters()),
        parity_error_eval=parity[0],
        parity_error_train=parity[0],
        parity_tolerance_eval=parity[1],
        parity_tolerance_train=parity[1],
        eps_error_train=0.0,
        noise_error_eval=0.0,
        output_factor=1.0,
        weighted_norms=[],
        report={},
        seconds=seconds.total,
        notes=notes,
        **asdict(grower.clock),
    )
    for part in grower.parts:
        event.notes.update(part.after_growth(grower, event))
    return event
