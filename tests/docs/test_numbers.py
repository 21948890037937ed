"""Committed tables equal those of their rows; test_stated.py checks sentences."""

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
from tests.docs.test_prose import markdown_of

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
# Further runs in tables.
WITH = {
    "resnet20_cifar10_schedules": (
        *("resnet20_cifar10_16_epochs/fixed_s*", "resnet20_cifar10_16_epochs/fixedflops_s*"),
        *("resnet20_cifar10_16_epochs/ours_s*", "resnet20_cifar10_8_epochs/hyperfan8_fixed"),
        "resnet20_cifar10_8_epochs/hyperfan8_ours",
    )
}
PAGES = [
    *(ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))),
    # tests/docs/test_paper_pages.py checks the pages of papers.
    *sorted(path for path in (ROOT / "notebooks/docs/pages").rglob("*.md") if path.parent.name != "papers"),
]
# Costs before training, checked by tests/lab/test_costs.py and tests/recipes/translation/test_costs.py.
COSTS = re.compile(r"^\| `\w+` \| [\d.]+ \| [\d.]+ \|$|`\w+` costs [\d.]+ %", re.M)


def quiet(sentence: str) -> None:
    """Ignore warnings: tables over two folders contain some rows twice."""


def rows_of(folder: str) -> list[Row]:
    more = [path for pattern in WITH.get(folder, ()) for path in sorted(RESULTS.glob(pattern))]
    return summarise(load_runs([RESULTS / folder, *more], quiet), quiet)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_a_table_equals_that_of_its_rows(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = MAKERS[table.name](rows_of(table.parent.name))
    # Tables contain paths as they were given.
    assert (RESULTS / table).read_text().replace("notebooks/results/", "") == made.replace(f"{RESULTS}/", "")


@pytest.mark.parametrize("name", ["matrix", "transformers"])
def test_a_matrix_equals_that_of_its_rows(name: str) -> None:
    kept = RESULTS / "matrix" / f"{name}.json"
    rows = json.loads(kept.read_text(encoding="utf-8"))["networks"]
    made = matrix_table([Report(**row) for row in rows])
    assert kept.with_suffix(".md").read_text(encoding="utf-8") == made


def prose(page: Path) -> str:
    return COSTS.sub("", markdown_of(page))


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_rows_of_the_table_in_the_docs_are_those_of_the_full_table() -> None:
    text = (ROOT / "notebooks/docs/pages/guide/measured.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- results -->\n(.*?)<!-- /results -->", text, re.S)
    assert block is not None
    head, _, *lines = block[1].strip().splitlines()
    table = (RESULTS / "resnet20_cifar10_16_epochs" / "table.md").read_text().splitlines()
    names = cells_of(table[0])
    kept = {
        tuple(cells[names.index(column)] for column in cells_of(head))
        for cells in map(cells_of, table[2:])
        if len(cells) == len(names)
    }
    shown = [tuple(cells_of(line)) for line in lines]
    assert shown and set(shown) <= kept
