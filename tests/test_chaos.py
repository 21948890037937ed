"""The short version of `make chaos`."""

from pathlib import Path

from tests.chaos import chaos
from tests.command_line import CommandLine


def test_nothing_is_lost(cli: CommandLine, tmp_path: Path) -> None:
    struck, runs, wrong = chaos(cli, tmp_path, kills=4, seed=1)
    assert wrong == []
    assert struck.total() == 4 and runs >= 1
