"""Methods compared seed by seed: the mean difference and its confidence interval."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student_t

from growlab.base.errors import UserError
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.metrics import Metric
from growlab.lab.analysis.tables import Row, told_apart


@dataclass(frozen=True)
class Comparison:
    """One method against another over the seeds that both were run with.

    Attributes:
        row: the method.
        against: the other one.
        differences: test score of the first less that of the second (of accuracy a fraction), one for each seed.
    """

    row: Row
    against: Row
    differences: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        """The mean difference; None without a common seed."""
        return statistics.fmean(self.differences) if self.differences else None

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Student's t interval of the mean difference, n - 1 degrees of freedom; None for fewer than two seeds."""
        return interval(self.differences, level)


def interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Student's t interval of their mean, n - 1 degrees of freedom; None for fewer than two."""
    n = len(differences)
    if n < 2:
        return None
    reach = float(student_t.ppf((1 + level) / 2, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    mean = statistics.fmean(differences)
    return mean - reach, mean + reach


def compare_pairs(rows: Sequence[Row], against: str | None = None) -> list[Comparison]:
    """Compare the rows of each network, data set and metric over equal seeds: each with each, or all with one.

    Args:
        rows: from `summarise`.
        against: a method's name, as the tables print it, that all others are compared with.

    Raises:
        UserError: no row has that name, or no two rows are of one network, data set and metric.
    """
    names_of = dict(zip(map(id, rows), told_apart(rows), strict=True))

    def is_named(row: Row) -> bool:
        return against in (row.method, names_of[id(row)])

    if against is not None and not any(map(is_named, rows)):
        names = ", ".join(names_of.values())
        raise UserError(f"there is no method {against} among the runs; choose one of: {names}.")
    comparisons = []
    for one, other in itertools.combinations(rows, 2):
        if _task(one) != _task(other):
            continue
        # The better one comes first, so that most differences are gains; the named one comes second.
        pair = sorted((one, other), key=lambda row: -row.metric.quality(row.score_mean))
        if against is not None:
            if not (is_named(one) or is_named(other)):
                continue
            pair = [other, one] if is_named(one) else [one, other]
        comparisons.append(Comparison(pair[0], pair[1], _differences(*pair)))
    if not comparisons:
        names = ", ".join(dict.fromkeys(row.method for row in rows))
        raise UserError(
            "there are no two methods on one network and data set to compare, judged by one metric; the runs have "
            f"{names}."
        )
    return comparisons


def paired_table(comparisons: Sequence[Comparison], level: float = 0.95) -> Grid:
    """One line a comparison: common seeds, mean difference (accuracy in percentage points), confidence interval."""
    several = len({(c.row.group.model, c.row.group.data) for c in comparisons}) > 1
    head = ["network", "data"] if several else []
    compared = list({id(row): row for one in comparisons for row in (one.row, one.against)}.values())
    names_of = dict(zip(map(id, compared), told_apart(compared), strict=True))
    rows = []
    for one in comparisons:
        bounds = one.interval(level)
        if one.mean is None:
            said = "no common seed"
        elif bounds is None:
            said = "one seed: no interval"
        else:
            said = f"{_points(one, bounds[0])} to {_points(one, bounds[1])}"
        where = [one.row.group.model, one.row.group.data] if several else []
        names = [names_of[id(one.row)], names_of[id(one.against)]]
        mean = "" if one.mean is None else _points(one, one.mean)
        if bounds is not None and (bounds[0] > 0 or bounds[1] < 0):
            mean = f"**{mean}**"
        rows.append([*where, *names, str(len(one.differences)), mean, said])
    metrics = sorted({comparison.row.metric for comparison in comparisons})
    told = " and ".join(metric.difference for metric in metrics)
    return Grid(
        header=[*head, "method", "against", "seeds", "difference", f"{100 * level:g} % interval"],
        rows=rows,
        num_text=2 + len(head),
        caption=(
            f"Test {told}, the method's less that of the other with the same seed. Interval: "
            "Student's t over the paired differences, not corrected for the number of comparisons; bold where it "
            "leaves out zero."
        ),
    )


def _task(row: Row) -> tuple[str, str, Metric]:
    return row.group.model, row.group.data, row.metric


def _differences(one: Row, other: Row) -> tuple[float, ...]:
    scores = [
        {run.results["seed"]: run.results.get(f"test_{row.metric.key}") for run in row.runs}
        for row in (one, other)
    ]
    common = sorted(set(scores[0]) & set(scores[1]))
    pairs = [(scores[0][seed], scores[1][seed]) for seed in common]
    return tuple(a - b for a, b in pairs if a is not None and b is not None and math.isfinite(a - b))


def _points(comparison: Comparison, difference: float) -> str:
    return f"{comparison.row.metric.scale * difference:+.2f}".replace("-", "−")
