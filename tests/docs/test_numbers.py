"""Tables are what the rows give that are kept; `test_stated.py` holds sentences to the rows of their own folders."""

import json
import re
from pathlib import Path

import pytest

from growlab.inspect import Report, matrix_table
from growlab.lab.analysis.paired import compare_pairs, paired_table
from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.schedules import time_to_score_table, times_to_scores
from growlab.lab.analysis.tables import Row, summarise, write_table
from growlab.recipes.papers.paper_table import paper_table
from tests.command_line import ROOT

RESULTS = ROOT / "notebooks" / "results"
MAKERS = {
    "table.md": lambda rows: write_table(rows, "markdown"),
    "table.csv": lambda rows: write_table(rows, "csv"),
    "table.tex": lambda rows: write_table(rows, "latex"),
    "paper.md": lambda rows: paper_table(rows).markdown(),
    "paired.md": lambda rows: paired_table(compare_pairs(rows)).markdown(),
    "time.md": lambda rows: time_to_score_table(times_to_scores(rows)).markdown(),
}
TABLES = sorted(path.relative_to(RESULTS) for name in MAKERS for path in RESULTS.glob(f"*/{name}"))
# Tables over more folders than their own.
WITH = {
    "resnet20_cifar10_schedules": (
        *("resnet20_cifar10_16_epochs/fixed_s*", "resnet20_cifar10_16_epochs/fixedflops_s*"),
        *("resnet20_cifar10_16_epochs/ours_s*", "resnet20_cifar10_8_epochs/hyperfan8_fixed"),
        "resnet20_cifar10_8_epochs/hyperfan8_ours",
    )
}
PAGES = [
    *(ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))),
    # Those of the papers are made from the rows as a whole: tests/docs/test_paper_pages.py.
    *sorted(path for path in (ROOT / "notebooks/docs/pages").rglob("*.md") if path.parent.name != "papers"),
]
# Costs before training: tests/lab/test_costs.py and tests/recipes/translation/test_costs.py work them out.
COSTS = re.compile(r"^\| `\w+` \| [\d.]+ \| [\d.]+ \|$|`\w+` costs [\d.]+ %", re.M)


def quiet(sentence: str) -> None:
    """Some rows are there twice, in tables of two folders."""


def rows_of(folder: str) -> list[Row]:
    more = [path for pattern in WITH.get(folder, ()) for path in sorted(RESULTS.glob(pattern))]
    return summarise(load_runs([RESULTS / folder, *more], quiet), quiet)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_a_table_is_what_its_rows_give(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = MAKERS[table.name](rows_of(table.parent.name))
    # Paths of runs are as they were given.
    assert (RESULTS / table).read_text().replace("notebooks/results/", "") == made.replace(f"{RESULTS}/", "")


@pytest.mark.parametrize("name", ["matrix", "transformers"])
def test_a_matrix_is_what_its_rows_give(name: str) -> None:
    kept = RESULTS / "matrix" / f"{name}.json"
    rows = json.loads(kept.read_text(encoding="utf-8"))["networks"]
    made = matrix_table([Report(**row) for row in rows])
    assert kept.with_suffix(".md").read_text(encoding="utf-8") == made


def prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return COSTS.sub("", text)


def test_the_table_of_the_docs_is_that_of_the_rows() -> None:
    text = (ROOT / "notebooks/docs/pages/guide/measured.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- results -->\n(.*?)<!-- /results -->", text, re.S)
    assert block is not None
    head, _, *lines = block[1].strip().splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    table = (RESULTS / "resnet20_cifar10_16_epochs" / "table.md").read_text().splitlines()
    names = [cell.strip() for cell in table[0].strip("|").split("|")]
    kept = {
        tuple(cells[names.index(column)] for column in columns)
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in table[2:])
        if len(cells) == len(names)
    }
    shown = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert shown and set(shown) <= kept
