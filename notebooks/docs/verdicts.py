"""Compare statements of the papers with our results: quantities of runs, differences by seed, intervals, verdicts."""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas
import pydantic

from growlab.base.errors import UserError
from growlab.lab.analysis.paired import interval
from growlab.lab.analysis.results import Run, metric_of, open_run
from growlab.recipes.papers.paper_table import Published, published
from growlab.recipes.papers.registry import Item

HOLDS, CONTRADICTED, UNDECIDED, ONE_RUN = "holds", "contradicted", "undecided", "one run"
# The third paper treats smaller widths separately.
_FEW_NEURONS = 16


@pydantic.dataclasses.dataclass(frozen=True)
class Check:
    """A statement of a paper to compare with our results.

    Attributes:
        first: pattern of run folders below `notebooks/results`, or several joined by " + ".
        second: pattern of the runs to compare them with, by seed; None if `quantity` is itself a difference.
        quantity: "score" (the test metric), or another name in `QUANTITIES`.
        study: two initialisations in a study's `summary.json`, in place of two folders; `quantity` is then a loss in
            its `by_seed`.
        summary: keys of a number in a study's `summary.json`, to compare with `at_most` or `at_least`.
        rows: in place of `summary`, one number per network: a table in the study's folder, a column of it, and other
            cells of the row, such as "task=rings".
        published: network, then two rows of `published.csv` such as "Table 2: Ours", then an override of both, if any.
        expect: "more", "less" or "equal": stated sign of the first value minus the second.
        margin: tolerance of stated equality: largest deviation from the published difference (or from 0), in the
            quantity's unit.
        ours: True if no paper states it and it is our own question.
    """

    says: str
    first: str
    second: str | None = None
    quantity: str = "score"
    study: tuple[str, str] | None = None
    published: tuple[str, ...] | None = None
    expect: str = "more"
    summary: tuple[str | int, ...] | None = None
    rows: tuple[str, ...] | None = None
    at_most: float | None = None
    at_least: float | None = None
    margin: float | None = None
    ours: bool = False

    @property
    def is_bound(self) -> bool:
        """True if a number is compared with a bound, not with another number."""
        return self.summary is not None or self.rows is not None

    def __post_init__(self) -> None:
        """Raise a UserError if a statement of equality has no margin, or another statement has one."""
        if (self.expect == "equal") != (self.margin is not None):
            raise UserError(f"the statement {self.says!r} needs a margin if it states equality, and none otherwise.")


def checks_of(item: Item) -> list[Check]:
    """Return the statements of an entry."""
    return [Check(**one) for check in item.checks for one in _pairs(check)]


def _pairs(check: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Expand a statement about two lists of initialisations, `study: [[...], [...]]`, to one for each pair."""
    study = check.get("study") or ()
    if not any(isinstance(side, list) for side in study):
        yield dict(check)
        return
    for first, second in itertools.product(*study):
        yield {**check, "study": [first, second], "says": check["says"].format(f"`{first}`", f"`{second}`")}


def score(run: Run) -> float:
    """Test metric in its unit; accuracy in percent."""
    metric = metric_of([run.results])
    value = run.results.get(f"test_{metric.key}")
    return math.nan if value is None else metric.scale * value


def first_loss(run: Run) -> float:
    """The loss on held-out images before training, from `layers.csv`."""
    losses = run.layers[run.layers["quantity"] == "loss"].sort_values("step")
    return float(losses["mean"].iloc[0])


def _train_losses(run: Run) -> Any:
    losses = run.curve("train_loss")
    if losses is None:
        raise UserError(f"{run.path} has no training loss over epochs.")
    return losses


def _width_changes(run: Run, more: bool) -> float:
    """Mean change of width between the ends of successive sets of classes, over increases or decreases."""
    classes, path = run.class_schedule, run.width_path
    starts = sorted(classes)
    ends = [float(path[after - 1]) for after in (*starts[1:], len(path))]
    counts = [len(classes[start]) for start in starts]
    steps = range(1, len(starts))
    changes = [ends[i] - ends[i - 1] for i in steps if (counts[i] > counts[i - 1]) == more]
    return sum(changes) / len(changes) if changes else math.nan


def jump(run: Run) -> float:
    """Change of held-out accuracy (points) in epochs after a change of width, minus that in other epochs.

    Counted from the first change of width on; nan for runs of constant width. Steps to fewer than 16 neurons are left
    out, as the paper treats them separately.
    """
    path, accuracy = run.width_path, run.held_out("accuracy")
    if accuracy is None:
        raise UserError(f"{run.path} has no held-out accuracy over epochs.")
    at = [epoch for epoch in range(1, len(path)) if path[epoch] != path[epoch - 1]]
    events = [epoch for epoch in at if path[epoch] >= _FEW_NEURONS or path[epoch] > path[epoch - 1]]
    others = [epoch for epoch in range(at[0], len(path)) if epoch not in at] if at else []
    if not events or not others:
        return math.nan
    means = [
        sum(float(accuracy[epoch] - accuracy[epoch - 1]) for epoch in epochs) / len(epochs)
        for epochs in (events, others)
    ]
    return 100 * (means[0] - means[1])


def new_rate_factor(run: Run) -> float:
    """Rate factor, less 1, of the newest region in its first record, the mean over inner layers.

    The first and the last layer are left out: the paper has separate rules for both.
    """
    if run.rates is None:
        raise UserError(f"{run.path} has no rates.csv.")
    layers = list(dict.fromkeys(run.rates["parameter"]))
    inner = run.rates[run.rates["parameter"].isin(layers[1:-1])]
    newest = inner[inner["region"] == inner["region"].max()].sort_values("step")
    first = newest.groupby("parameter", sort=False).first()
    return float(pandas.to_numeric(first["rate_factor"]).mean()) - 1


QUANTITIES: dict[str, tuple[Callable[[Run], float], str]] = {
    "score": (score, ""),
    "first_loss": (first_loss, "loss"),
    "last_train_loss": (lambda run: float(_train_losses(run)[-1]), "loss"),
    "train_loss_change": (lambda run: float(_train_losses(run)[-1] - _train_losses(run)[0]), "loss"),
    "last_width": (lambda run: float(run.width_path[-1]), "neurons"),
    # While there were more classes than before, and while there were fewer.
    "width_gained": (lambda run: _width_changes(run, more=True), "neurons"),
    "width_given_back": (lambda run: -_width_changes(run, more=False), "neurons"),
    "jump": (jump, "points"),
    # Differences of ratios.
    "log_seconds": (lambda run: math.log(run.results["seconds"]), "(logarithm of seconds)"),
    "new_rate_factor": (new_rate_factor, ""),
}
"""Quantities of a run that a statement may compare, each with its unit."""


@dataclass(frozen=True)
class Outcome:
    """Result of comparing a statement with our results.

    Attributes:
        difference: the first minus the second.
        interval: its 95 % interval; None for a single run.
        epochs: epochs of our runs; None for studies.
        published_epochs: epochs of the paper's runs.
    """

    check: Check
    n: int
    difference: float
    interval: tuple[float, float] | None
    unit: str = ""
    epochs: int | None = None
    published: float | None = None
    published_epochs: int | None = None

    @classmethod
    def over(cls, check: Check, values: Sequence[float], **more: Any) -> "Outcome":
        """The mean of some values and its interval."""
        return cls(check, len(values), statistics.fmean(values), interval(values), **more)

    @property
    def verdict(self) -> str:
        """Verdict on the statement: `HOLDS`, `CONTRADICTED`, `UNDECIDED` or `ONE_RUN`.

        Equality is confirmed if the whole interval is within the statement's margin around the published difference
        (around 0 without one), and contradicted if none of it is; a bound on a number of each network likewise. A
        bound on a single number of a study is either confirmed or contradicted.
        """
        check = self.check
        if check.is_bound:
            low, high = (-math.inf if check.at_least is None else check.at_least), check.at_most
            high = math.inf if high is None else high
            inside = [low <= value <= high for value in self.interval or (self.difference,)]
            return HOLDS if all(inside) else UNDECIDED if any(inside) else CONTRADICTED
        if self.interval is None:
            return ONE_RUN
        low, high = self.interval
        if check.margin is not None:
            least, most = ((self.published or 0.0) + side * check.margin for side in (-1, 1))
            if least <= low and high <= most:
                return HOLDS
            return CONTRADICTED if high < least or low > most else UNDECIDED
        if check.expect == "less":
            low, high = -high, -low
        return HOLDS if low > 0 else CONTRADICTED if high < 0 else UNDECIDED

    @property
    def within(self) -> bool | None:
        """True if the published difference is in our interval; None if one of them is missing."""
        if self.interval is None or self.published is None:
            return None
        return self.interval[0] <= self.published <= self.interval[1]

    def text(self) -> str:
        """Format the difference or the bounded number with its interval."""
        bound = self.check.is_bound
        shown: Callable[[float], str] = (lambda value: f"{value:.3g}") if bound else signed
        unit = f" {self.unit}" if self.unit else ""
        if self.interval is not None:
            low, high = self.interval
            reach = "the same in each" if low == high else f"{shown(low)} to {shown(high)}"
            text = f"{shown(self.difference)}{unit} ({reach}, n = {self.n})"
        elif bound:
            # E.g. largest_relative_error.
            key = (self.check.summary or ("",))[-1]
            of = next((f"{word} of " for word in ("largest", "smallest") if word in key), "")
            text = f"{self.difference:.2g} ({of}n = {self.n})"
        else:
            text = f"{shown(self.difference)}{unit} (1 run)"
        return text.replace("-", "−") if bound else text

    def says(self) -> str:
        """The statement in words, with its margin if it states equality."""
        if self.check.margin is None:
            return self.check.says
        unit = f" {self.unit}" if self.unit else ""
        unit = unit.removesuffix("s") if self.check.margin == 1 else unit
        of = "" if self.published is None else " of the published difference"
        return f"{self.check.says}, to within {self.check.margin:g}{unit}{of}"


def signed(value: float) -> str:
    """Format with two decimals and the sign.

    Example:
        >>> signed(-0.634), signed(0.0)
        ('−0.63', '+0.00')
    """
    return f"{value + 0.0:+.2f}".replace("-", "−")


def outcome(check: Check, results: Path) -> Outcome:
    """Compare a statement with the rows in a folder such as `notebooks/results`."""
    if check.summary is not None:
        # A number that a study has computed over its networks, or a count of names.
        summary = _read_summary(results / check.first)
        value = summary
        for key in check.summary:
            value = value[key]
        n = summary.get("num_networks") or summary["settings"]["num_seeds"]
        return Outcome(check, n, float(len(value) if isinstance(value, list) else value), None)
    if check.rows is not None:
        return _of_rows(check, results, *check.rows)
    if check.study is not None:
        return _of_study(check, results)
    firsts = _runs(results, check.first)
    measure, unit = QUANTITIES[check.quantity]
    if check.second is None:
        # Runs of one seed share draws, so they are not independent.
        values: dict[int, list[float]] = {}
        for run in firsts:
            if math.isfinite(value := measure(run)):
                values.setdefault(run.results["seed"], []).append(value)
        differences = [statistics.fmean(values[seed]) for seed in sorted(values)]
    else:
        first, second = (_by_seed(results, pattern, measure) for pattern in (check.first, check.second))
        differences = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
        differences = [value for value in differences if math.isfinite(value)]
    if not differences:
        raise UserError(f"no two runs of one seed are among {check.first} and {check.second} in {results}.")
    if check.quantity == "score":
        metric = metric_of([firsts[0].results])
        unit = "points" if metric.unit == "%" else metric.name
    theirs: dict[str, Any] = {}
    if check.published:
        network, *names = check.published
        paper, other = (_published(network, name, names[2:]) for name in names[:2])
        theirs = {"published": paper.value - other.value, "published_epochs": paper.epochs}
    return Outcome.over(check, differences, unit=unit, epochs=int(firsts[0].results["epochs"]), **theirs)


def _by_seed(results: Path, pattern: str, measure: Callable[[Run], float]) -> dict[int, float]:
    """Map each run's seed to a number."""
    of_seed: dict[int, Run] = {}
    for run in _runs(results, pattern):
        other = of_seed.setdefault(run.results["seed"], run)
        if other is not run:
            raise UserError(
                f"{other.path} and {run.path} are both runs {pattern} with seed {run.results['seed']}: a statement "
                "compares one run of each seed, so give it a pattern that takes one of them."
            )
    return {seed: measure(run) for seed, run in of_seed.items()}


def _published(network: str, name: str, override: Sequence[str]) -> Published:
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
    """Finished runs of a pattern, or of several with " + " between them."""
    paths = [path for one in pattern.split(" + ") for path in sorted(results.glob(one))]
    runs = [open_run(path) for path in paths if (path / "results.json").is_file()]
    if not runs:
        raise UserError(f"{results} has no runs {pattern}.")
    return tuple(runs)


def _read_summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def _of_rows(check: Check, results: Path, name: str, column: str, *wanted: str) -> Outcome:
    """Return a number for each network of a study."""
    path = results / check.first / name
    found = pandas.read_csv(path, dtype=str)
    for key, value in (one.split("=") for one in wanted):
        found = found[found[key] == value]
    if not len(found) or found["seed"].duplicated().any():
        raise UserError(f"{path} has {len(found)} rows of {', '.join(wanted)}, not one of each network.")
    return Outcome.over(check, [float(value) for value in found[column]])


def _of_study(check: Check, results: Path) -> Outcome:
    """Return a loss of two initialisations of a study by seed; both share samples, batches and embeddings."""
    rows = {row["initialisation"]: row for row in _read_summary(results / check.first)["rows"]}
    losses = []
    for name in check.study or ():
        by_seed = rows[name].get("by_seed", {})
        if None in by_seed[check.quantity]:
            raise UserError(f"{name} diverged in {check.first}, so it has no {check.quantity} to compare.")
        losses.append(by_seed[check.quantity])
    return Outcome.over(check, [one - other for one, other in zip(*losses, strict=True)], unit="loss")
