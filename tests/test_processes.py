"""Runs of two processes on the CPU: ranks agree, one process gives the same numbers, failures end all."""

import json
from pathlib import Path

from tests.runs import CommandLine

# Two growth events, momentum, batches that shrink; 12 steps.
SMALL = (
    *("trainer=ddp_cpu", "data.limit_train=96", "data.limit_test=40", "data.batch_size=32", "model.width=4"),
    *("schedule.epochs=[1,2,1]", "schedule.widths=[0.5,0.75,1]", "data.validation=none"),
)


def test_two_processes_grow(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*SMALL, "hydra.run.dir=run", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    print(outcome.err)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["world_size"] == 2
