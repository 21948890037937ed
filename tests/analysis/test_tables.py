"""The table's numbers against hand-computed ones."""

import csv
import io
import json
import os

import pytest

from growlab.lab.analysis import load_runs, markdown, summarise
from growlab.lab.analysis.paired import compare_pairs
from growlab.lab.analysis.tables import csv_text, grid, json_text

from .fake_runs import write_run


def rows_of(folder):
    return {row.method: row for row in summarise(load_runs(folder))}


def test_mean_sample_std_and_speedup_over_seeds(tmp_path):
    for seed, accuracy, seconds in ((0, 0.80, 100.0), (1, 0.82, 110.0), (2, 0.87, 90.0)):
        write_run(
            tmp_path / f"ours{seed}", seed=seed, test_accuracy=accuracy, seconds=seconds, cost_percent=61.4
        )
        fixed = {"growth": "none", "lr_adapt": "none", "seconds": 1.7 * seconds}
        write_run(tmp_path / f"fixed{seed}", seed=seed, test_accuracy=accuracy + 0.03, **fixed)
    write_run(tmp_path / "net2net", growth="net2net", lr_adapt="none", test_accuracy=0.785, seconds=85.0)
    rows = rows_of(tmp_path)
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


def test_runs_on_a_part_of_the_data_are_of_other_data(tmp_path):
    """Their epochs cost less: neither cost nor seconds compare with those of all the data."""
    part = {"overrides": ["data.limit_train=500"]}
    write_run(tmp_path / "fixed", growth="none", lr_adapt="none", seconds=300)
    write_run(tmp_path / "ours", overrides=["data.limit_train=null"], seconds=200)
    write_run(tmp_path / "part", **part, stage_epochs=(4, 4), seconds=20)
    rows = summarise(load_runs(tmp_path))
    found = {(row.group.data, row.method): (row.reference_epochs, row.speedup) for row in rows}
    assert found == {
        ("cifar10", "fixed-size"): (16, None),
        ("cifar10", "ours + stagewise_norm"): (16, pytest.approx(1.5)),
        ("cifar10 limit_train=500", "ours + stagewise_norm"): (8, None),
    }
    assert "resnet20 on cifar10, 16 epochs; resnet20 on cifar10 limit_train=500, 8 epochs" in markdown(rows)


@pytest.mark.parametrize(("share", "told"), [(1.0, False), (0.99, False), (0.25, True)])
def test_networks_of_several_sizes_in_one_table_are_told(tmp_path, share, told):
    fixed = {"growth": "none", "lr_adapt": "none", "stage_epochs": (4,)}
    write_run(tmp_path / "whole", train_flops=1_000_000, **fixed)
    write_run(tmp_path / "small", train_flops=share * 1e6, overrides=["model.width=8"], **fixed)
    said = "Rows of resnet20 on cifar10 differ in what an epoch at full width costs, by up to 4 times: each row's"
    assert (said in markdown(summarise(load_runs(tmp_path)))) == told


def test_cost_of_runs_of_different_length_shares_one_reference(tmp_path):
    fixed = {"growth": "none", "lr_adapt": "none"}
    write_run(tmp_path / "fixed16", stage_epochs=(16,), **fixed)
    write_run(tmp_path / "fixed10", stage_epochs=(10,), **fixed)
    # As the experiment writes a run of equal FLOPs: its cost is already relative to 16 epochs.
    equal = {"overrides": ["schedule.equal_flops=true"], "cost_percent": 62.5, "reference_epochs": 16}
    write_run(tmp_path / "equal", stage_epochs=(10,), seconds=300, **equal, **fixed)
    write_run(tmp_path / "ours", cost_percent=61.4)
    rows = summarise(load_runs(tmp_path))
    found = {(row.method, row.group.epochs): (row.cost_percent, row.reference_epochs) for row in rows}
    assert found["fixed-size", 16] == (100, 16)
    assert found["fixed-size", 10] == (pytest.approx(62.5), 16)
    assert found["fixed-size, schedule.equal_flops=true", 10] == (pytest.approx(62.5), 16)
    assert found["ours + stagewise_norm", 16] == (pytest.approx(61.4), 16)
    text = markdown(rows)
    assert text.startswith("| epochs |") and "resnet20 on cifar10, 16 epochs" in text


@pytest.mark.parametrize(
    "difference",
    [
        {"stage_epochs": (10,)},
        {"data": "cifar100"},
        {"model": "mlp"},
        {"precision": "bf16-mixed"},
        {"machine": {"name": "another", "threads": 2}},
        {"overrides": ["compile=true"]},
        {"cost_percent": 25.0},
    ],
)
def test_no_speedup_against_a_fixed_size_run_that_did_other_work(tmp_path, difference):
    write_run(tmp_path / "ours", seconds=50)
    assert rows_of(tmp_path)["ours + stagewise_norm"].speedup is None
    write_run(tmp_path / "other", growth="none", lr_adapt="none", seconds=100, **difference)
    assert rows_of(tmp_path)["ours + stagewise_norm"].speedup is None
    write_run(tmp_path / "same", growth="none", lr_adapt="none", seed=1, seconds=150)
    rows = summarise(load_runs(tmp_path))
    assert next(row for row in rows if row.group.growth == "ours").speedup == pytest.approx(3)


def test_speedup_is_against_the_fixed_size_run_with_the_nearest_settings(tmp_path):
    fixed = {"growth": "none", "lr_adapt": "none"}
    write_run(tmp_path / "fixed", seconds=100, **fixed)
    write_run(tmp_path / "fixed_lr", seconds=120, overrides=["optimizer.lr=0.2"], **fixed)
    write_run(tmp_path / "ours", seconds=50, overrides=["growth.noise_std=0"])
    write_run(tmp_path / "ours_lr", seconds=50, overrides=["optimizer.lr=0.20"])
    rows = rows_of(tmp_path)
    assert rows["ours + stagewise_norm, growth.noise_std=0"].speedup == pytest.approx(2)
    assert rows["ours + stagewise_norm, optimizer.lr=0.2"].speedup == pytest.approx(2.4)


def test_overrides_make_rows_and_seeds_do_not(tmp_path):
    write_run(tmp_path / "a", seed=0, overrides=["data.root=/here", "trainer.accelerator=cpu"])
    write_run(tmp_path / "b", seed=1, overrides=["data.root=/there", "logger=wandb"])
    write_run(tmp_path / "c", seed=0, overrides=["growth.output_multiplier=False"])
    rows = rows_of(tmp_path)
    assert {method: row.n for method, row in rows.items()} == {
        "ours + stagewise_norm": 2,
        "ours + stagewise_norm, growth.output_multiplier=false": 1,
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


def test_missing_and_nan_accuracy_are_left_out_of_mean_and_n(tmp_path):
    write_run(tmp_path / "a", seed=0, test_accuracy=0.8)
    write_run(tmp_path / "b", seed=1, test_accuracy=None)
    write_run(tmp_path / "c", seed=2, test_accuracy=float("nan"))
    said: list[str] = []
    (row,) = summarise(load_runs(tmp_path), said.append)
    assert (row.n, row.score_mean, row.score_std) == (1, 0.8, None)
    assert said == [
        "2 of 3 runs of ours + stagewise_norm have no finite test accuracy: its row is of the others."
    ]
    assert len(row.runs) == 3


def test_csv_and_json_hold_the_same_plain_numbers(tmp_path):
    write_run(tmp_path / "a", seed=0, test_accuracy=0.8, overrides=["growth.x=[1,2]"])
    write_run(tmp_path / "b", seed=1, test_accuracy=0.9, overrides=["growth.x=[1,2]"])
    rows = summarise(load_runs(tmp_path))
    (from_json,) = json.loads(json_text(rows))
    (from_csv,) = csv.DictReader(io.StringIO(csv_text(rows)))
    assert list(from_json) == list(from_csv)
    assert from_json["score_mean"] == pytest.approx(0.85)
    assert float(from_csv["score_mean"]) == from_json["score_mean"]
    assert from_json["score_std"] == pytest.approx(0.5**0.5 * 0.1)
    assert from_json["seeds"] == [0, 1] and from_csv["seeds"] == "0 1"
    assert from_json["speedup"] is None and from_csv["speedup"] == ""
    assert from_csv["overrides"] == "growth.x=[1,2]"


def test_columns_appear_only_where_rows_differ(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", experiment="digits", model="convnet4", data="digits")
    assert markdown(summarise(load_runs(tmp_path))).startswith("| model ")
    assert markdown(summarise(load_runs(tmp_path / "a"))).startswith("| method ")


def test_seeds_on_two_machines_are_each_compared_with_their_own_machine(tmp_path):
    slow, fast = {"name": "slow", "threads": 1}, {"name": "fast", "threads": 8}
    fixed = {"growth": "none", "lr_adapt": "none"}
    write_run(tmp_path / "a", seed=0, seconds=100, machine=slow)
    write_run(tmp_path / "b", seed=1, seconds=10, machine=fast)
    write_run(tmp_path / "c", seed=0, seconds=150, machine=slow, **fixed)
    assert rows_of(tmp_path)["ours + stagewise_norm"].speedup == pytest.approx(1.5)
    write_run(tmp_path / "d", seed=1, seconds=20, machine=fast, **fixed)
    assert rows_of(tmp_path)["ours + stagewise_norm"].speedup == pytest.approx(1.75)


def test_a_fixed_size_run_of_equal_cost_is_a_reference_for_runs_as_short(tmp_path):
    equal = {"overrides": ["schedule.equal_flops=true"], "cost_percent": 62.5, "reference_epochs": 16}
    write_run(tmp_path / "equal", growth="none", lr_adapt="none", stage_epochs=(10,), seconds=300, **equal)
    write_run(tmp_path / "short", stage_epochs=(4, 6), seconds=150, cost_percent=80)
    row = rows_of(tmp_path)["ours + stagewise_norm"]
    assert row.speedup == pytest.approx(2)
    assert (row.cost_percent, row.reference_epochs) == (pytest.approx(80 * 10 / 16), 16)


def test_overrides_that_all_rows_share_are_said_once(tmp_path):
    for name, growth, own in (("a", "ours", []), ("b", "net2net", ["growth.noise_std=0"])):
        write_run(tmp_path / name, growth=growth, overrides=["data.validation=none", *own])
    rows = summarise(load_runs([tmp_path]))
    names = {row.group.growth: row.method for row in rows}
    assert names["ours"] == "ours + stagewise_norm"
    assert names["net2net"].endswith(", growth.noise_std=0")
    assert markdown(rows).count("data.validation=none") == 1


def test_translations_are_judged_by_bleu_and_texts_by_their_bits(tmp_path):
    scores = {"net2net": (31.0, 3.6), "ours": (31.8, 3.4), "none": (38.1, 2.7)}
    for growth, (bleu, bits) in scores.items():
        write_run(tmp_path / "t" / growth, growth=growth, model="t", test_accuracy=0.5, test_bleu=bleu)
        write_run(
            tmp_path / "c" / growth, growth=growth, model="c", test_accuracy=0.5, test_bits_per_character=bits
        )
    translation, text = summarise(load_runs(tmp_path / "t")), summarise(load_runs(tmp_path / "c"))
    assert [row.score_text for row in translation] == ["38.10 (1)", "31.80 (1)", "31.00 (1)"]
    assert [row.score_text for row in text] == ["2.70 (1)", "3.40 (1)", "3.60 (1)"]  # the fewer the better
    assert " BLEU (n) |" in markdown(translation) and "BLEU: test, mean" in markdown(translation)
    both = grid([*translation, *text])
    column = both.header.index("metric")
    assert {row[column] for row in both.rows} == {"BLEU", "bits per character"} and "score (n)" in both.header
    (record, *_) = json.loads(json_text(translation))
    assert (record["metric"], record["score_mean"]) == ("BLEU", 38.1)
    assert all(pair.row.score_mean < pair.against.score_mean for pair in compare_pairs(text))


def test_other_objectives_are_judged_by_what_they_name(tmp_path):
    for growth, rmse in (("ours", 0.0625), ("none", 0.05)):
        metric = {"metric": {"name": "rmse", "higher_is_better": False}}
        write_run(tmp_path / growth, growth=growth, test_rmse=rmse, **metric)
    rows = summarise(load_runs(tmp_path))
    assert [(row.metric.label, row.score_text) for row in rows] == [
        ("rmse", "0.05 (1)"),
        ("rmse", "0.0625 (1)"),
    ]
    assert all(pair.row.metric.quality(0.1) > pair.row.metric.quality(0.2) for pair in compare_pairs(rows))


def test_rows_of_one_data_set_with_two_objectives_keep_their_own_metrics(tmp_path):
    for seed, (name, growth) in enumerate([("rmse", "ours"), ("rmse", "none"), ("mae", "ours")]):
        path = write_run(
            tmp_path / str(seed),
            growth=growth,
            overrides=[f"objective={name}", f"name={name}"],
            metric={"name": name, "higher_is_better": False},
            **{f"test_{name}": 0.5},
        )
        results = json.loads((path / "results.json").read_text())
        del results["test_accuracy"]
        (path / "results.json").write_text(json.dumps(results))
    rows = summarise(load_runs(tmp_path))
    assert sorted((row.metric.name, row.score_text) for row in rows) == [
        ("mae", "0.5 (1)"),
        ("rmse", "0.5 (1)"),
        ("rmse", "0.5 (1)"),
    ]
    (pair,) = compare_pairs(rows)
    assert pair.row.metric.name == pair.against.metric.name == "rmse"
    assert all("name=" not in row.method for row in rows)


def test_the_optimizers_state_sets_rows_apart(tmp_path):
    for method in ("ours_without_state", "ours_with_state", "growing_vt"):
        for optimizer in ("sgd", "adam"):
            about = {"lr_adapt": "none", "optimizer": optimizer, "overrides": [f"method={method}"]}
            run = write_run(tmp_path / method / optimizer, seed=int(method == "growing_vt"), **about)
            # What was typed is all that is known of it.
            (run / "config.yaml").unlink()
    rows = summarise(load_runs(tmp_path))
    # What growing does by itself with the state of SGD is to begin it anew, with Adam's to keep it.
    assert {(row.method, row.group.optimizer, row.n) for row in rows} == {
        ("ours, optimizer_state=reset", "sgd", 1),
        ("ours, optimizer_state=inherit", "sgd", 1),
        ("ours", "sgd", 1),
        ("ours, optimizer_state=reset", "adam", 1),
        ("ours", "adam", 2),
    }


def test_older_runs_of_one_seed_are_told_in_one_sentence(tmp_path):
    for number in range(3):
        write_run(tmp_path / str(number))
    told = []
    (row,) = summarise(load_runs(tmp_path), told.append)
    assert row.n == 1 and len(told) == 1
    assert told[0].startswith(f"left out {tmp_path / '0'} and 1 more: {tmp_path / '2'} is a newer run")
