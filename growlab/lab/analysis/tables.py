"""Tables over runs: one row per method, averaged over seeds, in four formats; or grouped by any settings."""

import json
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

from growlab.base.errors import UserError
from growlab.lab.analysis.grid import Grid, as_csv, inert
from growlab.lab.analysis.identity import leaves, spelling
from growlab.lab.analysis.results import Group, Metric, Report, Run, metric_of

# A grown run and its fixed-size reference are expected to differ in overrides with these prefixes.
_GROWTH_KEYS = ("growth.", "lr_adapt.", "schedule.")
# Ratio up to which costs of an epoch count as equal: dropped last batches make such a difference.
_EQUAL_COST = 1.02


@dataclass(frozen=True)
class Row:
    """Summary of runs that differ only in their seed.

    Attributes:
        group: settings that the runs have in common.
        runs: the runs, by seed.
        cost_percent: mean training cost (forward FLOPs) in percent of the fixed-size network trained for
            `reference_epochs`, the longest training of that network and data in the table.
        reference_epochs: number of epochs whose fixed-size cost counts as 100.
        metric: the score.
        score_mean: mean test score over seeds; accuracy as a fraction.
        score_std: sample standard deviation (n - 1) over seeds; None for a single run.
        n: number of runs with a score.
        seconds: mean wall-clock seconds of a run.
        speedup: seconds of the fixed-size runs of as many epochs divided by those of these runs, on the same machine
            (averaged over machines); None without such a fixed-size run.
        shared_overrides: Hydra overrides that all groups of this network and data have, omitted from method names.
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
    def scaled(self) -> tuple[float, float]:
        """Mean score and standard deviation (0 for a single run) in the metric's unit; nan without a score."""
        mean = math.nan if self.score_mean is None else self.score_mean
        return self.metric.scale * mean, self.metric.scale * (self.score_std or 0.0)

    @property
    def score_text(self) -> str:
        """Score as tables show it, accuracy in percent: `91.62 ± 0.12 (3)`; empty without a score."""
        if self.score_mean is None:
            return ""
        spread = "" if self.score_std is None else f" ± {self.metric.text(self.score_std)}"
        return f"{self.metric.text(self.score_mean)}{spread} ({self.n})"

    def column(self, name: str) -> str:
        """Return the cell of a column that distinguishes rows: a field of the group, epochs in passes, or metric."""
        if name == "epochs":
            # With `schedule.budget`, an epoch may be part of a pass over the data.
            run = self.runs[0]
            return f"{self.group.epochs * run.reference_passes / run.reference_epochs:g}"
        return self.metric.label if name == "metric" else str(getattr(self.group, name))

    @property
    def record(self) -> dict[str, Any]:
        """Plain numbers and strings for JSON: accuracy as a fraction, None if unknown."""
        group, own = self.group, ("cost_percent", "reference_epochs", "score_mean", "score_std")
        fields = ("experiment", "model", "data", "growth", "lr_adapt", "optimizer", "epochs", "precision")
        record = {"method": self.method} | {name: getattr(group, name) for name in fields}
        record |= {"overrides": list(group.overrides)} | {name: getattr(self, name) for name in own[:2]}
        record |= {"metric": self.metric.name} | {name: getattr(self, name) for name in own[2:]}
        record |= {"n": self.n, "seconds": self.seconds, "speedup": self.speedup}
        seeds, paths = zip(*((run.results["seed"], run.path.as_posix()) for run in self.runs), strict=True)
        return record | {"seeds": list(seeds), "runs": list(paths)}


def summarise(runs: Sequence[Run], report: Report | None = None) -> list[Row]:
    """Group runs whose composed configurations differ only in the seed.

    Rows are sorted by network and data, then fixed-size ones (longest first), then the others (best first). Of several
    runs with the same settings and seed only the newest counts.

    Args:
        runs: finished runs.
        report: called with a sentence for every run left out; a warning by default.
    """
    report = report or (lambda message: warnings.warn(message, stacklevel=3))
    kept, older = {}, list[tuple[Run, Run]]()
    for group, members in _grouped(runs).items():
        kept[group], superseded = _one_per_seed(members)
        older += superseded
    if older:
        more = f" and {len(older) - 1} more" if len(older) > 1 else ""
        report(f"left out {older[0][0].path}{more}: {older[0][1].path} is a newer run with the same settings and seed.")
    of_task: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for group, members in kept.items():
        of_task[group.task] += members
    # With a budget, costs are relative to it, however many epochs a run trained for.
    epochs = {
        task: max(run.budget or max(run.reference_epochs, run.group.epochs) for run in members)
        for task, members in of_task.items()
    }
    metrics = {task: metric_of(run.results for run in members) for task, members in of_task.items()}
    shared, references = _shared_overrides(kept), _references(kept)
    rows = []
    for group, members in kept.items():
        metric = metrics[group.task]
        if not any(f"test_{metric.key}" in run.results for run in members):
            # Same network and data, but another objective.
            metric = metric_of(run.results for run in members)
        scores = _finite(run.results.get(f"test_{metric.key}") for run in members)
        if 0 < len(scores) < len(members):
            report(
                f"{len(members) - len(scores)} of {len(members)} runs of {group.method} have no finite test "
                f"{metric.name}: its row averages the others."
            )
        # Each run's record has its own reference; rescale to a common one.
        costs = [
            cost * run.reference_passes / epochs[group.task]
            for run in members
            for cost in _finite([run.results["train_cost_percent"]])
        ]
        rows.append(
            Row(
                *(group, tuple(members), _mean(costs), epochs[group.task], metric, _mean(scores)),
                *(statistics.stdev(scores) if len(scores) > 1 else None, len(scores)),
                *(_mean(_finite(run.results["seconds"] for run in members)), _speedup(group, members, references)),
                shared[group.task],
            )
        )
    return sorted(rows, key=_order)


def _grouped(runs: Sequence[Run]) -> dict[Group, list[Run]]:
    """Collect runs of equal composed settings under a unique group.

    Groups of the same name get the settings in which they differ as overrides.
    """
    equal: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        same = (run.group.experiment, run.group.epochs, run.group.precision)
        equal[run.group if run.settings is None else (*same, *sorted(run.settings.items()))].append(run)
    named: dict[Group, list[list[Run]]] = defaultdict(list)
    for members in equal.values():
        # Some runs may spell out a default; name the group after the one with the fewest overrides.
        named[min((run.group for run in members), key=lambda group: (len(group.overrides), group))].append(members)
    groups: dict[Group, list[Run]] = defaultdict(list)
    for group, several in named.items():
        of_each = [members[0].settings or {} for members in several]
        keys = set[str]().union(*of_each)
        if not all("settings" in run.results for members in several for run in members):
            # Older versions may lack some settings.
            keys = set.intersection(*map(set, of_each))
        differing = [key for key in keys if len({settings.get(key) for settings in of_each}) > 1]
        for members, settings in zip(several, of_each, strict=True):
            added = (f"{key}={spelling(settings[key])}" for key in differing if key in settings)
            groups[replace(group, overrides=tuple(sorted({*group.overrides, *added})))] += members
    return groups


def one_task(rows: Sequence[Row], what: str) -> None:
    """Raise UserError if rows of a figure or table have several networks, data sets or metrics."""
    tasks = {f"{model} on {data}" for model, data in (row.group.task for row in rows)}
    metrics = {row.metric for row in rows}
    if len(tasks) > 1:
        raise UserError(f"{what} needs one network and data set, not {', '.join(sorted(tasks))}: name folders of one.")
    if len(metrics) > 1:
        names = " and ".join(sorted({metric.name for metric in metrics}))
        raise UserError(f"{what} needs runs with one metric, not {names}: name folders of one.")


def unique_names(rows: Sequence[Row]) -> list[str]:
    """Return unique row names: the method, plus optimizer, epochs, precision and experiment where needed."""
    names = [row.method for row in rows]
    for field in ("optimizer", "epochs", "precision", "experiment"):
        seen: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for row, name in zip(rows, names, strict=True):
            seen[*row.group.task, name].add(row.column(field))
        shared = {key[-1] for key, values in seen.items() if len(values) > 1}
        words = "{}, {} epochs" if field == "epochs" else "{}, {}"
        names = [
            words.format(name, row.column(field)) if name in shared else name
            for row, name in zip(rows, names, strict=True)
        ]
    return names


def _shared_overrides(groups: Iterable[Group]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the overrides that all groups of a network and data have in common, if there are several groups."""
    rivals: dict[tuple[str, str], list[set[str]]] = defaultdict(list)
    for group in groups:
        rivals[group.task].append(set(group.overrides))
    return {
        task: tuple(sorted(set.intersection(*several))) if len(several) > 1 else () for task, several in rivals.items()
    }


def _one_per_seed(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[Run, Run]]]:
    """Return the newest run of each seed, and pairs of each older run and the one that supersedes it."""
    by_seed: dict[int, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda r: ((r.path / "results.json").stat().st_mtime_ns, str(r.path))):
        by_seed[run.results["seed"]].append(run)
    superseded = [(older, several[-1]) for several in by_seed.values() for older in several[:-1]]
    return [by_seed[seed][-1] for seed in sorted(by_seed)], superseded


# A fixed-size group, the number of its runs at full width, and their seconds by machine.
_Reference = tuple[Group, int, dict[str, float]]


def _references(kept: dict[Group, list[Run]]) -> dict[tuple[Any, ...], dict[tuple[Any, ...], list[_Reference]]]:
    """Collect fixed-size groups by `_work` and `_settings`."""
    found: dict[Any, dict[Any, list[_Reference]]] = defaultdict(lambda: defaultdict(list))
    for group, runs in kept.items():
        # A narrower network of fixed size is no reference for the full-width one.
        full = [run for run in runs if run.keeps_full_width] if group.is_fixed_size else []
        if full:
            found[_work(group)][_settings(group)].append((group, len(full), _seconds_by_machine(full)))
    return found


def _speedup(
    group: Group, members: Sequence[Run], references: Mapping[Any, Mapping[Any, list[_Reference]]]
) -> float | None:
    """Return the speed-up over the nearest fixed-size group on the same machines; None without one."""
    rivals = {} if group.is_fixed_size else references.get(_work(group), {})
    if not rivals:
        return None
    mine, own = _seconds_by_machine(members), _settings(group)

    def candidates(settings: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for other, number, theirs in rivals.get(settings, ()):
            ratios = [theirs[machine] / mine[machine] for machine in mine if machine in theirs]
            if ratios:
                distance = len(own[0] ^ settings[0]) + (own[1] != settings[1])
                yield distance, -len(ratios), -number, other, ratios

    # A group of equal settings is always the nearest.
    nearest = min(candidates(own), default=None) or min(
        (one for key in rivals for one in candidates(key)), default=None
    )
    return None if nearest is None else statistics.fmean(nearest[-1])


def _work(group: Group) -> tuple[Any, ...]:
    compiled = sorted(o for o in group.overrides if o.partition("=")[0].rpartition(".")[2] == "compile")
    return group.task, group.epochs, group.precision, tuple(compiled)


def _settings(group: Group) -> tuple[frozenset[str], str]:
    """Return the overrides except those of growth, and the optimizer; fewer differences mean nearer groups."""
    return frozenset(o for o in group.overrides if not o.lstrip("~").startswith(_GROWTH_KEYS)), group.optimizer


def _seconds_by_machine(runs: Sequence[Run]) -> dict[str, float]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        machine = json.dumps(run.machine, sort_keys=True)
        seconds[machine] += [s for s in _finite([run.results["seconds"]]) if s > 0]
    return {machine: statistics.fmean(values) for machine, values in seconds.items() if values}


def _finite(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _order(row: Row) -> tuple[Any, ...]:
    worse = -row.metric.quality(row.score_mean)
    rank = (0, -float(row.group.epochs)) if row.group.is_fixed_size else (1, worse)
    return (*row.group.task, *rank, worse, row.group)


def table(rows: Sequence[Row]) -> Grid:
    """Return the rows as a table whose caption defines 100 % cost.

    Columns in which all rows agree (network, data, epochs, ...) are left out.
    """
    fields = ("experiment", "model", "data", "optimizer", "epochs", "precision")
    columns = [name for name in fields if len({getattr(row.group, name) for row in rows}) > 1]
    tasks = {row.group.task for row in rows}
    if "experiment" in columns and len({(row.group.experiment, row.group.task) for row in rows}) == len(tasks):
        columns.remove("experiment")
    metrics = sorted({row.metric for row in rows})
    if len(metrics) > 1:
        columns.append("metric")
    label = metrics[0].label if len(metrics) == 1 else "score"
    header = [*columns, "method", "cost %", f"{label} (n)", "seconds", "speed-up"]
    cells = [[row.column(name) for name in columns] + _cells(row) for row in rows]
    return Grid(header, cells, num_text=len(columns) + 1, caption=_legend(rows))


def markdown(rows: Sequence[Row]) -> str:
    """Format `table(rows)` as Markdown that is also readable as plain text."""
    return table(rows).markdown()


def write_table(rows: Sequence[Row], form: str) -> str:
    """Format rows as "markdown", "latex" (package booktabs), or with plain numbers as "csv" or "json" (a list).

    In plain numbers, accuracy is a fraction, and unknown values are empty or null.
    """
    if form == "json":
        return json.dumps([row.record for row in rows], indent=2) + "\n"
    if form == "csv":
        cells = [[" ".join(map(str, v)) if isinstance(v, list) else v for v in row.record.values()] for row in rows]
        lines = [[inert(v) if isinstance(v, str) else v for v in line] for line in cells]
        return as_csv([list(rows[0].record) if rows else ["method"], *lines])
    return table(rows).latex() if form == "latex" else markdown(rows)


def _cells(row: Row) -> list[str]:
    return [
        row.method,
        "" if row.cost_percent is None else f"{row.cost_percent:.1f}",
        row.score_text,
        "" if row.seconds is None else f"{row.seconds:.1f}" if row.seconds < 100 else f"{row.seconds:.0f}",
        "" if row.speedup is None else f"{row.speedup:.2f}x",
    ]


def _legend(rows: Sequence[Row]) -> str:
    references = sorted({(*row.group.task, row.reference_epochs) for row in rows})
    work = "; ".join(f"{model} on {data}, {epochs:g} epochs" for model, data, epochs in references)
    shared = sorted({(*row.group.task, row.shared_overrides) for row in rows})
    common = "; ".join(f"{model} on {data} with {' '.join(each)}" for model, data, each in shared if each)
    names = " and ".join(sorted({row.metric.name for row in rows}))
    tasks = sorted({row.group.task for row in rows})
    return (
        f"Cost 100 % = the fixed-size network at full width ({work}). {names[:1].upper() + names[1:]}: test, mean ± "
        "sample standard deviation over n seeds. Speed-up: against the fixed-size run of as many epochs on the "
        "same machine." + (f" All of {common}." if common else "")
    ) + "".join(_sizes([row for row in rows if row.group.task == task]) for task in tasks)


def _sizes(rows: Sequence[Row]) -> str:
    """Return a sentence if rows of one network and data differ in size, so that their costs are not comparable."""
    known = [flops for row in rows for run in row.runs if (flops := run.pass_flops)]
    if not known or max(known) <= _EQUAL_COST * min(known):
        return ""
    return (
        f" Rows of {' on '.join(rows[0].group.task)} differ in what an epoch at full width costs, by up to "
        f"{max(known) / min(known):.3g} times: each row's cost is in percent of its own network and data."
    )


def answer(
    rows: Sequence[Row],
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    filters: Sequence[str] = (),
    sort: str | None = None,
) -> Grid:
    """Group runs by settings and average numbers of their results over each group.

    Args:
        rows: from `summarise`, without superseded runs.
        by: settings (`optimizer.lr`), entries of `results.json` (`seed`) or "method", one column each; default:
            "method".
        metrics: numbers of `results.json`, such as "val_loss"; default: the metric that the runs are compared by.
        filters: `KEY=VALUE` or `KEY=PATTERN` with * and ?; a run must match all.
        sort: name of a column, with a leading - for descending order; None: the columns of `by`.
    """
    by, metrics = [*by] or ["method"], [*metrics]
    metrics = metrics or sorted({f"test_{row.metric.key}" for row in rows})
    asked = {*by, *metrics, *(one.partition("=")[0] for one in filters)}
    known = [(run, _facts(row, run, asked)) for row in rows for run in row.runs]
    for name in asked:
        if not any(name in facts for _, facts in known):
            near = get_close_matches(name, {key for _, facts in known for key in facts}, n=3)
            raise UserError(f"no run has '{name}'" + (f"; near it: {', '.join(near)}." if near else "."))
    for condition in filters:
        name, _, value = condition.partition("=")
        pattern = spelling(value).replace("[", "[[]")  # brackets of lists are no pattern
        known = [(run, facts) for run, facts in known if fnmatch(_spelled(facts.get(name)), pattern)]
    if not known:
        raise UserError(f"no run matches {' '.join(filters)}.")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for _, facts in known:
        groups[tuple(_spelled(facts.get(name)) for name in by)].append(facts)
    columns = [*metrics, *(name for name in ("train_cost_percent", "seconds") if name not in metrics)]
    lines = [(*key, *([one.get(n) for one in own] for n in columns)) for key, own in groups.items()]
    if sort is not None and sort.lstrip("-") not in (*by, *columns):
        raise UserError(f"--sort {sort} is no column of this table: {', '.join((*by, *columns))}.")
    place = 0 if sort is None else [*by, *columns].index(sort.lstrip("-"))
    backwards = (sort or "").startswith("-")
    # Rows without a number come last in both orders.
    missing = -math.inf if backwards else math.inf
    lines.sort(key=lambda line: [_place_of(cell, missing) for cell in (line[place], *line)], reverse=backwards)
    cells = [[cell if isinstance(cell, str) else _mean_text(cell) for cell in line] for line in lines]
    caption = f"Mean ± sample standard deviation (number of runs) over {len(known)} runs."
    return Grid([*by, *columns], cells, num_text=len(by), caption=caption)


def _facts(row: Row, run: Run, asked: set[str]) -> dict[str, Any]:
    facts = {**(run.settings or {}), **run.results, "method": row.method}
    # Settings that rows average over are only in the configuration, which is slower to read.
    return facts if asked <= facts.keys() else {**dict(leaves(run.config)), **facts}


def _spelled(value: Any) -> str:
    return "null" if value is None else spelling(str(value))


def _place_of(cell: Any, missing: float) -> tuple[int, Any]:
    if not isinstance(cell, str):
        return (0, statistics.fmean(values) if (values := _numbers(cell)) else missing)
    try:
        return (0, float(cell))
    except ValueError:
        return (1, cell)


def _numbers(values: Sequence[Any]) -> list[float]:
    return _finite(value for value in values if isinstance(value, int | float))


def _mean_text(values: Sequence[Any]) -> str:
    known = _numbers(values)
    if not known:
        return ""
    spread = f" ± {statistics.stdev(known):.2g}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.4g}{spread} ({len(known)})"
