"""Describe the blocks of a network that can be inserted later, as text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from growlab.parts.depth.finding import FAILURES
from growlab.parts.depth.search import Chain, Search, twins

_SHOWN_NAMES = 3


def describe(network: nn.Module, example: tuple[Any, ...]) -> list[str]:
    """Describe chains of blocks of one kind, one per line: exact starts, and reasons why other blocks stay.

    Args:
        network: the network at full width and depth; left unchanged.
        example: positional inputs.
    """
    try:
        blocks, chains = Search(network, example, "zero").all()
    except FAILURES as error:
        return [f"not looked for: {(str(error).splitlines() or ['no message'])[0]}"]
    lines = []
    copied = {block.name for block in blocks if next(twins(network, block), None)}
    for chain in chains:
        if chain.found:
            same = [name for name in chain.found if name in copied]
            exact = (
                "start=zero" if not same else "start=zero or stack" if len(same) == len(chain.found) else ""
            )
            exact = exact or f"start=zero, stack from {same[0]} on"
            lines.append(
                f"{_count(chain)} ({_shortened(chain.found)}) may come in later, exactly with {exact}"
            )
        lines += _reasons(chain.reasons)
    if any(chain.found for chain in chains):
        return lines
    for chain in Search(network, example, "identity").all()[1]:
        if chain.found:
            lines.append(
                f"{_count(chain)} ({_shortened(chain.found)}) may come in later, exactly with start=identity"
            )
    return lines or ["no modules of one kind behind one another"]


def _count(chain: Chain) -> str:
    return f"{len(chain.found)} of {len(chain.names)} {chain.kind}"


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= _SHOWN_NAMES:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]}"


def _reasons(reasons: Mapping[str, str]) -> list[str]:
    """Group names whose reasons differ only in numbers, one line each, with the first reason."""
    alike: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault(re.sub(r"\d+", "*", reason), []).append(name)
    return [f"{_shortened(names)} cannot be left out: {reasons[names[0]]}" for names in alike.values()]
