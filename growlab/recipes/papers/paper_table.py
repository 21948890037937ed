"""`growlab paper DIR...`: a table like the paper's, methods by networks, published values beside ours."""

import sys
from collections.abc import Sequence

from growlab.lab.analysis.__main__ import carry_out, put, rows_of, table_parser
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.tables import Row, unique_names
from growlab.recipes.papers.published import Published, published, published_for


def paper_table(rows: Sequence[Row], unmeasured: bool = False) -> Grid:
    """Methods down, networks across: cost and accuracy over seeds, the published ones, and ours less theirs.

    Networks of which nothing is published have no columns for it. The best grown method of each network is bold, in our
    column and among the published values shown.

    Args:
        rows: from `summarise`.
        unmeasured: also show methods that were published for these networks and have no run here.
    """
    tasks = list(dict.fromkeys((row.group.model, row.group.data) for row in rows))
    names = unique_names(rows)
    cells: dict[str, dict[tuple[str, str], tuple[Row | None, Published | None]]] = {}
    for row, name in zip(rows, names, strict=True):
        task = (row.group.model, row.group.data)
        cells.setdefault(name, {})[task] = (row, published_for(row.group))
    if unmeasured:
        shown = {found for line in cells.values() for _, found in line.values()}
        for one in published():
            task = (one.model, one.data)
            if task in tasks and one not in shown:
                cells.setdefault(f"{one.row} ({one.table})", {})[task] = (None, one)
    compared = {task for line in cells.values() for task, (_, found) in line.items() if found is not None}
    width = {task: 4 if task in compared else 2 for task in tasks}
    best = {task: _best([line[task] for line in cells.values() if task in line]) for task in tasks}
    body = [
        [
            name,
            *(c for task in tasks for c in _cells(*line.get(task, (None, None)), best[task])[: width[task]]),
        ]
        for name, line in cells.items()
    ]
    models = [model for model, _ in tasks]
    header = ["method"]
    for task in tasks:
        label = next(row.metric for row in rows if (row.group.model, row.group.data) == task).label
        theirs = ["cost % (published)", label, "published", "difference"]
        header += theirs if task in compared else ["cost %", label]
    return Grid(
        header=header,
        rows=body,
        caption=_caption(rows, [found for line in cells.values() for _, found in line.values() if found]),
        groups=[("", 1), *((f"{m} on {d}" if models.count(m) > 1 else m, width[m, d]) for m, d in tasks)],
    )


def _best(line: Sequence[tuple[Row | None, Published | None]]) -> tuple[float | None, float | None]:
    """The best score of ours and the highest published one, fixed-size networks aside."""
    grown = [row for row, _ in line if row is not None and not row.group.is_fixed_size]
    ours = sorted(
        (row for row in grown if row.score_mean is not None), key=lambda r: r.metric.quality(r.score_mean)
    )
    theirs = [found.value for _, found in line if found is not None and found.growth != "none"]
    return (ours[-1].score_mean if len(ours) > 1 else None, max(theirs) if len(theirs) > 1 else None)


def _cells(
    row: Row | None, found: Published | None, best: tuple[float | None, float | None]
) -> tuple[str, str, str, str]:
    cost = score = value = difference = ""
    if row is not None and row.cost_percent is not None:
        cost = f"{row.cost_percent:.1f}"
    if found is not None and found.cost_percent is not None:
        cost = f"{cost} ({found.cost_percent:.1f})".strip()
    if row is not None and row.score_mean is not None:
        score = row.score_text
        if not row.group.is_fixed_size and row.score_mean == best[0]:
            score = f"**{score}**"
    if found is not None:
        value = f"{found.value:.2f}" + ("" if found.std is None else f" ± {found.std:.2f}")
        if found.growth != "none" and found.value == best[1]:
            value = f"**{value}**"
    if (
        row is not None
        and row.score_mean is not None
        and found is not None
        and found.metric == row.metric.name
    ):
        difference = f"{row.metric.scale * row.score_mean - found.value:+.2f}".replace("-", "−")
    return cost, score, value, difference


def _caption(rows: Sequence[Row], found: Sequence[Published]) -> str:
    names = " and ".join(sorted({row.metric.name for row in rows}))
    parts = [
        f"{names[:1].upper() + names[1:]}: test, mean ± sample standard deviation (number of seeds). "
        "Cost: training FLOPs in percent of "
        "the fixed-size network's. Bold: the best grown method of each network."
    ]
    if found:
        tables = ", ".join(sorted({one.table for one in found}, key=lambda t: int(t.split()[1])))
        parts.append(f"Published: Yuan et al. 2023, {tables}; the difference is ours less theirs.")
    for model, data in dict.fromkeys((one.model, one.data) for one in found):
        theirs = {one.epochs for one in found if (one.model, one.data) == (model, data)}
        ours = {row.reference_epochs for row in rows if (row.group.model, row.group.data) == (model, data)}
        if ours and ours != theirs:
            parts.append(
                f"{model} on {data}: ours trained for {_listed(ours)} epochs, the published for {_listed(theirs)}, "
                "so the difference is no reproduction."
            )
    return " ".join(parts)


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit code (2 after one sentence on stderr)."""
    return carry_out(_print, list(sys.argv[1:] if argv is None else argv))


def _print(argv: Sequence[str]) -> None:
    parser = table_parser(
        "paper",
        "Print a table like the paper's: methods by networks, published values beside ours.",
        epilog="Example: growlab paper runs/table2 -o table.tex",
    )
    parser.add_argument(
        "--unmeasured", action="store_true", help="show published methods without a run here as well"
    )
    arguments = parser.parse_args(argv)
    put(paper_table(rows_of(arguments), arguments.unmeasured), arguments)


if __name__ == "__main__":
    sys.exit(main())
