"""Fixtures for tests in several folders."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.command_line import SERVER, CommandLine, Server, traces_beside

if TYPE_CHECKING:
    from tests.runs import Left

# Seeded like all other tests: the same examples in each run. `--hypothesis-profile=default` draws others.
settings.register_profile("seeded", derandomize=True)
settings.load_profile("seeded")
_SERVER = pytest.StashKey[Server]()
_TRACES = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """The process that gives tests to others starts the one that their runs fork from."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.stash[_SERVER] = Server()
        config.stash[_SERVER].announce()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported and collected stays: a full collection need not go through a million objects each time."""
    # Imported here, since the process that gives tests to others needs nothing of torch.
    from tests.once import read_conf_once, trace_once

    read_conf_once()
    if SERVER in os.environ:
        trace_once(traces_beside(os.environ[SERVER]))
    else:
        session.config.stash[_TRACES] = tempfile.TemporaryDirectory()
        trace_once(Path(session.config.stash[_TRACES].name))
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the interpreter take everything down in its order."""
    if _SERVER in config.stash:
        config.stash[_SERVER].close()
    if _TRACES in config.stash:
        config.stash[_TRACES].cleanup()
    gc.unfreeze()


@pytest.fixture(scope="session")
def cli() -> Iterator[CommandLine]:
    """The command line, as real processes."""
    started = CommandLine()
    yield started
    started.close()


@pytest.fixture(scope="session")
def uninterrupted(cli: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> "Callable[..., Left]":
    """What a run leaves that nothing disturbs, made once for each configuration."""
    from tests.runs import Left

    made: dict[tuple[str, ...], Left] = {}

    def run(*arguments: str) -> Left:
        if arguments not in made:
            folder = tmp_path_factory.mktemp("whole")
            outcome = cli(*arguments, "hydra.run.dir=run", cwd=folder)
            assert outcome.code == 0, outcome.err
            made[arguments] = Left.by(folder / "run")
        return made[arguments]

    return run
