"""The table's numbers against hand-computed ones, and names that distinguish its rows."""

import csv
import io
import json
import os
from itertools import product

import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis import load_runs, markdown, summarise, tables
from growlab.lab.analysis.comparison import frontier, frontier_seconds
from growlab.lab.analysis.grid import Grid
from growlab.lab.analysis.paired import compare_pairs, paired_table
from growlab.lab.analysis.schedules import series_over_budgets, times_to_scores
from growlab.lab.analysis.tables import table, unique_names, write_table
from growlab.recipes.papers.paper_table import paper_table

from .fake_runs import FIXED, changed, rows_of, write_run


def by_method(folder):
    return {row.method: row for row in rows_of(folder)}


def test_mean_sample_std_and_speedup_over_seeds(tmp_path):
    for seed, accuracy, seconds in ((0, 0.80, 100.0), (1, 0.82, 110.0), (2, 0.87, 90.0)):
        about = {"seed": seed, "test_accuracy": accuracy}
        write_run(tmp_path / f"ours{seed}", **about, seconds=seconds, cost_percent=61.4)
        about["test_accuracy"] += 0.03
        write_run(tmp_path / f"fixed{seed}", **about, **FIXED, seconds=1.7 * seconds)
    write_run(tmp_path / "net2net", growth="net2net", lr_adapt="none", test_accuracy=0.785, seconds=85.0)
    rows = by_method(tmp_path)
    assert list(rows) == ["fixed-size", "ours + stagewise_norm", "net2net"]
    ours, fixed, net2net = rows["ours + stagewise_norm"], rows["fixed-size"], rows["net2net"]
    assert ours.n == 3 and ours.score_mean == pytest.approx(0.83)
    # Deviations -3, -1, +4: sqrt(26 / 2).
    assert ours.score_std == pytest.approx(0.01 * 13**0.5)
    assert ours.cost_percent == pytest.approx(61.4)
    assert ours.seconds == pytest.approx(100.0) and ours.speedup == pytest.approx(1.7)
    assert fixed.speedup is None and fixed.cost_percent == pytest.approx(100)
    assert net2net.score_std is None and net2net.n == 1
    assert net2net.speedup == pytest.approx(170 / 85)
    lines = markdown(list(rows.values())).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["method", "cost %", "accuracy % (n)", "seconds", "speed-up"]
    assert cells[3] == ["ours + stagewise_norm", "61.4", "83.00 ± 3.61 (3)", "100", "1.70x"]
    assert cells[4][2:] == ["78.50 (1)", "85.0", "2.00x"]
    assert len({len(line) for line in lines[:5]}) == 1


def test_runs_on_a_part_of_the_data_are_not_compared_with_others(tmp_path):
    """Their epochs cost less."""
    write_run(tmp_path / "fixed", **FIXED, seconds=300)
    write_run(tmp_path / "ours", overrides=["data.limit_train=null"], seconds=200)
    write_run(tmp_path / "part", overrides=["data.limit_train=500"], stage_epochs=(4, 4), seconds=20)
    rows = rows_of(tmp_path)
    found = {(row.group.data, row.method): (row.reference_epochs, row.speedup) for row in rows}
    assert found == {
        ("cifar10", "fixed-size"): (16, None),
        ("cifar10", "ours + stagewise_norm"): (16, pytest.approx(1.5)),
        ("cifar10 limit_train=500", "ours + stagewise_norm"): (8, None),
    }
    assert "resnet20 on cifar10, 16 epochs; resnet20 on cifar10 limit_train=500, 8 epochs" in markdown(rows)


@pytest.mark.parametrize(("share", "warns"), [(0.99, False), (0.25, True)])
def test_a_table_warns_of_networks_of_different_sizes(tmp_path, share, warns):
    write_run(tmp_path / "whole", train_flops=1_000_000, **FIXED)
    write_run(tmp_path / "small", train_flops=share * 1e6, overrides=["model.width=8"], **FIXED)
    words = "Rows of resnet20 on cifar10 differ in what an epoch at full width costs, by up to 4 times: each row's"
    assert (words in markdown(rows_of(tmp_path))) == warns


def test_costs_of_runs_of_different_length_have_one_reference(tmp_path):
    write_run(tmp_path / "fixed16", stage_epochs=(16,), **FIXED)
    write_run(tmp_path / "fixed10", stage_epochs=(10,), **FIXED)
    # A run of equal FLOPs records its cost relative to 16 epochs.
    equal = {"overrides": ["schedule.equal_flops=true"], "cost_percent": 62.5, "reference_epochs": 16}
    write_run(tmp_path / "equal", stage_epochs=(10,), seconds=300, **equal, **FIXED)
    write_run(tmp_path / "ours", cost_percent=61.4)
    write_run(tmp_path / "short", stage_epochs=(4, 6), seconds=150, cost_percent=80)
    rows = rows_of(tmp_path)
    assert {(row.method, row.group.epochs): row.cost_percent for row in rows} == {
        ("fixed-size", 16): 100,
        ("fixed-size", 10): pytest.approx(62.5),
        ("fixed-size, schedule.equal_flops=true", 10): pytest.approx(62.5),
        ("ours + stagewise_norm", 16): pytest.approx(61.4),
        ("ours + stagewise_norm", 10): pytest.approx(80 * 10 / 16),
    }
    assert {row.reference_epochs for row in rows} == {16}
    text = markdown(rows)
    assert text.startswith("| epochs |") and "resnet20 on cifar10, 16 epochs" in text
    # With a budget, its epochs are 100 %.
    budget = {"schedule": {"budget": 10}, "reference_epochs": 10, "cost_percent": 100.0}
    write_run(tmp_path / "budget" / "full", stage_epochs=[10], **FIXED, **budget)
    write_run(tmp_path / "budget" / "grown", stage_epochs=[8, 7], **budget)
    assert [(row.reference_epochs, row.cost_percent) for row in rows_of(tmp_path / "budget")] == [(10, 100.0)] * 2


@pytest.mark.parametrize(
    "difference",
    [
        *({"stage_epochs": (10,)}, {"data": "cifar100"}, {"precision": "bf16-mixed"}, {"cost_percent": 25.0}),
        *({"machine": {"name": "another", "threads": 2}}, {"overrides": ["compile=true"]}, {"world_size": 4}),
    ],
    ids=str,
)
def test_no_speedup_against_a_fixed_size_run_of_other_work(tmp_path, difference):
    write_run(tmp_path / "ours", seconds=50)
    write_run(tmp_path / "other", **FIXED, seconds=100, **difference)
    assert by_method(tmp_path)["ours + stagewise_norm"].speedup is None
    write_run(tmp_path / "same", **FIXED, seed=1, seconds=150)
    assert next(row for row in rows_of(tmp_path) if row.group.growth == "ours").speedup == pytest.approx(3)


def test_speedup_is_against_the_fixed_size_run_with_the_nearest_settings(tmp_path):
    write_run(tmp_path / "fixed", seconds=100, **FIXED)
    write_run(tmp_path / "fixed_lr", seconds=120, overrides=["optimizer.lr=0.2"], **FIXED)
    write_run(tmp_path / "ours", seconds=50, overrides=["growth.noise_std=0"])
    write_run(tmp_path / "ours_lr", seconds=50, overrides=["optimizer.lr=0.20"])
    rows = by_method(tmp_path)
    assert rows["ours + stagewise_norm, growth.noise_std=0"].speedup == pytest.approx(2)
    assert rows["ours + stagewise_norm, optimizer.lr=0.2"].speedup == pytest.approx(2.4)


def test_speedups_take_time_linear_in_the_number_of_rows(tmp_path, monkeypatch):
    calls, own = [], tables._seconds_by_machine
    monkeypatch.setattr(tables, "_seconds_by_machine", lambda runs: calls.append(1) or own(runs))
    for number in range(20):
        overrides = [f"optimizer.lr={number}"]
        write_run(tmp_path / f"fixed{number}", seconds=100 + number, overrides=overrides, **FIXED)
        write_run(tmp_path / f"ours{number}", seconds=50, overrides=overrides)
    rows = rows_of(tmp_path)
    assert len(rows) == 40 and len(calls) == 40
    for row in rows:
        number = float(row.group.overrides[-1].partition("=")[2])
        assert row.speedup == (None if row.group.is_fixed_size else pytest.approx((100 + number) / 50))


def test_seeds_on_two_machines_are_each_compared_with_their_own_machine(tmp_path):
    slow, fast = {"name": "slow", "threads": 1}, {"name": "fast", "threads": 8}
    write_run(tmp_path / "a", seed=0, seconds=100, machine=slow)
    write_run(tmp_path / "b", seed=1, seconds=10, machine=fast)
    write_run(tmp_path / "c", seed=0, seconds=150, machine=slow, **FIXED)
    assert by_method(tmp_path)["ours + stagewise_norm"].speedup == pytest.approx(1.5)
    with pytest.raises(UserError, match=r"seconds of several machines are not comparable \(fast, 8 threads; slow, 1"):
        frontier_seconds(load_runs(tmp_path))
    write_run(tmp_path / "d", seed=1, seconds=20, machine=fast, **FIXED)
    assert by_method(tmp_path)["ours + stagewise_norm"].speedup == pytest.approx(1.75)


def test_overrides_make_rows_and_seeds_do_not(tmp_path):
    write_run(tmp_path / "a", seed=0, overrides=["data.root=/here", "trainer.accelerator=cpu"])
    write_run(tmp_path / "b", seed=1, overrides=["data.root=/there", "logger=wandb"])
    write_run(tmp_path / "c", seed=0, overrides=["growth.output_multiplier=False"])
    write_run(tmp_path / "d", seed=0, overrides=["trainer.gradient_clip_val=0.01"])
    assert {method: row.n for method, row in by_method(tmp_path).items()} == {
        "ours + stagewise_norm": 2,
        "ours + stagewise_norm, growth.output_multiplier=false": 1,
        "ours + stagewise_norm, trainer.gradient_clip_val=0.01": 1,
    }


def test_a_seed_run_twice_counts_once_with_the_newest(tmp_path):
    old = write_run(tmp_path / "z_old", seed=0, test_accuracy=0.5)
    new = write_run(tmp_path / "a_new", seed=0, test_accuracy=0.9)
    write_run(tmp_path / "other", seed=1, test_accuracy=0.7)
    os.utime(old / "results.json", (1, 1))
    reports = []
    (row,) = summarise(load_runs(tmp_path), reports.append)
    assert row.n == 2 and row.score_mean == pytest.approx(0.8)
    assert len(reports) == 1 and str(old) in reports[0] and str(new) in reports[0]
    older = write_run(tmp_path / "y_older", seed=0)
    os.utime(older / "results.json", (2, 2))
    summarise(load_runs(tmp_path), reports.append)
    assert len(reports) == 2 and reports[1].startswith(f"left out {old} and 1 more: {new} is a newer run")


def test_a_missing_or_nan_score_is_left_out_of_means_and_pairs(tmp_path):
    for seed, score in enumerate((0.8, None, float("nan"), ...)):
        changed(write_run(tmp_path / f"a{seed}", seed=seed), test_accuracy=score)
        write_run(tmp_path / f"b{seed}", **FIXED, seed=seed, test_accuracy=0.7)
    warnings: list[str] = []
    fixed, row = summarise(load_runs(tmp_path), warnings.append)
    assert (row.n, row.score_mean, row.score_std, len(row.runs)) == (1, 0.8, None, 4)
    assert warnings == [
        "3 of 4 runs of ours + stagewise_norm have no finite test accuracy: its row averages the others."
    ]
    (comparison,) = compare_pairs([fixed, row])
    assert comparison.differences == (pytest.approx(0.1),)


def test_csv_and_json_have_the_same_plain_numbers(tmp_path):
    write_run(tmp_path / "a", seed=0, test_accuracy=0.8, overrides=["growth.x=[1,2]"])
    write_run(tmp_path / "b", seed=1, test_accuracy=0.9, overrides=["growth.x=[1,2]"])
    rows = rows_of(tmp_path)
    (from_json,) = json.loads(write_table(rows, "json"))
    (from_csv,) = csv.DictReader(io.StringIO(write_table(rows, "csv")))
    assert list(from_json) == list(from_csv)
    assert from_json["score_mean"] == pytest.approx(0.85)
    assert float(from_csv["score_mean"]) == from_json["score_mean"]
    assert from_json["score_std"] == pytest.approx(0.5**0.5 * 0.1)
    assert from_json["seeds"] == [0, 1] and from_csv["seeds"] == "0 1"
    assert from_json["speedup"] is None and from_csv["speedup"] == ""
    assert from_csv["overrides"] == "growth.x=[1,2]"


def test_columns_appear_where_rows_differ_and_shared_overrides_once(tmp_path):
    write_run(tmp_path / "a", overrides=["data.validation=none"])
    write_run(tmp_path / "b", growth="net2net", overrides=["data.validation=none", "growth.noise_std=0"])
    rows = rows_of(tmp_path)
    names = {row.group.growth: row.method for row in rows}
    assert names["ours"] == "ours + stagewise_norm"
    assert names["net2net"].endswith(", growth.noise_std=0")
    text = markdown(rows)
    assert text.startswith("| method ") and text.count("data.validation=none") == 1
    write_run(tmp_path / "c", experiment="digits", model="convnet4", data="digits")
    assert markdown(rows_of(tmp_path)).startswith("| model ")


def test_translations_are_compared_by_bleu_and_texts_by_bits(tmp_path):
    scores = {"net2net": (31.0, 3.6), "ours": (31.8, 3.4), "none": (38.1, 2.7)}
    for growth, (bleu, bits) in scores.items():
        about = {"growth": growth, "test_accuracy": 0.5}
        write_run(tmp_path / "t" / growth, **about, model="t", test_bleu=bleu)
        write_run(tmp_path / "c" / growth, **about, model="c", test_bits_per_character=bits)
    translation, text = rows_of(tmp_path / "t"), rows_of(tmp_path / "c")
    assert [row.score_text for row in translation] == ["38.10 (1)", "31.80 (1)", "31.00 (1)"]
    assert [row.score_text for row in text] == ["2.70 (1)", "3.40 (1)", "3.60 (1)"]  # fewer are better
    assert " BLEU (n) |" in markdown(translation) and "BLEU: test, mean" in markdown(translation)
    both = table([*translation, *text])
    column = both.header.index("metric")
    assert {row[column] for row in both.rows} == {"BLEU", "bits per character"} and "score (n)" in both.header
    assert (translation[0].record["metric"], translation[0].record["score_mean"]) == ("BLEU", 38.1)
    assert all(pair.row.score_mean < pair.against.score_mean for pair in compare_pairs(text))


def test_other_objectives_are_compared_by_their_own_metric(tmp_path):
    for seed, (name, growth, score) in enumerate(
        (("rmse", "ours", 0.0625), ("rmse", "none", 0.05), ("mae", "ours", 0.5))
    ):
        about = {"metric": {"name": name, "higher_is_better": False}, f"test_{name}": score}
        overrides = [f"objective={name}", f"name={name}"]
        run = write_run(tmp_path / str(seed), growth=growth, stage_epochs=(4, 4), overrides=overrides)
        changed(run, **about, test_accuracy=...)
    rows = rows_of(tmp_path)
    found = sorted((row.metric.label, row.score_text) for row in rows)
    assert found == [("mae", "0.5 (1)"), ("rmse", "0.05 (1)"), ("rmse", "0.0625 (1)")]
    (pair,) = compare_pairs(rows)
    assert pair.row.metric.name == pair.against.metric.name == "rmse"
    assert pair.row.metric.quality(0.1) > pair.row.metric.quality(0.2)
    assert all("name=" not in row.method for row in rows)
    with pytest.raises(UserError, match="needs runs with one metric, not mae and rmse"):
        times_to_scores(rows)
    with pytest.raises(UserError, match="needs runs with one metric"):
        frontier(load_runs(tmp_path))


def test_small_differences_have_the_digits_of_their_metric(tmp_path):
    for seed in range(3):
        for growth, score in (("ours", 0.0123), ("none", 0.0126 + 1e-4 * seed)):
            about = {"metric": {"name": "rmse", "higher_is_better": False}, "test_rmse": score}
            write_run(tmp_path / f"{growth}{seed}", growth=growth, seed=seed, test_accuracy=None, **about)
    (cells,) = paired_table(compare_pairs(rows_of(tmp_path))).rows
    # Differences of 3, 4 and 5: the interval reaches 4.3027 / sqrt(3) on both sides.
    assert cells[2:] == ["3", "**−0.0004**", "−0.0006484 to −0.0001516"]


@pytest.mark.parametrize(("sort", "found"), [("test_rmse", "abc"), ("-test_rmse", "bac")])
def test_rows_without_the_number_that_they_are_sorted_by_come_last(tmp_path, sort, found):
    for model, score in (("a", 0.25), ("b", 0.5), ("c", None)):
        write_run(tmp_path / model, model=model, test_rmse=score)
    assert (
        "".join(row[0] for row in tables.answer(rows_of(tmp_path), ["model"], ["test_rmse"], sort=sort).rows) == found
    )


def test_rows_are_distinguished_by_the_optimizers_state(tmp_path):
    for method in ("ours_without_state", "ours_with_state", "growing_vt"):
        for optimizer in ("sgd", "adam"):
            about = {"lr_adapt": "none", "optimizer": optimizer, "overrides": [f"method={method}"]}
            run = write_run(tmp_path / method / optimizer, seed=int(method == "growing_vt"), **about)
            # Only the overrides are known.
            (run / "config.yaml").unlink()
    # By default growing resets the state of SGD and keeps that of Adam.
    assert {(row.method, row.group.optimizer, row.n) for row in rows_of(tmp_path)} == {
        ("ours, optimizer_state=reset", "sgd", 1),
        ("ours, optimizer_state=inherit", "sgd", 1),
        ("ours", "sgd", 1),
        ("ours, optimizer_state=reset", "adam", 1),
        ("ours", "adam", 2),
    }


def test_tables_of_pairs_and_papers_name_every_row_differently(tmp_path):
    kinds = product(("sgd", "adam"), ("32-true", "bf16-mixed"), (4, 8))
    for number, (optimizer, precision, epochs) in enumerate(kinds):
        about = {"optimizer": optimizer, "precision": precision, "test_accuracy": 0.8 + number / 100}
        write_run(tmp_path / str(number), stage_epochs=[epochs], **about)
    for name in ("one", "another"):
        write_run(tmp_path / name, stage_epochs=[16], experiment=name, test_accuracy=0.7)
    rows = rows_of(tmp_path)
    names = unique_names(rows)
    assert len(set(names)) == len(rows) == 10
    assert "ours + stagewise_norm, sgd, 4 epochs, bf16-mixed" in names
    lines = [tuple(row[:2]) for row in paired_table(compare_pairs(rows)).rows]
    assert len(set(lines)) == len(lines) == 45
    named = compare_pairs(rows, names[0])
    assert len(named) == 9 and all(one.against is rows[0] for one in named)
    assert len(paper_table(rows).rows) == 10
    # Names have no unnecessary words.
    for name, about in (("a", {}), ("b", {**FIXED, "optimizer": "adam", "precision": "bf16-mixed"})):
        write_run(tmp_path / "two" / name, **about)
    assert sorted(unique_names(rows_of(tmp_path / "two"))) == ["fixed-size", "ours + stagewise_norm"]
    # Curves over budgets are of one optimizer and precision.
    series = [one for one in series_over_budgets(rows) if len(one.points) > 1]
    assert len(series) == 4 and "ours + stagewise_norm, adam, 32-true, resnet20_cifar10" in {one.name for one in series}


def test_a_table_fits_a_terminal_with_whole_words() -> None:
    names = ["ours + stagewise_norm, schedule.learning_rate.progress_unit=cost", "fixed-size"]
    rows = [["40", name, "28.8", "**78.02 ± 0.61 (3)**", "135", "0.78x"] for name in names]
    grid = Grid(["epochs", "method", "cost %", "accuracy % (n)", "seconds", "speed-up"], rows, 2, "Cost.")
    assert grid.fitted(130) == grid.markdown()
    for columns, number in ((80, 1), (60, 2)):
        text = grid.fitted(columns)
        assert max(map(len, text.splitlines())) <= columns and text.endswith("\n\nCost.\n")
        assert text.count("| method ") == number and text.count("**78.02 ± 0.61 (3)**") == 2
        body = [line.split("|") for line in text.split("\n\n")[0].splitlines()]
        words = [cells[2].strip() for cells in body if cells[2].strip("- ")][1:]
        assert "".join(words).replace(" ", "") == "".join(names).replace(" ", "")
        assert words[0].startswith("ours +") and "stagewise_norm," in " ".join(words)
