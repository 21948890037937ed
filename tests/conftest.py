"""Fixtures for tests in several folders."""

from collections.abc import Iterator

import pytest

from tests.runs import CommandLine


@pytest.fixture(scope="session")
def cli() -> Iterator[CommandLine]:
    """The command line, as real processes."""
    started = CommandLine()
    yield started
    started.close()
