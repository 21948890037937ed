"""Metrics by which runs are compared, and the form of `results.json`, which has them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError


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


class _Form(BaseModel):
    """Fields that are read; others may be there. Those with a default may be missing, as in older runs."""

    model_config = ConfigDict(strict=True)


class _Metric(_Form):
    name: str
    higher_is_better: bool


class _Schedule(_Form):
    budget: float | None = None
    epochs: list[Any] | None = None
    widths: list[Any] | None = None
    learning_rate: dict[str, Any] | None = None


class _Stage(_Form):
    epochs: int
    batch_size: int
    seconds: float
    samples_per_sec: float
    stage: int = 0
    num_params: int = 0
    flops_per_sample: float | None = None
    peak_memory_bytes: float | None = None
    widths: dict[str, Any] | None = None


class _Results(_Form):
    model: str
    data: str
    growth: str
    lr_adapt: str
    seed: int
    epochs: Annotated[float, Field(gt=0)]
    train_cost_percent: float | None
    test_loss: float | None
    seconds: float | None
    reference_epochs: float | None = None
    parity_max_error: float | None = None
    overrides: list[Any] | None = None
    stages: list[_Stage] | None = None
    schedule: _Schedule | None = None
    metric: _Metric | None = None
    machine: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None


_SCORES = TypeAdapter(dict[str, float | None], config=ConfigDict(strict=True))


def check_form(content: Any) -> dict[str, Any]:
    """Return the content of a `results.json` if it is a run's.

    Raises:
        ValueError: it is not; the message is half a sentence.
    """
    try:
        metric = _Results.model_validate(content).metric
        names = {ACCURACY.key, BLEU.key, BITS.key, *([metric.name] if metric else [])}
        _SCORES.validate_python(
            {key: content[key] for name in sorted(names) if (key := f"test_{name}") in content}
        )
    except ValidationError as error:
        where = "".join(
            f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.errors()[0]["loc"]
        )[1:]
        reason = f" ({where} is missing or of another kind)" if where else ""
        raise ValueError(f"it is not the result of a growlab run{reason}.") from error
    return dict(content)
