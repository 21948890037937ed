"""Cost against accuracy over schedules: which runs belong to one curve, and how far above fixed size they are."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from growlab.lab.analysis.results import called
from growlab.lab.analysis.tables import Row

# What a curve of one schedule runs over: the budget. Everything else of a schedule makes another curve.
_LENGTH = {"total_epochs", "initial_epochs", "epochs", "equal_flops", "budget"}
_WORDS = {
    "num_stages": "{} stages",
    "initial_width": "from {} of the width",
    "initial_fraction": "T_0 = {}",
    "epoch_growth_rate": "p_t = {}",
    "width_growth_rate": "p_c = {}",
    "batch_growth_rate": "p_b = {}",
    "widths": "widths {}",
    "batch_sizes": "batches {}",
    "max_batch_size": "batch at most {}",
    "max_batch_size_per_device": "batch at most {} a device",
    "batch_size": "batches that fit",
    "max_memory_gib_per_device": "{} GiB a device",
    "batch_size_of": "batch size of the {} stage",
}
# Settings that say that something is not done: no word about them. A run that is older than a setting has it off.
_OFF = {
    "batch_growth_rate": "0.0",
    "batch_rule": '"none"',
    "restarts": '"none"',
    "batch_size_of": '"last"',
    "milestones": "[]",
    "clock": '"epochs"',
    "warmup_fraction": "0.0",
    "rewarm_steps": "0",
}
# What a table has columns of beside the method, where rows differ in it.
_FIELDS = ("optimizer", "precision", "experiment")
_PREFIX = "schedule."
_RATE = "optimizer.lr="
_FRACTIONS = {0.5: "1/2", 0.25: "1/4", 0.125: "1/8"}


@dataclass(frozen=True)
class Point:
    """One row of the table as a point.

    Attributes:
        row: the row.
        cost: forward FLOPs in epochs of the fixed-size network at full width.
        score: mean test score, of accuracy a fraction.
    """

    row: Row
    cost: float
    score: float


@dataclass(frozen=True)
class Series:
    """Points of one method and shape of schedule, by rising cost; only their budgets differ."""

    name: str
    is_fixed_size: bool
    points: tuple[Point, ...]


def series_over_budgets(rows: Sequence[Row]) -> list[Series]:
    """Join the rows that differ by their budget only: fixed-size ones first, then the rest by name.

    A name holds what distinguishes a series from the others, schedules in words. A method that has a learning rate of
    its own at each budget, as tuned ones have, is one series, whose name tells the rates by rising cost.

    Args:
        rows: rows of one network and data set, from `summarise`.
    """
    points = [
        Point(row, row.cost_percent * row.reference_epochs / 100, row.score_mean)
        for row in rows
        if row.cost_percent is not None and row.score_mean is not None
    ]
    shapes = [_shape(point.row) for point in points]

    def has_name(row: Row) -> bool:
        # What it grows in is said in words already.
        return bool(set(called(row.group.overrides)) - set(row.group.overrides))

    grown = [shape for shape, point in zip(shapes, points, strict=True) if not point.row.group.is_fixed_size]
    varying = {
        key for shape in grown for key in shape if len({other.get(key, _off(key)) for other in grown}) > 1
    }
    apart = [field for field in _FIELDS if len({getattr(point.row.group, field) for point in points}) > 1]
    joined: dict[tuple[bool, str, str], dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point, shape in zip(points, shapes, strict=True):
        group = point.row.group
        words = [
            _WORDS.get(key, key + " {}").format(_value(key, shape[key]))
            for key in sorted(varying & shape.keys(), key=lambda k: [*_WORDS, k].index(k))
            if shape[key] not in ("null", _off(key)) and not (key == "initial_width" and has_name(point.row))
        ]
        named = called(group.overrides, point.row.shared_overrides)
        own = [override for override in named if not _of_schedule(override)]
        rate = next((override.removeprefix(_RATE) for override in own if override.startswith(_RATE)), "")
        own = [override for override in own if not override.startswith(_RATE)]
        own += [getattr(group, field) for field in apart]
        method = "fixed-size" if group.is_fixed_size else group.growth
        method += "" if group.lr_adapt == "none" else f" + {group.lr_adapt}"
        words = [] if group.is_fixed_size else words
        joined[not group.is_fixed_size, ", ".join([method, *own]), "".join(f", {word}" for word in words)][
            rate
        ].append(point)
    return [
        Series(name + (f", {_RATE}{rates}" if rates else "") + words, not is_grown, members)
        for (is_grown, name, words), of_rates in sorted(joined.items())
        for rates, members in sorted(_over_rates(of_rates))
    ]


def _over_rates(of_rates: dict[str, list[Point]]) -> list[tuple[str, tuple[Point, ...]]]:
    """One series where no budget has two rates, else one for each rate."""
    of_points = sorted(
        ((point, rate) for rate, points in of_rates.items() for point in points),
        key=lambda pair: pair[0].cost,
    )
    budgets = {_budget(point.row) for point, _ in of_points}
    if "" not in of_rates and len(budgets) == len(of_points):
        rates = dict.fromkeys(rate for _, rate in of_points)
        return [("/".join(rates), tuple(point for point, _ in of_points))]
    return [(rate, tuple(sorted(points, key=lambda point: point.cost))) for rate, points in of_rates.items()]


def _budget(row: Row) -> str:
    schedule: dict[str, Any] = row.runs[0].results.get("schedule") or {}
    return json.dumps({key: schedule.get(key) for key in sorted(_LENGTH)})


def best_at_cost(points: Sequence[Point], amount: Callable[[Point], float] | None = None) -> list[Point]:
    """The points that no other one beats at equal or lower cost, by rising cost (or by another amount)."""
    amount = amount or (lambda point: point.cost)
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (amount(p), -_quality(p))):
        if not best or _quality(point) > _quality(best[-1]):
            best.append(point)
    return best


def fixed_size_at(cost: float, series: Sequence[Series]) -> float | None:
    """Score of fixed-size training at a cost, between the nearest measured budgets; None outside of them.

    Args:
        cost: in epochs of the fixed-size network at full width.
        series: as from `series_over_budgets`; of several fixed-size ones the best at that cost counts.
    """
    values = []
    for fixed in (one for one in series if one.is_fixed_size):
        costs = [point.cost for point in fixed.points]
        slack = 1e-6 * costs[-1]
        if costs[0] - slack <= cost <= costs[-1] + slack:
            values.append(float(np.interp(cost, costs, [point.score for point in fixed.points])))
    return max(values, key=series[0].points[0].row.metric.quality) if values else None


def gains(rows: Sequence[Row]) -> list[tuple[str, Point, float | None]]:
    """(series, point, its score less that of fixed-size training of equal cost) of every grown row.

    The difference is in the score's own unit (of accuracy a fraction), interpolated between fixed-size budgets;
    None outside of those measured.
    """
    series = series_over_budgets(rows)
    out = []
    for one in series:
        for point in () if one.is_fixed_size else one.points:
            fixed = fixed_size_at(point.cost, series)
            out.append((one.name, point, None if fixed is None else point.score - fixed))
    return out


def _quality(point: Point) -> float:
    return point.row.metric.quality(point.score)


def _of_schedule(override: str) -> bool:
    return override.lstrip("~").startswith(_PREFIX)


def _shape(row: Row) -> dict[str, str]:
    """The schedule's settings but its length, as words."""
    schedule: dict[str, Any] = row.runs[0].results.get("schedule") or {}
    shape = {
        key: json.dumps(value) for key, value in schedule.items() if key not in _LENGTH | {"learning_rate"}
    }
    learning_rate = schedule.get("learning_rate") or {}
    shape |= {k: json.dumps(v) for k, v in learning_rate.items() if not k.startswith("_")}
    if shape.get("milestones", "[]") == "[]":
        shape.pop("decay", None)  # of the milestones
    if learning_rate.get("shape") != "wsd":
        for key in ("decay_fraction", "decay_shape"):
            shape.pop(key, None)
    if schedule.get("epochs"):
        # Explicit lists win over the rates.
        shape["num_stages"] = str(len(schedule["epochs"]))
        shape.pop("epoch_growth_rate", None)
    if schedule.get("epochs") or schedule.get("initial_epochs"):
        shape.pop("initial_fraction", None)
    if schedule.get("widths"):
        for key in ("initial_width", "width_growth_rate"):
            shape.pop(key, None)
    return shape


def _off(key: str) -> str:
    return _OFF.get(key, "null")


def _value(key: str, text: str) -> str:
    value = json.loads(text)
    if key == "initial_fraction":
        return f"{100 * value:g} %"
    if key == "initial_width" and value in _FRACTIONS:
        return _FRACTIONS[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
