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
        ("parts/hypernets", "studies/continual_regression.py", "reproduce/papers/2_chang.yaml"),
        ("*/hyper*.yaml", "experiment/*hyperfan.yaml"),
        ("parts/hypernets", "studies/test_continual_regression.py"),
    ),
}
# The engine in plain loops, the rules of imports and words, what configurations are made of.
SAMPLE = (
    *("tests/test_grower.py", "tests/test_imports.py", "tests/test_words.py", "tests/test_face.py"),
    *("tests/optim/test_follow.py", "tests/test_configuration.py", "tests/parts/test_own_part.py"),
)


def remove(folder: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in list(folder.glob(pattern)):
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)


@pytest.fixture(params=PARTS)
def without(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Files]:
    """A copy of the project without a part."""
    files, code = PARTS[request.param], tmp_path / "code"
    for name in ("growlab", "conf", "tests"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "Makefile", "README.md", "requirements.lock"):
        shutil.copy(ROOT / name, code)
    (code / "notebooks").symlink_to(ROOT / "notebooks")
    for name, patterns in (("growlab", files.code), ("conf", files.conf), ("tests", files.tests)):
        remove(code / name, patterns)
    return code, files


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
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_without_a_part_the_rest_runs_and_is_tested(without: tuple[Path, Files], tmp_path: Path) -> None:
    code, files = without
    called(code, tmp_path, "growlab", *MLP, *files.others, "hydra.run.dir=run")
    assert (tmp_path / "run" / "results.json").exists()
    quietly = ("pytest", "-q", "-p", "no:cacheprovider", "-n", "0")
    collected = called(code, code, *quietly, "--collect-only", "-m", "", "tests")
    assert "::" in collected and not any(f"tests/{name}" in collected for name in files.tests)
    called(code, code, *quietly, *SAMPLE)
