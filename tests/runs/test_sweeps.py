"""Sweeps: failures of jobs, finished jobs that are skipped, names, and selection by validation."""

import json
import shutil
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_class
from omegaconf import OmegaConf, flag_override

from growlab.base.errors import UserError
from growlab.base.files import FAILURE, write_json
from growlab.lab.analysis import load_runs
from growlab.lab.cli.runs import resumed
from growlab.lab.cli.sweeps import SweepTable, check_selection, objective
from growlab.lab.training.configuration import composed, naming_override
from tests.command_line import CommandLine
from tests.runs.test_experiment import SHORT

TOO_LARGE = 2**32
SWEEP = ("-m", *SHORT, "+hydra/sweep=same_folder", "hydra.sweep.dir=sweep", f"seed=0,1,{TOO_LARGE}")


def named(lines: str, start: str) -> list[str]:
    return [line for line in lines.splitlines() if line.startswith(start)]


def test_a_failed_job_is_reported_and_alone_runs_again(cli: CommandLine, tmp_path: Path) -> None:
    first = cli(*SWEEP, cwd=tmp_path)
    assert first.code == 2
    assert named(first.err, "error: ") == ["error: 1 job of the sweep failed."]
    sweep = tmp_path / "sweep"
    results = {path: path.stat().st_mtime_ns for path in sweep.rglob("results.json")}
    seeds = {json.loads(path.read_text())["seed"]: path for path in results}
    assert sorted(seeds) == [0, 1]
    (failure,) = sweep.rglob(FAILURE)
    content = json.loads(failure.read_text())
    assert "seed must be less than" in content["reason"] and "Traceback" in content["traceback"]
    assert f"seed={TOO_LARGE}" in content["overrides"]
    # The table has both seeds, and a warning names the failure.
    assert "(2) " in first.out and "everything about these runs: sweep" in first.out
    assert named(first.err, f"warning: sweep/{failure.parent.name} failed: seed must be less than")

    again = cli(*SWEEP, cwd=tmp_path)
    assert again.code == 2
    assert named(again.out, "finished before: ") == [f"finished before: {seeds[seed].parent}" for seed in (0, 1)]
    assert named(again.err, "job 2 (") and f"seed={TOO_LARGE}) failed: " in again.err
    assert {path: path.stat().st_mtime_ns for path in sweep.rglob("results.json")} == results
    # Results with other settings are neither reused nor overwritten.
    taken = seeds[0].parent
    shutil.copytree(taken, tmp_path / "other" / "0")
    more = ("hydra.sweep.dir=other", "hydra.sweep.subdir=0", "seed=0", "optimizer.lr=0.025")
    other = cli("-m", *SHORT, *more, cwd=tmp_path)
    assert other.code == 2 and "has a result with other settings (optimizer.lr=" in other.err
    for name in ("results.json", "model.pt"):
        assert (tmp_path / "other" / "0" / name).read_bytes() == (taken / name).read_bytes()
    # Later commands on the folder report the failure too.
    reported: list[str] = []
    assert len(load_runs(sweep, reported.append)) == 2
    assert reported == [f"{failure.parent} failed: {content['reason']}"]


def test_an_extended_sweep_skips_finished_jobs_with_other_numbers(cli: CommandLine, tmp_path: Path) -> None:
    sweep = ("-m", *SHORT, "hydra.sweep.dir=sweep")
    assert cli(*sweep, "seed=1", "growth=pairs,net2net", cwd=tmp_path).code == 0
    again = cli(*sweep, "seed=1", "growth=ours,pairs,net2net", cwd=tmp_path)
    assert again.code == 0
    assert named(again.out, "finished before: ") == [
        f"finished before: {tmp_path / 'sweep' / name}" for name in ("0_growth=pairs", "1_growth=net2net")
    ]
    assert sorted(path.parent.name for path in (tmp_path / "sweep").rglob("results.json")) == [
        *("0_growth=ours", "0_growth=pairs", "1_growth=net2net")
    ]


def test_names_of_jobs_contain_swept_experiments() -> None:
    assert "experiment" in naming_override(["experiment=digits", "seed=0,1"])
    assert "experiment" not in naming_override(["experiment=digits,gpt_char", "seed=0,1"])


@pytest.mark.parametrize(
    ("swept", "folder"), [("seed=0", "data=folder,seed=0"), ("data.root=a", "data.root=a,data=folder")]
)
def test_jobs_in_the_same_folder_are_named_by_all_that_differs(swept: str, folder: str) -> None:
    naming = naming_override(["experiment=digits", "data=folder", f"{swept},other"])
    overrides = ["experiment=digits", "data=folder", swept, "+hydra/sweep=same_folder", naming]
    assert composed(overrides).hydra.sweep.subdir == folder


def test_a_search_of_another_sweeper_can_be_resumed_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra's basic sweeper saves the command in the folder, Optuna's does not."""
    monkeypatch.setattr(SweepTable, "unfinished", None)
    config = composed([f"hydra.sweep.dir={tmp_path / 'search'}", "seed=1"])
    with flag_override(config.hydra, "readonly", False):
        config.hydra.sweeper._target_ = "theirs.Sweeper"
    SweepTable().on_multirun_start(config)
    assert resumed([str(tmp_path / "search")])[:2] == ["-m", "seed=1"]


def test_failures_with_the_same_reason_are_reported_once(tmp_path: Path) -> None:
    for number, reason in enumerate(["too short.", "too wide.", "too short.", "too short."]):
        write_json(tmp_path / str(number) / FAILURE, {"reason": reason})
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / FAILURE).write_text("{")
    reported: list[str] = []
    with pytest.raises(UserError, match="no finished run"):
        load_runs(tmp_path, reported.append)
    assert reported == [
        *(f"{tmp_path / '0'} and 2 more failed: too short.", f"{tmp_path / '1'} failed: too wide."),
        f"{tmp_path / '4'} failed: {FAILURE} does not say why.",
    ]


@pytest.mark.parametrize(
    ("overrides", "holds_out", "metric"),
    [
        (("experiment=digits",), True, ("accuracy", 1.0)),
        (("experiment=digits", "data.validation=test"), False, None),
        (("experiment=gpt_char", "data.path=text"), True, ("bits_per_character", -1.0)),
        (("experiment=llama_text", "data.path=text"), True, ("bits_per_byte", -1.0)),
        (("experiment=transformer_multi30k",), True, ("perplexity", -1.0)),
        (("experiment=transformer_multi30k", "data.validation=none"), False, None),
    ],
)
def test_a_search_selects_by_the_validation_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides, holds_out: bool, metric
) -> None:
    """It is negated if lower is better; without validation data there is no selection."""
    cfg = composed([*overrides, "name=given"])
    sweeper = {"_target_": "OptunaSweeper", "direction": "maximize"}
    job = OmegaConf.create({"mode": RunMode.MULTIRUN, "sweeper": sweeper})
    monkeypatch.setattr(HydraConfig, "get", lambda: job)
    kind = get_class(cfg.objective._target_)
    name, higher_is_better = kind.compared_by
    values = {f"val_{each}": number for number, each in enumerate(kind.metric_names, 2)}
    write_json(
        tmp_path / "results.json",
        {"metric": {"name": name, "higher_is_better": higher_is_better}, **values, "train_cost_percent": 50.0},
    )
    if not holds_out:
        with pytest.raises(UserError, match=r"neither for training nor for testing: set data\.validation=split"):
            check_selection(cfg)
        assert objective(cfg, tmp_path) is None
        return
    check_selection(cfg)
    assert objective(cfg, tmp_path) == metric[1] * values[f"val_{metric[0]}"]
    # A data set without validation data.
    results = json.loads((tmp_path / "results.json").read_text())
    write_json(tmp_path / "results.json", results | {f"val_{metric[0]}": None})
    assert objective(cfg, tmp_path) is None
