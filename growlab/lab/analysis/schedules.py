"""Cost against score over schedules: runs that make one curve, gains over fixed size, and time to a score."""

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

# Settings that a curve of one schedule runs over: the budget. Everything else of a schedule makes another curve.
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
# Settings that say that something is not done: no word about them. A run that is older than a setting has it off.
_OFF = {"batch_growth_rate": "0.0", "warmup_fraction": "0.0", "warmup_steps_after_growth": "0", "milestones": "[]"}
_OFF |= {"batch_rule": '"none"', "restarts": '"none"', "batch_size_stage": '"last"', "progress_unit": '"epochs"'}
# Columns that a table has next to the method, where rows differ in it.
_FIELDS = ("optimizer", "precision", "experiment")
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

    @property
    def quality(self) -> float:
        """A number that is larger for the better score."""
        return self.row.metric.quality(self.score)


@dataclass(frozen=True)
class Series:
    """Points of one method and shape of schedule, by rising cost; only their budgets differ."""

    name: str
    is_fixed_size: bool
    points: tuple[Point, ...]


def series_over_budgets(rows: Sequence[Row]) -> list[Series]:
    """Join the rows that differ by their budget only: fixed-size ones first, then the rest by name.

    A name has what distinguishes a series from the others, schedules in words. A method that has a learning rate of
    its own at each budget, as tuned ones have, is one series, whose name lists the rates by rising cost.

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
    varying = {key for one in grown for key in one if len({o.get(key, _off(key)) for o in grown}) > 1}
    apart = [field for field in _FIELDS if len({getattr(point.row.group, field) for point in points}) > 1]
    joined: dict[tuple[bool, str, str], dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point, shape in zip(points, shapes, strict=True):
        group, shared = point.row.group, point.row.shared_overrides
        # The width that it starts from may be in words already.
        named = bool(set(in_words(group.overrides)) - set(group.overrides))
        words = "".join(
            ", " + _WORDS.get(key, key + " {}").format(_value(key, shape[key]))
            for key in sorted(varying & shape.keys(), key=lambda k: [*_WORDS, k].index(k))
            if shape[key] not in ("null", _off(key)) and not (key == "initial_width" and named)
        )
        others = in_words(group.overrides, shared)
        own = [each for each in others if not each.lstrip("~").startswith("schedule.")]
        rate = next((each.removeprefix(_RATE) for each in own if each.startswith(_RATE)), "")
        own = [one for one in own if not one.startswith(_RATE)] + [getattr(group, field) for field in apart]
        key = (not group.is_fixed_size, ", ".join([group.plain_method, *own]), "" if group.is_fixed_size else words)
        joined[key][rate].append(point)
    return [
        Series(name + (f", {_RATE}{rates}" if rates else "") + words, not is_grown, members)
        for (is_grown, name, words), of_rates in sorted(joined.items())
        for rates, members in sorted(_over_rates(of_rates))
    ]


def _over_rates(of_rates: dict[str, list[Point]]) -> list[tuple[str, tuple[Point, ...]]]:
    """One series where no budget has two rates, else one for each rate."""
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
    """The points that no other one beats at equal or lower cost, by rising cost (or by another amount)."""
    amount = amount or (lambda point: point.cost)
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (amount(p), -p.quality)):
        if not best or point.quality > best[-1].quality:
            best.append(point)
    return best


def _shape(row: Row) -> dict[str, str]:
    """The schedule's settings but its length, as words."""
    schedule = _schedule(row)
    shape = {key: value for key, value in schedule.items() if key not in _LENGTH | {"learning_rate"}}
    rate = schedule.get("learning_rate") or {}
    shape |= {key: value for key, value in rate.items() if not key.startswith("_")}
    unused = [] if shape.get("milestones") else ["decay"]  # of the milestones
    if rate.get("shape") != "wsd":
        unused += ["decay_fraction", "decay_shape"]
    if schedule.get("epochs"):
        # Explicit lists win over the rates.
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
    """Amount that it takes to reach a score.

    Attributes:
        value: the amount; None where nothing was measured.
        sign: "" between two budgets of the curve, "<" below its smallest budget, ">" beyond its largest.
    """

    value: float | None
    sign: str = ""

    def text(self, digits: int) -> str:
        """The amount with its sign and so many decimals; empty where nothing was measured."""
        return "" if self.value is None else f"{self.sign} {self.value:.{digits}f}".strip()

    def over(self, reference: "Amount") -> "Amount":
        """The ratio, bounded from the side that is known; none where both ends are open."""
        opposite = {"": "", "<": ">", ">": "<"}[reference.sign]
        if self.value is None or reference.value is None or (self.sign and opposite and self.sign != opposite):
            return Amount(None)
        return Amount(self.value / reference.value, self.sign or opposite)


@dataclass(frozen=True)
class TimeToScore:
    """Cost and seconds of one method to a test score, and ratios to the reference.

    Attributes:
        level: the score, of accuracy a fraction.
        series: the method over its budgets.
        reference: the method that ratios are to.
        cost: forward FLOPs, in epochs of the fixed-size network at full width; `cost_ratio` over the reference's.
        seconds: wall-clock seconds; without a value where machines differ; `seconds_ratio` over the reference's.
    """

    level: float
    series: Series
    reference: Series
    cost: Amount
    seconds: Amount
    cost_ratio: Amount
    seconds_ratio: Amount


def times_to_scores(rows: Sequence[Row], against: str | None = None, level: float | None = None) -> list[TimeToScore]:
    """Cost and seconds of every method to the scores of the reference, or to one score ("time to accuracy").

    A method's test score is interpolated linearly over the logarithm of cost, and over that of seconds, between
    neighbouring budgets; the first crossing counts. Nothing is extrapolated: a score below that of the smallest
    budget, or above that of the largest, bounds the amount from one side.

    Args:
        rows: from `summarise`, of one network and data set, each method at several budgets.
        against: name of the reference, as `time_to_score_table` prints it; if None, the fixed-size network at full
            width.
        level: the score, of accuracy a fraction; if None, that of the reference at each of its budgets.
    """
    one_task(rows, "the time to a score")
    if level is not None and not math.isfinite(level):
        raise UserError(f"a score of {level:g} cannot be reached: give a number.")
    series = series_over_budgets(rows)
    reference = _reference(series, against)
    timed = len({str(run.machine) for row in rows for run in row.runs}) == 1
    found = []
    for each in [point.score for point in reference.points] if level is None else [level]:
        costs, seconds = (
            [_amount(one, each, in_seconds) if timed or not in_seconds else Amount(None) for one in series]
            for in_seconds in (False, True)
        )
        place = series.index(reference)
        for one, cost, time in zip(series, costs, seconds, strict=True):
            ratios = cost.over(costs[place]), time.over(seconds[place])
            found.append(TimeToScore(each, one, reference, cost, time, *ratios))
    return found


def time_to_score_table(times: Sequence[TimeToScore]) -> Grid:
    """A line for each score and method."""
    metric = times[0].series.points[0].row.metric
    rows = [
        [
            *(metric.text(one.level), one.series.name),
            *(one.cost.text(2), one.cost_ratio.text(2), one.seconds.text(0), one.seconds_ratio.text(2)),
        ]
        for one in times
    ]
    untimed = all(one.seconds.value is None for one in times)
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
    for one in series:
        full = all(run.keeps_full_width for point in one.points for run in point.row.runs)
        if full if against is None else one.name == against:
            return one
    names = "; ".join(one.name for one in series)
    what = "the runs hold no fixed-size network at full width" if against is None else f"no method {against}"
    raise UserError(f"{what}; name a method to compare with by --against, one of: {names}.")


def _amount(series: Series, level: float, in_seconds: bool) -> Amount:
    """Cost or seconds at which the score first reaches `level`."""
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
