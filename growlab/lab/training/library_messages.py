"""Turn errors of third-party libraries into sentences, and silence their warnings."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from growlab.base.errors import UserError
from growlab.growth import ParityError
from growlab.lab.data.loaders import DIED
from growlab.widths import UnsupportedOperation

_PACKAGE = Path(__file__).resolve().parents[2]
# Beginnings of messages of libraries about the user's settings, and what to do.
_MEANT = {
    "Expected more than 1 value per channel when training": (
        "batch normalisation has no statistics of a single value per channel, and a batch of training, such as the "
        "last of an epoch, has one: change data.batch_size, or take a network with another normalisation."
    ),
    DIED: "a process that reads images died: if memory ran out, lower data.num_workers.",
    "Early stopping conditioned on metric": "",
}


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise errors of libraries about impossible settings as UserError."""
    try:
        yield
    except ParityError as error:
        raise UserError(f"{error} Lower optimizer.lr or choose another growth method.") from error
    except Exception as error:
        said = " ".join(str(error).split())
        # wandb: such as a key that is missing for an online run.
        theirs = type(error).__module__.partition(".")[0] == "wandb"
        if theirs or isinstance(error, MisconfigurationException | UnsupportedOperation):
            raise UserError(said) from error
        if isinstance(error, RuntimeError | ValueError):
            for beginning, advice in _MEANT.items():
                if str(error).startswith(beginning):
                    raise UserError(advice or said) from error
        raise


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
