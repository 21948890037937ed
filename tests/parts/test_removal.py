"""A part's files taken away: everything else runs as before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import MLP, ROOT

# Files of each part, and settings of the others, which then still work.
PARTS = {
    "averages": (["parts/averages.py", "conf/parts/ema.yaml"], ["osgd.anneal=run"]),
    "old gradients": (["parts/osgd.py", "conf/parts/osgd.yaml"], ["ema.decay=0.9"]),
    "depth": (["parts/depth", "conf/parts/depth.yaml"], ["ema.decay=0.9", "osgd.anneal=stage"]),
    "arriving classes": (["parts/classes.py"], ["ema.decay=0.9"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_without_a_part_the_others_run(tmp_path: Path, part: str) -> None:
    files, others = PARTS[part]
    package = tmp_path / "code" / "growlab"
    shutil.copytree(ROOT / "growlab", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "conf", package / "conf")
    for file in files:
        path = package / file
        (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    command = [sys.executable, "-m", "growlab", *MLP, *others, "hydra.run.dir=run"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "code"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "results.json").exists()
