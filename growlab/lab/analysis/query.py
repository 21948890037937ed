"""Tables that answer a question: chosen runs, grouped by settings of one's choice, with the mean of any number."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

from growlab.base.errors import UserError
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.identity import leaves, spelling
from growlab.lab.analysis.results import Run
from growlab.lab.analysis.tables import Row


def answer(
    rows: Sequence[Row],
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    filters: Sequence[str] = (),
    sort: str | None = None,
) -> Grid:
    """Group runs by settings and average numbers of their results over each group.

    Args:
        rows: from `summarise`, which has left out superseded runs.
        by: settings (`optimizer.lr`), entries of `results.json` (`seed`) or "method", one column each; none: "method".
        metrics: numbers of `results.json`, such as "val_loss"; none: the metric that the runs are compared by.
        filters: `KEY=VALUE` or `KEY=PATTERN` with * and ?, all of which a run must match.
        sort: name of a column, with - in front from the largest; None: the columns of `by`.
    """
    by, metrics = [*by] or ["method"], [*metrics]
    metrics = metrics or sorted({f"test_{row.metric.key}" for row in rows})
    asked = {*by, *metrics, *(one.partition("=")[0] for one in filters)}
    known = [(run, _facts(row, run, asked)) for row in rows for run in row.runs]
    for name in asked:
        if not any(name in facts for _, facts in known):
            near = get_close_matches(name, {key for _, facts in known for key in facts}, n=3)
            raise UserError(f"no run has '{name}'" + (f"; near it: {', '.join(near)}." if near else "."))
    for one in filters:
        name, _, wanted = one.partition("=")
        known = [(run, facts) for run, facts in known if fnmatch(_text(facts.get(name)), spelling(wanted))]
    if not known:
        raise UserError(f"no run matches {' '.join(filters)}.")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for _, facts in known:
        groups[tuple(_text(facts.get(name)) for name in by)].append(facts)
    columns = [*metrics, *(name for name in ("train_cost_percent", "seconds") if name not in metrics)]
    lines = [(*key, *([one.get(n) for one in own] for n in columns)) for key, own in groups.items()]
    if sort is not None and sort.lstrip("-") not in (*by, *columns):
        raise UserError(f"--sort {sort} is no column of this table: {', '.join((*by, *columns))}.")
    place = 0 if sort is None else [*by, *columns].index(sort.lstrip("-"))
    backwards = (sort or "").startswith("-")
    lines.sort(key=lambda line: (_order(line[place]), *map(_order, line)), reverse=backwards)
    cells = [[cell if isinstance(cell, str) else _mean(cell) for cell in line] for line in lines]
    caption = f"Mean ± sample standard deviation (number of runs) over {len(known)} runs."
    return Grid([*by, *columns], cells, num_text=len(by), caption=caption)


def _facts(row: Row, run: Run, asked: set[str]) -> dict[str, Any]:
    facts = {**(run.settings or {}), **run.results, "method": row.method}
    # Settings that rows average over are in the configuration alone, which takes longer to read.
    return facts if asked <= facts.keys() else {**dict(leaves(run.config)), **facts}


def _text(value: Any) -> str:
    return "null" if value is None else spelling(str(value))


def _order(cell: Any) -> tuple[int, Any]:
    if not isinstance(cell, str):
        mean = statistics.fmean(values) if (values := _numbers(cell)) else math.inf
        return (0, mean)
    try:
        return (0, float(cell))
    except ValueError:
        return (1, cell)


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def _mean(values: Sequence[Any]) -> str:
    known = _numbers(values)
    if not known:
        return ""
    spread = f" ± {statistics.stdev(known):.2g}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.4g}{spread} ({len(known)})"
