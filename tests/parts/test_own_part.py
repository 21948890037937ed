"""A part of one's own, by a line of configuration."""

import json
from pathlib import Path

import pytest
import torch

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.part import checked_parts
from growlab.growth import PairGrowth
from growlab.lab.networks import mlp5
from growlab.parts import Part
from tests.command_line import CommandLine
from tests.runs import MLP

PART = """
from growlab.parts import Part

class Counted(Part):
    name = "counted"

    def __init__(self, start):
        self.steps = start

    def after_step(self, grower):
        self.steps += 1

    def after_growth(self, grower, event):
        return {"counted_steps": self.steps}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]
"""


BARE = """
from growlab.parts import Part

class BarePart(Part):
    pass
"""


def test_a_part_without_a_name_has_its_key_in_the_configuration(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(BARE)
    one, two = (f"+parts.{name}._target_=my_parts.BarePart" for name in ("one", "two"))
    outcome = cli(*MLP, one, two, "hydra.run.dir=run", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    (saved,) = (tmp_path / "run").glob("checkpoints/last*")
    state = torch.load(saved, weights_only=True)
    assert "'parts': {'one': {}, 'two': {}}" in str(state)


def test_a_part_is_called_after_its_class_where_nothing_else_says_its_name() -> None:
    class GradientNoise(Part):
        pass

    class Named(Part):
        name = "own"

    assert [part.name for part in checked_parts([GradientNoise(), Named()])] == ["gradient_noise", "own"]


def test_two_parts_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two parts are called part, the key of their states"):
        Grower(
            mlp5((1, 4, 4), 3, width=4),
            torch.randn(4, 1, 4, 4),
            method=PairGrowth(),
            trigger={0: 0.5, 1: 1.0},
            parts=[Part(), Part()],
        )


@pytest.mark.parametrize("entry", ["+parts.x=3", "+parts.x.y=3", "+parts.x=[1]"])
def test_what_is_no_part_is_refused(cli: CommandLine, tmp_path: Path, entry: str) -> None:
    outcome = cli(*MLP, entry, cwd=tmp_path)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("error: parts.x is no part: give it a _target_")


def test_a_part_of_the_users_own_sees_steps_and_events_and_resumes(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(PART)
    command = (
        *MLP,
        "+parts.counted._target_=my_parts.Counted",
        "+parts.counted.start=100",
        "hydra.run.dir=run",
    )
    assert cli(*command, cwd=tmp_path, fault=("at_step", 8, 9)).code == -9
    outcome = cli(*command, "ckpt_path=last", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    events = json.loads((tmp_path / "run" / "growth.json").read_text())["events"]
    assert [event["counted_steps"] - event["step"] for event in events] == [100, 100]
    refused = cli(*MLP, "+parts.wrong._target_=fractions.Fraction", cwd=tmp_path)
    assert refused.code == 2 and "parts.wrong makes a Fraction, not a growlab.parts.Part" in refused.err
