"""Short version of `make chaos`."""

from collections.abc import Callable
from pathlib import Path

from tests.chaos import chaos
from tests.command_line import CommandLine
from tests.whole_runs import MLP, Left


def test_killed_runs_end_as_the_undisturbed_one(
    cli: CommandLine, uninterrupted: Callable[..., Left], tmp_path: Path
) -> None:
    struck, runs, wrong = chaos(cli, tmp_path, uninterrupted(*MLP), kills=4, seed=1)
    assert wrong == []
    assert struck.total() == 4 and runs >= 1
