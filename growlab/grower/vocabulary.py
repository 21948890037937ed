"""More tokens for a growing model of transformers: rows of its embeddings and of its output layer."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError, as_user_errors
from growlab.base.settings import whole
from growlab.grower.rows import change_rows, stage_of_rows
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.growth.state import GrowthEvent
from growlab.widths import WidthGraph

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
    if before is not None and (now := vocabulary(network)) != before:
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


def set_tokens(grower: Any, size: int) -> tuple[Any, ...]:
    """Change the number of tokens in place; new rows are the mean of the old ones. See `change_rows`."""
    names = rows_of_tokens(grower.network, grower.graph)
    before, grower._vocabulary = len(grower.network.get_parameter(names[0])), size

    def resized(name: str, old: Tensor) -> Tensor:
        rest = old.mean(0, keepdim=True).expand(max(0, size - len(old)), *old.shape[1:])
        return torch.cat([old[:size], rest])

    return change_rows(grower, TOKENS, names, (before, size), resized, partial(_note_tokens, size=size))


def _note_tokens(network: Any, size: int) -> None:
    network.config.get_text_config().vocab_size = size
    if hasattr(network, "vocab_size"):
        network.vocab_size = size


def fit_vocabulary(grower: Any, size: int) -> None:
    """Resize the vocabulary of a grower's network and its averages to a checkpoint's; ages of rows are in its state."""
    if size != grower._vocabulary:
        past = dict(grower.network.named_parameters())
        set_tokens(grower, size)
        grower.state.tokens = []
        grower.followers.exchange(past)


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
    if before is None or not rows_of_tokens(network, grower.graph):
        raise UserError(
            f"{type(network).__name__} is no language model of transformers whose embeddings growlab has traced."
        )
    if grower.sharding is not None or size <= before:
        reason = f"{size} tokens are not more than {before}" if size <= before else "the network is sharded"
        raise UserError(f"the vocabulary cannot be resized: {reason}.")
    with stage_of_rows(grower, TOKENS, {"tokens_before": before, "tokens": size}) as parity:
        expected, state = evaluate(network, grower.probe()), grower.state
        state.tokens = [*(state.tokens or [0] * before), *[state.stage] * (size - before)]
        grower.followers.carry(*set_tokens(grower, size))
        found = evaluate(network, grower.probe())
        parity += relative_error(expected, found[..., :before]), EXACT * torch.finfo(found.dtype).eps
        if found.shape[-1] not in (expected.shape[-1], size) or parity[0] > parity[1]:
            raise UserError(
                f"{type(network).__name__} cannot take {size} tokens: something else than its embeddings and its "
                f"output layer depends on their number (the output differs by {parity[0]:.0e})."
            )
    event: GrowthEvent = grower.events[-1]
    return event
