"""What Lightning's loggers need from a run beside its numbers: an end."""

from collections.abc import Sequence

from lightning.pytorch.loggers import Logger, WandbLogger


def finish(loggers: Sequence[Logger], succeeded: bool) -> None:
    """End the loggers' runs, so that the next run of the process begins its own.

    Lightning leaves a W&B run open, and the next logger of the process would write into it.

    Args:
        loggers: those of the run that is over.
        succeeded: whether it came to its end.
    """
    for logger in loggers:
        if succeeded:
            logger.finalize("success")
        if isinstance(logger, WandbLogger) and logger._experiment is not None:
            logger._experiment.finish(exit_code=0 if succeeded else 1)
