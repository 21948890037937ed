"""Cost and seconds that each method takes to a given test score, read off its curve over budgets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from growlab.base.errors import UserError
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.schedules import Point, Series, series_over_budgets
from growlab.lab.analysis.tables import Row, one_task


@dataclass(frozen=True)
class Amount:
    """Amount that it takes to reach a score.

    Attributes:
        value: the amount; None where nothing was measured.
        sign: "" between two budgets of the curve, "<" below its smallest budget, ">" beyond its largest.
    """

    value: float | None
    sign: str = ""

    def text(self, digits: Callable[[float], str]) -> str:
        """The amount with its sign; empty where nothing was measured."""
        return "" if self.value is None else f"{self.sign} {digits(self.value)}".strip()


@dataclass(frozen=True)
class TimeToScore:
    """Cost and seconds of one method to a test score, and ratios to the reference.

    Attributes:
        level: the score, of accuracy a fraction.
        series: the method over its budgets.
        reference: the method that ratios are to.
        cost: forward FLOPs, in epochs of the fixed-size network at full width.
        seconds: wall-clock seconds; without a value where machines differ.
        cost_ratio: the cost over that of the reference.
        seconds_ratio: the seconds over those of the reference.
    """

    level: float
    series: Series
    reference: Series
    cost: Amount
    seconds: Amount
    cost_ratio: Amount
    seconds_ratio: Amount


def times_to_scores(
    rows: Sequence[Row], against: str | None = None, level: float | None = None
) -> list[TimeToScore]:
    """Cost and seconds of every method to the scores of the reference, or to one score ("time to accuracy").

    A method's test score is interpolated linearly over the logarithm of cost, and over that of seconds, between
    neighbouring budgets; the first crossing counts. Nothing is extrapolated: a score below that of the smallest
    budget, or above that of the largest, bounds the amount from one side.

    Args:
        rows: from `summarise`, of one network and data set, each method at several budgets.
        against: name of the reference, as `time_to_score_table` prints it; if None, the fixed-size network at full
            width.
        level: the score, of accuracy a fraction; if None, that of the reference at each of its budgets.

    Raises:
        UserError: the rows are of several networks or data sets, there is no such reference, or the score is not
            finite.
    """
    one_task(rows, "the time to a score")
    if level is not None and not math.isfinite(level):
        raise UserError(f"a score of {level:g} is none to reach: give a number.")
    series = series_over_budgets(rows)
    reference = _reference(series, against)
    levels = [point.score for point in reference.points] if level is None else [level]
    timed = len({str(run.machine) for row in rows for run in row.runs}) == 1
    found = []
    for each in levels:
        own = [_amount(reference, each, measure) for measure in (_cost, _seconds)]
        for one in series:
            cost, seconds = (_amount(one, each, measure) for measure in (_cost, _seconds))
            seconds = seconds if timed else Amount(None)
            found.append(
                TimeToScore(
                    each, one, reference, cost, seconds, _ratio(cost, own[0]), _ratio(seconds, own[1])
                )
            )
    return found


def time_to_score_table(times: Sequence[TimeToScore]) -> Grid:
    """A line for each score and method."""
    reference = times[0].reference.name
    metric = times[0].series.points[0].row.metric
    rows = [
        [
            metric.text(one.level),
            one.series.name,
            one.cost.text(lambda cost: f"{cost:.2f}"),
            one.cost_ratio.text(lambda ratio: f"{ratio:.2f}"),
            one.seconds.text(lambda seconds: f"{seconds:.0f}"),
            one.seconds_ratio.text(lambda ratio: f"{ratio:.2f}"),
        ]
        for one in times
    ]
    untimed = all(one.seconds.value is None for one in times)
    return Grid(
        header=[f"test {metric.label}", "method", "cost", "cost ratio", "seconds", "seconds ratio"],
        rows=rows,
        num_text=2,
        caption=(
            "Cost, in epochs of the fixed-size network at full width, and seconds to a test score; ratios to "
            f"{reference}. Interpolated over their logarithms between budgets, means over seeds. < and >: the "
            "method's smallest budget is above the score already, its largest still below it."
            + (" Seconds are left out: the runs are of several machines." if untimed else "")
        ),
    )


def _reference(series: Sequence[Series], against: str | None) -> Series:
    if against is None:
        full = [one for one in series if all(run.keeps_full_width for p in one.points for run in p.row.runs)]
    else:
        full = [one for one in series if one.name == against]
    if not full:
        names = "; ".join(one.name for one in series)
        what = (
            "the runs hold no fixed-size network at full width" if against is None else f"no method {against}"
        )
        raise UserError(f"{what}; name a method to compare with by --against, one of: {names}.")
    return full[0]


def _cost(point: Point) -> float | None:
    return point.cost


def _seconds(point: Point) -> float | None:
    return point.row.seconds


def _amount(series: Series, level: float, measure: Callable[[Point], float | None]) -> Amount:
    """The amount at which the score first reaches `level`."""
    points = [(value, point) for point in series.points if (value := measure(point))]
    quality = series.points[0].row.metric.quality
    if len(points) != len(series.points):
        return Amount(None)
    aim = quality(level)

    def reaches(score: float) -> bool:
        return quality(score) >= aim or math.isclose(score, level, rel_tol=1e-9)

    (first, smallest), (last, _) = points[0], points[-1]
    if reaches(smallest.score):
        return Amount(first, "" if math.isclose(smallest.score, level, rel_tol=1e-9) else "<")
    for (low, before), (high, behind) in pairwise(points):
        if reaches(behind.score):
            start = quality(before.score)
            share = min(1.0, (aim - start) / (quality(behind.score) - start))
            return Amount(math.exp(math.log(low) * (1 - share) + math.log(high) * share))
    return Amount(last, ">")


def _ratio(mine: Amount, reference: Amount) -> Amount:
    """The ratio, bounded from the side that is known; none where both ends are open."""
    if mine.value is None or reference.value is None:
        return Amount(None)
    opposite = {"": "", "<": ">", ">": "<"}[reference.sign]
    if mine.sign and opposite and mine.sign != opposite:
        return Amount(None)
    return Amount(mine.value / reference.value, mine.sign or opposite)
