"""Paired comparison of methods over seeds: mean differences and their confidence intervals."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student_t

from growlab.base.errors import UserError
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.tables import Row, unique_names


@dataclass(frozen=True)
class Comparison:
    """Comparison of one method against another over their common seeds.

    Attributes:
        row: the method.
        against: the other one.
        differences: test score of `row` minus that of `against`, one per seed; accuracy as a fraction.
    """

    row: Row
    against: Row
    differences: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        """Mean difference; None without a common seed."""
        return statistics.fmean(self.differences) if self.differences else None

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Return Student's t interval of the mean difference; None for fewer than two seeds."""
        return interval(self.differences, level)

    def text(self, difference: float) -> str:
        """Format a difference in the metric's unit, with its sign."""
        metric = self.row.metric
        return format(metric.scale * difference, f"+{metric.digits}").replace("-", "−")


def interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Return Student's t interval of the mean, with n - 1 degrees of freedom; None for fewer than two values."""
    n = len(differences)
    if n < 2:
        return None
    # scipy's confidence_interval would warn if all differences are equal.
    reach = float(student_t.ppf((1 + level) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    mean = statistics.fmean(differences)
    return mean - reach, mean + reach


def compare_pairs(rows: Sequence[Row], against: str | None = None) -> list[Comparison]:
    """Compare rows of the same network, data and metric over equal seeds: each pair, or all with one.

    Args:
        rows: from `summarise`.
        against: name of the method, as in tables, that all others are compared with.
    """
    names = dict(zip(map(id, rows), unique_names(rows), strict=True))
    references = {id(row) for row in rows if against in (row.method, names[id(row)])}
    if against is not None and not references:
        known = ", ".join(names.values())
        raise UserError(f"there is no method {against} among the runs; choose one of: {known}.")
    comparisons = []
    for one, other in itertools.combinations(rows, 2):
        if (one.group.task, one.metric) != (other.group.task, other.metric):
            continue
        # The better one comes first, so that most differences are gains; the reference, if any, comes second.
        pair = sorted((one, other), key=lambda row: -row.metric.quality(row.score_mean))
        if against is not None:
            if not references & {id(one), id(other)}:
                continue
            pair = [other, one] if id(one) in references else [one, other]
        comparisons.append(Comparison(pair[0], pair[1], _differences(*pair)))
    if not comparisons:
        known = ", ".join(dict.fromkeys(row.method for row in rows))
        raise UserError(
            f"there are no two methods with the same network, data set and metric to compare; the runs have {known}."
        )
    return comparisons


def paired_table(comparisons: Sequence[Comparison], level: float = 0.95) -> Grid:
    """Return a table with a row per comparison: common seeds, mean difference, confidence interval."""
    head = ["network", "data"] if len({one.row.group.task for one in comparisons}) > 1 else []
    compared = list({id(row): row for one in comparisons for row in (one.row, one.against)}.values())
    names = dict(zip(map(id, compared), unique_names(compared), strict=True))
    rows = []
    for one in comparisons:
        bounds = one.interval(level)
        mean = "" if one.mean is None else one.text(one.mean)
        if bounds is None:
            limits = "no common seed" if one.mean is None else "one seed: no interval"
        else:
            limits = f"{one.text(bounds[0])} to {one.text(bounds[1])}"
            mean = f"**{mean}**" if bounds[0] > 0 or bounds[1] < 0 else mean
        cells = [names[id(one.row)], names[id(one.against)], str(len(one.differences)), mean, limits]
        rows.append([*(one.row.group.task if head else ()), *cells])
    metrics = " and ".join(metric.difference for metric in sorted({one.row.metric for one in comparisons}))
    return Grid(
        header=[*head, "method", "against", "seeds", "difference", f"{100 * level:g} % interval"],
        rows=rows,
        num_text=2 + len(head),
        caption=f"Test {metrics}, the method's less that of the other with the same seed. Interval: "
        "Student's t over the paired differences, not corrected for the number of comparisons; bold where it "
        "leaves out zero.",
    )


def _differences(one: Row, other: Row) -> tuple[float, ...]:
    key = f"test_{one.metric.key}"
    scores, others = ({run.results["seed"]: run.results.get(key) for run in row.runs} for row in (one, other))
    pairs = [(scores[seed], others[seed]) for seed in sorted(scores.keys() & others.keys())]
    return tuple(a - b for a, b in pairs if a is not None and b is not None and math.isfinite(a - b))
