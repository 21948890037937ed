"""The table that a run ends with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from growlab.lab.analysis.metrics import metric_of

# FLOPs of a sample below which a table counts in thousands.
_SMALL = 1e5


def print_results(results: Mapping[str, Any], run_dir: Path, console: Console | None = None) -> None:
    """Print a run's stages and its result.

    Args:
        results: the content of `results.json`.
        run_dir: where everything about the run lies.
        console: where to print; standard output if None.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        # Piped output is read by programs and logs: no wrapping at a terminal's width.
        console.width = 120
    table = Table(title=f"{results['experiment']}: {results['growth']}, seed {results['seed']}")
    # Small networks in thousands: 0.00 million says nothing.
    small = max((stage["flops_per_sample"] for stage in results["stages"]), default=0) < _SMALL
    unit, scale = ("kFLOPs", 1e3) if small else ("MFLOPs", 1e6)
    for column in ("stage", "epochs", "widths", "parameters", unit, "batch", "samples/s", "seconds"):
        table.add_column(column, justify="right")
    for stage in results["stages"]:
        widths = sorted(set(stage["widths"].values()))
        table.add_row(
            str(stage["stage"]),
            str(stage["epochs"]),
            _span(widths),
            f"{stage['num_params']:,}",
            f"{stage['flops_per_sample'] / scale:,.2f}",
            str(stage["batch_size"]),
            f"{stage['samples_per_sec']:,.0f}",
            f"{stage['seconds']:,.1f}",
        )
    console.print(table)
    parity = results["parity_max_error"]
    metric = metric_of([results])
    best = f"test {metric.name} [bold]{metric.text(results[f'test_{metric.key}'])}{metric.unit}[/bold]"
    console.print(
        f"{best} at {results['train_cost_percent']:.1f} % of "
        f"the fixed-size network's training FLOPs ({results['reference_epochs']} epochs), in "
        f"{results['seconds']:.0f} s" + ("" if parity is None else f"; largest parity error {parity:.1e}")
    )
    console.print(f"everything about the run: {run_dir}", soft_wrap=True)
    console.print(f"look at it in a browser: {run_dir / 'report.html'}", soft_wrap=True)


def _span(widths: list[int]) -> str:
    if not widths:
        return "fixed"
    return str(widths[0]) if len(widths) == 1 else f"{widths[0]}-{widths[-1]}"
