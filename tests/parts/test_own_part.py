"""A part of one's own, by a line of configuration."""

import json
from pathlib import Path

from tests.command_line import CommandLine
from tests.runs import MLP

PART = """
from growlab.parts import Part

class Counted(Part):
    name = "counted"

    def __init__(self, start):
        self.steps = start

    def after_step(self, run):
        self.steps += 1

    def after_growth(self, run, event):
        return {"counted_steps": self.steps}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]
"""


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
    assert refused.code == 2 and "parts must be growlab.parts.Part, not Fraction" in refused.err
