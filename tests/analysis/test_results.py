"""Run folders: which are found, which are refused, and what makes runs one group."""

import json
import subprocess
import sys

import numpy as np
import pytest
from omegaconf import OmegaConf

from growlab.base.errors import UserError
from growlab.lab.analysis.__main__ import main as table
from growlab.lab.analysis.identity import row_overrides, row_settings
from growlab.lab.analysis.paired import compare_pairs
from growlab.lab.analysis.report import main as report
from growlab.lab.analysis.results import load_runs, open_run
from growlab.lab.analysis.tables import summarise
from growlab.lab.training.configuration import config_dir

from .fake_runs import STAGE_WIDTHS, write_run


def test_runs_are_found_at_any_depth_once_and_sorted(tmp_path):
    write_run(tmp_path / "b" / "deep" / "run", seed=1)
    write_run(tmp_path / "a")
    write_run(tmp_path / ".hidden" / "run")
    write_run(tmp_path / "unfinished", finished=False)
    runs = load_runs([tmp_path, tmp_path / "a", tmp_path / "b"])
    assert [run.path for run in runs] == [tmp_path / "a", tmp_path / "b" / "deep" / "run"]
    assert load_runs(str(tmp_path / "a"))[0].results["seed"] == 0


def test_torn_and_foreign_results_are_named_and_skipped(tmp_path):
    write_run(tmp_path / "good")
    torn = write_run(tmp_path / "torn") / "results.json"
    torn.write_text(torn.read_text()[:100])
    foreign = tmp_path / "foreign" / "results.json"
    foreign.parent.mkdir()
    foreign.write_text(json.dumps({"model": "x", "score": 3}))
    listed = tmp_path / "list" / "results.json"
    listed.parent.mkdir()
    listed.write_text("[1, 2]")
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "results.json").write_bytes(b"\xff\xfe\x00")
    reports = []
    runs = load_runs(tmp_path, reports.append)
    assert [run.path.name for run in runs] == ["good"]
    assert len(reports) == 4
    for path in (torn, foreign, listed):
        assert sum(str(path) in report for report in reports) == 1
    assert "data is missing" in next(report for report in reports if str(foreign) in report)
    with pytest.warns(UserWarning, match="torn"):
        load_runs([torn.parent, tmp_path / "good"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", 3),
        ("schedule", {"budget": "long"}),
        ("schedule", {"learning_rate": 1}),
        ("stages", "abc"),
        ("stages", [3]),
        ("stages", [{"stage": 0}]),
        ("metric", "accuracy"),
        ("metric", {"name": "loss"}),
        ("machine", "mine"),
        ("versions", [1]),
        ("overrides", 3),
        ("reference_epochs", "ten"),
        ("parity_max_error", "none"),
        ("test_accuracy", "good"),
        ("epochs", 0),
        ("seed", True),
    ],
)
def test_results_of_another_form_are_named_and_skipped(tmp_path, capsys, field, value):
    write_run(tmp_path / "good")
    write_run(tmp_path / "fixed", growth="none", lr_adapt="none")
    wrong = write_run(tmp_path / "wrong") / "results.json"
    wrong.write_text(json.dumps({**json.loads(wrong.read_text()), field: value}))
    reports = []
    assert [run.path.name for run in load_runs(tmp_path, reports.append)] == ["fixed", "good"]
    (told,) = reports
    assert told.startswith(f"skipped {wrong}: it is not the result of a growlab run ({field}")
    assert open_run(wrong.parent).results == {}
    assert table([str(tmp_path)]) == 0
    assert report([str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().err.count("warning: skipped") == 2


def test_fields_that_older_runs_lack_may_be_absent(tmp_path):
    path = write_run(tmp_path / "old") / "results.json"
    content = json.loads(path.read_text())
    for field in ("stages", "schedule", "machine", "versions", "overrides", "parity_max_error"):
        del content[field]
    path.write_text(json.dumps({**content, "test_bleu_signature": "nrefs:1"}))
    assert len(load_runs(tmp_path)) == 1 and table([str(tmp_path)]) == 0


def test_no_runs_is_one_sentence_that_counts_the_unfinished(tmp_path):
    write_run(tmp_path / "killed", finished=False)
    with pytest.raises(UserError, match=r"no finished run under .* \(1 unfinished\)"):
        load_runs(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        load_runs(tmp_path / "nowhere")


def test_tables_are_read_lazily_and_absent_cells_are_nan(tmp_path):
    run = open_run(write_run(tmp_path, lr_adapt="none", validation=False))
    assert run.rates is None
    assert run.curve("val_loss") is None and run.curve("no_such_column") is None
    assert len(run.metrics) == 16 and run.metrics["epoch"].tolist() == list(range(16))
    assert np.isfinite(run.curve("train_loss")).all()
    assert run.growth_epochs == [1, 2, 3, 4, 5, 6, 8, 10]
    assert run.events[-1]["widths_after"]["layer3.stream"] == STAGE_WIDTHS[64][-1]


@pytest.mark.parametrize("content", ["", "epoch\n", "a,b\n1,2\n"])
def test_unreadable_metrics_name_the_file(tmp_path, content):
    run = open_run(write_run(tmp_path))
    (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(UserError, match=r"cannot read .*metrics\.csv"):
        _ = run.metrics


def test_torn_growth_history_names_the_file(tmp_path):
    run = open_run(write_run(tmp_path))
    (tmp_path / "growth.json").write_text('{"events": [')
    with pytest.raises(UserError, match=r"growth\.json"):
        _ = run.events


@pytest.mark.parametrize("content", [{"events": [3]}, {"events": "abc"}, {"events": [], "groups": {"a": 3}}])
def test_a_growth_history_of_another_form_names_the_file(tmp_path, content):
    run = open_run(write_run(tmp_path))
    (tmp_path / "growth.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"growth\.json"):
        _ = run.events


def test_an_unfinished_run_opens_without_results(tmp_path):
    assert open_run(write_run(tmp_path / "run", finished=False)).results == {}
    with pytest.raises(UserError, match="not a run folder"):
        open_run(tmp_path)


def test_overrides_that_say_nothing_of_the_method_are_dropped_and_the_rest_spelled_alike():
    quiet = [
        "seed=3",
        "data.root=/x",
        "trainer.devices=2",
        "trainer=cpu",
        "hydra.run.dir=/y",
        "hydra/launcher=joblib",
    ]
    quiet += [
        "logger=wandb",
        "logger.offline=true",
        "trainer.strategy.static_graph=true",
        "growth=ours",
        "schedule.total_epochs=16",
    ]
    assert row_overrides(quiet) == ()
    assert row_overrides(["growth.noise_std=0.0", "b=True"]) == ("b=true", "growth.noise_std=0")
    assert row_overrides(["b='True'", "++growth.noise_std=0"]) == ("b=true", "growth.noise_std=0")
    assert row_overrides(["optimizer.lr=0.1", "optimizer.lr=2e-1"]) == ("optimizer.lr=0.2",)
    mup = ("growth.initialisation=mup",)
    assert row_overrides(["method=fixed_size_mup"]) == row_overrides(mup) == mup
    assert row_overrides(["method=equal_flops_mup"]) == (*mup, "schedule.equal_flops=true")
    assert row_overrides(["trainer.compile=true"]) == ("trainer.compile=true",)
    assert row_overrides(["~optimizer.nesterov"]) == ("~optimizer.nesterov",)


def test_networks_and_data_of_ones_own_are_told_apart(tmp_path):
    write_run(tmp_path / "a", model="custom", overrides=["model._target_=nets.one", "++optimizer.lr=0.2"])
    write_run(tmp_path / "b", model="custom", overrides=["model._target_='nets.two'"])
    write_run(
        tmp_path / "c",
        model="timm",
        data="custom",
        overrides=["+model.name=vit", "data.source._target_=my.Set"],
    )
    groups = [run.group for run in load_runs(tmp_path)]
    assert [group.model for group in groups] == ["custom nets.one", "custom nets.two", "timm vit"]
    assert [group.data for group in groups] == [*[groups[0].data] * 2, "custom my.Set"]
    assert [group.overrides for group in groups] == [("optimizer.lr=0.2",), (), ()]


@pytest.mark.parametrize(
    ("choice", "key"), [("folder", "root"), ("imagenet", "name"), ("tokens", "path"), ("text", "path")]
)
def test_data_of_one_choice_are_told_apart_by_what_tells_where_they_are(tmp_path, choice, key):
    for number, name in enumerate(("cats", "dogs")):
        write_run(tmp_path / name, data=choice, seed=number, overrides=[f"data.{key}=sets/{name}"])
    runs = load_runs(tmp_path)
    assert [run.group.data for run in runs] == [f"{choice} sets/cats", f"{choice} sets/dogs"]
    assert [row.n for row in summarise(runs)] == [1, 1]
    with pytest.raises(UserError, match="there are no two methods on one network and data set"):
        compare_pairs(summarise(runs))


def composed(folder, typed=(), *, seed=0, lr=0.1, settings=True, **rest):
    """A run whose composed configuration has this rate, whatever was typed."""
    write_run(folder, seed=seed, overrides=typed, **rest)
    config = {"seed": seed, "data": {"seed": seed, "num_workers": seed}, "optimizer": {"lr": lr}}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    if settings:
        path = folder / "results.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "settings": row_settings(config, "cifar10", "sgd", "ours")}))


@pytest.mark.parametrize("settings", [True, False])
def test_an_experiment_edited_between_two_sweeps_makes_two_rows(tmp_path, settings):
    for lr, accuracy in ((0.1, 0.9), (0.0001, 0.1)):
        for seed in (0, 1):
            composed(tmp_path / f"{lr}_{seed}", seed=seed, lr=lr, settings=settings, test_accuracy=accuracy)
    said = []
    rows = summarise(load_runs(tmp_path), said.append)
    name = "ours + stagewise_norm, optimizer.lr"
    assert [(row.method, row.n, row.score_mean) for row in rows] == [
        (f"{name}=0.1", 2, 0.9),
        (f"{name}=0.0001", 2, 0.1),
    ]
    assert said == []


def test_a_default_that_is_typed_makes_no_other_row(tmp_path):
    composed(tmp_path / "a", seed=0)
    composed(tmp_path / "b", ["optimizer.lr=0.1"], seed=1)
    composed(tmp_path / "c", ["optimizer.lr=1e-1"], seed=1)
    said = []
    (row,) = summarise(load_runs(tmp_path), said.append)
    assert (row.method, row.n) == ("ours + stagewise_norm", 2)
    assert said == [
        f"left out {tmp_path / 'b'}: {tmp_path / 'c'} is a newer run with the same settings and seed."
    ]


def test_a_setting_that_an_older_version_did_not_have_makes_no_other_row(tmp_path):
    composed(tmp_path / "old", seed=0, settings=False)
    composed(tmp_path / "new", seed=1)
    path = tmp_path / "new" / "results.json"
    content = json.loads(path.read_text())
    content["settings"]["later"] = "1"
    path.write_text(json.dumps(content))
    assert [row.n for row in summarise(load_runs(tmp_path))] == [2]


def test_a_configuration_that_cannot_be_read_is_named(tmp_path):
    path = write_run(tmp_path / "a") / "config.yaml"
    path.write_text("[")
    with pytest.raises(UserError, match=r"config.yaml is not a run's configuration; restore it"):
        summarise(load_runs(tmp_path))


def test_methods_of_different_settings_are_told_apart(tmp_path):
    settings: dict = {}
    sizes = "resolution.sizes=[0.5,1.0]"
    for path in (config_dir() / "method").glob("*.yaml"):
        said = OmegaConf.to_container(OmegaConf.load(path))
        choices = {"growth": "ours", "lr_adapt": "stagewise_norm", "optimizer": "sgd"}
        for one in said["defaults"]:
            choices |= (
                {} if isinstance(one, str) else {k.removeprefix("override /"): v for k, v in one.items()}
            )
        run = write_run(tmp_path / path.stem, **choices, overrides=[f"method={path.stem}", sizes])
        settings.setdefault(open_run(run).group, []).append((path.stem, said))
    mixed = [methods for methods in settings.values() if any(said != methods[0][1] for _, said in methods)]
    assert mixed == [] and len(settings) > 15


def test_reading_and_tabulating_runs_imports_nothing_slow(tmp_path):
    write_run(tmp_path / "run")
    code = (
        "import sys; from growlab.lab.analysis.__main__ import main; code = main(sys.argv[1:]); "
        "slow = {'torch', 'lightning', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'{slow}' if slow else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ours + stagewise_norm" in done.stdout
