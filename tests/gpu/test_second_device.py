"""Growth on a device made of the CPU's memory, where mixed devices raise as on CUDA: faults of device without a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# torch gives LSTMs on such a device a kernel that only CUDA has, and inductor has none for it.
LEFT_OUT = "not recurrent and not reduce-overhead"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None, reason="needs a C++ compiler and ninja"
)
def test_the_gpu_s_tests_pass_on_a_second_device() -> None:
    command = ["pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-k", LEFT_OUT, "tests/gpu/test_engine.py"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"GROWLAB_TEST_DEVICE": "second_device"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
