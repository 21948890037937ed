"""Experiments and parts in a folder of the user's own: found by every process, and by each command that is told."""

import json
import shlex
import signal
from pathlib import Path

import pytest

from growlab.lab.cli.app import _with_more
from growlab.lab.training.configuration import register_schemas
from growlab.lab.training.resuming import resume_override
from tests.command_line import CommandLine
from tests.parts_here import needs
from tests.runs import MLP

OPTIONS = {
    "config-dir": ("--config-dir", "own conf"),
    "searchpath": ("hydra.searchpath=['file://own conf']",),
}
BOTH = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of configurations: `mine` is digits, `yours` begins with it, `wrong` asks for a part."""
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


def saved(cli: CommandLine, options: tuple[str, ...], folder: Path) -> str:
    """The command to go on with of a run that is asked to end."""
    fault = ("at_step", 7, int(signal.SIGTERM))
    outcome = cli(*options, *MLP, "experiment=yours", cwd=folder, fault=fault)
    assert outcome.code == 0, outcome.err
    return outcome.err.splitlines()[-1].split("resume with: growlab ")[1]


def results(folder: Path) -> dict:
    (path,) = folder.glob("runs/*/*/results.json")
    return json.loads(path.read_text())


@BOTH
def test_the_command_to_go_on_with_finds_the_experiment(
    options: tuple[str, ...], cli: CommandLine, own: Path, tmp_path: Path
) -> None:
    told = saved(cli, options, tmp_path)
    assert cli(*shlex.split(told), cwd=tmp_path).code == 0
    assert results(tmp_path)["experiment"] == "yours_with_mlp8"


@pytest.mark.parametrize("behind", [False, True])
@BOTH
def test_last_finds_the_run(
    options: tuple[str, ...], behind: bool, cli: CommandLine, own: Path, tmp_path: Path
) -> None:
    saved(cli, options, tmp_path)
    overrides = (*MLP, "experiment=yours", "ckpt_path=last")
    if behind and not options[0].startswith("--"):
        overrides, options = (*options, *overrides), ()
    arguments = (*overrides, *options) if behind else (*options, *overrides)
    outcome = cli(*arguments, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert results(tmp_path)["experiment"] == "yours_with_mlp8"


@BOTH
def test_processes_find_the_experiment_and_so_does_the_command_in_the_results(
    options: tuple[str, ...], cli: CommandLine, own: Path, tmp_path: Path
) -> None:
    outcome = cli(*options, *MLP, "experiment=mine", "trainer=ddp_cpu", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    row = results(tmp_path)
    assert (row["experiment"], row["world_size"]) == ("mine_with_mlp8", 2)
    words = shlex.split(row["command"].partition("growlab")[2])
    composed = cli(*words, "--cfg", "job", cwd=tmp_path)
    assert composed.code == 0 and "_target_: growlab.lab.networks.mlp8" in composed.out, composed.err


@needs("depth")
@BOTH
@pytest.mark.parametrize("name", ["wrong", "behind"])
def test_a_part_that_an_experiment_asks_for_in_vain_is_told(
    name: str, options: tuple[str, ...], cli: CommandLine, own: Path, tmp_path: Path
) -> None:
    outcome = cli(*options, f"experiment={name}", cwd=tmp_path)
    assert outcome.code == 2 and outcome.out == ""
    assert "there is no parts 'depht'" in outcome.err
    assert not list(tmp_path.glob("runs/*/*/config.yaml"))


@needs("depth")
def test_a_plan_takes_options_behind_its_settings(cli: CommandLine, own: Path, tmp_path: Path) -> None:
    program = "import sys; from growlab.lab.planner.__main__ import main; sys.exit(main())"
    arguments = ("experiment=wrong", "schedule.budget=2", "--config-dir", str(own))
    outcome = cli(*arguments, cwd=tmp_path, program=program)
    assert outcome.code == 2 and "there is no parts 'depht'" in outcome.err


def test_both_ways_beside_each_other(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "it's, [another]" / "experiment"
    other.mkdir(parents=True)
    (other / "theirs.yaml").write_text("# @package _global_\ndefaults: [mine]\n")
    (tmp_path / "runs" / "theirs" / "1").mkdir(parents=True)
    (tmp_path / "runs" / "theirs" / "1" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    register_schemas()
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
def test_more_overrides_stand_beside_the_others(argv: str, overrides: str, expected: str) -> None:
    assert _with_more(argv.split(), overrides.split(), ["M"]) == expected.split()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with configurations of its own: a part, and experiments with it and with a part that is not there."""
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
    for name, part in {"counting": "counted", "miscounting": "cuonted"}.items():
        (conf / "experiment" / f"{name}.yaml").write_text(
            f"# @package _global_\ndefaults: [digits, override /parts: [{part}]]\n"
        )
    return conf


IN_PACKAGE = "hydra.searchpath=[pkg://mine.conf]"


@pytest.mark.parametrize("with_init", [True, False])
def test_parts_and_experiments_of_a_package_are_found(
    with_init: bool, cli: CommandLine, package: Path, tmp_path: Path
) -> None:
    if with_init:
        (package / "__init__.py").touch()
    outcome = cli(IN_PACKAGE, *MLP, "experiment=counting", "parts.counted.by=3", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    row = results(tmp_path)
    assert row["experiment"] == "counting_with_mlp8" and IN_PACKAGE in row["command"]
    (path,) = tmp_path.glob("runs/*/*/growth.json")
    counted = [event["counted_steps"] for event in json.loads(path.read_text())["events"]]
    assert counted and all(steps > 0 and steps % 3 == 0 for steps in counted)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((IN_PACKAGE, "parts=[cuonted]"), "there is no parts 'cuonted'"),
        ((IN_PACKAGE, "experiment=miscounting"), "there is no parts 'cuonted'"),
        (("hydra.searchpath=[pkg://mine.cnf]", "experiment=counting"), "there is no experiment 'counting'"),
    ],
)
def test_what_a_package_has_not_is_told(
    arguments: tuple[str, ...], told: str, cli: CommandLine, package: Path, tmp_path: Path
) -> None:
    outcome = cli(*arguments, *MLP, cwd=tmp_path)
    assert outcome.code == 2 and told in outcome.err, outcome.err
    assert not list(tmp_path.glob("runs/*/*/config.yaml"))
