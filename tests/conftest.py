"""Fixtures for tests in several folders."""

import gc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.once import read_conf_once
from tests.runs import CommandLine, Left

# Seeded like all other tests: the same examples in each run. `--hypothesis-profile=default` draws others.
settings.register_profile("seeded", derandomize=True)
settings.load_profile("seeded")
read_conf_once()


def pytest_collection_finish() -> None:
    """What is imported and collected stays: a full collection need not go through a million objects each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter take everything down in its order."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def cli() -> Iterator[CommandLine]:
    """The command line, as real processes."""
    started = CommandLine()
    yield started
    started.close()


@pytest.fixture(scope="session")
def uninterrupted(cli: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Left]:
    """What a run leaves that nothing disturbs, made once for each configuration."""
    made: dict[tuple[str, ...], Left] = {}

    def run(*arguments: str) -> Left:
        if arguments not in made:
            folder = tmp_path_factory.mktemp("whole")
            outcome = cli(*arguments, "hydra.run.dir=run", cwd=folder)
            assert outcome.code == 0, outcome.err
            made[arguments] = Left.by(folder / "run")
        return made[arguments]

    return run
