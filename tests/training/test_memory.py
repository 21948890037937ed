"""What training takes of memory: of this process, here."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from growlab.lab.training.memory import LiveTensors, PeakMemory
from tests.command_line import CommandLine

CPU = torch.device("cpu")
MIB = 2**20


def clearable() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5\n")
    except OSError:
        return False
    return True


needs_linux = pytest.mark.skipif(
    not clearable(), reason="this system does not tell what a process held at most"
)


@needs_linux
def test_the_peak_is_of_what_was_held_since_the_reset() -> None:
    memory = PeakMemory(CPU)
    memory.reset()
    before = memory.bytes()
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    del held
    assert memory.bytes() - before == pytest.approx(64 * MIB, abs=8 * MIB)
    memory.reset()
    assert memory.bytes() < before + 16 * MIB, "given back"
    held = torch.ones(32 * MIB, dtype=torch.uint8)
    assert 24 * MIB < memory.bytes() - before < 56 * MIB
    assert "RAM" in memory.measure and len(held)


@pytest.mark.parametrize("chosen", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_large_blocks_are_kept_for_the_next_step(chosen: dict[str, str]) -> None:
    program = (
        "import resource, torch\n"
        "from growlab.lab.training.memory import keep_freed\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(64 * 2**20, dtype=torch.uint8)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "keep_freed()\n"
        "print(min(faults() for _ in range(20)))"
    )
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this system's C library has no mallopt")
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **chosen},
    )
    # Of 16,384 pages, or of 32 large ones.
    assert int(ended.stdout) >= 32 if chosen else int(ended.stdout) < 8, "what was chosen outside stands"


def test_where_nothing_is_measured_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    memory = PeakMemory(CPU)
    memory.reset()
    assert memory.bytes() is None and "Permission denied" in memory.measure
    assert PeakMemory(torch.device("meta")).measure.startswith("not measured: torch does not tell")


def test_counting_changes_no_operation() -> None:
    with LiveTensors() as live:
        made = torch.full((10,), 2.0, dtype=torch.float64)
        counted = torch.arange(6, dtype=torch.int16)
        mean = made.view(2, 5).mean(1, keepdim=True)
    assert (made.dtype, counted.dtype, mean.shape) == (torch.float64, torch.int16, (2, 1))
    assert live.bytes == made.nbytes + counted.nbytes + mean.nbytes


@needs_linux
def test_a_run_tells_every_stages_memory(cli: CommandLine, tmp_path: Path) -> None:
    """Two stages of an equal network, the second with four times the images."""
    images = ("data.limit_train=512", "data.limit_test=20", "log_rates_every_n_steps=1000")
    stages = ("schedule.epochs=[1,1]", "schedule.widths=[1,1]", "schedule.batch_sizes=[128,512]")
    outcome = cli(*images, *stages, "growth=net2net", "model.width=8", "hydra.run.dir=run", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    small, large = (stage["peak_memory_bytes"] for stage in results["stages"])
    # The stem alone keeps three tensors of 8 channels of 8 x 8 floats for the backward pass.
    assert large > 512 * 3 * 8 * 64 * 4 and large > 1.3 * small > 0
    assert results["memory_measure"].startswith("bytes that the process holds in RAM")
