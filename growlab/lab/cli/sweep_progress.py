"""Where a sweep stands: a line before each of its runs."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

from hydra.core.override_parser.overrides_parser import OverridesParser

from growlab.lab.training.processes import is_first, started_elsewhere


class SweepProgress:
    """Counts and times the runs of a sweep that this process carries out one after the other.

    Args:
        overrides: of the sweep, with all their values: `seed=0,1`; the experiment's own come first.
        counted: whether every combination is a run; a search decides by itself how many there are.
        clock: seconds.

    Examples:
        >>> times = iter([0.0, 60.0])
        >>> progress = SweepProgress(["seed=0,1", "seed=0,1,2", "model=mlp8"], clock=lambda: next(times))
        >>> progress.line(0, ["seed=0", "model=mlp8"])
        'run 1 of 3: seed=0'
        >>> with progress.run():
        ...     pass
        >>> progress.line(1, ["seed=1", "model=mlp8"])
        'run 2 of 3: seed=1; about 0:02:00 left'
    """

    def __init__(
        self, overrides: Sequence[str], counted: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        # Of a key that is given twice the last values count.
        last = {one.get_key_element(): one for one in parsed}
        swept = [one for one in last.values() if one.is_sweep_override()]
        self._keys = {one.get_key_element() for one in swept}
        self._total = prod(len(list(one.sweep_string_iterator())) for one in swept) if counted else None
        self._clock, self._seconds = clock, list[float]()

    def line(self, number: int, overrides: Sequence[str]) -> str:
        """The line before a run: which it is of how many, what it has of its own, the time left.

        Args:
            number: of the run, from 0.
            overrides: of the run.
        """
        own = [one for one in overrides if one.partition("=")[0] in self._keys] or overrides
        line = f"run {number + 1}{'' if self._total is None else f' of {self._total}'}: {' '.join(own)}"
        if self._total is None or not self._seconds:
            return line
        left = round(sum(self._seconds) / len(self._seconds) * (self._total - number))
        return f"{line}; about {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"

    @contextmanager
    def run(self) -> Iterator[None]:
        """Time a run; one that fails says nothing of how long others take."""
        began = self._clock()
        yield
        self._seconds.append(self._clock() - began)

    @contextmanager
    def told(self, number: int, overrides: Sequence[str]) -> Iterator[None]:
        """Print the line, and time the run."""
        if is_first() and not started_elsewhere():
            print(self.line(number, overrides), file=sys.stderr, flush=True)
        with self.run():
            yield
