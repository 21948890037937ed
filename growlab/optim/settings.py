"""Checks of optimizers' arguments that torch does not validate."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from growlab.base.settings import at_least, finite, flag

_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "eps", "adam_eps", "trust_coefficient")
_FLAGS = ("amsgrad", "maximize", "nesterov")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise an error for settings that torch accepts, or that fail in it with an unhelpful TypeError.

    Args:
        settings: arguments of an optimizer, or a parameter group with its settings.

    Raises:
        ValueError: a numeric setting is not a finite number from 0 on, betas are not two numbers from 0 to below 1, or
            a flag is neither True nor False.

    Examples:
        >>> check_settings({"lr": 0.1, "betas": (0.9,)})
        Traceback (most recent call last):
        ValueError: betas must be two numbers, each from 0 to below 1, not (0.9,).
    """
    for name in _NUMBERS:
        # A rate may be a tensor, which is not read here: that would synchronise with the GPU.
        if name in settings and not isinstance(settings[name], Tensor):
            at_least(0, **{name: settings[name]})
    for name in _FLAGS:
        if name in settings:
            flag(**{name: settings[name]})
    if "betas" in settings:
        _check_betas(settings["betas"])


def _check_betas(betas: Any) -> None:
    pair = betas if isinstance(betas, Sequence) and not isinstance(betas, str) else ()
    try:
        numbers = [beta for beta in pair if not isinstance(beta, Tensor)]
        for beta in numbers:
            finite(betas=beta)
        fits = len(pair) == 2 and all(0 <= beta < 1 for beta in numbers)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"betas must be two numbers, each from 0 to below 1, not {betas!r}.")
