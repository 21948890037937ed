"""A part's files taken away, its settings with them: nothing else imports them, and experiments run."""

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import ROOT, SERVER
from tests.whole_runs import MLP


@dataclass(frozen=True)
class Files:
    """Patterns of a part's files below growlab/ and conf/, and settings of other parts, which still work."""

    code: tuple[str, ...]
    conf: tuple[str, ...]
    others: tuple[str, ...] = ("ema.decay=0.9",)


PARTS = {
    "averages": Files(("parts/averages.py",), ("parts/ema.yaml",), ("osgd.anneal=run",)),
    "old gradients": Files(
        ("parts/osgd.py", "recipes/papers/entries/*_osgd.yaml"), ("parts/osgd.yaml", "method/ours_osgd.yaml")
    ),
    "depth": Files(
        ("parts/depth", "recipes/papers/entries/*_depth.yaml"),
        ("parts/depth.yaml", "method/grown_*.yaml", "method/smaller.yaml"),
        ("ema.decay=0.9", "osgd.anneal=stage"),
    ),
    "resolution": Files(("parts/resolution.py",), ("parts/resolution.yaml", "method/grown_resolution.yaml")),
    "patch sizes": Files(("parts/patch_size.py",), ("parts/patch_size.yaml",)),
    "settings": Files(("parts/setting.py",), ("parts/setting.yaml",)),
    "arriving classes": Files(("parts/classes.py",), ()),
    "arriving features": Files(("parts/features.py",), ("parts/features.yaml",)),
    "isotropic layers": Files(
        ("parts/isotropic", "recipes/papers/studies/isotropic*.py", "recipes/papers/entries/3_bird*.yaml"),
        ("parts/isotropic.yaml", "parts/gain_weights.yaml"),
    ),
    "hypernetworks": Files(
        ("parts/hypernets", "recipes/papers/studies/continual_regression*.py", "recipes/papers/entries/2_chang.yaml"),
        ("*/hyperfan*.yaml", "*/hypernet*.yaml"),
    ),
}


def matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]


def copied(code: Path, *parts: Files) -> None:
    """A copy of the package and its settings without some parts."""
    for name in ("growlab", "conf"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    for files in parts:
        for path in (*matching(code / "growlab", files.code), *matching(code / "conf", files.conf)):
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    # A run takes the parts that config.yaml names, in their order, which says what a pass over old data costs.
    config, there = code / "conf" / "config.yaml", {path.stem for path in (code / "conf" / "parts").glob("*.yaml")}

    def left(found: re.Match[str]) -> str:
        return f"- parts: [{', '.join(name for name in found[1].split(', ') if name in there)}]"

    config.write_text(re.sub(r"- parts: \[(.*)\]", left, config.read_text()))


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
    package = ROOT / "growlab"
    gone = {path for own in matching(package, PARTS[part].code) for path in (own, *own.rglob("*.py"))}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in gone if path.suffix == ".py"}
    modules |= {name.removesuffix(".__init__") for name in modules}
    stay = set(package.rglob("*.py")) - gone
    assert modules and {path.name: lost for path in stay if (lost := imported(path) & modules)} == {}


@pytest.mark.slow
@pytest.mark.parametrize("gone", [(name,) for name in PARTS] + [tuple(PARTS)], ids=" and ".join)
def test_experiments_run_without_a_part(gone: tuple[str, ...], tmp_path: Path) -> None:
    code = tmp_path / "code"
    copied(code, *(PARTS[name] for name in gone))
    others = PARTS[gone[0]].others if len(gone) == 1 else ()
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    # It has imported what the copy lacks.
    environment.pop(SERVER, None)
    command = [sys.executable, "-m", "growlab", *MLP, *others, "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert (tmp_path / "run" / "results.json").exists()
