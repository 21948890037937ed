"""`tests/gpu/run.sh` on a CPU, and GPU tests on a second device in the memory of the CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [ROOT / "tests/gpu/run.sh", "--device", "cpu", "--small", "--out", tmp_path]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert list(steps) == ["engine", "ratios", "training", "sharded", "rows", "tests"]
    rows = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [0, 1] * 4 and all(row["steps"] == 8 for row in rows)
    assert [bool(row["events"]) for row in rows] == [False] * 4 + [True] * 4
    assert (tmp_path / "rows/table2_short/net2net_80_s0/results.json").is_file()
    assert len(json.loads((tmp_path / "ratios.json").read_text())["ratios"]) > 3


def test_without_packages_the_script_says_which_wheels_are_needed(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(bare), "WHEELS": str(tmp_path)}
    done = subprocess.run(
        [ROOT / "tests/gpu/run.sh"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "pip wheel" in done.stderr


# For such a device, torch has no LSTM kernel and inductor no backend.
LEFT_OUT = "not recurrent and not reduce-overhead"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None, reason="needs a C++ compiler and ninja"
)
def test_gpu_tests_pass_on_a_second_device() -> None:
    command = ["pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-k", LEFT_OUT, "tests/gpu/test_engine.py"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"GROWLAB_TEST_DEVICE": "second_device"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
