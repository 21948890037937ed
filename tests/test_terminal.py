"""Text as a terminal shows it."""

import os
import sys

import pytest

from growlab.base.terminal import wrapped

TEXT = """torchvision/resnet18: 12 width groups (sets of channels that grow together), traced in 0.7 s
  depth       1 of 2 BasicBlock (layer1.1) may come in later, exactly with start=zero or stack
    ours: 6.0e-15 in eval mode, 1.9e-04 in train mode, 0.0e+00 loaded into the network as it is

| method                | cost % | accuracy % (n) | seconds | speed-up | and another column that is wide |
short"""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")


@pytest.mark.usefixtures("terminal")
def test_lines_break_between_words_and_go_on_below_their_second_column() -> None:
    assert wrapped(TEXT).split("\n") == [
        "torchvision/resnet18: 12 width groups (sets of channels that",
        "  grow together), traced in 0.7 s",
        "  depth       1 of 2 BasicBlock (layer1.1) may come in",
        "              later, exactly with start=zero or stack",
        "    ours: 6.0e-15 in eval mode, 1.9e-04 in train mode,",
        "      0.0e+00 loaded into the network as it is",
        "",
        TEXT.split("\n")[4],
        "short",
    ]


@pytest.mark.usefixtures("terminal")
def test_a_word_wider_than_the_terminal_stays_whole() -> None:
    path = os.path.join("a" * 40, "b" * 40)
    assert path in wrapped(f"everything: {path}").split()


def test_a_pipe_gets_the_lines_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert wrapped(TEXT) == TEXT
