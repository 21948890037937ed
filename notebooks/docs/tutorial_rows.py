"""Runs the program of the notebook "Grow your own network" with several seeds and keeps what it prints.

`python notebooks/docs/tutorial_rows.py` writes notebooks/results/your_network/rows.csv (two minutes on one CPU core);
the notebook's table is made from it.
"""

import contextlib
import csv
import io
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "notebooks" / "01_your_network.ipynb"
ROWS = ROOT / "notebooks" / "results" / "your_network" / "rows.csv"
SEEDS = range(8)
# What the program prints: a run, its accuracy, its share of the full network's FLOPs.
_PRINTED = re.compile(r"^(grown|fixed size, \d+ epochs): ([\d.]+) for ([\d.]+) of the FLOPs$", re.M)


def program(seed: int) -> str:
    """The notebook's program with another seed, which prints numbers with all of their digits."""
    cells = json.loads(TUTORIAL.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return code.replace("manual_seed(0)", f"manual_seed({seed})").replace(":.1%}", ":.6f}")


def rows(seed: int) -> list[dict[str, str]]:
    """Its runs with a seed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(program(seed), str(TUTORIAL), "exec"), {})
    return [
        {"run": run, "seed": str(seed), "test_accuracy": accuracy, "flops_share": share}
        for run, accuracy, share in _PRINTED.findall(said.getvalue())
    ]


if __name__ == "__main__":
    found = [row for seed in SEEDS for row in rows(seed)]
    ROWS.parent.mkdir(exist_ok=True)
    with ROWS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    print(ROWS)
