"""Optimizers hold other parameters in place of those that they hold: a loaded network's, or more of them."""

import re
from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from growlab.base.errors import UserError
from growlab.optim.contents import tensors_within
from growlab.optim.own_lists import cannot_exchange, exchange_own, holds_own


def exchange(optimizer: Optimizer, replaced: Mapping[int, Tensor]) -> None:
    """Let an optimizer track other parameters in place of those that it has: a loaded network's, at other widths.

    State that fits the new parameter stays (the optimizer's own state was loaded before the network); other state is
    of the old one and goes. A tensor fits that has the parameter's shape, or for each of its dimensions one of the
    parameter's lengths, as Adafactor's rows and columns have.

    Args:
        optimizer: any `torch.optim.Optimizer`; groups stay the same objects.
        replaced: the new parameter by `id` of the old one.

    Raises:
        UserError: lists of the optimizer's own would not fit the new ones.
    """
    if told := cannot_exchange(optimizer, replaced):
        raise UserError(f"{told}.")
    exchange_own(optimizer, replaced)
    for group in getattr(optimizer, "param_groups", ()):
        for index, old in enumerate(group["params"]):
            group["params"][index] = replaced.get(id(old), old)
    # An optimizer around another one shares its groups, which may be exchanged already.
    state = getattr(optimizer, "state", {})
    for old in [parameter for parameter in state if id(parameter) in replaced]:
        new, kept = replaced[id(old)], state.pop(old)
        if all(length in (1, *new.shape) for tensor in tensors_within(kept) for length in tensor.shape):
            state[new] = kept


def order_parameters(optimizer: Optimizer, past: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Let an optimizer that held a network's parameters hold those that have come since too, in the network's order.

    So a run that makes its optimizer of the network as it is then has the same order. Of several groups a new parameter
    joins the one that holds those whose names differ from its own in numbers alone: `layers.3.norm.weight` that of
    `layers.0.norm.weight`.

    Args:
        optimizer: any.
        past: the network's parameters before, by name.
        now: and as they are.

    Raises:
        UserError: it has several groups, and names do not say which a new parameter belongs to; or it holds parameters
            outside of its groups too.
    """
    known = {id(p) for p in (*past.values(), *now.values())}
    if name := holds_own(optimizer, known):
        raise UserError(
            f"{type(optimizer).__name__} holds parameters in {name!r} too: growlab cannot tell which of those that "
            "come in while the network trains belong there."
        )
    groups = optimizer.param_groups
    home = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    # Where the network is loading, an optimizer may hold its present parameters already.
    held = {
        name: next(
            (home[id(p)] for p in (now.get(name), past[name]) if p is not None and id(p) in home), None
        )
        for name in past
    }
    if len(groups) == 1 and None not in held.values():
        members = [list(now.values())]
    else:
        members = _by_group(held, now, len(groups), type(optimizer).__name__)
    for group, own in zip(groups, members, strict=True):
        group["params"][:] = [*own, *(p for p in group["params"] if id(p) not in known)]
    for parameter in [
        p for p in optimizer.state if id(p) in known and not any(p is one for one in now.values())
    ]:
        del optimizer.state[parameter]


def _by_group(
    held: Mapping[str, int | None], now: Mapping[str, Tensor], num_groups: int, optimizer: str
) -> list[list[Tensor]]:
    """A network's parameters in each group of an optimizer.

    Args:
        held: index of the group that holds each parameter that was there, by name; None: it is not the optimizer's.
        now: the network's parameters by name.
        num_groups: of the optimizer.
        optimizer: its class, for the message.
    """
    alike: dict[str, set[int | None]] = {}
    for name, index in held.items():
        alike.setdefault(re.sub(r"\d+", "*", name), set()).add(index)
    members: list[list[Tensor]] = [[] for _ in range(num_groups)]
    for name, parameter in now.items():
        choices = {held[name]} if name in held else alike.get(re.sub(r"\d+", "*", name), set())
        if not choices and num_groups == 1:
            choices = {0 if parameter.requires_grad else None}
        if len(choices) != 1:
            raise UserError(
                "parameters that come in while a network trains join the group of those of the same name; of "
                f"{optimizer}'s {num_groups} groups {len(choices) or 'none'} hold parameters named like {name}: give "
                "it one group, or one for each kind of parameter."
            )
        (own,) = choices
        if own is not None:
            members[own].append(parameter)
    return members
