"""Loops of one's own under libraries that put something around network and optimizer, on two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.command_line import ROOT

pytest.importorskip("accelerate")


def test_two_processes_end_alike_and_compute_what_one_does(tmp_path: Path) -> None:
    from tests.frontends.loops_of_libraries import trained

    command = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    module = ["-m", "tests.frontends.loops_of_libraries", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *command, *module], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    alone = trained(lambda *given: given, torch.Tensor.backward, 0, 1)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for library in ("fabric", "accelerate"):
        for one, other, expected in zip(first[library], second[library], alone, strict=True):
            for ours, theirs, whole in zip(one, other, expected, strict=True):
                assert torch.equal(ours, theirs)
                torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)
