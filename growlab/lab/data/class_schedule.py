"""Tasks that change while a network trains: which classes an epoch is about."""

from collections.abc import Mapping, Sequence

import numpy as np

from growlab.base.errors import UserError


class ClassSchedule:
    """Classes by epoch.

    Args:
        classes: the classes from an epoch on, by epoch; the first epoch is 0. None for all classes always.

    Raises:
        UserError: it does not begin with epoch 0, or an entry names no class.
    """

    def __init__(self, classes: Mapping[int, Sequence[int]] | None) -> None:
        self.tasks = {int(epoch): tuple(sorted(set(named))) for epoch, named in (classes or {}).items()}
        if self.tasks and (min(self.tasks) != 0 or not all(self.tasks.values())):
            raise UserError(
                "data.class_schedule must give classes from epoch 0 on, such as {0:[0,1],10:[0,1,2,3]}, not "
                f"{dict(classes or {})}."
            )

    def check(self, num_classes: int) -> None:
        """Refuse classes that the data does not have.

        Raises:
            UserError: naming them.
        """
        unknown = sorted({c for named in self.tasks.values() for c in named if not 0 <= c < num_classes})
        if unknown:
            raise UserError(
                f"data.class_schedule names the classes {unknown}; this data has 0 to {num_classes - 1}."
            )

    def at(self, epoch: int) -> tuple[int, ...] | None:
        """The classes of an epoch; None for all."""
        begun = [start for start in self.tasks if start <= epoch]
        return self.tasks[max(begun)] if begun else None


def positions_of(labels_N: np.ndarray, classes: Sequence[int], length: int | None = None) -> np.ndarray:
    """Positions of the images of some classes, in order.

    Args:
        labels_N: of all images.
        classes: those wanted.
        length: repeat or cut them to so many, so that every epoch has as many steps; None for all, once.

    Raises:
        UserError: there is no image of them.
    """
    found = np.flatnonzero(np.isin(labels_N, classes))
    if not len(found):
        raise UserError(f"data.class_schedule: there is no image of the classes {list(classes)}.")
    return found if length is None else np.resize(found, length)
