"""Experiments and parts in a user's folder or package are found by all processes and by printed commands."""

import shlex
import signal
from pathlib import Path

import pytest

from growlab.lab.cli.app import _with_more
from growlab.lab.training.configuration import resume_override, set_plugin_defaults
from tests.command_line import PLAN, CommandLine
from tests.whole_runs import MLP, read_events, read_results

OPTIONS = {"config-dir": ("--config-dir", "own conf"), "searchpath": ("hydra.searchpath=['file://own conf']",)}
BOTH = pytest.mark.parametrize(
    "options", [OPTIONS["config-dir"], pytest.param(OPTIONS["searchpath"], marks=pytest.mark.slow)], ids=OPTIONS
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Folder of experiments: `mine` is digits, `yours` inherits from it, `wrong` names a part that does not exist."""
    folder = tmp_path / "own conf" / "experiment"
    folder.mkdir(parents=True)
    for name, defaults in {
        "mine": "[digits]",
        "yours": "[mine, _self_]",
        "wrong": "[digits, override /parts: [depht]]",
        "behind": "[wrong, _self_]",
    }.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\ndefaults: {defaults}\n")
    return folder.parent


def results(folder: Path) -> dict:
    (run,) = folder.glob("runs/*/*")
    return read_results(run)


@BOTH
def test_printed_commands_and_last_find_the_experiment(
    options: tuple[str, ...], cli: CommandLine, own: Path, tmp_path: Path
) -> None:
    command = (*options, *MLP, "experiment=yours")
    outcome = cli.done(*command, cwd=tmp_path, fault=("at_step", 7, int(signal.SIGTERM)))
    printed = shlex.split(outcome.err.splitlines()[-1].split("resume with: growlab ")[1])
    cli.done(*printed, cwd=tmp_path, fault=("at_step", 13, int(signal.SIGTERM)))
    # Options may follow the overrides.
    cli.done(*MLP, "experiment=yours", "ckpt_path=last", *options, cwd=tmp_path)
    assert results(tmp_path)["experiment"] == "yours_with_mlp3"


def test_processes_find_the_experiment_and_so_does_the_command_in_the_results(
    cli: CommandLine, own: Path, tmp_path: Path
) -> None:
    command = (*OPTIONS["config-dir"], *MLP, "experiment=mine", "schedule.epochs=[1,1]")
    cli.done(*command, "schedule.widths=[0.5,1]", "trainer=ddp_cpu", cwd=tmp_path)
    row = results(tmp_path)
    assert (row["experiment"], row["world_size"]) == ("mine_with_mlp3", 2)
    words = shlex.split(row["command"].partition("growlab")[2])
    composed = cli(*words, "--cfg", "job", cwd=tmp_path)
    assert composed.code == 0 and "_target_: tests.whole_runs.mlp3" in composed.out, composed.err


@pytest.mark.parametrize(
    ("arguments", "planned"),
    [
        ((*OPTIONS["config-dir"], "experiment=behind"), False),
        ((*OPTIONS["searchpath"], "experiment=wrong"), False),
        (("experiment=wrong", "schedule.budget=2", *OPTIONS["config-dir"]), True),
    ],
    ids=["config_dir", "searchpath", "plan"],
)
def test_a_part_that_does_not_exist_is_refused(
    arguments: tuple[str, ...], planned: bool, cli: CommandLine, own: Path, tmp_path: Path
) -> None:
    outcome = cli(*arguments, cwd=tmp_path, environment={PLAN: "1"} if planned else None)
    assert outcome.code == 2 and "there is no parts 'depht'" in outcome.err
    assert not list(tmp_path.glob("runs/*/*/config.yaml"))


def test_config_dir_and_searchpath_together(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "it's, [another]" / "experiment"
    other.mkdir(parents=True)
    (other / "theirs.yaml").write_text("# @package _global_\ndefaults: [mine]\n")
    (tmp_path / "runs" / "theirs" / "1").mkdir(parents=True)
    (tmp_path / "runs" / "theirs" / "1" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    set_plugin_defaults()
    searched = rf'hydra.searchpath=["file://{other.parent}"]'
    overrides = [searched, "experiment=theirs", "ckpt_path=last"]
    assert resume_override(overrides, more="own conf") == "hydra.run.dir=runs/theirs/1"


@pytest.mark.parametrize(
    ("argv", "overrides", "expected"),
    [
        ("g a=1 b=2 --dir d", "a=1 b=2", "g a=1 b=2 M --dir d"),
        ("g --dir d a=1 b=2", "a=1 b=2", "g --dir d a=1 b=2 M"),
        ("g --dir d", "", "g --dir d M"),
        ("g --cfg a=1 a=1 --dir d", "a=1", "g --cfg a=1 a=1 M --dir d"),
        ("g", "", "g M"),
    ],
)
def test_more_overrides_are_inserted_after_the_others(argv: str, overrides: str, expected: str) -> None:
    assert _with_more(argv.split(), overrides.split(), ["M"]) == expected.split()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Configurations of a package with a part and an experiment that uses it."""
    conf = tmp_path / "mine" / "conf"
    for group in ("parts", "experiment"):
        (conf / group).mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "counting.py").write_text(
        "from growlab.parts import Part\n\n\nclass Counted(Part):\n    name = 'counted'\n    steps = 0\n\n"
        "    def __init__(self, by):\n        self.by = by\n\n"
        "    def after_step(self, grower):\n        self.steps += self.by\n\n"
        "    def after_growth(self, grower, event):\n        return {'counted_steps': self.steps}\n"
    )
    (conf / "parts" / "counted.yaml").write_text(
        "# @package _global_\nparts: {counted: {_target_: mine.counting.Counted, by: 1}}\n"
    )
    experiment = "# @package _global_\ndefaults: [digits, override /parts: [counted]]\n"
    (conf / "experiment" / "counting.yaml").write_text(experiment)
    return conf


IN_PACKAGE = "hydra.searchpath=[pkg://mine.conf]"


def test_parts_and_experiments_of_a_package_are_found(cli: CommandLine, package: Path, tmp_path: Path) -> None:
    """With and without an `__init__.py` next to the configurations."""
    short = ("schedule.epochs=[1,1]", "schedule.widths=[0.5,1]")
    cli.done(IN_PACKAGE, *MLP, *short, "experiment=counting", "parts.counted.by=3", cwd=tmp_path)
    row = results(tmp_path)
    assert row["experiment"] == "counting_with_mlp3" and IN_PACKAGE in row["command"]
    (run,) = tmp_path.glob("runs/*/*")
    counted = [event["counted_steps"] for event in read_events(run)]
    assert counted and all(steps > 0 and steps % 3 == 0 for steps in counted)
    (package / "__init__.py").touch()
    composed = cli(IN_PACKAGE, "experiment=counting", "--cfg", "job", cwd=tmp_path)
    assert composed.code == 0 and "_target_: mine.counting.Counted" in composed.out
