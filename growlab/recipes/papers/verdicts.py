"""Statements of the papers held against our rows: differences by seed, intervals, and what follows."""

import csv
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from growlab.base.errors import UserError
from growlab.lab.analysis.metrics import metric_of
from growlab.lab.analysis.paired import interval
from growlab.lab.analysis.results import Run, open_run
from growlab.recipes.papers.published import Published, published
from growlab.recipes.papers.registry import Check
from growlab.recipes.papers.statistics import QUANTITIES

HOLDS, CONTRADICTED, UNDECIDED, ONE_RUN = "holds", "contradicted", "undecided", "one run"


@dataclass(frozen=True)
class Outcome:
    """Result of comparing a statement with our rows.

    Attributes:
        check: the statement.
        n: seeds that the difference is over.
        difference: of the first less the second.
        interval: its 95 % interval; None for a single run.
        unit: of both.
        epochs: epochs of our runs; None for studies.
        published: the difference that the paper gives; None where it gives none.
        published_epochs: of the runs behind it.
    """

    check: Check
    n: int
    difference: float
    interval: tuple[float, float] | None
    unit: str
    epochs: int | None
    published: float | None
    published_epochs: int | None

    @property
    def verdict(self) -> str:
        """Verdict of our rows on the statement: `HOLDS`, `CONTRADICTED`, `UNDECIDED` or `ONE_RUN`.

        Equality holds where the whole interval lies within the statement's margin around the published difference
        (around 0 where there is none), and is contradicted where none of it does. So does a bound on a number of each
        network; one on a single number of a study holds or does not.
        """
        if self.check.is_bound:
            inside = [self._in_bounds(value) for value in self.interval or (self.difference,)]
            return HOLDS if all(inside) else UNDECIDED if any(inside) else CONTRADICTED
        if self.interval is None:
            return ONE_RUN
        low, high = self.interval
        if self.check.expect == "equal":
            assert self.check.margin is not None
            stated, margin = self.published or 0.0, self.check.margin
            if stated - margin <= low and high <= stated + margin:
                return HOLDS
            return CONTRADICTED if high < stated - margin or low > stated + margin else UNDECIDED
        if self.check.expect == "less":
            low, high = -high, -low
        return HOLDS if low > 0 else CONTRADICTED if high < 0 else UNDECIDED

    def _in_bounds(self, value: float) -> bool:
        low, high = self.check.at_least, self.check.at_most
        return (low is None or value >= low) and (high is None or value <= high)

    @property
    def points_away(self) -> bool:
        """True if the difference itself has the opposite sign."""
        signs = {"more": self.difference < 0, "less": self.difference > 0}
        return signs.get(self.check.expect, False)

    @property
    def within(self) -> bool | None:
        """True if the published difference lies in our interval; None without either."""
        if self.interval is None or self.published is None:
            return None
        return self.interval[0] <= self.published <= self.interval[1]

    def text(self) -> str:
        """The difference with its interval, as the page shows it."""
        if self.check.is_bound:
            return self._number()
        unit = f" {self.unit}" if self.unit else ""
        if self.interval is None:
            return f"{signed(self.difference)}{unit} (1 run)"
        low, high = self.interval
        reach = "the same in each" if low == high else f"{signed(low)} to {signed(high)}"
        return f"{signed(self.difference)}{unit} ({reach}, n = {self.n})"

    def _number(self) -> str:
        """A number of a study, with its interval where it is of each network."""
        if self.interval is not None:
            low, high = self.interval
            reach = "the same in each" if low == high else f"{low:.3g} to {high:.3g}"
            text = f"{self.difference:.3g} ({reach}, n = {self.n})"
        else:
            # Such as largest_relative_error.
            key = (self.check.summary or ("",))[-1]
            of = next((f"{word} of " for word in ("largest", "smallest") if word in key), "")
            text = f"{self.difference:.2g} ({of}n = {self.n})"
        return text.replace("-", "−")

    def says(self) -> str:
        """The statement, of one of equality with its margin."""
        if self.check.margin is None:
            return self.check.says
        unit = f" {self.unit}" if self.unit else ""
        unit = unit.removesuffix("s") if self.check.margin == 1 else unit
        of = "" if self.published is None else " of the published difference"
        return f"{self.check.says}, to within {self.check.margin:g}{unit}{of}"


def signed(value: float) -> str:
    """Two decimals and the sign.

    Example:
        >>> signed(-0.634), signed(0.0)
        ('−0.63', '+0.00')
    """
    return f"{value + 0.0:+.2f}".replace("-", "−")


def outcome(check: Check, results: Path) -> Outcome:
    """Hold a statement against the rows in a folder such as `notebooks/results`.

    Raises:
        UserError: there are no such rows.
    """
    if check.summary is not None:
        return _of_summary(check, results)
    if check.rows is not None:
        return _of_rows(check, results)
    if check.study is not None:
        return _of_study(check, results)
    firsts = _runs(results, check.first)
    measure, unit = QUANTITIES[check.quantity]
    if check.second is None:
        differences = _means_by_seed(firsts, measure)
    else:
        seconds = _runs(results, check.second)
        by_seed = [_by_seed(firsts, check.first, measure), _by_seed(seconds, check.second, measure)]
        common = sorted(set(by_seed[0]) & set(by_seed[1]))
        differences = [by_seed[0][seed] - by_seed[1][seed] for seed in common]
    differences = [value for value in differences if math.isfinite(value)]
    if not differences:
        raise UserError(f"no two runs of one seed are among {check.first} and {check.second} in {results}.")
    paper = _published(check.published) if check.published else None
    if check.quantity == "score":
        unit = "points" if metric_of([firsts[0].results]).unit == "%" else metric_of([firsts[0].results]).name
    return Outcome(
        check,
        len(differences),
        statistics.fmean(differences),
        interval(differences),
        unit,
        int(firsts[0].results["epochs"]),
        None if paper is None else paper[0].value - paper[1].value,
        None if paper is None else paper[0].epochs,
    )


def _by_seed(runs: Sequence[Run], pattern: str, measure: Callable[[Run], float]) -> dict[int, float]:
    """A number of each run by its seed.

    Raises:
        UserError: two runs have the same seed.
    """
    of_seed: dict[int, Run] = {}
    for run in runs:
        seed = run.results["seed"]
        if seed in of_seed:
            raise UserError(
                f"{of_seed[seed].path} and {run.path} are both runs {pattern} with seed {seed}: a statement compares "
                "one run of each seed, so give it a pattern that takes one of them."
            )
        of_seed[seed] = run
    return {seed: measure(run) for seed, run in of_seed.items()}


def _means_by_seed(runs: Sequence[Run], measure: Callable[[Run], float]) -> list[float]:
    """Mean of each seed over its runs, which share draws and are no independent ones; nan where all of them are."""
    values: dict[int, list[float]] = {}
    for run in runs:
        values.setdefault(run.results["seed"], []).append(measure(run))
    finite = {seed: [one for one in of_seed if math.isfinite(one)] for seed, of_seed in values.items()}
    return [statistics.fmean(finite[seed]) if finite[seed] else math.nan for seed in sorted(finite)]


def _published(named: tuple[str, ...]) -> tuple[Published, Published]:
    network, first, second, *override = named
    return _row(network, first, override), _row(network, second, override)


def _row(network: str, name: str, override: Sequence[str]) -> Published:
    table, _, row = name.partition(": ")
    found = [
        one
        for one in published()
        if (one.table, one.model, one.row) == (table, network, row) and set(override) <= set(one.overrides)
    ]
    if len(found) != 1:
        raise UserError(f"published.csv has {len(found)} rows {name} of {network}, not one.")
    return found[0]


@cache
def _runs(results: Path, pattern: str) -> tuple[Run, ...]:
    """Finished runs of a pattern, or of several with " + " between them.

    Raises:
        UserError: there is none.
    """
    paths = [path for one in pattern.split(" + ") for path in sorted(results.glob(one))]
    runs = [open_run(path) for path in paths if (path / "results.json").is_file()]
    if not runs:
        raise UserError(f"{results} has no runs {pattern}.")
    return tuple(runs)


def _of_summary(check: Check, results: Path) -> Outcome:
    """A number that a study has worked out over its networks, or how many it names."""
    summary = _read_summary(results / check.first)
    value = summary
    for key in check.summary or ():
        value = value[key]
    value = float(len(value) if isinstance(value, list) else value)
    n = summary.get("num_networks") or summary["settings"]["num_seeds"]
    return Outcome(check, n, value, None, "", None, None, None)


def _of_rows(check: Check, results: Path) -> Outcome:
    """A number of each network of a study.

    Raises:
        UserError: the table is not there, or has no such rows, or several of one network.
    """
    table, column, *wanted = check.rows or ()
    path = results / check.first / table
    if not path.is_file():
        raise UserError(f"{path} is not there.")
    with path.open(encoding="utf-8", newline="") as file:
        found = [
            row for row in csv.DictReader(file) if all(row[k] == v for k, v in (w.split("=") for w in wanted))
        ]
    if not found or len({row["seed"] for row in found}) < len(found):
        raise UserError(f"{path} has {len(found)} rows of {', '.join(wanted)}, not one of each network.")
    values = [float(row[column]) for row in found]
    return Outcome(check, len(values), statistics.fmean(values), interval(values), "", None, None, None)


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.is_file():
        raise UserError(f"{path} is not there.")
    return json.loads(path.read_text(encoding="utf-8"))


def _of_study(check: Check, results: Path) -> Outcome:
    """A loss of two initialisations of a study, seed by seed: both have its samples, batches and embeddings."""
    summary = _read_summary(results / check.first)
    rows = {row["initialisation"]: row for row in summary["rows"]}
    assert check.study is not None
    for name in check.study:
        if check.quantity not in rows[name].get("by_seed", {}):
            raise UserError(
                f"{check.first} has no {check.quantity} of single seeds of {name}: run the study again."
            )
        if None in rows[name]["by_seed"][check.quantity]:
            raise UserError(f"{name} diverged in {check.first}, so it has no {check.quantity} to compare.")
    first, second = (rows[name]["by_seed"][check.quantity] for name in check.study)
    differences = [one - other for one, other in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    return Outcome(check, len(differences), mean, interval(differences), "loss", None, None, None)
