"""Swap an optimizer's parameters for those of a resized network."""

import re
from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from growlab.base.errors import UserError
from growlab.optim.contents import tensors_within
from growlab.optim.own_lists import cannot_exchange, exchange_own, holds_own


def exchange(optimizer: Optimizer, replaced: Mapping[int, Tensor]) -> None:
    """Replace an optimizer's parameters by those of a network that was resized to load a checkpoint.

    State that fits the new parameter is kept (the optimizer's state was loaded before the network); other state belongs
    to the old one and is removed. A tensor fits if each of its dimensions has a length of the parameter's, as with
    Adafactor's rows and columns, or 1.

    Args:
        optimizer: any `torch.optim.Optimizer`; groups stay the same objects.
        replaced: the new parameter by `id` of the old one.

    Raises:
        UserError: other containers of the optimizer would not fit the new parameters.
    """
    if told := cannot_exchange(optimizer, replaced):
        raise UserError(f"{told}.")
    exchange_own(optimizer, replaced)
    for group in getattr(optimizer, "param_groups", ()):
        for index, old in enumerate(group["params"]):
            group["params"][index] = replaced.get(id(old), old)
    # A wrapper of another optimizer shares its groups, which may be exchanged already.
    state = getattr(optimizer, "state", {})
    for old in [parameter for parameter in state if id(parameter) in replaced]:
        new, kept = replaced[id(old)], state.pop(old)
        if all(length in (1, *new.shape) for tensor in tensors_within(kept) for length in tensor.shape):
            state[new] = kept


def order_parameters(optimizer: Optimizer, past: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Add a network's new parameters to its optimizer, and sort each group in the network's order.

    The order is then that of an optimizer made for the present network. With several groups, a new parameter joins the
    group of the parameters whose names differ from its name only in numbers: `layers.3.norm.weight` that of
    `layers.0.norm.weight`.

    Args:
        optimizer: any.
        past: the network's parameters before, by name.
        now: the network's present parameters, by name.

    Raises:
        UserError: it has several groups, and names do not determine the group of a new parameter; or it keeps
            parameters outside of its groups too.
    """
    known = {id(p) for p in (*past.values(), *now.values())}
    if name := holds_own(optimizer, known):
        raise UserError(
            f"{type(optimizer).__name__} holds parameters in {name!r} too: growlab cannot tell which of those that "
            "come in while the network trains belong there."
        )
    groups = optimizer.param_groups
    home = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    # While the network is loading, an optimizer may have its present parameters already.
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
    """Sort a network's parameters into the groups of its optimizer.

    Args:
        held: group index of each previous parameter, by name; None: it is not in the optimizer.
        now: the network's parameters by name.
        num_groups: number of the optimizer's groups.
        optimizer: name of its class, for the message.
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
