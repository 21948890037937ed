"""`schedule.batch_size=auto`, on fake devices of little memory: see `tests.whole_runs.HungryMlp`."""

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.command_line import CommandLine
from tests.runs.test_process_sweeps import command
from tests.whole_runs import Left

SIGKILL = int(signal.SIGKILL)
STAGES = ("schedule.epochs=[1,2,1]", "schedule.widths=[0.5,0.75,1]", "schedule.batch_growth_rate=0.3")
IMAGES = ("data.limit_train=96", "data.limit_test=40", "data.batch_size=32", "log_rates_every_n_steps=2")
HUNGRY = (*IMAGES, *STAGES, "model=custom", "model._target_=tests.whole_runs.HungryMlp", "growth=net2net")
LINEAR = "schedule.learning_rate.batch_rule=linear"
AUTO = (*HUNGRY, LINEAR, "schedule.batch_size=auto", "schedule.max_memory_gib_per_device=1")
# 480 // 12 = 40 images at full width; by Eq. 8 40 + 12 = 52 before it, but 480 // 10 = 48; and 52 + 16 = 68 < 480 // 6.
FOUND = [68, 48, 40]
LITTLE = {"HUNGRY": "480"}


def batch_fit(folder: Path) -> list[dict[str, int]]:
    return json.loads((folder / "results.json").read_text())["batch_fit"]


def test_sizes_are_found_and_a_resumed_run_takes_the_same_without_trying(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*AUTO, "hydra.run.dir=run", cwd=tmp_path, fault=("at_step", 4, SIGKILL), environment=LITTLE)
    assert outcome.code == -SIGKILL, outcome.err
    assert outcome.err.startswith("batch sizes that fit, stage by stage: 68 48 40\n")
    # With more memory, which would lead to other sizes.
    cli.done(*AUTO, "hydra.run.dir=run", "ckpt_path=last", cwd=tmp_path, environment={"HUNGRY": "960"})
    assert batch_fit(tmp_path / "run") == [
        {"stage": stage, "eq8": eq8, "batch_size": size}
        for stage, (eq8, size) in enumerate(zip([68, 52, 40], FOUND, strict=True))
    ]
    # As with these sizes in the configuration: the trials leave no trace, and the rate is for data.batch_size.
    given = (*HUNGRY, LINEAR, "schedule.learning_rate.batch_size=32", f"schedule.batch_sizes={FOUND}")
    cli.done(*given, "hydra.run.dir=given", cwd=tmp_path)
    left = Left.by(tmp_path / "run")
    differences = left.differences(Left.by(tmp_path / "given"))
    assert differences == ["results"], "the schedule's settings and batch_fit"
    assert [int(row["batch_size"]) for row in left.metrics] == [68, 48, 48, 40]
    # Before the decay; times B / 32.
    assert float(left.metrics[0]["lr"]) == pytest.approx(0.1 * 68 / 32)


def test_two_processes_take_what_fits_on_both_devices(cli: CommandLine, tmp_path: Path) -> None:
    cli.done(*AUTO, "trainer=ddp_cpu", "hydra.run.dir=run", cwd=tmp_path, environment={"HUNGRY": "480,240"})
    # Twice 240 // 12 = 20; 40 + 12; 52 + 16 = 68.
    sizes = [(stage["eq8"], stage["batch_size"]) for stage in batch_fit(tmp_path / "run")]
    assert sizes == [(68, 68), (52, 48), (40, 40)]
    assert json.loads((tmp_path / "run" / "results.json").read_text())["world_size"] == 2


@pytest.mark.gpu
def test_a_gpu_is_filled(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = ("schedule.batch_size=auto", "schedule.max_memory_gib_per_device=0.25", "trainer=gpu")
    outcome = command(*IMAGES, *STAGES, *found, "data.limit_train=1200", "hydra.run.dir=run", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    stages = json.loads((tmp_path / "run" / "results.json").read_text())["stages"]
    assert stages[0]["batch_size"] >= stages[1]["batch_size"] >= stages[2]["batch_size"] > 2
    assert all(stage["peak_memory_bytes"] < 1.1 * 2**28 for stage in stages)
