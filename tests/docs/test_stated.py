"""Sentences with numbers equal those computed from runs (`tests/docs/stated.py`)."""

import re
from pathlib import Path

import pytest

from tests.command_line import ROOT
from tests.docs import blind
from tests.docs.stated import ISOTROPIC, MEASURED, README, ROWS, Stated, plain, stated
from tests.docs.stated_rows import more
from tests.docs.test_numbers import COSTS, PAGES, prose
from tests.docs.test_prose import markdown_of

STATED = [*stated(), *more(), *blind.stated()]


def text_of(page: str) -> str:
    return plain(markdown_of(ROOT / page))


@pytest.mark.parametrize("one", STATED, ids=lambda one: f"{one.page.rpartition('/')[2]}: {one.template[:40]}")
def test_a_sentence_has_the_numbers_of_its_runs(one: Stated) -> None:
    assert one.text in text_of(one.page), f"{one.page} has no {one.text!r}"


@pytest.mark.parametrize("one", blind.rounds().values(), ids=lambda one: one.name)
def test_the_table_of_a_round_of_pairs_is_that_of_its_runs(one: blind.Round) -> None:
    assert (blind.folder_of(one.name) / "accuracy.md").read_text(encoding="utf-8") == blind.table_of(one)


# Results to find on every page: numbers with a point or an exponent, and integers with a unit.
RESULT = re.compile(
    r"(?<![\w.,/=^])[−-]?(?:\d+\.\d+(?:e-?\d+)?|\d+e-?\d+|\d+(?= (?:%|points?|s\b|bits|times|neurons|BLEU)))"
    r"(?![\w`]|\.\d|,\d)"
)
# Accuracies, BLEU and costs in percent, which are found in code too.
PERCENT = re.compile(r"(?<![\d.,])\d\d\.\d\d(?![\d.])")
CHANGES = "CHANGELOG.md"
# Other numbers: budgets, rates, thresholds, sizes of data and packages, sections and versions.
SETTINGS = {
    README: {"3.11", "2.0"},
    ROWS: {
        *("0.001", "0.002", "0.004", "0.008", "0.01", "0.02", "0.05", "0.08", "0.1", "0.2", "0.5"),
        *("1e-4", "3e-5", "5e-4", "1e-11", "1e-15", "5.1", "5.2", "5.3"),
        *("2.11", "15.363", "1.2", "2.4", "3.6", "8 neurons", "16 neurons", "32 neurons", "180 s"),
    },
    MEASURED: {
        *(
            "0.05",
            "13 s",
            "0.1",
            "0.2",
            "0.4",
            "1.2",
            "1.5",
            "2.5",
            "3.6",
            "0.008",
            "2 %",
            "3 %",
            "5 %",
            "10 %",
            "30 %",
            "95 %",
        )
    },
    ISOTROPIC: {"0.01", "0.08", "0.001", "1e-6", "32 neurons", "64 neurons"},
    CHANGES: {"0.1.0", "1.3", "2.6", "2.11", "5.4"},
    "notebooks/docs/pages/index.md": {"3.11"},
    "notebooks/docs/pages/guide/devices.md": {"2.15"},
    "notebooks/docs/pages/guide/experiments.md": {"5.8", "5.3", "1e-6", "50 times"},
    "notebooks/docs/pages/guide/growing_pays.md": {"0.25", "3 %", "40 %"},
    "notebooks/docs/pages/guide/how_it_works.md": {"1e-4", "1e-10", "2409.12903"},
    "notebooks/docs/pages/guide/language_models.md": {"1.5", "1.1", "3 %", "5 %", "10 %"},
    "notebooks/docs/pages/guide/networks.md": {"0.5", "1e-6", "1e-10", "90 %"},
    blind.PAGE: {"0.12", "0.25", "0.3", "95 %"},
    "notebooks/docs/pages/guide/sharded.md": {"3.35"},
    "notebooks/docs/pages/guide/schedules.md": {"0.3", "1.2", "2405.15319", "2212.08013"},
}


def left_over(page: str, text: str) -> set[str]:
    """Results in a page's text that are in no stated sentence, generated table or code."""
    text = re.sub(r"<!-- results -->.*<!-- /results -->", "", COSTS.sub("", text), flags=re.S)
    text = plain(text)
    for one in STATED:
        text = text.replace(one.text, " ") if one.page == page else text
    percent = set(PERCENT.findall(text))
    text = re.sub(r"`[^`]*`", "`", re.sub(r"```.*?```", " ", text))
    return percent | {_with_unit(text, match) for match in RESULT.finditer(text)}


def _with_unit(text: str, match: re.Match[str]) -> str:
    """Return an integer with its unit, other numbers without."""
    if not match[0].strip("-−").isdigit():
        return match[0]
    return f"{match[0]} {re.match(r'%|[a-zA-Z]+', text[match.end() + 1 :])[0]}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / CHANGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_all_results_are_in_stated_sentences(page: Path) -> None:
    """Add new sentences to `tests/docs/stated.py` or `stated_rows.py`."""
    name, text = page.relative_to(ROOT).as_posix(), prose(page)
    assert left_over(name, text) <= SETTINGS.get(name, set())


def test_results_outside_of_stated_sentences_are_found() -> None:
    text = "It has 75.1 % (at 0.2), 3 points more, within 2e-6 in `lr=0.3`; 14 times. ```\n0.7 %, 81.85\n```"
    assert left_over(MEASURED, text) == {"75.1", "0.2", "3 points", "2e-6", "14 times", "81.85"}


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        (README, "70.21 grown", "71.21 grown"),
        (README, "80.10 % grown", "82.83 % grown"),
        (MEASURED, "by 7.2 points", "by 17.2 points"),
        (MEASURED, "| 1.954 ±", "| 1.154 ±"),
        (MEASURED, "(85 epochs) at 88.30 %", "(85 epochs) at 87.34 %"),
        (ISOTROPIC, "finds 10 neurons", "finds 20 neurons"),
        (ROWS, "| 81.43 | 1.06 |", "| 81.43 | 1.16 |"),
        (ROWS, "and 38.3 to 39.1 %", "and 38.2 to 39.1 %"),
        (ROWS, "all sixteen by 0.04", "all sixteen by 0.36"),
    ],
)
def test_a_wrong_number_is_found(page: str, right: str, wrong: str) -> None:
    text = text_of(page)
    assert text.count(right) == 1
    broken = text.replace(right, wrong)
    assert any(one.text not in broken for one in STATED if one.page == page)
