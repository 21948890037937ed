"""A part that a user writes, by a line of configuration."""

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from growlab.base.errors import UserError
from growlab.grower.part import checked_parts
from growlab.grower.triggers import At
from growlab.lab.training.build import make_parts
from growlab.parts import Part
from tests.command_line import CommandLine
from tests.whole_runs import MLP

PARTS = """
from growlab.parts import Part

class BarePart(Part):
    pass

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


def test_parts_see_steps_and_events_and_resume_under_their_names(cli: CommandLine, tmp_path: Path) -> None:
    """A part without a name has its key in the configuration."""
    (tmp_path / "my_parts.py").write_text(PARTS)
    bare = (f"+parts.{name}._target_=my_parts.BarePart" for name in ("one", "two"))
    counted = ("+parts.counted._target_=my_parts.Counted", "+parts.counted.start=100")
    command = (*MLP, *bare, *counted, "hydra.run.dir=run")
    assert cli(*command, cwd=tmp_path, fault=("at_step", 8, 9)).code == -9
    outcome = cli(*command, "ckpt_path=last", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    events = json.loads((tmp_path / "run" / "growth.json").read_text())["events"]
    assert [event["counted_steps"] - event["step"] for event in events] == [100, 100]
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert "'one': {}, 'two': {}, 'counted': {'steps': 118}" in str(state)


def test_a_part_without_a_name_has_that_of_its_class() -> None:
    class GradientNoise(Part):
        pass

    class Named(Part):
        name = "own"

    assert [part.name for part in checked_parts([GradientNoise(), Named()])] == ["gradient_noise", "own"]
    with pytest.raises(UserError, match="two parts are called part, the key of their states"):
        checked_parts([Part(), Part()])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, "parts.x=3 is not a part: give it a _target_"),
        ({"y": 3}, "is not a part: give it a _target_"),
        ({"_target_": f"fractions.{Fraction.__name__}"}, "makes a Fraction, not a growlab.grower.part.Part"),
    ],
)
def test_entries_that_make_no_part_are_refused(entry: Any, message: str) -> None:
    data = SimpleNamespace(parts=list)
    with pytest.raises(UserError, match=message):
        make_parts(OmegaConf.create({"x": entry}), data, At({0: 0.5, 1: 1.0}))
