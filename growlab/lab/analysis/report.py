"""`growlab report DIR...`: one page about finished runs that opens in any browser, offline."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from growlab.base.command_parser import CommandParser
from growlab.base.errors import UserError
from growlab.base.files import write_text
from growlab.lab.analysis import style
from growlab.lab.analysis.figures import write_run_figures
from growlab.lab.analysis.results import Run, load_runs, open_run

# Points of a curve that a screen can show.
_POINTS = 150
# Columns of metrics.csv that are no curve.
_NOT_CURVES = ("epoch", "step", "stage")
_STAGE = ("stage", "epochs", "batch_size", "num_params", "flops_per_sample", "samples_per_sec", "seconds")
_RECEIPT = (
    "stage",
    "epoch",
    "step",
    "num_params_before",
    "num_params",
    "parity_error_eval",
    "parity_error_train",
)
_RECEIPT_END = ("parity_tolerance_eval", "output_factor", "seconds")


def write_run_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write a run's figures, and its page `report.html`, into its folder.

    Returns:
        The page.

    Raises:
        UserError: as `growlab.lab.analysis.figures.write_run_figures`.
    """
    write_run_figures(run_dir)
    run = open_run(run_dir)
    path = run.path / "report.html"
    write_text(path, page([run]))
    return path


def page(runs: Sequence[Run]) -> str:
    """The page about runs: self-contained HTML.

    Args:
        runs: finished ones.
    """
    template = files("growlab.lab.analysis").joinpath("report.html").read_text(encoding="utf-8")
    methods = list(dict.fromkeys(map(_method, runs)))
    colours = {name: look["color"] for name, look in zip(methods, style.looks(methods), strict=True)}
    content = json.dumps(
        [_told(run, name, colours[_method(run)]) for run, name in zip(runs, _names(runs), strict=True)],
        allow_nan=False,
    )
    # Inside a script, `</script` would end it, and behind `<!--<script` nothing would.
    return template.replace("/*RUNS*/[]", content.replace("<", "\\u003c"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit code (2: told in one sentence on stderr)."""
    parser = CommandParser(
        prog="growlab report",
        description="Write one page about finished runs: curves, widths, regions, receipts and cost.",
        epilog="Example: growlab report runs/digits_methods -o report.html",
    )
    parser.add_argument("folders", metavar="DIR", nargs="+", help="run folders, or folders above them")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="report.html", help="the page (report.html)"
    )
    try:
        arguments = parser.parse_args(argv)
        runs = load_runs(arguments.folders, lambda message: print(f"warning: {message}", file=sys.stderr))
        write_text(arguments.output, page(runs))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(arguments.output)
    return 0


def _names(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its method and seed, and its folder where others have the same."""
    names = [
        f"{run.group.method}, seed {run.results['seed']}" if run.results else run.path.name for run in runs
    ]
    return [
        f"{name} ({run.path.parent.name}/{run.path.name})" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def _method(run: Run) -> str:
    return run.group.method if run.results else run.path.name


def _told(run: Run, name: str, colour: str) -> dict[str, Any]:
    """Content of the page about a run, in types of JSON."""
    results = run.results
    return {
        "name": name,
        "method": _method(run),
        "colour": colour,
        "title": f"{results['model']} on {results['data']}" if results else run.path.name,
        "facts": _facts(results),
        "curves": _curves(run),
        "events": run.growth_epochs,
        "stages": [_picked(stage, _STAGE) for stage in results.get("stages") or ()],
        "widths": _widths(run),
        "receipts": [_receipt(event) for event in run.events],
        "regions": _regions(run),
        "command": results.get("command"),
        "about": {key: results.get(key) for key in ("git_commit", "versions", "machine", "schedule")},
    }


def _facts(results: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers at the top, by what they are called."""
    found = {key.removeprefix("test_"): value for key, value in results.items() if key.startswith("test_")}
    facts = {f"test {key}": value for key, value in found.items() if isinstance(value, int | float)}
    facts |= {
        "cost % of fixed size": results.get("train_cost_percent"),
        "seconds": results.get("seconds"),
        "epochs": results.get("epochs"),
        "largest parity error": results.get("parity_max_error"),
    }
    return {key: _number(value) for key, value in facts.items() if value is not None}


def _curves(run: Run) -> dict[str, list[float | None]]:
    """Columns of metrics.csv that hold numbers, thinned; `cost` and `time` accumulate over the epochs."""
    if not (run.path / "metrics.csv").exists():
        return {}
    names = [name for name in run.metrics.columns if name not in _NOT_CURVES]
    curves = {name: values for name in names if (values := run.curve(name)) is not None}
    epochs = [float(epoch) + 1 for epoch in run.metrics["epoch"]]
    if "seconds" in curves:
        curves["time"] = curves["seconds"].cumsum()
    by_stage = {
        stage.get("stage"): stage.get("flops_per_sample") for stage in run.results.get("stages") or ()
    }
    stages = [int(stage) for stage in run.metrics["stage"]]
    if by_stage and all(by_stage.get(stage) for stage in stages):
        # Relative to the whole run: what an epoch costs goes with the forward FLOPs of its stage.
        total = sum(by_stage[stage] for stage in stages)
        spent = [sum(by_stage[s] for s in stages[: index + 1]) for index in range(len(stages))]
        curves["cost"] = [100 * flops / total for flops in spent]
    kept = _thinned(len(epochs))
    return {
        "epoch": [epochs[i] for i in kept],
        **{name: [_number(values[i]) for i in kept] for name, values in curves.items()},
    }


def _widths(run: Run) -> dict[str, list[int]]:
    """Width of each group at each stage."""
    stages = [stage["widths"] for stage in run.results.get("stages") or () if stage.get("widths")]
    names = list(dict.fromkeys(name for widths in stages for name in widths))
    return {name: [widths.get(name) for widths in stages] for name in names}


def _regions(run: Run) -> dict[str, dict[str, dict[str, list[float | None]]]]:
    """Rate factor, weight and gradient norm of each region of each parameter over steps, thinned."""
    rates = run.rates
    if rates is None:
        return {}
    columns = [
        "step",
        *(name for name in ("rate_factor", "weight_norm", "grad_norm") if name in rates.columns),
    ]
    found: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for (parameter, region), rows in rates.groupby(["parameter", "region"], sort=False):
        kept = rows.iloc[_thinned(len(rows), _POINTS // 3)]
        found.setdefault(str(parameter), {})[str(region)] = {
            name: [_number(value) for value in kept[name]] for name in columns
        }
    return found


def _receipt(event: Mapping[str, Any]) -> dict[str, Any]:
    widths = zip(event["widths_before"].values(), event["widths_after"].values(), strict=False)
    told = _picked(event, _RECEIPT)
    return {**told, "groups_widened": sum(a != b for a, b in widths), **_picked(event, _RECEIPT_END)}


def _picked(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: _number(row[name]) for name in names if name in row}


def _thinned(length: int, points: int = _POINTS) -> list[int]:
    """Positions of so many of a curve's points at most, the last one among them."""
    step = max(1, -(-length // points))
    return sorted({*range(0, length, step), length - 1} if length else set())


def _number(value: Any) -> Any:
    """A number as JSON has it: six significant digits, None for NaN and infinity."""
    if isinstance(value, bool) or value is None or isinstance(value, str | list | dict):
        return value
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        return None
    return int(number) if number.is_integer() else float(f"{number:.6g}")


if __name__ == "__main__":
    sys.exit(main())
