"""Metrics by which runs are compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Metric:
    """A number of `results.json` by which runs of a task are compared.

    Attributes:
        key: its name there, after the split's ("test_bleu").
        scale: factor of tables and figures.
        digits: format of the scaled number.
    """

    key: str
    name: str
    scale: float = 1.0
    unit: str = ""
    higher_is_better: bool = True
    digits: str = ".2f"

    @property
    def label(self) -> str:
        """Name and unit, for the head of a column."""
        return f"{self.name} {self.unit}".strip()

    @property
    def axis(self) -> str:
        """Name and unit of the test value, for an axis."""
        return f"test {self.name}" + (f" ({self.unit})" if self.unit else "")

    @property
    def difference(self) -> str:
        """Unit in which differences are printed."""
        return f"{self.name} in percentage points" if self.unit == "%" else self.name

    def quality(self, value: float | None) -> float:
        """A number that is larger for better values; None is the worst."""
        if value is None:
            return float("-inf")
        return value if self.higher_is_better else -value

    def text(self, value: float) -> str:
        """The value as tables show it, without its unit."""
        return format(self.scale * value, self.digits)


ACCURACY = Metric("accuracy", "accuracy", 100.0, "%")
BLEU = Metric("bleu", "BLEU")
BITS = Metric("bits_per_character", "bits per character", higher_is_better=False)


def metric_of(results: Iterable[Mapping[str, Any]]) -> Metric:
    """The metric that all of these `results.json` share; accuracy if there is no common one.

    Examples:
        >>> metric_of([{"test_accuracy": 0.6, "test_bleu": 31.8}]).label, metric_of([{"test_accuracy": 0.9}]).label
        ('BLEU', 'accuracy %')
    """
    results = list(results)
    for metric in (BLEU, BITS):
        if results and all(row.get(f"test_{metric.key}") is not None for row in results):
            return metric
    metrics = [row.get("metric") or {"name": "accuracy", "higher_is_better": True} for row in results]
    named = {(str(metric["name"]), bool(metric["higher_is_better"])) for metric in metrics}
    if len(named) == 1 and (ACCURACY.key, True) not in named:
        ((key, higher_is_better),) = named
        return Metric(key, key.replace("_", " "), higher_is_better=higher_is_better, digits=".4g")
    return ACCURACY
