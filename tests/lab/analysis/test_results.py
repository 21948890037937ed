"""Run folders: search, errors, and settings that group runs."""

import subprocess
import sys

import numpy as np
import pytest
from omegaconf import OmegaConf

from growlab.base.errors import UserError
from growlab.lab.analysis.__main__ import main as table
from growlab.lab.analysis.comparison import compare
from growlab.lab.analysis.identity import row_overrides, row_settings
from growlab.lab.analysis.paired import compare_pairs
from growlab.lab.analysis.results import load_runs, open_run
from growlab.lab.analysis.tables import summarise
from growlab.lab.training.configuration import config_dir

from .fake_runs import STAGE_WIDTHS, changed, rows_of, write_run


def test_runs_are_found_at_any_depth_once_and_sorted(tmp_path):
    write_run(tmp_path / "b" / "deep" / "run", seed=1)
    write_run(tmp_path / "a")
    write_run(tmp_path / ".hidden" / "run")
    write_run(tmp_path / "unfinished", finished=False)
    runs = load_runs([tmp_path, tmp_path / "a", tmp_path / "b"])
    assert [run.path for run in runs] == [tmp_path / "a", tmp_path / "b" / "deep" / "run"]
    assert load_runs(str(tmp_path / "a"))[0].results["seed"] == 0
    # Older runs lack some entries.
    fields = ("stages", "schedule", "machine", "versions", "overrides", "parity_max_error")
    changed(tmp_path / "a", **dict.fromkeys(fields, ...), test_bleu_signature="nrefs:1")
    assert len(load_runs(tmp_path)) == 2 and table([str(tmp_path)]) == 0


def test_damaged_and_foreign_results_are_skipped_with_a_warning(tmp_path):
    write_run(tmp_path / "good")
    contents = {"torn": '{"model": ', "foreign": '{"model": "x", "score": 3}', "list": "[1, 2]", "bytes": "\udcff"}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    reports = []
    runs = load_runs(tmp_path, reports.append)
    assert [run.path.name for run in runs] == ["good"]
    assert len(reports) == 4
    for name in contents:
        assert sum(str(tmp_path / name) in report for report in reports) == 1
    assert "data is missing" in next(one for one in reports if str(tmp_path / "foreign") in one)
    with pytest.warns(UserWarning, match="torn"):
        load_runs([tmp_path / "torn", tmp_path / "good"])


def test_without_finished_runs_the_error_counts_unfinished_ones(tmp_path):
    write_run(tmp_path / "killed", finished=False)
    with pytest.raises(UserError, match=r"no finished run under .* \(1 unfinished\)"):
        load_runs(tmp_path)
    assert open_run(tmp_path / "killed").results == {}
    with pytest.raises(UserError, match="not a run folder"):
        open_run(tmp_path)


def test_files_are_read_lazily_and_absent_cells_are_nan(tmp_path):
    run = open_run(write_run(tmp_path, lr_adapt="none", validation=False))
    assert run.rates is None
    assert run.curve("val_loss") is None and run.curve("no_such_column") is None
    assert len(run.metrics) == 16 and run.metrics["epoch"].tolist() == list(range(16))
    assert np.isfinite(run.curve("train_loss")).all()
    assert run.growth_epochs == [1, 2, 3, 4, 5, 6, 8, 10]
    assert run.events[-1]["widths_after"]["layer3.stream"] == STAGE_WIDTHS[64][-1]
    # A quarter of 4 x 112 channels at first; an epoch counts with its last width.
    assert run.width_path[0] == 112 and run.width_path[-1] == 448 and len(run.width_path) == 16


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("metrics.csv", "epoch\n", "metrics"),
        ("metrics.csv", "a,b\n1,2\n", "metrics"),
        ("growth.json", '{"events": [', "events"),
        ("growth.json", '{"events": [], "groups": {"a": 3}}', "events"),
        ("config.yaml", "[", "settings"),
        ("layers.csv", "a,b\n1,2\n", "layers"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content, read):
    run = open_run(write_run(tmp_path))
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}.*restore it or leave out this run"):
        getattr(run, read)


def test_of_a_repeated_epoch_the_last_row_counts(tmp_path):
    run = write_run(tmp_path / "a")
    lines = (run / "metrics.csv").read_text().splitlines()
    (run / "metrics.csv").write_text("\n".join([*lines[:4], lines[2], *lines[3:]]) + "\n")
    assert list(open_run(run).metrics["epoch"]) == list(range(len(lines) - 1))
    assert compare(load_runs(tmp_path)) is not None


def test_overrides_of_rows_are_normalised_and_irrelevant_ones_dropped():
    irrelevant = ["seed=3", "data.root=/x", "trainer.devices=2", "trainer=cpu", "hydra.run.dir=/y", "growth=ours"]
    irrelevant += ["hydra/launcher=joblib", "logger=wandb", "logger.offline=true", "schedule.total_epochs=16"]
    irrelevant += ["+trainer.strategy.static_graph=true", "trainer.precision=32-true"]
    assert row_overrides(irrelevant) == ()
    assert row_overrides(["growth.noise_std=0.0", "b=True"]) == ("b=true", "growth.noise_std=0")
    assert row_overrides(["b='True'", "++growth.noise_std=0"]) == ("b=true", "growth.noise_std=0")
    assert row_overrides(["optimizer.lr=0.1", "optimizer.lr=2e-1"]) == ("optimizer.lr=0.2",)
    mup = ("growth.initialisation=mup",)
    assert row_overrides(["method=fixed_size_mup"]) == row_overrides(mup) == mup
    assert row_overrides(["method=equal_flops_mup"]) == (*mup, "schedule.equal_flops=true")
    assert row_overrides(["trainer.compile=true"]) == ("trainer.compile=true",)
    assert row_overrides(["~optimizer.nesterov"]) == ("~optimizer.nesterov",)


def test_custom_networks_and_data_are_distinguished(tmp_path):
    write_run(tmp_path / "a", model="custom", overrides=["model._target_=nets.one", "++optimizer.lr=0.2"])
    write_run(tmp_path / "b", model="custom", overrides=["model._target_='nets.two'"])
    own = ["+model.name=vit", "data.source._target_=my.Set"]
    write_run(tmp_path / "c", model="timm", data="custom", overrides=own)
    groups = [run.group for run in load_runs(tmp_path)]
    assert [group.model for group in groups] == ["custom nets.one", "custom nets.two", "timm vit"]
    assert [group.data for group in groups] == [*[groups[0].data] * 2, "custom my.Set"]
    assert [group.overrides for group in groups] == [("optimizer.lr=0.2",), (), ()]


@pytest.mark.parametrize(("choice", "key"), [("folder", "root"), ("imagenet", "name"), ("text", "path")])
def test_data_of_one_option_are_distinguished_by_their_path(tmp_path, choice, key):
    for number, name in enumerate(("cats", "dogs")):
        write_run(tmp_path / name, data=choice, seed=number, overrides=[f"data.{key}=sets/{name}"])
    rows = rows_of(tmp_path)
    assert [(row.group.data, row.n) for row in rows] == [(f"{choice} sets/cats", 1), (f"{choice} sets/dogs", 1)]
    with pytest.raises(UserError, match="there are no two methods with the same network, data set"):
        compare_pairs(rows)


def composed(folder, typed=(), *, seed=0, lr=0.1, settings=True, more=(), **rest):
    """Write a run whose composed configuration has this rate; `typed` are its overrides."""
    write_run(folder, seed=seed, overrides=typed, **rest)
    config = {"seed": seed, "data": {"seed": seed, "num_workers": seed}, "optimizer": {"lr": lr}}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    if settings:
        changed(folder, settings={**row_settings(config, "cifar10", "sgd", "ours"), **dict(more)})


@pytest.mark.parametrize("settings", [True, False])
def test_an_experiment_edited_between_two_sweeps_makes_two_rows(tmp_path, settings):
    for lr, accuracy in ((0.1, 0.9), (0.0001, 0.1)):
        for seed in (0, 1):
            composed(tmp_path / f"{lr}_{seed}", seed=seed, lr=lr, settings=settings, test_accuracy=accuracy)
    warnings = []
    rows = summarise(load_runs(tmp_path), warnings.append)
    name = "ours + stagewise_norm, optimizer.lr"
    expected = [(f"{name}=0.1", 2, 0.9), (f"{name}=0.0001", 2, 0.1)]
    assert [(row.method, row.n, row.score_mean) for row in rows] == expected and warnings == []


def test_an_override_with_the_default_value_makes_no_new_row(tmp_path):
    composed(tmp_path / "a", seed=0)
    composed(tmp_path / "b", ["optimizer.lr=0.1"], seed=1)
    composed(tmp_path / "c", ["optimizer.lr=1e-1"], seed=1)
    warnings = []
    (row,) = summarise(load_runs(tmp_path), warnings.append)
    assert (row.method, row.n) == ("ours + stagewise_norm", 2)
    newer = f"{tmp_path / 'c'} is a newer run with the same settings and seed."
    assert warnings == [f"left out {tmp_path / 'b'}: {newer}"]
    # Settings that older versions lack make no new row either.
    composed(tmp_path / "ages" / "old", seed=0, settings=False)
    composed(tmp_path / "ages" / "new", seed=1, more={"later": "1"})
    assert [row.n for row in rows_of(tmp_path / "ages")] == [2]


def test_methods_of_different_settings_are_distinguished(tmp_path):
    settings: dict = {}
    for path in (config_dir() / "method").glob("*.yaml"):
        said = OmegaConf.to_container(OmegaConf.load(path))
        choices = {"growth": "ours", "lr_adapt": "stagewise_norm", "optimizer": "sgd"}
        for one in said["defaults"]:
            choices |= {} if isinstance(one, str) else {k.removeprefix("override /"): v for k, v in one.items()}
        overrides = [f"method={path.stem}", "resolution.sizes=[0.5,1.0]"]
        run = write_run(tmp_path / path.stem, **choices, overrides=overrides, stage_epochs=(1, 1))
        settings.setdefault(open_run(run).group, []).append((path.stem, said))
    mixed = [methods for methods in settings.values() if any(said != methods[0][1] for _, said in methods)]
    assert mixed == [] and len(settings) > 15


def test_tables_import_nothing_slow(tmp_path):
    write_run(tmp_path / "run")
    code = (
        "import sys; from growlab.lab.analysis.__main__ import main; code = main(sys.argv[1:]); "
        "slow = {'torch', 'lightning', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'{slow}' if slow else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ours + stagewise_norm" in done.stdout
