"""Choices that Hydra lets pass: mistyped parts, and groups and values that are deleted."""

from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from growlab.base.errors import UserError
from growlab.lab.cli.explain import explain
from growlab.lab.training.configuration import config_dir, register_schemas
from growlab.lab.training.override_checks import check_choices
from tests.parts_here import needs

CONF = config_dir()
SPARED = {"experiment", "method", "plan", "callbacks"}
TOP = yaml.safe_load((CONF / "config.yaml").read_text())
GROUPS = {
    name.removeprefix("optional ") for entry in TOP["defaults"][1:] if entry != "_self_" for name in entry
}
NEEDED = sorted((GROUPS | TOP.keys()) - SPARED - {"defaults", "hydra", "override hydra/help"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of configurations with two parts."""
    (tmp_path / "parts").mkdir()
    for name in ("ema", "depth"):
        (tmp_path / "parts" / f"{name}.yaml").touch()
    return tmp_path


@pytest.mark.parametrize("override", ["parts=[emma]", "parts=emma", "parts=[ema,emma]", "parts=[ema],[emma]"])
def test_a_mistyped_part_is_answered_with_the_nearest(folder: Path, override: str) -> None:
    with pytest.raises(UserError) as raised:
        check_choices(["seed=1", override], folder)
    assert str(raised.value) == "there is no part 'emma'; did you mean 'ema'? Choices: depth, ema"


@pytest.mark.parametrize(
    "override", ["parts=[ema,depth]", "parts=ema", "parts=[]", "parts=[[x", "+parts.x=3"]
)
def test_parts_that_are_there_and_what_others_answer_pass(folder: Path, override: str) -> None:
    check_choices([override], folder)


def test_parts_of_the_users_own_folders_pass(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "parts").mkdir(parents=True)
    (own / "parts" / "mine.yaml").touch()
    check_choices(["parts=[ema,mine]"], folder, str(own))
    check_choices(["parts=[ema,mine]", f"hydra.searchpath=['file://{own}']"], folder)
    with pytest.raises(UserError, match="no part 'mine'"):
        check_choices(["parts=[ema,mine]"], folder)


@pytest.mark.parametrize("name", NEEDED)
def test_the_deletion_of_what_a_run_needs_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"^~{name} takes away what a run needs: "):
        check_choices([f"~{name}"], CONF)


@pytest.mark.parametrize("name", sorted(SPARED))
def test_what_a_run_does_without_can_be_deleted(name: str) -> None:
    check_choices([f"~{name}"], CONF)


def test_a_group_comes_with_its_choices() -> None:
    with pytest.raises(UserError) as raised:
        check_choices(["~optimizer=sgd"], CONF)
    assert str(raised.value).startswith(
        "~optimizer takes away what a run needs: choose with optimizer=NAME. Choi"
    )
    assert "adamw" in str(raised.value)


@needs("averages")
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["parts=[]", "ema.decay=0.9"], "ema is a part that parts=[] leaves out: add it to that list."),
        (
            ["~ema"],
            "ema.decay is needed and has no value, for ~ema takes it away: leave that out.",
        ),
        (
            ["~schedule.total_epochs"],
            "schedule.total_epochs cannot be left out: give schedule.total_epochs=VALUE instead of "
            "~schedule.total_epochs.",
        ),
    ],
)
def test_a_setting_that_the_command_line_itself_takes_away(overrides: list[str], sentence: str) -> None:
    register_schemas()
    with pytest.raises(Exception) as raised, initialize_config_dir(str(CONF), version_base="1.3"):
        _ = compose("config", overrides=overrides).parts.ema.decay
    assert explain(raised.value, overrides, CONF) == sentence
