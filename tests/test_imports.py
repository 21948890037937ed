"""Dependencies point one way: the imports are read and held against DESIGN.md."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import growlab

PACKAGE = Path(growlab.__file__).parent
EVERYWHERE = {"command_parser", "errors", "files", "ranks", "settings"}


@dataclass(frozen=True)
class Rule:
    """What one part of growlab may import: its own modules, `EVERYWHERE` and the standard library aside."""

    parts: frozenset[str]
    packages: frozenset[str] | None = None  # None: anything that no other rule reserves


def rule(parts: str = "", packages: str | None = None) -> Rule:
    return Rule(frozenset(parts.split()), None if packages is None else frozenset(packages.split()))


RULES = {
    "command_parser": rule(packages=""),
    "errors": rule(packages=""),
    "files": rule(packages=""),
    "settings": rule(packages=""),
    "terminal": rule(packages=""),
    "streams": rule(packages=""),
    "ranks": rule(packages="torch"),
    "networks": rule("widths", packages="torch"),
    "unchanged": rule(packages="torch numpy"),
    "widths": rule("networks unchanged", packages="torch"),
    "growth": rule("widths networks unchanged", packages="torch"),
    "optim": rule("widths", packages="torch"),
    "triggers": rule("widths growth", packages="torch"),
    "flops": rule("unchanged widths", packages="torch"),
    "parts": rule("unchanged widths growth optim triggers flops", packages="torch"),
    "grower": rule("unchanged widths growth optim triggers parts", packages="torch"),
    "frontends": rule("widths growth optim triggers parts grower", packages="torch lightning transformers"),
    "data": rule("fairseq_library parts"),
    "fairseq_library": rule(packages="hydra"),
    "identity": rule(packages=""),
    "analysis": rule("widths identity"),
    "training": rule("widths growth optim triggers parts grower analysis flops data frontends"),
    "studies": rule(
        "widths parts networks growth analysis flops training configuration", packages="torch hydra omegaconf"
    ),
    "translation": rule("fairseq_library data training", packages="torch"),
    "signatures": rule(packages="omegaconf"),
    "configs": rule("naming signatures", packages="hydra omegaconf"),
    "naming": rule(packages="hydra omegaconf"),
    "configuration": rule("configs", packages="hydra omegaconf"),
    "argument_types": rule(packages="hydra omegaconf"),
    "trainer_options": rule(packages="omegaconf"),
    "wording": rule(packages=""),
    "explain": rule("commands trainer_options wording", packages="hydra omegaconf yaml"),
    "choices": rule("configuration wording", packages="hydra yaml"),
    "library": rule(packages="torch torchvision timm safetensors"),
    "widths.__main__": rule("survey terminal", packages=""),
    "survey": rule("networks widths growth parts analysis flops", packages="torch"),
    "widen": rule("widths growth survey library", packages="torch"),
    "widen.__main__": rule("widen", packages=""),
    "language_models": rule("survey widen", packages="torch"),
    "analysis.__main__": rule("analysis streams terminal"),
    "reproduce": rule("analysis configuration processes run_folder"),
    "reproduce.__main__": rule("analysis reproduce streams"),
    "dashboard": rule(packages="wandb_workspaces"),
    # It finds the modules of commands by name, when one is asked for.
    "commands": rule(packages=""),
    "resuming": rule("configuration processes", packages="hydra omegaconf"),
    "run_folder": rule(packages=""),
    "processes": rule(packages="omegaconf torch"),
    "launcher": rule("configuration processes", packages="hydra torch"),
    "sweep_progress": rule("processes", packages="hydra"),
    "sweeps": rule(
        "analysis processes experiment training sweep_progress terminal", packages="hydra omegaconf torch"
    ),
    "next_commands": rule("configuration processes", packages="hydra omegaconf"),
    "outcome": rule("configuration identity resuming training", packages="hydra omegaconf"),
    "planning": rule(
        "argument_types widths growth triggers parts grower data training processes trainer_options pairing"
    ),
    "overruled": rule("planning", packages="omegaconf"),
    "setting_names": rule(packages="hydra omegaconf"),
    "starting": rule("grower library optim", packages="torch"),
    "telling": rule("grower data planning training"),
    "callbacks": rule("training", packages="lightning hydra omegaconf"),
    "pairing": rule("training data", packages="torch hydra omegaconf"),
    "experiment": rule(
        "studies networks widths growth optim data training analysis configuration processes outcome planning "
        "callbacks next_commands overruled pairing run_folder setting_names starting telling trainer_options"
    ),
    "plan": rule(
        "growth optim triggers parts grower training analysis processes trainer_options pairing planning flops "
        "configuration run_folder setting_names starting",
    ),
    "plan.__main__": rule("plan choices processes __main__", packages="omegaconf"),
    "__main__": rule(
        "choices commands configuration explain experiment launcher resuming processes streams sweeps terminal",
        packages="hydra omegaconf",
    ),
    "__init__": rule("frontends grower growth parts triggers widths", packages=""),
}
CONFIGURED = {
    "studies",
    # Keeps Hydra's store as it was when fairseq puts its own configurations there.
    "fairseq_library",
    "__main__",
    "argument_types",
    "callbacks",
    "pairing",
    "planning",
    "plan",
    "plan.__main__",
    "experiment",
    "configuration",
    "configs",
    "signatures",
    "choices",
    "explain",
    "naming",
    "next_commands",
    "outcome",
    "overruled",
    "resuming",
    "setting_names",
    "processes",
    "launcher",
    "sweep_progress",
    "sweeps",
    "trainer_options",
}
# Packages that only some parts may import, however free their rule is.
RESERVED = {
    "hydra": CONFIGURED,
    "omegaconf": CONFIGURED,
    "lightning": {"frontends", "training", "data", "experiment", "planning", "plan", "telling", "callbacks"},
    "pytorch_lightning": set(),
    "wandb": set(),
    "tensorboard": set(),
}
# A logger may need its own package: it is chosen in conf/logger and imports it where it is made.
LOGGERS = "growlab.training.loggers"


def part_of(module: str) -> str:
    """`growlab.widths.trace` -> `widths`; a part's command line is a part of its own."""
    names = module.split(".")
    return ".".join(names[1:]) if names[-1] == "__main__" else names[1] if len(names) > 1 else "__init__"


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import of a module, those inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                names = module.split(".")
                above = names[: len(names) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            # `from growlab import configs` imports the module growlab.configs
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "growlab" else [base]
            yield from ((node.lineno, name) for name in names)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of a module of growlab that its rule does not allow."""
    own = part_of(module)
    allowed = RULES[own]
    found = []
    for line, name in imported(source, module, is_package):
        top = name.split(".")[0]
        if top == "growlab":
            part = part_of(name)
            fine = part in {own, "__init__", *EVERYWHERE, *allowed.parts}
        elif top in sys.stdlib_module_names or (
            module.startswith(LOGGERS) and top in ("wandb", "tensorboard")
        ):
            fine = True
        elif top in RESERVED:
            fine = own in RESERVED[top]
        else:
            fine = allowed.packages is None or top in allowed.packages
        if not fine:
            found.append(f"{module}, line {line}: {own} may not import {name}")
    return found


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "conf" not in path.relative_to(PACKAGE).parts)


def test_every_part_has_a_rule() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    assert parts <= set(RULES), "a new top-level part needs a row in RULES, in agreement with the design"


def test_the_rules_have_no_cycle() -> None:
    """A part never depends on one that depends on it, but networks and widths may use each other."""
    for part, allowed in RULES.items():
        reached, frontier = set(), set(allowed.parts)
        while frontier:
            reached |= frontier
            frontier = {p for f in frontier for p in RULES[f].parts} - reached
        assert part not in reached or part in ("networks", "widths")


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_follow_the_design(path: Path) -> None:
    is_package = path.name == "__init__.py"
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = ".".join(names[:-1] if is_package else names)
    assert violations(path.read_text(encoding="utf-8"), module, is_package) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("growlab.widths.trace", "from growlab.growth import method"),
        ("growlab.widths.trace", "from ..growth.method import Method"),
        ("growlab.widths.trace", "import numpy as np"),
        ("growlab.growth.pairs", "from growlab import optim"),
        ("growlab.optim.stagewise", "import growlab.training.tasks"),
        ("growlab.training.tasks", "from omegaconf import DictConfig"),
        ("growlab.training.tasks", "import wandb"),
        ("growlab.analysis.tables", "import lightning"),
        ("growlab.analysis.tables", "def f():\n    from growlab.training import tasks"),
        ("growlab.data.module", "from growlab.experiment import run"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str) -> None:
    assert len(violations(line, module)) == 1


def test_an_allowed_import_passes() -> None:
    source = "import math\nimport torch\nfrom growlab.errors import UserError\nfrom . import groups\n"
    assert violations(source, "growlab.widths.trace") == []
    assert violations("from . import loggers\nimport wandb", "growlab.training.loggers") == []
