"""The table that a run ends with."""

import io
import json

import pytest
from rich.console import Console

from growlab.lab.analysis.report import print_results
from tests.command_line import ROOT

RESULTS = ROOT / "notebooks" / "results"


@pytest.mark.parametrize(
    ("folder", "unit", "scale"),
    [("isotropic_digits/width2_s0", "kFLOPs", 1e3), ("digits/ours_s0", "MFLOPs", 1e6)],
)
def test_flops_of_small_networks_are_told_in_thousands(folder: str, unit: str, scale: float) -> None:
    results = json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))
    told = io.StringIO()
    print_results(results, RESULTS / folder, Console(file=told, highlight=False))
    rows = [line.strip("│┃").split("│") for line in told.getvalue().splitlines() if line.startswith("│")]
    assert unit in told.getvalue()
    shown = [float(row[4].replace(",", "")) for row in rows]
    assert shown == [round(stage["flops_per_sample"] / scale, 2) for stage in results["stages"]]
    assert min(shown) > 0
