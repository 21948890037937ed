"""Tables over runs as text: Markdown, LaTeX, CSV and JSON."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from growlab.base.errors import UserError
from growlab.lab.analysis.grid import Grid, inert
from growlab.lab.analysis.tables import Row, column

# Epochs whose costs differ by no more than last batches that are left out cost the same.
_ALIKE = 1.02


def grid(rows: Sequence[Row]) -> Grid:
    """The rows as a table, and below it what its 100 % stands for.

    Columns in which all rows agree (network, data, epochs, ...) are left out.
    """
    columns = _varying(rows)
    metrics = sorted({row.metric for row in rows})
    if len(metrics) > 1:
        columns.append("metric")
    label = metrics[0].label if len(metrics) == 1 else "score"
    return Grid(
        header=[*columns, "method", "cost %", f"{label} (n)", "seconds", "speed-up"],
        rows=[[column(row, name) for name in columns] + _cells(row) for row in rows],
        num_text=len(columns) + 1,
        caption=_legend(rows),
    )


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table that reads well as plain text too, and what its 100 % stands for."""
    return grid(rows).markdown()


def latex(rows: Sequence[Row]) -> str:
    """The same as a LaTeX table (package booktabs)."""
    return grid(rows).latex()


def csv_text(rows: Sequence[Row]) -> str:
    """The rows as CSV with plain numbers: accuracy as a fraction, empty cells where nothing is known."""
    records = [_record(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else ["method"], lineterminator="\n")
    writer.writeheader()
    for record in records:
        record["overrides"] = " ".join(record["overrides"])
        record["seeds"] = " ".join(map(str, record["seeds"]))
        record["runs"] = " ".join(record["runs"])
        writer.writerow({key: inert(v) if isinstance(v, str) else v for key, v in record.items()})
    return text.getvalue()


def json_text(rows: Sequence[Row]) -> str:
    """The rows as a JSON list with plain numbers: accuracy as a fraction, null where nothing is known."""
    return json.dumps([_record(row) for row in rows], indent=2) + "\n"


FORMATS = {"markdown": markdown, "latex": latex, "csv": csv_text, "json": json_text}


def write_table(rows: Sequence[Row], form: str) -> str:
    """The rows as text of one of the `FORMATS`.

    Raises:
        UserError: there is no such format.
    """
    if form not in FORMATS:
        raise UserError(f"there is no table format {form}; choose one of {', '.join(FORMATS)}.")
    return FORMATS[form](rows)


def _varying(rows: Sequence[Row]) -> list[str]:
    columns = [
        column
        for column in ("experiment", "model", "data", "optimizer", "epochs", "precision")
        if len({getattr(row.group, column) for row in rows}) > 1
    ]
    tasks = {(row.group.model, row.group.data) for row in rows}
    if "experiment" in columns and len(
        {(r.group.experiment, r.group.model, r.group.data) for r in rows}
    ) == len(tasks):
        columns.remove("experiment")
    return columns


def _cells(row: Row) -> list[str]:
    return [
        row.method,
        "" if row.cost_percent is None else f"{row.cost_percent:.1f}",
        row.score_text,
        "" if row.seconds is None else f"{row.seconds:.1f}" if row.seconds < 100 else f"{row.seconds:.0f}",
        "" if row.speedup is None else f"{row.speedup:.2f}x",
    ]


def _legend(rows: Sequence[Row]) -> str:
    references = sorted({(row.group.model, row.group.data, row.reference_epochs) for row in rows})
    work = "; ".join(f"{model} on {data}, {epochs:g} epochs" for model, data, epochs in references)
    shared = sorted({(row.group.model, row.group.data, row.shared_overrides) for row in rows})
    said = "; ".join(f"{model} on {data} with {' '.join(common)}" for model, data, common in shared if common)
    names = " and ".join(sorted({row.metric.name for row in rows}))
    return (
        f"Cost 100 % = the fixed-size network at full width ({work}). {names[:1].upper() + names[1:]}: test, mean ± "
        "sample standard deviation over n seeds. Speed-up: against the fixed-size run of as many epochs on the "
        "same machine." + (f" All of {said}." if said else "") + "".join(map(_of_its_own, _tasks(rows)))
    )


def _tasks(rows: Sequence[Row]) -> list[list[Row]]:
    tasks = sorted({(row.group.model, row.group.data) for row in rows})
    return [[row for row in rows if (row.group.model, row.group.data) == task] for task in tasks]


def _of_its_own(rows: Sequence[Row]) -> str:
    """A sentence where rows of one network and data are of different sizes, so that their costs do not compare."""
    flops = [run.pass_flops for row in rows for run in row.runs]
    known = [number for number in flops if number]
    if not known or max(known) <= _ALIKE * min(known):
        return ""
    group = rows[0].group
    return (
        f" Rows of {group.model} on {group.data} differ in what an epoch at full width costs, by up to "
        f"{max(known) / min(known):.3g} times: each row's cost is in percent of its own network and data."
    )


def _record(row: Row) -> dict[str, Any]:
    group = row.group
    return {
        "method": row.method,
        "experiment": group.experiment,
        "model": group.model,
        "data": group.data,
        "growth": group.growth,
        "lr_adapt": group.lr_adapt,
        "optimizer": group.optimizer,
        "epochs": group.epochs,
        "precision": group.precision,
        "overrides": list(group.overrides),
        "cost_percent": row.cost_percent,
        "reference_epochs": row.reference_epochs,
        "metric": row.metric.name,
        "score_mean": row.score_mean,
        "score_std": row.score_std,
        "n": row.n,
        "seconds": row.seconds,
        "speedup": row.speedup,
        "seeds": [run.results["seed"] for run in row.runs],
        "runs": [run.path.as_posix() for run in row.runs],
    }
