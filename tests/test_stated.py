"""Sentences with numbers are those that the rows of their own folders give: see `tests/stated.py`."""

import re

import pytest

from tests.command_line import ROOT
from tests.parts_here import needs
from tests.stated import ISOTROPIC, MEASURED, OVERABUNDANCE, README, ROWS, Stated, plain, stated
from tests.test_numbers import COSTS

STATED = stated()


def text_of(page: str) -> str:
    return plain((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, marks=[needs("isotropic")] if one.page == OVERABUNDANCE else []) for one in STATED],
    ids=lambda one: f"{one.page.rpartition('/')[2]}: {one.template[:40]}",
)
def test_a_sentence_has_the_numbers_of_its_rows(one: Stated) -> None:
    assert one.text in text_of(one.page), f"{one.page} has no {one.text!r}"


# Numbers with a point that are no results of rows here: budgets, rates, the number of parameters.
SETTINGS = {"0.1", "0.2", "0.4", "1.2", "1.5", "3.6", "0.008"}
# Results without rows of their own: rates that were tried before, whose runs are not kept, and a published cost whose
# schedule is not told.
NOT_TIED = {"0.3", "54.5", "68.0", "73.7", "75.1", "58.24"}


def left_over(page: str, start: str = "", end: str = "\0") -> set[str]:
    """Numbers with a point that no stated sentence of the page holds, or of a part of it."""
    text = COSTS.sub("", (ROOT / page).read_text(encoding="utf-8"))
    text = text[text.index(start) :].partition(end)[0]
    text = plain(re.sub(r"<!-- results -->.*<!-- /results -->", "", text, flags=re.S))
    for one in STATED:
        text = text.replace(one.text, "") if one.page == page else text
    return set(re.findall(r"(?<![\d.,/`=])\d+\.\d+(?![\d.`])", text))


def test_no_result_of_the_measured_page_stands_by_itself() -> None:
    """A new one is to be added to `tests/stated.py`, with the folder that it comes from."""
    assert left_over(MEASURED) <= SETTINGS | NOT_TIED
    # One of 359 images of the digits.
    assert left_over(README, "## What it costs", "## Where things are") <= SETTINGS | {"0.28"}


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        (README, "in 56 s against", "in 26 s against"),
        (README, "81.85 % for 61.4 %", "84.90 % for 41.4 %"),
        (README, "± 1.18", "± 0.18"),
        (README, "2.61 and 1.97 bits", "2.62 and 1.97 bits"),
        (MEASURED, "by 7.2 points", "by 17.2 points"),
        (MEASURED, "| 1.954 ±", "| 1.154 ±"),
        (MEASURED, "(85 epochs) at 88.30 %", "(85 epochs) at 87.34 %"),
        (ISOTROPIC, "finds 10 neurons", "finds 20 neurons"),
        (ROWS, "| 81.43 | 1.06 |", "| 81.43 | 1.16 |"),
        (ROWS, "and 38.3 to 39.1 %", "and 38.2 to 39.1 %"),
        (ROWS, "all sixteen by 0.04", "all sixteen by 0.36"),
    ],
)
def test_a_number_of_another_folder_is_noticed(page: str, right: str, wrong: str) -> None:
    text = text_of(page)
    assert text.count(right) == 1
    broken = text.replace(right, wrong)
    assert any(one.text not in broken for one in STATED if one.page == page)
