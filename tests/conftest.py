"""Fixtures for all tests."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.command_line import SERVER, CommandLine, Server, shared_folder

if TYPE_CHECKING:
    from tests.whole_runs import Left, Whole

# Otherwise every process would compile torch and Lightning again.
sys.dont_write_bytecode = False
# The same examples in each run; `--hypothesis-profile=default` draws others.
settings.register_profile("seeded", derandomize=True, max_examples=50)
settings.load_profile("seeded")
_SERVER = pytest.StashKey[Server]()
_MODULES = pytest.StashKey[int]()
_TRACES = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of runs in the process that distributes the tests."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.stash[_SERVER] = Server()
        config.stash[_SERVER].announce()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt everything imported and collected from garbage collection, which would visit a million objects."""
    # Imported here, since the process that distributes the tests does not need torch.
    from tests.once import read_conf_once, trace_once

    read_conf_once()
    if SERVER in os.environ:
        trace_once(shared_folder(os.environ[SERVER], "traces"))
    else:
        session.config.stash[_TRACES] = tempfile.TemporaryDirectory()
        trace_once(Path(session.config.stash[_TRACES].name))
    _exempt(session.config)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Exempt modules that a test imported, such as transformers, from garbage collection: it would slow later tests."""
    if len(sys.modules) > item.config.stash[_MODULES] + 100:
        _exempt(item.config)


def _exempt(config: pytest.Config) -> None:
    config.stash[_MODULES] = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the server and undo `_exempt`."""
    if _SERVER in config.stash:
        config.stash[_SERVER].close()
    if _TRACES in config.stash:
        config.stash[_TRACES].cleanup()
    gc.unfreeze()


@pytest.fixture(scope="session")
def cli() -> Iterator[CommandLine]:
    """The command line, each run in a separate process."""
    started = CommandLine()
    yield started
    started.close()


@pytest.fixture(scope="session")
def whole(cli: CommandLine) -> "Callable[..., Whole]":
    """Return a function that makes an undisturbed run of its arguments, once for all test processes."""
    from tests.whole_runs import whole_run

    return partial(whole_run, cli)


@pytest.fixture(scope="session")
def uninterrupted(whole: "Callable[..., Whole]") -> "Callable[..., Left]":
    """Return a function that gives the files of an undisturbed run of its arguments."""
    return lambda *arguments: whole(*arguments).left
