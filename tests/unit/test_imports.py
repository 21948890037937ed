"""Imports point one way: base, the engine, the lab, recipes."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import growlab

PACKAGE = Path(growlab.__file__).parent
# A room imports from rooms on floors below its own, and from none beside it.
FLOORS = (
    {"base"},
    {"widths", "plan"},
    {"growth", "optim"},
    {"grower"},
    {"parts", "frontends"},
    {"inspect"},
    {"widen"},
    {"lab.networks", "lab.data", "lab.analysis"},
    {"lab.training"},
    {"lab.cli"},
    {"lab.planner"},
    {"recipes.translation", "recipes.papers"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Packages that an empty environment with torch lacks, and the rooms that may import them.
LAB = {room for room in FLOOR if room.startswith(("lab.", "recipes."))}
OPTIONAL = {
    "lightning": LAB | {"frontends"},
    "transformers": LAB | {"frontends", "inspect", "widen"},
    "torchvision": LAB | {"inspect"},
    "timm": LAB | {"inspect"},
    "safetensors": LAB | {"inspect", "widen"},
    **dict.fromkeys(("hydra", "omegaconf", "yaml", "pandas", "scipy", "PIL", "sklearn", "wandb"), LAB),
    **dict.fromkeys(("matplotlib", "rich", "tensorboard", "pyarrow", "datasets", "fairseq"), LAB),
}


def names(path: Path) -> str:
    """Dotted name of a module."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {names(path): path for path in sorted(PACKAGE.rglob("*.py")) if "conf" not in path.relative_to(PACKAGE).parts}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def room_of(module: str) -> str:
    """`growlab.widths.trace` -> `widths`; the lab and the recipes have rooms of their own."""
    _, *parts = module.split(".")
    return ".".join(parts[: 2 if parts[:1] in (["lab"], ["recipes"]) else 1])


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import of a module, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name if name in MODULES else str(node.module)


def violations(tree: ast.Module, module: str) -> list[str]:
    """Imports of a module that go up, to another room on its floor, or to a package that its room does without."""
    own, found = room_of(module), []
    for line, name in imported(tree):
        top, other = name.partition(".")[0], room_of(name)
        if top != "growlab":
            fine = own in OPTIONAL.get(top, {own})
        else:
            fine = own in ("", "__main__", other) or not other or FLOOR[other] < FLOOR[own]
        if not fine:
            found.append(f"{module}, line {line}: {own} may not import {name}")
    return found


def test_each_package_has_a_layer() -> None:
    rooms = {room_of(module) for module in MODULES} - {"", "__main__", "lab", "recipes"}
    assert rooms == set(FLOOR)
    assert len({room.partition(".")[0] for room in rooms}) <= 12
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_no_two_modules_import_each_other() -> None:
    arrows = {
        module: {name for _, name in imported(tree_of(module)) if name in MODULES} - {module} for module in MODULES
    }
    assert set(TopologicalSorter(arrows).static_order()) == set(MODULES)


def test_imports_go_to_lower_layers_only() -> None:
    assert [line for module in MODULES for line in violations(tree_of(module), module)] == []


def test_a_forbidden_import_is_found_and_an_allowed_one_passes() -> None:
    for module, line in {
        "growlab.widths.trace": "from growlab.growth import method",
        "growlab.growth.methods.pairs": "from growlab.optim import SGD",
        "growlab.optim.rates": "import growlab.lab.training.task",
        "growlab.grower.grower": "from omegaconf import DictConfig",
        "growlab.parts.averages": "import lightning",
        "growlab.lab.data.image_data": "def f():\n    from growlab.lab.training import run",
        "growlab.lab.training.build": "from growlab.recipes.papers import studies",
    }.items():
        assert len(violations(ast.parse(line), module)) == 1, module
    source = "import math\nimport torch\nfrom growlab.base.errors import UserError\nfrom growlab.widths import groups\n"
    assert violations(ast.parse(source), "growlab.growth.event") == []


# Rooms and modules that read Hydra's configuration; the objects that they make know nothing of it.
CONFIGURED = ("growlab.lab.cli", "growlab.lab.planner", "growlab.lab.training.build")


def configured(tree: ast.Module) -> list[str]:
    """Functions of a module that take a DictConfig."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [
        function.name
        for function in functions
        for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if one.annotation is not None and "DictConfig" in ast.unparse(one.annotation)
    ]


def test_the_configuration_ends_at_the_door() -> None:
    others = [m for m in MODULES if not m.startswith(CONFIGURED)]
    assert {m: found for m in others if (found := configured(tree_of(m)))} == {}


def test_a_function_that_takes_the_configuration_is_found() -> None:
    tree = ast.parse("class A:\n    def f(self, *, cfg: DictConfig | None = None): ...")
    assert configured(tree) == ["f"]
    assert "build" in configured(tree_of("growlab.lab.training.build"))
