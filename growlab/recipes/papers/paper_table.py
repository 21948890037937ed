"""`growlab paper DIR...`: a table of our results with the published values (Yuan, Savarese, Maire, NeurIPS 2023).

`published.csv` has the published values. If the paper lists a method twice, our run is compared with the first value:
plain SGD of Table 11 (91.95) with Growing+VT of Table 6 (92.00), plain SGD of Table 12 with Growing (91.62 both). Rows
of Table 2 that Tables 6, 7, 11 and 12 repeat unchanged are listed once.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from growlab.base.command_parser import command
from growlab.lab.analysis.__main__ import put, rows_of, table_parser
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.results import Group
from growlab.lab.analysis.tables import Row, unique_names

# Overrides with these prefixes change the method; others change its duration, data or device.
_METHOD_KEYS = (
    *("growth.", "lr_adapt.", "optimizer.", "model.", "optimizer_state=", "schedule.", "~"),
    *("osgd.", "data.incremental."),
)


@dataclass(frozen=True)
class Published:
    """Published value.

    Attributes:
        table: the paper's table, such as "Table 2".
        row: the method's name there.
        model: our name of the network.
        data: our name of the data set.
        epochs: epochs of the published training.
        growth: our name of the growth method.
        lr_adapt: our name of the rate adaptation.
        optimizer: our name of the optimizer.
        overrides: further overrides of the method in our commands.
        cost_percent: training FLOPs in percent of the fixed-size network's; None if not published.
        value: mean of the metric, in its unit (percent for accuracy).
        std: standard deviation over three seeds; None if not published.
        metric: "accuracy" (test, percent) or "BLEU".
    """

    table: str
    row: str
    model: str
    data: str
    epochs: int
    growth: str
    lr_adapt: str
    optimizer: str
    overrides: tuple[str, ...]
    cost_percent: float | None
    value: float
    std: float | None
    metric: str


@cache
def published() -> tuple[Published, ...]:
    """Return all published values in the paper's order.

    Examples:
        >>> [p.value for p in published() if (p.model, p.growth) == ("resnet20", "firefly")]
        [92.1]
    """
    text = resources.files("growlab.recipes.papers").joinpath("published.csv").read_text(encoding="utf-8")
    parsers: dict[str, Callable[[str], Any]] = {"epochs": int, "overrides": lambda cell: tuple(cell.split())}
    parsers |= dict.fromkeys(("cost_percent", "value", "std"), lambda cell: float(cell) if cell else None)
    lines = csv.DictReader(text.splitlines())
    return tuple(Published(**{key: parsers.get(key, str)(cell) for key, cell in line.items()}) for line in lines)


def published_for(group: Group) -> Published | None:
    """Return the published value for the method, network and data of a row, or None.

    Schedule, optimizer settings and variant of the method must agree. Epochs and batch size may differ, so a comparison
    has to state them.
    """
    overrides = {override for override in group.overrides if override.startswith(_METHOD_KEYS)}
    keys = ("model", "data", "growth", "lr_adapt", "optimizer")
    for value in published():
        if all(getattr(value, key) == getattr(group, key) for key in keys) and overrides == set(value.overrides):
            return value
    return None


def paper_table(rows: Sequence[Row], unmeasured: bool = False) -> Grid:
    """Return a table of methods (rows) by networks (columns): our cost and score, the published ones, the difference.

    Networks without published values have no columns for them. The best grown method of each network is bold, among
    ours and among the published values.

    Args:
        rows: from `summarise`.
        unmeasured: also show published methods for these networks that have no run here.
    """
    tasks = list(dict.fromkeys(row.group.task for row in rows))
    cells: dict[str, dict[tuple[str, str], tuple[Row | None, Published | None]]] = {}
    for row, name in zip(rows, unique_names(rows), strict=True):
        cells.setdefault(name, {})[row.group.task] = (row, published_for(row.group))
    if unmeasured:
        shown = {theirs for line in cells.values() for _, theirs in line.values()}
        for value in published():
            if (value.model, value.data) in tasks and value not in shown:
                cells.setdefault(f"{value.row} ({value.table})", {})[value.model, value.data] = (None, value)
    values = [theirs for line in cells.values() for _, theirs in line.values() if theirs is not None]
    compared = {(value.model, value.data) for value in values}
    body = [[name] for name in cells]
    header, groups = ["method"], [("", 1)]
    for task in tasks:
        label = next(row.metric for row in rows if row.group.task == task).label
        names = ["cost % (published)", label, "published", "difference"]
        names = names if task in compared else ["cost %", label]
        model, data = task
        unique = [name for name, _ in tasks].count(model) == 1
        header += names
        groups.append((model if unique else f"{model} on {data}", len(names)))
        best = _best([line[task] for line in cells.values() if task in line])
        for row_cells, line in zip(body, cells.values(), strict=True):
            row_cells += _cells(*line.get(task, (None, None)), *best)[: len(names)]
    return Grid(header, body, caption=_caption(rows, values), groups=groups)


def _best(line: Sequence[tuple[Row | None, Published | None]]) -> tuple[float | None, float | None]:
    """Return our best score and the highest published one of several, without fixed-size networks."""
    grown = [row for row, _ in line if row is not None and not row.group.is_fixed_size]
    ours = [row for row in grown if row.score_mean is not None]
    ours.sort(key=lambda row: row.metric.quality(row.score_mean))
    theirs = [value.value for _, value in line if value is not None and value.growth != "none"]
    return (ours[-1].score_mean if len(ours) > 1 else None, max(theirs) if len(theirs) > 1 else None)


def _cells(row: Row | None, theirs: Published | None, best: float | None, highest: float | None) -> list[str]:
    cost = score = value = difference = ""
    if row is not None and row.cost_percent is not None:
        cost = f"{row.cost_percent:.1f}"
    if row is not None and row.score_mean is not None:
        bold = not row.group.is_fixed_size and row.score_mean == best
        score = f"**{row.score_text}**" if bold else row.score_text
        if theirs is not None and theirs.metric == row.metric.name:
            difference = f"{row.scaled[0] - theirs.value:+.2f}".replace("-", "−")
    if theirs is not None:
        if theirs.cost_percent is not None:
            cost = f"{cost} ({theirs.cost_percent:.1f})".strip()
        value = f"{theirs.value:.2f}" + ("" if theirs.std is None else f" ± {theirs.std:.2f}")
        value = f"**{value}**" if theirs.growth != "none" and theirs.value == highest else value
    return [cost, score, value, difference]


def _caption(rows: Sequence[Row], values: Sequence[Published]) -> str:
    names = " and ".join(sorted({row.metric.name for row in rows}))
    parts = [
        f"{names[:1].upper() + names[1:]}: test, mean ± sample standard deviation (number of seeds). "
        "Cost: training FLOPs in percent of the fixed-size network's. Bold: the best grown method of each network."
    ]
    if values:
        tables = ", ".join(sorted({value.table for value in values}, key=lambda t: int(t.split()[1])))
        parts.append(f"Published: Yuan et al. 2023, {tables}; the difference is ours minus theirs.")
    for task in dict.fromkeys((value.model, value.data) for value in values):
        theirs = {value.epochs for value in values if (value.model, value.data) == task}
        ours = {row.reference_epochs for row in rows if row.group.task == task}
        if ours and ours != theirs:
            listed = [", ".join(map(str, sorted(numbers))) for numbers in (ours, theirs)]
            parts.append(
                f"{' on '.join(task)}: ours trained for {listed[0]} epochs, the published for {listed[1]}, "
                "so the difference does not measure the reproduction."
            )
    return " ".join(parts)


@command
def main(argv: Sequence[str]) -> None:
    """Print a table with the published values next to ours."""
    parser = table_parser(
        "paper",
        "Print a table like the paper's: methods by networks, with published values next to ours.",
        "Example: growlab paper runs/table2 -o table.tex",
    )
    shown = "also show published methods without a run here"
    parser.add_argument("--unmeasured", action="store_true", help=shown)
    arguments = parser.parse_args(argv)
    put(paper_table(rows_of(arguments), arguments.unmeasured), arguments)
