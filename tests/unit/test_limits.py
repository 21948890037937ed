"""Modules and functions stay below the sizes that make code hard to read."""

import ast
from pathlib import Path

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


def test_code_stays_short() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    long = {name: violations(source, SHORT.get(name, FUNCTION_LINES)) for name, source in files.items()}
    assert len(files) > 100 and {name: found for name, found in long.items() if found} == {}


def test_code_over_a_limit_is_found() -> None:
    assert violations("x = 1\n" * 701) == ["701 lines"]
    assert violations("def f():\n" + "    x = 1\n" * 80) == ["line 1: f has 81 lines"]
    assert violations("def f():\n" + "    x = 1\n" * 79 + "y = 1\n" * 620) == []
