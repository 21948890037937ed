"""Score against cost over schedules: curves over budgets, frontiers, and cost or time to a score."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from growlab.base.errors import UserError
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.results import in_words
from growlab.lab.analysis.tables import Row, one_task

# Settings of the budget, which varies along a curve. All other settings of a schedule distinguish curves.
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
    "batch_size_stage": "batch size of the {} stage",
}
# Values that switch a setting off and are not named. In runs that are older than a setting it is off.
_OFF = {"batch_growth_rate": "0.0", "warmup_fraction": "0.0", "warmup_steps_after_growth": "0", "milestones": "[]"}
_OFF |= {"batch_rule": '"none"', "restarts": '"none"', "batch_size_stage": '"last"', "progress_unit": '"epochs"'}
# Columns of a table besides the method, if rows differ in them.
_FIELDS = ("optimizer", "precision", "experiment")
_RATE = "optimizer.lr="
_FRACTIONS = {0.5: "1/2", 0.25: "1/4", 0.125: "1/8"}


@dataclass(frozen=True)
class Point:
    """Row of a table as a point.

    Attributes:
        row: the row.
        cost: forward FLOPs in epochs of the fixed-size network at full width.
        score: mean test score; accuracy as a fraction.
    """

    row: Row
    cost: float
    score: float

    @property
    def quality(self) -> float:
        """A number that is larger for better scores."""
        return self.row.metric.quality(self.score)


@dataclass(frozen=True)
class Series:
    """Points of one method and shape of schedule, by rising cost, that differ only in their budgets."""

    name: str
    is_fixed_size: bool
    points: tuple[Point, ...]


def series_over_budgets(rows: Sequence[Row]) -> list[Series]:
    """Join rows that differ only in their budget: fixed-size series first, then the rest by name.

    A name lists what distinguishes a series from the others. If each budget of a method has a single, perhaps tuned,
    learning rate, they form one series, whose name lists the rates by rising cost.

    Args:
        rows: rows of one network and data set, from `summarise`.
    """
    points = [
        Point(row, row.cost_percent * row.reference_epochs / 100, row.score_mean)
        for row in rows
        if row.cost_percent is not None and row.score_mean is not None
    ]
    shapes = [_shape(point.row) for point in points]
    grown = [shape for shape, point in zip(shapes, points, strict=True) if not point.row.group.is_fixed_size]
    varying = {key for shape in grown for key in shape if len({other.get(key, _off(key)) for other in grown}) > 1}
    apart = [field for field in _FIELDS if len({getattr(point.row.group, field) for point in points}) > 1]
    joined: dict[tuple[bool, str, str], dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point, shape in zip(points, shapes, strict=True):
        group, shared = point.row.group, point.row.shared_overrides
        # A name for several overrides may include the initial width.
        named = bool(set(in_words(group.overrides)) - set(group.overrides))
        words = "".join(
            ", " + _WORDS.get(key, key + " {}").format(_value(key, shape[key]))
            for key in sorted(varying & shape.keys(), key=lambda k: [*_WORDS, k].index(k))
            if shape[key] not in ("null", _off(key)) and not (key == "initial_width" and named)
        )
        others = in_words(group.overrides, shared)
        kept = [override for override in others if not override.lstrip("~").startswith("schedule.")]
        rate = next((override.removeprefix(_RATE) for override in kept if override.startswith(_RATE)), "")
        kept = [override for override in kept if not override.startswith(_RATE)]
        name = ", ".join([group.plain_method, *kept, *(getattr(group, field) for field in apart)])
        key = (not group.is_fixed_size, name, "" if group.is_fixed_size else words)
        joined[key][rate].append(point)
    return [
        Series(name + (f", {_RATE}{rates}" if rates else "") + words, not is_grown, members)
        for (is_grown, name, words), of_rates in sorted(joined.items())
        for rates, members in sorted(_over_rates(of_rates))
    ]


def _over_rates(of_rates: dict[str, list[Point]]) -> list[tuple[str, tuple[Point, ...]]]:
    """Return one series if every budget has a single rate, else one series per rate."""
    pairs = [(point, rate) for rate, points in of_rates.items() for point in points]
    pairs.sort(key=lambda pair: pair[0].cost)
    if "" not in of_rates and len({_budget(point.row) for point, _ in pairs}) == len(pairs):
        return [("/".join(dict.fromkeys(rate for _, rate in pairs)), tuple(point for point, _ in pairs))]
    return [(rate, tuple(sorted(points, key=lambda point: point.cost))) for rate, points in of_rates.items()]


def _schedule(row: Row) -> dict[str, Any]:
    return row.runs[0].results.get("schedule") or {}


def _budget(row: Row) -> str:
    return json.dumps({key: _schedule(row).get(key) for key in sorted(_LENGTH)})


def best_at_cost(points: Sequence[Point], amount: Callable[[Point], float] | None = None) -> list[Point]:
    """Return the points that no other one beats at equal or lower cost (or `amount`), in rising order."""
    amount = amount or (lambda point: point.cost)
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (amount(p), -p.quality)):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    return best


def _shape(row: Row) -> dict[str, str]:
    """Return the schedule's settings except its length, as JSON."""
    schedule = _schedule(row)
    shape = {key: value for key, value in schedule.items() if key not in _LENGTH | {"learning_rate"}}
    rate = schedule.get("learning_rate") or {}
    shape |= {key: value for key, value in rate.items() if not key.startswith("_")}
    unused = [] if shape.get("milestones") else ["decay"]  # used by milestones only
    if rate.get("shape") != "wsd":
        unused += ["decay_fraction", "decay_shape"]
    if schedule.get("epochs"):
        # Explicit lists override the growth rates.
        shape["num_stages"] = len(schedule["epochs"])
        unused.append("epoch_growth_rate")
    if schedule.get("epochs") or schedule.get("initial_epochs"):
        unused.append("initial_fraction")
    if schedule.get("widths"):
        unused += ["initial_width", "width_growth_rate"]
    return {key: json.dumps(value) for key, value in shape.items() if key not in unused}


def _off(key: str) -> str:
    return _OFF.get(key, "null")


def _value(key: str, text: str) -> str:
    value = json.loads(text)
    if key == "initial_fraction":
        return f"{100 * value:g} %"
    if key == "initial_width" and value in _FRACTIONS:
        return _FRACTIONS[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Amount:
    """Cost or time to reach a score.

    Attributes:
        value: the amount; None if unknown.
        sign: "" between two budgets of the curve, "<" below its smallest budget, ">" above its largest.
    """

    value: float | None
    sign: str = ""

    def text(self, digits: int) -> str:
        """Format the amount with its sign; empty if unknown."""
        return "" if self.value is None else f"{self.sign} {self.value:.{digits}f}".strip()

    def over(self, reference: "Amount") -> "Amount":
        """Return the ratio, with its bound; unknown if the bounds of both amounts do not combine."""
        opposite = {"": "", "<": ">", ">": "<"}[reference.sign]
        if self.value is None or reference.value is None or (self.sign and opposite and self.sign != opposite):
            return Amount(None)
        return Amount(self.value / reference.value, self.sign or opposite)


@dataclass(frozen=True)
class TimeToScore:
    """Cost and seconds for one method to reach a test score, and their ratios to a reference.

    Attributes:
        level: the score; accuracy as a fraction.
        series: the method over its budgets.
        reference: the reference method of the ratios.
        cost: forward FLOPs in epochs of the fixed-size network at full width; `cost_ratio` relative to the reference.
        seconds: wall-clock seconds, unknown if machines differ; `seconds_ratio` relative to the reference.
    """

    level: float
    series: Series
    reference: Series
    cost: Amount
    seconds: Amount
    cost_ratio: Amount
    seconds_ratio: Amount


def times_to_scores(rows: Sequence[Row], against: str | None = None, level: float | None = None) -> list[TimeToScore]:
    """Return each method's cost and seconds to the scores of a reference, or to one score ("time to accuracy").

    Between neighbouring budgets, a method's test score is interpolated linearly over the logarithm of cost or seconds;
    the first crossing counts. Nothing is extrapolated: a score below that of the smallest budget, or above that of the
    largest, bounds the amount from one side.

    Args:
        rows: from `summarise`, of one network and data set, each method at several budgets.
        against: name of the reference, as printed by `time_to_score_table`; None: the fixed-size network at full
            width.
        level: the score, accuracy as a fraction; None: the reference's score at each of its budgets.
    """
    one_task(rows, "the time to a score")
    if level is not None and not math.isfinite(level):
        raise UserError(f"a score of {level:g} cannot be reached: give a number.")
    series = series_over_budgets(rows)
    reference = _reference(series, against)
    timed = len({str(run.machine) for row in rows for run in row.runs}) == 1
    place = series.index(reference)
    times = []
    for score in [point.score for point in reference.points] if level is None else [level]:
        costs = [_amount(method, score, in_seconds=False) for method in series]
        seconds = [_amount(method, score, in_seconds=True) if timed else Amount(None) for method in series]
        for method, cost, time in zip(series, costs, seconds, strict=True):
            ratios = cost.over(costs[place]), time.over(seconds[place])
            times.append(TimeToScore(score, method, reference, cost, time, *ratios))
    return times


def time_to_score_table(times: Sequence[TimeToScore]) -> Grid:
    """Return a table with a row per score and method."""
    metric = times[0].series.points[0].row.metric
    rows = [
        [
            *(metric.text(time.level), time.series.name),
            *(time.cost.text(2), time.cost_ratio.text(2), time.seconds.text(0), time.seconds_ratio.text(2)),
        ]
        for time in times
    ]
    untimed = all(time.seconds.value is None for time in times)
    return Grid(
        header=[f"test {metric.label}", "method", "cost", "cost ratio", "seconds", "seconds ratio"],
        rows=rows,
        num_text=2,
        caption="Cost, in epochs of the fixed-size network at full width, and seconds to a test score; ratios to "
        f"{times[0].reference.name}. Interpolated over their logarithms between budgets, means over seeds. < and >: "
        "the method's smallest budget is above the score already, its largest still below it."
        + (" Seconds are left out: the runs are of several machines." if untimed else ""),
    )


def _reference(series: Sequence[Series], against: str | None) -> Series:
    for method in series:
        full = all(run.keeps_full_width for point in method.points for run in point.row.runs)
        if full if against is None else method.name == against:
            return method
    names = "; ".join(method.name for method in series)
    what = "there is no fixed-size network at full width" if against is None else f"there is no method {against}"
    raise UserError(f"{what}; choose the method to compare with by --against, one of: {names}.")


def _amount(series: Series, level: float, in_seconds: bool) -> Amount:
    """Return the cost or seconds at which the score first reaches `level`."""
    amounts = [point.row.seconds if in_seconds else point.cost for point in series.points]
    aim = series.points[0].row.metric.quality(level)

    def reaches(point: Point) -> bool:
        return point.quality >= aim or math.isclose(point.score, level, rel_tol=1e-9)

    if not all(amounts):
        return Amount(None)
    points: list[tuple[float, Point]] = list(zip(amounts, series.points, strict=True))  # type: ignore[arg-type]
    (first, smallest), (last, _) = points[0], points[-1]
    if reaches(smallest):
        return Amount(first, "" if math.isclose(smallest.score, level, rel_tol=1e-9) else "<")
    for (low, before), (high, behind) in pairwise(points):
        if reaches(behind):
            share = min(1.0, (aim - before.quality) / (behind.quality - before.quality))
            return Amount(math.exp(math.log(low) * (1 - share) + math.log(high) * share))
    return Amount(last, ">")
