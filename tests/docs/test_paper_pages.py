"""Pages of papers equal those generated from the registry and rows; verdicts follow from intervals."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from growlab.base.errors import UserError
from growlab.base.files import write_json
from growlab.lab.analysis.results import open_run
from growlab.recipes.papers.registry import Item, Rows, registry
from tests.command_line import ROOT
from tests.lab.analysis.fake_runs import write_run

sys.path.insert(0, str(ROOT / "notebooks" / "docs"))
from paper_pages import Standing, pages, standings
from verdicts import CONTRADICTED, HOLDS, ONE_RUN, QUANTITIES, UNDECIDED, Check, _runs, outcome

RESULTS = ROOT / "notebooks" / "results"


def test_the_pages_are_up_to_date() -> None:
    """Update them with `python notebooks/docs/paper_pages.py`."""
    folder = ROOT / "notebooks" / "docs" / "pages" / "papers"
    kept = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert kept == pages(registry(), RESULTS)


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    _runs.cache_clear()


def scores(folder: Path, first: list[float], second: list[float]) -> None:
    for name, values in (("a", first), ("b", second)):
        for seed, value in enumerate(values):
            method = {} if name == "a" else {"growth": "none", "lr_adapt": "none"}
            write_run(folder / f"{name}_s{seed}", seed=seed, test_accuracy=value, **method)


@pytest.mark.parametrize(
    ("first", "second", "verdicts"),
    [
        ([0.9, 0.91, 0.92], [0.8, 0.81, 0.82001], (HOLDS, CONTRADICTED, CONTRADICTED)),
        ([0.8, 0.81, 0.82001], [0.9, 0.91, 0.92], (CONTRADICTED, HOLDS, CONTRADICTED)),
        ([0.9, 0.85, 0.92], [0.91, 0.86, 0.88], (UNDECIDED, UNDECIDED, UNDECIDED)),
        ([0.9, 0.85, 0.92], [0.91, 0.85, 0.91], (UNDECIDED, UNDECIDED, HOLDS)),
        ([0.9], [0.8], (ONE_RUN, ONE_RUN, ONE_RUN)),
    ],
)
def test_a_verdict_follows_from_the_interval(tmp_path: Path, first, second, verdicts) -> None:
    scores(tmp_path, first, second)
    found = [
        outcome(Check("", "a_s*", "b_s*", expect=e, margin=3.0 if e == "equal" else None), tmp_path)
        for e in ("more", "less", "equal")
    ]
    assert tuple(one.verdict for one in found) == verdicts
    differences = 100 * (np.array(first) - np.array(second))
    assert found[0].difference == pytest.approx(differences.mean()) and found[0].unit == "points"
    if len(first) > 1:
        expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        assert found[0].interval == pytest.approx(tuple(expected))


def test_equality_is_a_margin_around_the_published_difference(tmp_path: Path) -> None:
    """The published difference is +0.93; 0.4 to 1.6 is within 2 points of it, but not within 0.5."""
    scores(tmp_path, [0.91, 0.92, 0.93], [0.9025, 0.91, 0.9175])
    named = {"expect": "equal", "published": ("resnet20", "Table 2: Ours", "Table 2: Net2Net")}
    found = [outcome(Check("x", "a_s*", "b_s*", margin=m, **named), tmp_path) for m in (2.0, 0.5, 0.05)]
    assert found[0].published == pytest.approx(0.93) and found[0].within and found[0].published_epochs == 160
    wrong = Check("", "a_s*", "b_s*", published=("resnet20", "Table 2: Ours", "Table 2: Nobody"))
    with pytest.raises(UserError, match=r"published\.csv has 0 rows Table 2: Nobody of resnet20"):
        outcome(wrong, tmp_path)
    assert [one.verdict for one in found] == [HOLDS, UNDECIDED, UNDECIDED]
    assert found[0].says() == "x, to within 2 points of the published difference"
    plain = outcome(Check("x", "a_s*", "b_s*", margin=0.5, expect="equal"), tmp_path)
    assert plain.says().endswith("0.5 points")
    for expect, margin in (("equal", None), ("more", 0.5)):
        with pytest.raises(UserError, match="needs a margin"):
            Check("x", "a_s*", "b_s*", expect=expect, margin=margin)


def test_equal_values_of_all_seeds_have_no_interval(tmp_path: Path) -> None:
    for seed, values in enumerate([(0.9, 0.8), (0.86, 0.84), (0.85, 0.85)]):
        for name, value in zip("ab", values, strict=True):
            write_run(tmp_path / f"{name}_s{seed}", seed=seed, test_accuracy=value)
    found = outcome(Check("", "*_s*"), tmp_path)
    assert found.n == 3 and found.text() == "+85.00 points (the same in each, n = 3)"


def test_missing_rows_are_named(tmp_path: Path) -> None:
    scores(tmp_path, [0.9], [0.8])
    with pytest.raises(UserError, match=r"has no runs c_s\*"):
        outcome(Check("", "c_s*", "b_s*"), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"summary\.json"):
        outcome(Check("", "study", study=("a", "b"), quantity="first_loss"), tmp_path)


def test_two_runs_of_one_seed_in_one_pattern_are_refused(tmp_path: Path) -> None:
    scores(tmp_path, [0.9, 0.91], [0.8, 0.81])
    write_run(tmp_path / "a_shorter_s1", seed=1, test_accuracy=0.5)
    write_run(tmp_path / "b_shorter_s0", seed=0, test_accuracy=0.5)
    for first, second, names in (
        ("a_*", "b_s[0-9]", ("a_s1", "a_shorter_s1")),
        ("a_s[0-9]", "b_*", ("b_s0", "b_shorter_s0")),
    ):
        with pytest.raises(UserError, match=r"are both runs ._\* with seed [01]: ") as refused:
            outcome(Check("", first, second), tmp_path)
        assert all(str(tmp_path / name) in str(refused.value) for name in names)


def study(folder: Path, first: list[float | None], second: list[float]) -> None:
    rows = [
        {"initialisation": name, "by_seed": {"loss_when_learnt": losses}, "rates": ["0.1", "1"]}
        for name, losses in (("a", first), ("b", second))
    ]
    folder.mkdir(exist_ok=True)
    summary = {"settings": {"num_seeds": 3}, "rows": rows}
    (folder / "summary.json").write_text(json.dumps(summary))


def test_initialisations_of_a_study_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """Seeds vary much, paired differences little: means alone could not decide."""
    study(tmp_path / "study", [1.0, 2.0, 3.1], [0.9, 1.91, 3.0])
    check = Check("", "study", study=("a", "b"), quantity="loss_when_learnt")
    found = outcome(check, tmp_path)
    expected = stats.ttest_rel([1.0, 2.0, 3.1], [0.9, 1.91, 3.0])
    assert found.difference == pytest.approx(0.29 / 3) and found.n == 3 and found.verdict == HOLDS
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    study(tmp_path / "study", [1.0, None, 3.1], [0.9, 1.91, 3.0])
    with pytest.raises(UserError, match="a diverged"):
        outcome(check, tmp_path)
    named = Check("", "study", summary=("rows", 1, "rates"), at_least=2, at_most=2)
    assert outcome(named, tmp_path).verdict == HOLDS and outcome(named, tmp_path).n == 3


def test_bounds_on_a_number_of_a_study(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "summary.json").write_text('{"num_networks": 3, "errors": {"+1": 0.25}}')
    named = {"first": "study", "summary": ("errors", "+1")}
    bounds = [{"at_most": 0.25}, {"at_most": 0.2}, {"at_least": 0.2}, {"at_least": 0.3}]
    bounds.append({"at_least": 0, "at_most": 1})
    found = [outcome(Check("", **named, **bound), tmp_path) for bound in bounds]
    assert [one.verdict for one in found] == [HOLDS, CONTRADICTED, HOLDS, CONTRADICTED, HOLDS]
    assert found[0].text() == "0.25 (n = 3)"
    summary = tmp_path / "study" / "summary.json"
    summary.write_text('{"num_networks": 3, "errors": {"+1": -2e-16}, "largest_error": 0.25}')
    largest = outcome(Check("", "study", summary=("largest_error",), at_most=1), tmp_path)
    assert largest.text() == "0.25 (largest of n = 3)"
    # With minus signs, since browsers break lines at hyphens.
    assert outcome(Check("", **named, at_most=0), tmp_path).text() == "−2e−16 (n = 3)"


def test_bounds_on_a_number_of_each_network_use_its_interval(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    table = tmp_path / "study" / "table.csv"
    table.write_text("seed,task,error\n0,a,0.3\n1,a,0.5\n2,a,0.4\n0,b,9\n1,b,9\n2,b,9\n", encoding="utf-8")
    rows = ("table.csv", "error", "task=a")
    low, high = stats.ttest_1samp([0.3, 0.5, 0.4], 0).confidence_interval(0.95)
    assert 0.1 < low < 0.2 and 0.6 < high < 0.7
    verdicts = {0.7: HOLDS, 0.5: UNDECIDED, 0.3: UNDECIDED, 0.1: CONTRADICTED}
    for bound, verdict in verdicts.items():
        found = outcome(Check("", "study", rows=rows, at_most=bound), tmp_path)
        assert (found.verdict, found.n) == (verdict, 3) and found.interval == pytest.approx((low, high))
    assert found.text() == f"0.4 ({low:.3g} to {high:.3g}, n = 3)"
    same = outcome(Check("", "study", rows=("table.csv", "error", "task=b"), at_least=1), tmp_path)
    assert (same.verdict, same.text()) == (HOLDS, "9 (the same in each, n = 3)")
    with pytest.raises(UserError, match="has 6 rows of , not one of each network"):
        outcome(Check("", "study", rows=rows[:2], at_most=1), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"other\.csv"):
        outcome(Check("", "study", rows=("other.csv", "error"), at_most=1), tmp_path)


def test_contradictions_have_an_interval() -> None:
    """Except counts over all seeds."""
    outcomes = [one for standing in standings(registry(), RESULTS) for one in standing.outcomes]
    against = [one for one in outcomes if one.verdict == CONTRADICTED]
    assert len(against) > 10
    assert [one.check.says for one in against if one.interval is None] == [
        "Kaiming's fan-in diverges at three of the four rates (not at 1e-5)"
    ]


def test_an_entry_counts_whole_rows_and_shortened_ones(tmp_path: Path) -> None:
    scores(tmp_path / "kept", [0.9, 0.91, 0.92], [0.8, 0.81, 0.82001])
    command = "experiment=papers/table2 model=resnet20 method=ours,fixed_size,net2net"
    rows = (Rows("kept", "a_*", "whole"), Rows("kept", "b_*"), Rows("kept", "c_* + d_*", "other"))
    checks = (Check("", "kept/a_s*", "kept/b_s*"),)
    item = Item("x", "bird", "X", "A claim.", (command,), rows=rows, checks=tuple(map(asdict, checks)))
    for name in ("c_s0", "d_s2"):
        write_run(tmp_path / "kept" / name, seed=int(name[-1]), growth="random", lr_adapt="none")
    standing = Standing(item, tmp_path)
    assert (standing.num_whole, len(standing.jobs)) == (3, 9)
    assert standing.rows_text == "3 of 9; 3 shortened (16 epochs); 2 others (16 epochs)"
    assert standing.verdict == "reproduced; it takes 6 runs of 160 epochs"
    of_seeds = Standing(item, tmp_path, seeds=(1, 7))
    assert of_seeds.rows_text == "1 of 6; 1 shortened (16 epochs)"
    assert of_seeds.verdict == "reproduced; it takes 5 runs of 160 epochs"


def test_only_runs_with_an_infinite_loss_count_as_diverged(tmp_path: Path) -> None:
    item = registry().items["figure14"]
    path = tmp_path / "figure14" / "run" / "failure.json"
    for reason, diverged in (("the training loss became NaN or infinite at step 3", 1), ("no space", 0)):
        write_json(path, {"reason": reason, "overrides": ["seed=0"]})
        standing = Standing(item, tmp_path)
        assert (standing.num_diverged, standing.num_left) == (diverged, 30 - diverged)
        assert Standing(item, tmp_path, seeds=(1,)).num_diverged == 0


def test_an_entry_states_the_length_of_missing_runs(tmp_path: Path) -> None:
    scores(tmp_path / "kept", [0.9, 0.91, 0.92], [])
    command = "experiment=papers/table2 model=resnet20 method=ours"
    longer = f"{command} hydra.sweeper.params=null schedule.total_epochs=20,40,80 seed=0"
    whole = (Rows("kept", kind="whole"),)
    assert Standing(Item("x", "yuan", "X", "", (command, longer), rows=whole), tmp_path).verdict == (
        "run; the paper makes no statement about it; it takes 3 runs of 20, 40, 80 or 160 epochs"
    )
    short = Item("x", "yuan", "X", "", (longer,), rows=(Rows("kept"),))
    assert Standing(short, tmp_path).verdict.startswith("not run at this length; it takes 3 runs")


def entry(*checks: Check, rows: tuple[Rows, ...] = (Rows("kept", kind="whole"),)) -> Item:
    command = "experiment=papers/table2 model=resnet20 method=ours,fixed_size"
    return Item("x", "bird", "X", "A claim.", (command,), rows=rows, checks=tuple(map(asdict, checks)))


def test_only_statements_of_the_paper_at_full_length_are_reproduced(tmp_path: Path) -> None:
    scores(tmp_path / "kept", [0.9, 0.91, 0.92], [0.8, 0.81, 0.82001])
    scores(tmp_path / "short", [0.9, 0.91, 0.92], [0.8, 0.81, 0.82001])
    holds, asked = Check("", "kept/a_s*", "kept/b_s*"), Check("", "kept/a_s*", "kept/b_s*", ours=True)
    short = Check("", "short/b_s*", "short/a_s*")
    both = (Rows("kept", kind="whole", note="of fewer images"), Rows("short"))
    said = [
        (entry(asked), "run; the paper makes no statement about it; our own questions: 1 holds"),
        (entry(holds, asked), "reproduced; our own questions: 1 holds"),
        (entry(holds, short, rows=both), "reproduced; shortened: 1 contradicted"),
        (entry(holds, Check("", "kept/a_s*", "kept/b_s*", expect="less")), "1 holds, 1 contradicted"),
        (entry(holds, Check("", "kept/a_s0", "kept/b_s0")), "reproduced in part: 1 holds, 1 one run"),
        (entry(short, rows=both), "6 run at this length; shortened: 1 contradicted"),
    ]
    for item, verdict in said:
        assert Standing(item, tmp_path).verdict == verdict
    assert Standing(entry(rows=both), tmp_path).rows_text.endswith("of fewer images")


def test_width_gained_and_given_back_when_classes_change(tmp_path: Path) -> None:
    """3 channels with two classes, 9 with four, then 4 with three; NaN without such a task."""
    group = {"channels": "layer", "full_width": 9, "widths": [2, 3, 8, 9, 7, 4]}
    run = open_run(write_run(tmp_path / "run", stage_epochs=[1] * 6, groups={"layer": group}))
    changes = [QUANTITIES[name][0] for name in ("width_gained", "width_given_back")]
    assert all(math.isnan(change(run)) for change in changes)
    task = "data: {class_schedule: {0: [0, 1], 2: [0, 1, 2, 3], 4: [2, 5, 7]}}"
    (run.path / "config.yaml").write_text(task, encoding="utf-8")
    run = open_run(run.path)
    assert [change(run) for change in changes] == [6.0, 5.0]
