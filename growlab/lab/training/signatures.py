"""Structured configs made from signatures, read from the source: composing a configuration need not import torch."""

import ast
from collections.abc import Iterator
from dataclasses import field, make_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING

_ROOT = Path(__file__).resolve().parents[2]
# A configuration holds no fractions: they are numbers like others there.
_PLAIN: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "Fraction": float}


def schema(target: str, leave_out: tuple[str, ...] = (), **more: Any) -> type:
    """A dataclass with one field for each argument of a class or function of growlab; all values are MISSING.

    Types that OmegaConf knows are kept: numbers, words, sequences of them, `None`. A Literal of words becomes an
    enumeration of plain strings, anything else `Any`. A class's has the field `_target_` too.

    Args:
        target: dotted path, as `_target_` gives it; packages may re-export it.
        leave_out: arguments that the configuration does not give.
        more: further fields and their types.

    Raises:
        LookupError: growlab has no such class or function.
    """
    types = {
        name: _type(note, tree, name) for name, note, tree in _arguments(target) if name not in leave_out
    }
    fields: list[Any] = [(name, kind, field(default=MISSING)) for name, kind in {**types, **more}.items()]
    if isinstance(_find(target)[0], ast.ClassDef):
        fields.insert(0, ("_target_", str, field(default=target)))
    return make_dataclass(f"{target.rsplit('.', 1)[-1]}Config", fields)


@cache
def _statements(module: str) -> list[ast.stmt]:
    """Top-level statements of a module, those below `if TYPE_CHECKING` too."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text()).body
    return [*body, *(inner for node in body if isinstance(node, ast.If) for inner in node.body)]


def _find(target: str) -> tuple[ast.AST, str]:
    """The definition that a dotted path leads to, and the module that it stands in."""
    module, _, name = target.rpartition(".")
    for node in _statements(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node, module
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            return node.value, module
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("growlab"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find(f"{node.module}.{alias.name}")
    raise LookupError(f"growlab has no {target}")


def _arguments(target: str) -> Iterator[tuple[str, ast.expr | None, str]]:
    """Name, annotation and module of each argument."""
    node, module = _find(target)
    kinds: list[ast.expr] = []
    if isinstance(node, ast.ClassDef):
        made = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if made is None and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, line.annotation, module
            return
        if made is None:
            yield from _arguments(f"{module}.{ast.unparse(node.bases[0])}")
            return
        kinds = [
            kind
            for line in node.body
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "SETTINGS"
            for kind in (line.value.elts if isinstance(line.value, ast.Tuple) else ())
        ]
        node = made
    assert isinstance(node, ast.FunctionDef)
    for argument in (*node.args.args, *node.args.kwonlyargs):
        if argument.arg != "self":
            yield argument.arg, argument.annotation, module
    # Classes whose arguments it takes as if they were its own, see `growlab.base.settings`.
    for kind in kinds:
        yield from _arguments(f"{module}.{ast.unparse(kind)}")


def _type(note: ast.AST | None, module: str, name: str) -> Any:
    if isinstance(note, ast.Name):
        if note.id in _PLAIN:
            return _PLAIN[note.id]
        try:
            found, place = _find(f"{module}.{note.id}")
        except LookupError:
            return Any
        return Any if isinstance(found, ast.ClassDef) else _type(found, place, name)
    if isinstance(note, ast.BinOp):
        parts = [_type(side, module, name) for side in (note.left, note.right) if ast.unparse(side) != "None"]
        if len(parts) == 1:
            return Any if parts[0] is Any else Optional[parts[0]]  # noqa: UP045 - the type is a value here
        # Of numbers, the widest; other unions are not OmegaConf's.
        return float if set(parts) <= {int, float} else Any
    if isinstance(note, ast.Subscript):
        kind, inner = ast.unparse(note.value), note.slice
        if kind == "Literal":
            words = ast.literal_eval(inner)
            return StrEnum(name, {word: word for word in ((words,) if isinstance(words, str) else words)})
        if kind in ("Sequence", "list"):
            entry = _type(inner, module, name)
            return list[entry]  # type: ignore[valid-type]
    return Any
