"""A part's files taken away, its settings and tests with them: the rest is collected, tested and runs as before."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import ROOT, SERVER
from tests.runs import MLP


@dataclass(frozen=True)
class Files:
    """What belongs to a part.

    Attributes:
        code: below growlab/.
        conf: below conf/; patterns.
        tests: below tests/; patterns.
        others: settings of other parts, which then still work.
    """

    code: tuple[str, ...]
    conf: tuple[str, ...]
    tests: tuple[str, ...]
    others: tuple[str, ...] = ("ema.decay=0.9",)


# Tests of features that meet belong to each of them.
TOGETHER = ("parts/test_combinations.py", "parts/*/test_combinations.py", "parts/test_depth_grower.py")
PARTS = {
    "averages": Files(
        ("parts/averages.py",),
        ("parts/ema.yaml",),
        ("parts/test_averages*.py", "parts/*/test_averages.py", *TOGETHER),
        ("osgd.anneal=run",),
    ),
    "old gradients": Files(
        ("parts/osgd.py", "reproduce/papers/*_osgd.yaml"),
        (
            "parts/osgd.yaml",
            "method/ours_osgd.yaml",
            "experiment/table14.yaml",
            "experiment/incremental*.yaml",
        ),
        ("parts/test_osgd.py", *TOGETHER),
    ),
    "depth": Files(
        ("parts/depth", "reproduce/papers/*_depth.yaml"),
        (
            "parts/depth.yaml",
            "method/grown_*.yaml",
            "method/smaller.yaml",
            "experiment/*depth.yaml",
            "experiment/*testbed*.yaml",
            "experiment/*llama_text.yaml",
            "experiment/frontier_*.yaml",
        ),
        (
            "parts/depth",
            "parts/test_blocks.py",
            "parts/test_finding.py",
            "parts/test_depth_runs.py",
            *TOGETHER,
        ),
        ("ema.decay=0.9", "osgd.anneal=stage"),
    ),
    "resolution": Files(
        ("parts/resolution.py",),
        ("parts/resolution.yaml", "method/grown_resolution.yaml"),
        ("parts/test_resolution.py",),
    ),
    "arriving classes": Files(("parts/classes.py",), (), ("parts/test_classes*.py", *TOGETHER)),
    "isotropic layers": Files(
        ("parts/isotropic", "studies/isotropic*.py", "reproduce/papers/3_bird*.yaml"),
        ("parts/isotropic.yaml", "parts/gain_weights.yaml", "*/isotropic*.yaml"),
        ("parts/isotropic", "studies/test_isotropic*.py"),
    ),
    "hypernetworks": Files(
        ("parts/hypernets", "studies/continual_regression*.py", "reproduce/papers/2_chang.yaml"),
        ("*/hyper*.yaml", "experiment/*hyperfan.yaml"),
        ("parts/hypernets", "studies/test_continual_regression.py"),
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


def called(code: Path, folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    # It has imported what the copy lacks.
    environment.pop(SERVER, None)
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(3600)
@pytest.mark.slow
@pytest.mark.parametrize("gone", [(name,) for name in PARTS] + [tuple(PARTS)], ids=" and ".join)
def test_without_a_part_the_rest_runs_and_is_tested(gone: tuple[str, ...], tmp_path: Path) -> None:
    code = tmp_path / "code"
    copied(code, *(PARTS[name] for name in gone))
    others = PARTS[gone[0]].others if len(gone) == 1 else ()
    called(code, tmp_path, "growlab", *MLP, *others, "hydra.run.dir=run")
    assert (tmp_path / "run" / "results.json").exists()
    quietly = ("pytest", "-q", "-p", "no:cacheprovider")
    collected = called(code, code, *quietly, "-n", "0", "--collect-only", "-m", "", "tests")
    assert "::" in collected
    assert not any(f"tests/{name}" in collected for part in gone for name in PARTS[part].tests)
    called(code, code, *quietly, "-n", str(os.cpu_count()), "--dist", "worksteal", "tests")
