"""Checks of arguments of data modules, and the number of cores."""

import os
from typing import NoReturn

from growlab.base.errors import UserError


def check_numbers(least: int, **values: int | None) -> None:
    """Refuse numbers that are no whole ones or too small; None passes.

    Raises:
        UserError: naming the first.
    """
    for key, value in values.items():
        if value is None:
            continue
        if not isinstance(value, int):
            raise UserError(
                f"data.{key}={value} must be a whole number (schedule.batch_size=auto finds batch sizes)."
            )
        if value < least:
            raise UserError(f"data.{key}={value} must be at least {least}.")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_unreadable(error: OSError) -> NoReturn:
    """Refuse a folder that cannot be read, which a walk through folders would pass over without a word.

    Raises:
        UserError: naming it.
    """
    raise UserError(f"cannot read {error.filename}: {error.strerror}.") from error
