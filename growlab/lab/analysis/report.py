"""Reports of runs: the table printed at the end of a run, and `growlab report`, an offline HTML page."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from rich.console import Console
from rich.table import Table

from growlab.base.command_parser import CommandParser, command
from growlab.base.files import write_text
from growlab.lab.analysis import style
from growlab.lab.analysis.__main__ import warn
from growlab.lab.analysis.figures import write_run_figures
from growlab.lab.analysis.results import Run, load_runs, metric_of, open_run

# Below this many FLOPs per sample, a table counts in thousands.
_SMALL = 1e5
# Most points of a curve.
_POINTS = 150
# Columns of metrics.csv that are not curves.
_NOT_CURVES = ("epoch", "step", "stage")
_STAGE = ("stage", "epochs", "batch_size", "num_params", "flops_per_sample", "samples_per_sec", "seconds")
_PARITY = ("parity_error_eval", "parity_error_train")
_RECEIPT = ("stage", "epoch", "step", "num_params_before", "num_params", *_PARITY)
_RECEIPT_END = ("parity_tolerance_eval", "output_factor", "seconds")


def print_results(results: Mapping[str, Any], run_dir: Path, console: Console | None = None) -> None:
    """Print a run's stages and result from `results.json`, by default on standard output."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        # Programs and logs read piped output: do not wrap it at a terminal's width.
        console.width = 120
    table = Table(title=f"{results['experiment']}: {results['growth']}, seed {results['seed']}")
    small = max((stage["flops_per_sample"] for stage in results["stages"]), default=0) < _SMALL
    unit, scale = ("kFLOPs", 1e3) if small else ("MFLOPs", 1e6)
    length = "steps" if "steps" in results else "epochs"
    for column in ("stage", length, "widths", "parameters", unit, "batch", "samples/s", "seconds"):
        table.add_column(column, justify="right")
    for stage in results["stages"]:
        widths = sorted(set(stage["widths"].values())) or ["fixed"]
        ends = "-".join(map(str, dict.fromkeys((widths[0], widths[-1]))))
        size = (f"{stage['num_params']:,}", f"{stage['flops_per_sample'] / scale:,.2f}", str(stage["batch_size"]))
        speed = (f"{stage['samples_per_sec']:,.0f}", f"{stage['seconds']:,.1f}")
        table.add_row(str(stage["stage"]), str(stage[length]), ends, *size, *speed)
    console.print(table)
    parity, metric = results["parity_max_error"], metric_of([results])
    best = f"test {metric.name} [bold]{metric.text(results[f'test_{metric.key}'])}{metric.unit}[/bold]"
    console.print(
        f"{best} at {results['train_cost_percent']:.1f} % of "
        f"the fixed-size network's training FLOPs ({results.get('steps', results['reference_epochs'])} {length}), in "
        f"{results['seconds']:.0f} s" + ("" if parity is None else f"; largest parity error {parity:.1e}")
    )
    console.print(f"everything about the run: {run_dir}", soft_wrap=True)
    console.print(f"open it in a browser: {run_dir / 'report.html'}", soft_wrap=True)


def write_run_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write a run's figures and its page `report.html` into its folder; return the page's path."""
    write_run_figures(run_dir)
    run = open_run(run_dir)
    write_text(run.path / "report.html", page([run]))
    return run.path / "report.html"


def page(runs: Sequence[Run]) -> str:
    """Return a page about finished runs as self-contained HTML."""
    template = files("growlab.lab.analysis").joinpath("report.html").read_text(encoding="utf-8")
    methods = list(dict.fromkeys(map(_method, runs)))
    colours = {name: line["color"] for name, line in zip(methods, style.line_styles(methods), strict=True)}
    names = [f"{_method(run)}, seed {run.results['seed']}" if run.results else _method(run) for run in runs]
    # Add the folder to names that are not unique.
    places = [f" ({run.path.parent.name}/{run.path.name})" for run in runs]
    unique = [name + (names.count(name) > 1) * place for name, place in zip(names, places, strict=True)]
    content = [_content(run, name, colours[_method(run)]) for run, name in zip(runs, unique, strict=True)]
    # Escape "<": in a script element, `</script` would end it, and `<!--<script` would keep it from ending.
    return template.replace("/*RUNS*/[]", json.dumps(content, allow_nan=False).replace("<", "\\u003c"))


@command
def main(argv: Sequence[str]) -> None:
    """Write one page about finished runs."""
    parser = CommandParser(
        prog="growlab report",
        description="Write one page about finished runs: curves, widths, regions, receipts and cost.",
        epilog="Example: growlab report runs/digits_methods -o report.html",
    )
    parser.add_argument("folders", metavar="DIR", nargs="+", help="run folders, or folders above them")
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="the page (report.html)")
    arguments = parser.parse_args(argv)
    write_text(arguments.output, page(load_runs(arguments.folders, warn)))
    print(arguments.output)


def _method(run: Run) -> str:
    return run.group.method if run.results else run.path.name


def _content(run: Run, name: str, colour: str) -> dict[str, Any]:
    """Return the page's content about a run, as JSON types."""
    results = run.results
    stages = results.get("stages") or ()
    widths = pandas.DataFrame([stage["widths"] for stage in stages if stage.get("widths")]).astype(object)
    return {
        "name": name,
        "method": _method(run),
        "colour": colour,
        "title": f"{results['model']} on {results['data']}" if results else run.path.name,
        "facts": _facts(results),
        "curves": _curves(run),
        "events": run.growth_epochs,
        "stages": [_picked(stage, _STAGE) for stage in stages],
        "widths": widths.where(widths.notna(), None).to_dict("list"),
        "receipts": [_receipt(event) for event in run.events],
        "regions": _regions(run),
        "command": results.get("command"),
        "about": {key: results.get(key) for key in ("git_commit", "versions", "machine", "schedule")},
    }


def _facts(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers at the top of the page, by name."""
    facts: dict[str, Any] = {
        f"test {key.removeprefix('test_')}": value
        for key, value in results.items()
        if key.startswith("test_") and isinstance(value, int | float)
    }
    keys = {"cost % of fixed size": "train_cost_percent", "seconds": "seconds", "epochs": "epochs"}
    keys["largest parity error"] = "parity_max_error"
    facts |= {name: results.get(key) for name, key in keys.items()}
    return {key: _number(value) for key, value in facts.items() if value is not None}


def _curves(run: Run) -> dict[str, list[float | None]]:
    """Return the numeric columns of metrics.csv, thinned, with cumulative `cost` and `time`."""
    if not (run.path / "metrics.csv").exists():
        return {}
    names = [name for name in run.metrics.columns if name not in _NOT_CURVES]
    curves = {name: values for name in names if (values := run.curve(name)) is not None}
    if "seconds" in curves:
        curves["time"] = curves["seconds"].cumsum()
    flops = {stage.get("stage"): stage.get("flops_per_sample") for stage in run.results.get("stages") or ()}
    of_epoch = [flops.get(int(stage)) for stage in run.metrics["stage"]]
    if all(of_epoch):
        # In percent of the whole run; an epoch's cost is proportional to the forward FLOPs of its stage.
        curves["cost"] = 100 * np.array(of_epoch, dtype=object).cumsum() / sum(filter(None, of_epoch))
    kept = _thinned(len(run.metrics))
    epochs = {"epoch": [float(run.metrics["epoch"][i]) + 1 for i in kept]}
    return epochs | {name: [_number(values[i]) for i in kept] for name, values in curves.items()}


def _regions(run: Run) -> dict[str, dict[str, dict[str, list[float | None]]]]:
    """Return rate factor, weight norm and gradient norm over steps by parameter and region, thinned."""
    regions: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    if (rates := run.rates) is None:
        return regions
    columns = ["step", *(n for n in ("rate_factor", "weight_norm", "grad_norm") if n in rates.columns)]
    for (parameter, region), rows in rates.groupby(["parameter", "region"], sort=False):
        kept = rows.iloc[_thinned(len(rows), _POINTS // 3)]
        curves = {name: [_number(value) for value in kept[name]] for name in columns}
        regions.setdefault(str(parameter), {})[str(region)] = curves
    return regions


def _receipt(event: Mapping[str, Any]) -> dict[str, Any]:
    widths = zip(event["widths_before"].values(), event["widths_after"].values(), strict=False)
    widened = {"groups_widened": sum(a != b for a, b in widths)}
    return _picked(event, _RECEIPT) | widened | _picked(event, _RECEIPT_END)


def _picked(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: _number(row[name]) for name in names if name in row}


def _thinned(length: int, points: int = _POINTS) -> list[int]:
    """Return indices of about `points` evenly spaced points of a curve, including the last one."""
    step = max(1, -(-length // points))
    return sorted({*range(0, length, step), length - 1} if length else set())


def _number(value: Any) -> Any:
    """Convert a number for JSON: six significant digits, None for NaN and infinity."""
    if isinstance(value, bool) or value is None or isinstance(value, str | list | dict):
        return value
    number = float(value)
    if not np.isfinite(number):
        return None
    return int(number) if number.is_integer() else float(f"{number:.6g}")
