"""Rows that a method's name alone does not tell apart, and runs whose numbers do not compare."""

import json
from pathlib import Path

import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis.comparison import compare, frontier, frontier_seconds
from growlab.lab.analysis.identity import row_overrides
from growlab.lab.analysis.paired import compare_pairs, paired_table
from growlab.lab.analysis.results import load_runs, open_run
from growlab.lab.analysis.schedules import series_over_budgets, times_to_scores
from growlab.lab.analysis.tables import summarise, unique_names
from growlab.recipes.papers.paper_table import paper_table
from tests.analysis.fake_runs import write_run

NLL = {"name": "nll", "higher_is_better": False}


def rows_of(folder: Path) -> list:
    return summarise(load_runs(folder), lambda sentence: None)


def changed(folder: Path, **values: object) -> None:
    path = folder / "results.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


@pytest.mark.parametrize(
    "setting", ["gradient_clip_val=0.01", "accumulate_grad_batches=8", "limit_train_batches=3"]
)
def test_what_lightning_trains_otherwise_is_another_method(setting: str, tmp_path: Path) -> None:
    write_run(tmp_path / "a", growth="none", lr_adapt="none", test_accuracy=0.9)
    override = f"trainer.{setting}"
    write_run(tmp_path / "b", growth="none", lr_adapt="none", test_accuracy=0.5, overrides=[override])
    said: list[str] = []
    rows = summarise(load_runs(tmp_path), said.append)
    assert [row.n for row in rows] == [1, 1] and said == []
    assert {row.method for row in rows} == {"fixed-size", f"fixed-size, {override}"}


@pytest.mark.parametrize(
    "override",
    ["trainer.devices=4", "+trainer.strategy.static_graph=true", "trainer.precision=32-true", "trainer=gpu"],
)
def test_where_it_ran_is_none(override: str) -> None:
    assert row_overrides([override]) == ()


def test_tables_of_pairs_and_papers_name_every_row_differently(tmp_path: Path) -> None:
    number = 0
    for optimizer in ("sgd", "adam"):
        for precision in ("32-true", "bf16-mixed"):
            for epochs in (4, 8):
                about = {"optimizer": optimizer, "precision": precision, "test_accuracy": 0.8 + number / 100}
                write_run(tmp_path / str(number), stage_epochs=[epochs], **about)
                number += 1
    for name in ("one", "another"):
        write_run(tmp_path / name, stage_epochs=[16], experiment=name, test_accuracy=0.7)
    rows = rows_of(tmp_path)
    names = unique_names(rows)
    assert len(set(names)) == len(rows) == 10
    assert "ours + stagewise_norm, sgd, 4 epochs, bf16-mixed" in names
    comparisons = compare_pairs(rows)
    lines = [tuple(row[:2]) for row in paired_table(comparisons).rows]
    assert len(set(lines)) == len(lines) == 45
    named = compare_pairs(rows, names[0])
    assert len(named) == 9 and all(one.against is rows[0] for one in named)
    with pytest.raises(UserError, match="there is no method zzz among the runs; choose one of: "):
        compare_pairs(rows, "zzz")
    assert len(paper_table(rows).rows) == 10


def test_what_no_field_tells_apart_needs_no_more_words(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", growth="none", lr_adapt="none", optimizer="adam", precision="bf16-mixed")
    assert sorted(unique_names(rows_of(tmp_path))) == ["fixed-size", "ours + stagewise_norm"]


def test_curves_over_budgets_are_of_one_optimizer_and_precision(tmp_path: Path) -> None:
    for optimizer, precision in (("sgd", "32-true"), ("adam", "32-true"), ("sgd", "bf16-mixed")):
        for epochs in (5, 10):
            folder = tmp_path / f"{optimizer}{precision}{epochs}"
            about = {"optimizer": optimizer, "precision": precision, "growth": "none", "lr_adapt": "none"}
            write_run(folder, stage_epochs=[epochs], test_accuracy=epochs / 20, **about)
    series = series_over_budgets(rows_of(tmp_path))
    assert sorted(one.name for one in series) == [
        "fixed-size, adam, 32-true",
        "fixed-size, sgd, 32-true",
        "fixed-size, sgd, bf16-mixed",
    ]
    assert all([point.score for point in one.points] == [0.25, 0.5] for one in series)


def test_runs_of_several_metrics_have_no_time_to_a_score_and_no_frontier(tmp_path: Path) -> None:
    for epochs in (4, 8):
        write_run(tmp_path / f"a{epochs}", growth="none", lr_adapt="none", stage_epochs=[epochs])
        other = write_run(tmp_path / f"b{epochs}", stage_epochs=[epochs], overrides=["objective=custom"])
        content = json.loads((other / "results.json").read_text())
        changed(other, metric=NLL, test_nll=0.3)
        content = json.loads((other / "results.json").read_text())
        del content["test_accuracy"]
        (other / "results.json").write_text(json.dumps(content))
    rows = rows_of(tmp_path)
    assert {row.metric.name for row in rows} == {"accuracy", "nll"}
    with pytest.raises(UserError, match="judged by one metric, not accuracy and nll"):
        times_to_scores(rows)
    with pytest.raises(UserError, match="judged by one metric"):
        frontier(load_runs(tmp_path))


def test_seconds_of_several_devices_do_not_compare(tmp_path: Path) -> None:
    write_run(tmp_path / "fixed", growth="none", lr_adapt="none", seconds=100.0)
    write_run(tmp_path / "ours", seconds=25.0, world_size=4)
    assert [row.speedup for row in rows_of(tmp_path)] == [None, None]
    with pytest.raises(UserError, match=r"seconds of several machines do not compare \(.*, 4 processes.*\)"):
        frontier_seconds(load_runs(tmp_path))
    write_run(tmp_path / "alike", growth="none", lr_adapt="none", seconds=50.0, seed=1, world_size=4)
    assert [row.speedup for row in rows_of(tmp_path)] == [None, 2.0]


def test_with_a_budget_its_epochs_are_the_hundred_percent(tmp_path: Path) -> None:
    budget = {"schedule": {"budget": 10}, "reference_epochs": 10}
    about = {"growth": "none", "lr_adapt": "none", "cost_percent": 100.0}
    write_run(tmp_path / "full", stage_epochs=[10], **about, **budget)
    write_run(tmp_path / "grown", stage_epochs=[8, 7], cost_percent=100.0, **budget)
    rows = rows_of(tmp_path)
    assert [row.reference_epochs for row in rows] == [10, 10]
    assert [row.cost_percent for row in rows] == [100.0, 100.0]


def test_a_seed_without_a_score_is_told_and_left_out_of_pairs(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", seed=seed, test_accuracy=0.9)
        write_run(tmp_path / f"b{seed}", growth="none", lr_adapt="none", seed=seed, test_accuracy=0.8)
    changed(tmp_path / "a1", test_accuracy=None)
    content = json.loads((tmp_path / "b2" / "results.json").read_text())
    del content["test_accuracy"]
    (tmp_path / "b2" / "results.json").write_text(json.dumps(content))
    said: list[str] = []
    (comparison,) = compare_pairs(summarise(load_runs(tmp_path), said.append))
    assert comparison.differences == (pytest.approx(0.1),)
    assert len(said) == 2 and all("1 of 3 runs of " in one for one in said)


def test_an_epoch_that_stands_twice_counts_as_it_was_trained_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    lines = (run / "metrics.csv").read_text().splitlines()
    (run / "metrics.csv").write_text("\n".join([*lines[:4], lines[2], *lines[3:]]) + "\n")
    table = open_run(run).metrics
    assert list(table["epoch"]) == sorted(set(table["epoch"])) == list(range(len(lines) - 1))
    assert compare(load_runs(tmp_path)) is not None
