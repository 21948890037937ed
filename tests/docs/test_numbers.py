"""Numbers in prose and tables come out of the rows that are kept: they are worked out again.

What is looked at is every number of two digits before and two behind the point: accuracies, BLEU and costs in percent,
which have to be those of some row; `test_stated.py` holds sentences to the rows of their own folders.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from growlab.inspect import Report, matrix_table
from growlab.lab.analysis.paired import compare_pairs, paired_table
from growlab.lab.analysis.results import Run, load_runs
from growlab.lab.analysis.schedules import time_to_score_table, times_to_scores
from growlab.lab.analysis.tables import Row, summarise, write_table
from growlab.recipes.papers.paper_table import paper_table, published
from tests.command_line import ROOT
from tests.docs.stated import by_seconds, on_inputs

sys.path.insert(0, str(ROOT / "notebooks" / "docs"))
from verdicts import first_loss

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
NUMBER = re.compile(r"(?<![\d.,])\d\d\.\d\d(?![\d.])")
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


@cache
def known() -> frozenset[str]:
    """Every number that rows or papers give, in two decimals."""
    numbers: set[float] = {one.value for one in published()}
    numbers |= {one.cost_percent for one in published() if one.cost_percent is not None}
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        if not any(folder.glob("*/results.json")):
            continue
        for row in rows_of(folder.name):
            scale = row.metric.scale
            numbers |= {scale * value for value in (row.score_mean, row.score_std) if value is not None}
            numbers |= {row.cost_percent} if row.cost_percent is not None else set()
            for run in row.runs:
                numbers |= of_run(run, row)
    inputs = on_inputs("grown_24_32", "grown_16_24_32", "blocks2_24", "blocks2_24_32")
    apart = {number for one in inputs for number in one.split(" ± ")}
    return frozenset({f"{number:.2f}" for number in numbers} | set(by_seconds()) | apart)


def of_run(run: Run, row: Row) -> set[float]:
    """Scores, losses and costs of one run, cost in epochs of the fixed-size network too."""
    results = run.results
    found = {float(results[key]) for key in ("test_loss", "train_loss") if results.get(key) is not None}
    found |= {100 * results[key] for key in ("test_accuracy", "val_accuracy", "train_accuracy") if results.get(key)}
    found |= {results[key] for key in ("test_bleu", "val_bleu") if results.get(key)}
    # On the way: BLEU on validation data is in no result.
    bleu = run.curve("val_bleu")
    found |= set() if bleu is None else set(map(float, bleu))
    cost = results["train_cost_percent"]
    found |= {cost, cost * run.reference_epochs / 100} if cost is not None else set()
    return found | ({first_loss(run)} if (run.path / "layers.csv").is_file() else set())


def prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return COSTS.sub("", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_number_in_prose_comes_out_of_rows(page: Path) -> None:
    unknown = [number for number in NUMBER.findall(prose(page)) if number not in known()]
    assert not unknown, "no row and no paper gives these: make the rows, or take the numbers out"


def test_a_number_that_nothing_gives_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "It reached 81.85 % (three seeds), 12.34 at first, 52.97.1 is no number.\n| `vgg11` | 53.45 | 52.91 |\n"
    )
    assert NUMBER.findall(prose(page)) == ["81.85", "12.34"]
    assert "81.85" in known() and "12.34" not in known()


def test_intervals_of_the_digits_are_those_of_the_rows() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "notebooks/docs/pages/guide/measured.md").read_text(encoding="utf-8"))
    (ours, full, stopped) = (
        next(row for row in rows_of("digits") if row.method == name)
        for name in ("ours + stagewise_norm", "fixed-size", "fixed-size, schedule.equal_flops=true")
    )
    intervals = []
    for other in (stopped, full):
        (one,) = compare_pairs([ours, other])
        assert one.row is ours
        intervals.append("{:.1f} to {:.1f}".format(*(100 * end for end in one.interval())))
    assert f"five seeds, paired 95 % interval {intervals[0]})" in text
    assert f"not distinguishable with five seeds ({intervals[1]})" in text
    assert (round(ours.cost_percent), round(stopped.cost_percent)) == (73, 69)


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
