"""Tables over runs: one row a method, averaged over seeds, beside the fixed-size network."""

import json
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from growlab.base.errors import UserError
from growlab.lab.analysis.identity import spelling
from growlab.lab.analysis.metrics import Metric, metric_of
from growlab.lab.analysis.results import Group, Report, Run

# Overrides below these keys are what a grown run and its fixed-size reference are expected to differ in.
_GROWTH_KEYS = ("growth.", "lr_adapt.", "schedule.")


@dataclass(frozen=True)
class Row:
    """Runs that differ only by their seed, summarised.

    Attributes:
        group: what the runs have in common.
        runs: the runs, by seed.
        cost_percent: mean training cost (forward FLOPs) in percent of the fixed-size network trained for
            `reference_epochs`, the longest training of that network and data in the table.
        reference_epochs: number of epochs whose fixed-size cost counts as 100.
        metric: what the runs are judged by.
        score_mean: its mean over the test set, for accuracy a fraction.
        score_std: the sample standard deviation (n - 1) over seeds; None for a single run.
        n: number of runs with a score.
        seconds: mean wall-clock seconds of a run.
        shared_overrides: Hydra overrides that all groups of this network and data have; the method's name
            leaves them out.
        speedup: seconds of the fixed-size runs of as many epochs over those of these runs, on the same
            machine (the mean over machines, if on several); None where there is no such fixed-size run.
    """

    group: Group
    runs: tuple[Run, ...]
    cost_percent: float | None
    reference_epochs: float
    metric: Metric
    score_mean: float | None
    score_std: float | None
    n: int
    seconds: float | None
    speedup: float | None
    shared_overrides: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """Short name of the method."""
        return self.group.name_without(self.shared_overrides)

    @property
    def score_text(self) -> str:
        """The score as tables show it, accuracy in percent: `91.62 ± 0.12 (3)`; empty without one."""
        if self.score_mean is None:
            return ""
        spread = "" if self.score_std is None else f" ± {self.metric.text(self.score_std)}"
        return f"{self.metric.text(self.score_mean)}{spread} ({self.n})"


def summarise(runs: Sequence[Run], report: Report | None = None) -> list[Row]:
    """Group runs whose composed configurations differ by nothing but the seed.

    Rows come per network and data, fixed-size ones first (longest first), then the others from the best.
    A seed that was run twice counts once, with its newest run: two equal seeds are not two samples.

    Args:
        runs: finished runs.
        report: called with a sentence for every run left out; a warning by default.
    """
    report = report or (lambda message: warnings.warn(message, stacklevel=3))
    kept = {group: _one_per_seed(members, report) for group, members in _grouped(runs).items()}
    epochs: dict[tuple[str, str], float] = defaultdict(int)
    for group in kept:
        task = (group.model, group.data)
        epochs[task] = max(epochs[task], *(_length(run) for run in kept[group]))
    rows = []
    metrics = {
        task: metric_of(
            run.results for group in kept if (group.model, group.data) == task for run in kept[group]
        )
        for task in epochs
    }
    for group, members in kept.items():
        metric = metrics[group.model, group.data]
        if not any(f"test_{metric.key}" in run.results for run in members):
            # Of one network and data set, but with another objective.
            metric = metric_of(run.results for run in members)
        scores = _finite(run.results.get(f"test_{metric.key}") for run in members)
        if 0 < len(scores) < len(members):
            report(
                f"{len(members) - len(scores)} of {len(members)} runs of {group.method} have no finite test "
                f"{metric.name}: its row is of the others."
            )
        reference_epochs = epochs[group.model, group.data]
        # Each run's record has its own reference; rows are comparable only against one.
        costs = [
            cost * run.reference_passes / reference_epochs
            for run in members
            for cost in _finite([run.results["train_cost_percent"]])
        ]
        seconds = _mean(_finite(run.results["seconds"] for run in members))
        rows.append(
            Row(
                group=group,
                runs=tuple(members),
                cost_percent=_mean(costs),
                reference_epochs=reference_epochs,
                metric=metric,
                score_mean=_mean(scores),
                score_std=statistics.stdev(scores) if len(scores) > 1 else None,
                n=len(scores),
                seconds=seconds,
                speedup=_speedup(group, members, kept),
                shared_overrides=_shared_overrides(group, kept),
            )
        )
    return sorted(rows, key=_order)


def _grouped(runs: Sequence[Run]) -> dict[Group, list[Run]]:
    """Runs of equal composed settings, by a group that no others have.

    Groups that share a name get the settings in which they differ as overrides.
    """
    alike: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        same = (run.group.experiment, run.group.epochs, run.group.precision)
        alike[run.group if run.settings is None else (*same, *sorted(run.settings.items()))].append(run)
    named: dict[Group, list[list[Run]]] = defaultdict(list)
    for members in alike.values():
        # Of runs that type a default and runs that do not, those that type less give the name.
        named[min((run.group for run in members), key=lambda group: (len(group.overrides), group))].append(
            members
        )
    groups: dict[Group, list[Run]] = defaultdict(list)
    for group, several in named.items():
        of_each = [members[0].settings or {} for members in several]
        keys = set[str]().union(*of_each)
        if not all("settings" in run.results for members in several for run in members):
            # Of an older version, which may not have had each setting.
            keys = set.intersection(*map(set, of_each))
        differing = [key for key in keys if len({settings.get(key) for settings in of_each}) > 1]
        for members, settings in zip(several, of_each, strict=True):
            added = (f"{key}={spelling(settings[key])}" for key in differing if key in settings)
            groups[replace(group, overrides=tuple(sorted({*group.overrides, *added})))] += members
    return groups


def _length(run: Run) -> float:
    """Epochs that a run's cost may be relative to; with a budget those of the budget, however many it trained for."""
    return run.budget or max(run.reference_epochs, run.group.epochs)


def one_task(rows: Sequence[Row], what: str) -> None:
    """Refuse rows of several networks or data sets, or judged by several metrics, whose numbers do not compare.

    Args:
        rows: the rows.
        what: what is to be made of them, for the sentence.

    Raises:
        UserError: naming them.
    """
    tasks = sorted({(row.group.model, row.group.data) for row in rows})
    if len(tasks) > 1:
        listed = ", ".join(f"{model} on {data}" for model, data in tasks)
        raise UserError(f"{what} is of one network and data set, not {listed}: name the folders of one.")
    metrics = sorted({row.metric for row in rows})
    if len(metrics) > 1:
        listed = " and ".join(metric.name for metric in metrics)
        raise UserError(f"{what} is of runs judged by one metric, not {listed}: name the folders of one.")


def told_apart(rows: Sequence[Row]) -> list[str]:
    """Unique row names: the method, with more where two rows of one network and data would share it.

    Args:
        rows: from `summarise`.

    Returns:
        A name for each: the method, and where needed optimizer, epochs, precision and experiment.
    """
    names = [row.method for row in rows]
    for field, word in (
        ("optimizer", "{}"),
        ("epochs", "{} epochs"),
        ("precision", "{}"),
        ("experiment", "{}"),
    ):
        seen: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        for row, name in zip(rows, names, strict=True):
            seen[row.group.model, row.group.data, name].add(column(row, field))
        shared = {name for (_, _, name), values in seen.items() if len(values) > 1}
        names = [
            f"{name}, {word.format(column(row, field))}" if name in shared else name
            for row, name in zip(rows, names, strict=True)
        ]
    return names


def _shared_overrides(group: Group, groups: Iterable[Group]) -> tuple[str, ...]:
    """Overrides that a group has in common with all others of its network and data."""
    rivals = [other for other in groups if (other.model, other.data) == (group.model, group.data)]
    if len(rivals) < 2:
        return ()
    return tuple(sorted(set.intersection(*(set(rival.overrides) for rival in rivals))))


def _one_per_seed(runs: Sequence[Run], report: Report) -> list[Run]:
    by_seed: dict[int, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda r: ((r.path / "results.json").stat().st_mtime_ns, str(r.path))):
        by_seed[run.results["seed"]].append(run)
    for *older, newest in by_seed.values():
        if older:
            more = f" and {len(older) - 1} more" if len(older) > 1 else ""
            report(
                f"left out {older[0].path}{more}: {newest.path} is a newer run with the same settings and seed."
            )
    return [by_seed[seed][-1] for seed in sorted(by_seed)]


def _speedup(group: Group, members: Sequence[Run], kept: dict[Group, list[Run]]) -> float | None:
    """Speed-up over the nearest fixed-size group, on the same machines."""
    if group.is_fixed_size:
        return None
    mine = _seconds_by_machine(members)
    candidates = []
    for other, runs in kept.items():
        same_work = (other.model, other.data, other.epochs, other.precision, _compiled(other)) == (
            *(group.model, group.data, group.epochs, group.precision),
            _compiled(group),
        )
        if not (other.is_fixed_size and same_work):
            continue
        # A narrower network kept at its width is no reference for the full-width one.
        full = [run for run in runs if run.keeps_full_width]
        theirs = _seconds_by_machine(full)
        ratios = [theirs[machine] / mine[machine] for machine in mine if machine in theirs]
        if ratios:
            candidates.append((_distance(group, other), -len(ratios), -len(full), other, ratios))
    return statistics.fmean(min(candidates)[-1]) if candidates else None


def _distance(group: Group, other: Group) -> int:
    """In how many settings two groups differ, apart from those of growth."""
    mine, theirs = (
        {o for o in g.overrides if not o.lstrip("~").startswith(_GROWTH_KEYS)} for g in (group, other)
    )
    return len(mine ^ theirs) + (other.optimizer != group.optimizer)


def _seconds_by_machine(runs: Sequence[Run]) -> dict[str, float]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        machine = json.dumps(run.machine, sort_keys=True)
        seconds[machine] += [s for s in _finite([run.results["seconds"]]) if s > 0]
    return {machine: statistics.fmean(values) for machine, values in seconds.items() if values}


def _compiled(group: Group) -> set[str]:
    return {o for o in group.overrides if o.partition("=")[0].rpartition(".")[2] == "compile"}


def _finite(values: Any) -> list[float]:
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _order(row: Row) -> tuple[Any, ...]:
    group = row.group
    worse = -row.metric.quality(row.score_mean)
    rank = (0, -float(group.epochs)) if group.is_fixed_size else (1, worse)
    return (group.model, group.data, *rank, worse, group)


def column(row: Row, name: str) -> str:
    """A row's text in a column that tells rows apart: a field of its group, its epochs in passes, or its metric."""
    if name == "epochs":
        # Within a budget, epochs of the loop may be parts of those of the data.
        run = row.runs[0]
        return f"{row.group.epochs * run.reference_passes / run.reference_epochs:g}"
    return row.metric.label if name == "metric" else str(getattr(row.group, name))
