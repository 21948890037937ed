"""Silence what third-party libraries print during a run."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence greetings and tips of libraries, and warnings about their use of deprecated functions.

    growlab's warnings are printed without their line of code.
    """
    names = ("lightning.pytorch", "lightning.fabric", "matplotlib.font_manager")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    usual, warnings.formatwarning = warnings.formatwarning, _formatted
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.pytorch\.utilities\._pytree")
            # About speed, where kernels of one channel are ambiguous; and about numbers that are of all ranks already.
            warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
            warnings.filterwarnings("ignore", message=r"It is recommended to use .self\.log")
            # Said of a test whose weights are handed over, where a callback of the user's is a `Checkpoint`.
            warnings.filterwarnings("ignore", message=r".*was called without a model\. The")
            yield
    finally:
        warnings.formatwarning = usual
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if Path(filename).is_relative_to(_PACKAGE):
        return f"warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"
