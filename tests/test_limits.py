"""Modules and functions stay below the sizes that make code hard to read."""

import ast
from pathlib import Path

import pytest

import growlab

PACKAGE = Path(growlab.__file__).parent
MODULE_LINES, FUNCTION_LINES = 700, 80
# A run, read top to bottom.
SHORT = {"lab/training/run.py": 60}


def violations(source: str, function_lines: int = FUNCTION_LINES) -> list[str]:
    """List the module's and its functions' sizes that exceed the limits."""
    found, tree = [], ast.parse(source)
    if (lines := len(source.splitlines())) > MODULE_LINES:
        found.append(f"{lines} lines")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (lines := node.end_lineno - node.lineno + 1) > function_lines:
            found.append(f"line {node.lineno}: {node.name} has {lines} lines")
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.relative_to(PACKAGE).as_posix()
)
def test_code_stays_short(path: Path) -> None:
    assert violations(path.read_text(), SHORT.get(path.relative_to(PACKAGE).as_posix(), FUNCTION_LINES)) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\n" * 701, "701 lines"),
        ("def f():\n" + "    x = 1\n" * 80, "f has 81 lines"),
    ],
)
def test_what_is_too_long_is_found(source: str, said: str) -> None:
    (found,) = violations(source)
    assert said in found


def test_what_is_just_short_enough_passes() -> None:
    assert violations("def f():\n" + "    x = 1\n" * 79 + "y = 1\n" * 620) == []
