"""A part's files taken away, its settings and tests with them: the rest is collected, tested and runs as before.

Where a single part goes, the tests that could notice are run: those that name something that is gone, and those that
list the package or its settings. Without all parts at once it is the whole suite.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.command_line import ROOT, SERVER
from tests.parts_here import skip_unless_whole
from tests.whole_runs import MLP


@dataclass(frozen=True)
class Files:
    """Patterns of a part's files below growlab/, conf/ and tests/, and settings of other parts, which still work."""

    code: tuple[str, ...]
    conf: tuple[str, ...]
    tests: tuple[str, ...]
    others: tuple[str, ...] = ("ema.decay=0.9",)


# They list the package's modules, or all settings.
LISTING = (
    "tests/lab/test_configs.py",
    *("tests/runs/test_configuration.py", "tests/unit/test_imports.py", "tests/unit/test_limits.py"),
)
# Tests of parts that meet belong to each of them.
TOGETHER = (
    "unit/parts/test_depth_grower.py",
    "unit/parts/hypernets/test_growth.py",
    "unit/parts/isotropic/test_part.py",
)
PARTS = {
    "averages": Files(
        ("parts/averages.py",), ("parts/ema.yaml",), ("unit/parts/test_averages.py", *TOGETHER), ("osgd.anneal=run",)
    ),
    "old gradients": Files(
        ("parts/osgd.py", "recipes/papers/entries/*_osgd.yaml"),
        ("parts/osgd.yaml", "method/ours_osgd.yaml", "experiment/table14.yaml", "experiment/incremental*.yaml"),
        ("unit/parts/test_osgd.py", *TOGETHER),
    ),
    "depth": Files(
        ("parts/depth", "recipes/papers/entries/*_depth.yaml"),
        (
            *("parts/depth.yaml", "method/grown_*.yaml", "method/smaller.yaml", "experiment/*depth.yaml"),
            *("experiment/*testbed*.yaml", "experiment/*llama_text.yaml", "experiment/frontier_*.yaml"),
        ),
        ("unit/parts/test_blocks.py", "unit/parts/test_finding.py", *TOGETHER),
        ("ema.decay=0.9", "osgd.anneal=stage"),
    ),
    "resolution": Files(
        ("parts/resolution.py",),
        ("parts/resolution.yaml", "method/grown_resolution.yaml"),
        ("unit/parts/test_resolution.py",),
    ),
    "patch sizes": Files(("parts/patch_size.py",), ("parts/patch_size.yaml",), ("unit/parts/test_patch_size.py",)),
    "settings": Files(("parts/setting.py",), ("parts/setting.yaml",), ("unit/parts/test_setting.py",)),
    "arriving classes": Files(("parts/classes.py",), (), ("unit/parts/test_classes.py",)),
    "arriving features": Files(("parts/features.py",), ("parts/features.yaml",), ("unit/parts/test_features.py",)),
    "isotropic layers": Files(
        ("parts/isotropic", "recipes/papers/studies/isotropic*.py", "recipes/papers/entries/3_bird*.yaml"),
        ("parts/isotropic.yaml", "parts/gain_weights.yaml", "*/isotropic*.yaml"),
        ("unit/parts/isotropic", "recipes/studies/test_isotropic*.py"),
    ),
    "hypernetworks": Files(
        (
            *("parts/hypernets", "recipes/papers/studies/continual_regression*.py"),
            "recipes/papers/entries/2_chang.yaml",
        ),
        ("*/hyperfan*.yaml", "*/hypernet*.yaml", "experiment/*hyperfan.yaml"),
        ("unit/parts/hypernets", "runs/test_hypernets.py", "recipes/studies/test_continual_regression.py"),
    ),
}


def remove(folder: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in list(folder.glob(pattern)):
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)


def copied(code: Path, *parts: Files) -> None:
    """A copy of the project without some parts."""
    for name in ("growlab", "conf", "tests"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.*"), ROOT / "Makefile", ROOT / "LICENSE"):
        if path.is_file():
            shutil.copy(path, code)
    # Tests of the docs build them, and read the rows.
    shutil.copytree(ROOT / "notebooks", code / "notebooks")
    for files in parts:
        for name, patterns in (("growlab", files.code), ("conf", files.conf), ("tests", files.tests)):
            remove(code / name, patterns)
    # A run takes the parts that config.yaml names, in their order, which says what a pass over old data costs.
    config, there = code / "conf" / "config.yaml", {path.stem for path in (code / "conf" / "parts").glob("*.yaml")}

    def left(found: re.Match[str]) -> str:
        return f"- parts: [{', '.join(name for name in found[1].split(', ') if name in there)}]"

    config.write_text(re.sub(r"- parts: \[(.*)\]", left, config.read_text()))


def called(code: Path, folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    # It has imported what the copy lacks.
    environment.pop(SERVER, None)
    whole = [sys.executable, "-m", *command]
    done = subprocess.run(whole, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def named(files: Files) -> re.Pattern[str]:
    """What is gone, as tests name it: modules by their path or dotted name, settings by the file's name."""
    modules = [path for pattern in files.code for path in (ROOT / "growlab").glob(pattern)]
    settings = [path.stem for pattern in files.conf for path in (ROOT / "conf").glob(pattern)]
    dotted = [".".join(path.relative_to(ROOT / "growlab").with_suffix("").parts) for path in modules]
    marks = {f'"{path.stem}"' for path in modules if path.parent.name == "parts"}
    words = {*settings, *dotted, *(name.replace(".", "/") for name in dotted), *marks}
    return re.compile(rf"(?<!\w)({'|'.join(map(re.escape, sorted(words)))})(?!\w)")


def noticing(code: Path, files: Files) -> list[str]:
    """Tests of a copy that could notice that these files are gone; not this one."""
    words, found = named(files), []
    for path in sorted((code / "tests").rglob("test_*.py")):
        name = path.relative_to(code).as_posix()
        if name in LISTING or (words.search(path.read_text()) and path.name != Path(__file__).name):
            found.append(name)
    return found


@cache
def imported(path: Path) -> set[str]:
    """Names of what a module imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("part", PARTS)
def test_nothing_that_stays_needs_a_part_to_be_imported(part: str) -> None:
    skip_unless_whole()
    places = (("growlab", PARTS[part].code), ("tests", PARTS[part].tests))
    owned = [path for top, patterns in places for pattern in patterns for path in (ROOT / top).glob(pattern)]
    gone = {path for own in owned for path in ([own] if own.is_file() else own.rglob("*.py"))}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in gone if path.suffix == ".py"}
    modules |= {name.removesuffix(".__init__") for name in modules}
    stay = {path for top, _ in places for path in (ROOT / top).rglob("*.py")} - gone
    assert modules and {path.name: lost for path in stay if (lost := imported(path) & modules)} == {}


def test_tests_that_name_a_part_are_known() -> None:
    skip_unless_whole()
    assert set(LISTING) <= set(noticing(ROOT, PARTS["averages"]))
    assert "tests/runs/test_resume.py" in noticing(ROOT, PARTS["averages"])
    assert "tests/runs/test_parts.py" in noticing(ROOT, PARTS["old gradients"])
    assert "tests/unit/optim/test_follow.py" not in noticing(ROOT, PARTS["averages"])


@pytest.mark.timeout(7200)
@pytest.mark.slow
@pytest.mark.parametrize("gone", [(name,) for name in PARTS] + [tuple(PARTS)], ids=" and ".join)
def test_without_a_part_the_rest_runs_and_is_tested(gone: tuple[str, ...], tmp_path: Path) -> None:
    code = tmp_path / "code"
    copied(code, *(PARTS[name] for name in gone))
    alone = len(gone) == 1
    others = PARTS[gone[0]].others if alone else ()
    called(code, tmp_path, "growlab", *MLP, *others, "hydra.run.dir=run")
    assert (tmp_path / "run" / "results.json").exists()
    quietly = ("pytest", "-q", "-p", "no:cacheprovider")
    collected = called(code, code, *quietly, "-n", "0", "--collect-only", "-m", "", "tests")
    assert "::" in collected
    assert not any(f"tests/{name}" in collected for part in gone for name in PARTS[part].tests)
    chosen = noticing(code, PARTS[gone[0]]) if alone else ["tests"]
    called(code, code, *quietly, "-n", str(os.cpu_count()), "--dist", "worksteal", *chosen)
