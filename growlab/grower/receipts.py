"""Times and entries of an event's receipt."""

import time
from collections.abc import Mapping
from typing import Any

# Entries of receipts that add up.
_SUMMED = ("auxiliary_flops", "auxiliary_samples")


class Seconds:
    """Wall time of an event, by its parts."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.parts: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Seconds since the event began."""
        return time.perf_counter() - self._began

    def note(self, name: str) -> None:
        """End a part, which began where the one before ended."""
        self.parts[name] = self.total - sum(self.parts.values())

    def move(self, part: str, to: str, seconds: float) -> None:
        """Count some seconds of one part as another's."""
        self.parts[part] -= seconds
        self.parts[to] = self.parts.get(to, 0.0) + seconds


def merged(*entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries for one receipt; costs add up."""
    found: dict[str, Any] = {}
    for entry in entries:
        summed = {key: found[key] + entry[key] for key in _SUMMED if key in found and key in entry}
        found |= {**entry, **summed}
    return found
