"""Published values (L. Yuan, P. Savarese, M. Maire, NeurIPS 2023), and `growlab paper DIR...`: a table with ours.

They are in `published.csv`. Where the paper's tables give a method twice, a run stands next to the first table's
value: plain SGD of Table 11 (91.95) next to Growing+VT of Table 6 (92.00), plain SGD of Table 12 next to Growing
(91.62 both). Rows of Table 2 that Tables 6, 7, 11 and 12 repeat as they are stand there once.
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

# Only overrides of these keys change the method; others change its duration, data or device.
_METHOD_KEYS = (
    *("growth.", "lr_adapt.", "optimizer.", "model.", "optimizer_state=", "schedule.", "~"),
    *("osgd.", "data.incremental."),
)


@dataclass(frozen=True)
class Published:
    """One published value.

    Attributes:
        table: "Table 2" and so on.
        row: the method's name there.
        model: our name of the network.
        data: our name of the data set.
        epochs: epochs of the published training.
        growth: our name of the growth method.
        lr_adapt: our name of the rate adaptation.
        optimizer: our name of the optimizer.
        overrides: further overrides that make our command the same method.
        cost_percent: training FLOPs in percent of the fixed-size network's; None where not given.
        value: mean of the metric, in its own unit (percent for accuracy).
        std: its standard deviation over three seeds; None where not given.
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
    """All published values, in the paper's order.

    Examples:
        >>> [p.value for p in published() if (p.model, p.growth) == ("resnet20", "firefly")]
        [92.1]
    """
    text = resources.files("growlab.recipes.papers").joinpath("published.csv").read_text(encoding="utf-8")
    read: dict[str, Callable[[str], Any]] = {"epochs": int, "overrides": lambda cell: tuple(cell.split())}
    read |= dict.fromkeys(("cost_percent", "value", "std"), lambda cell: float(cell) if cell else None)
    lines = csv.DictReader(text.splitlines())
    return tuple(Published(**{key: read.get(key, str)(cell) for key, cell in line.items()}) for line in lines)


def published_for(group: Group) -> Published | None:
    """Find the published value for the method, network and data of a row, or None.

    Epochs and batch size may differ, so a comparison has to state them; the schedule, optimizer settings and variant
    of the method may not.
    """
    own = {override for override in group.overrides if override.startswith(_METHOD_KEYS)}
    keys = ("model", "data", "growth", "lr_adapt", "optimizer")
    for one in published():
        if all(getattr(one, key) == getattr(group, key) for key in keys) and own == set(one.overrides):
            return one
    return None


def paper_table(rows: Sequence[Row], unmeasured: bool = False) -> Grid:
    """Table of methods (rows) by networks (columns): our cost and accuracy, the published ones, and the difference.

    Networks without published values have no columns for them. The best grown method of each network is bold, in our
    column and among the published values shown.

    Args:
        rows: from `summarise`.
        unmeasured: also show methods that were published for these networks and have no run here.
    """
    tasks = list(dict.fromkeys(row.group.task for row in rows))
    cells: dict[str, dict[tuple[str, str], tuple[Row | None, Published | None]]] = {}
    for row, name in zip(rows, unique_names(rows), strict=True):
        cells.setdefault(name, {})[row.group.task] = (row, published_for(row.group))
    if unmeasured:
        shown = {found for line in cells.values() for _, found in line.values()}
        for one in published():
            if (one.model, one.data) in tasks and one not in shown:
                cells.setdefault(f"{one.row} ({one.table})", {})[one.model, one.data] = (None, one)
    there = [found for line in cells.values() for _, found in line.values() if found is not None]
    compared = {(one.model, one.data) for one in there}
    body = [[name] for name in cells]
    header, groups = ["method"], [("", 1)]
    for task in tasks:
        label = next(row.metric for row in rows if row.group.task == task).label
        names = ["cost % (published)", label, "published", "difference"]
        names = names if task in compared else ["cost %", label]
        model, data = task
        unique = [one for one, _ in tasks].count(model) == 1
        header += names
        groups.append((model if unique else f"{model} on {data}", len(names)))
        best = _best([line[task] for line in cells.values() if task in line])
        for row_cells, line in zip(body, cells.values(), strict=True):
            row_cells += _cells(*line.get(task, (None, None)), *best)[: len(names)]
    return Grid(header, body, caption=_caption(rows, there), groups=groups)


def _best(line: Sequence[tuple[Row | None, Published | None]]) -> tuple[float | None, float | None]:
    """Our best score and the highest published one, without fixed-size networks."""
    grown = [row for row, _ in line if row is not None and not row.group.is_fixed_size]
    ours = [row for row in grown if row.score_mean is not None]
    ours.sort(key=lambda row: row.metric.quality(row.score_mean))
    theirs = [found.value for _, found in line if found is not None and found.growth != "none"]
    return (ours[-1].score_mean if len(ours) > 1 else None, max(theirs) if len(theirs) > 1 else None)


def _cells(row: Row | None, found: Published | None, best: float | None, highest: float | None) -> list[str]:
    cost = score = value = difference = ""
    if row is not None and row.cost_percent is not None:
        cost = f"{row.cost_percent:.1f}"
    if row is not None and row.score_mean is not None:
        bold = not row.group.is_fixed_size and row.score_mean == best
        score = f"**{row.score_text}**" if bold else row.score_text
        if found is not None and found.metric == row.metric.name:
            difference = f"{row.scaled[0] - found.value:+.2f}".replace("-", "−")
    if found is not None:
        if found.cost_percent is not None:
            cost = f"{cost} ({found.cost_percent:.1f})".strip()
        value = f"{found.value:.2f}" + ("" if found.std is None else f" ± {found.std:.2f}")
        value = f"**{value}**" if found.growth != "none" and found.value == highest else value
    return [cost, score, value, difference]


def _caption(rows: Sequence[Row], found: Sequence[Published]) -> str:
    names = " and ".join(sorted({row.metric.name for row in rows}))
    parts = [
        f"{names[:1].upper() + names[1:]}: test, mean ± sample standard deviation (number of seeds). "
        "Cost: training FLOPs in percent of the fixed-size network's. Bold: the best grown method of each network."
    ]
    if found:
        tables = ", ".join(sorted({one.table for one in found}, key=lambda t: int(t.split()[1])))
        parts.append(f"Published: Yuan et al. 2023, {tables}; the difference is ours minus theirs.")
    for task in dict.fromkeys((one.model, one.data) for one in found):
        theirs = {one.epochs for one in found if (one.model, one.data) == task}
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
