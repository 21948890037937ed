import json
from pathlib import Path

import pytest

from tests.command_line import CommandLine


@pytest.fixture(scope="module")
def folder(cli: CommandLine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with the module's `SMALL` arguments, which prints its summary."""
    run = tmp_path_factory.mktemp("study") / "run"
    outcome = cli.done(*request.module.SMALL, "hydra.run.dir=run", cwd=run.parent)
    assert json.loads(outcome.out) == json.loads((run / "summary.json").read_text())
    return run
