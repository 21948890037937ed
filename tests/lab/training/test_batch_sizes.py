"""`schedule.batch_size=auto` with simulated limits of memory (`tests.whole_runs.HungryMlp`)."""

import signal
from pathlib import Path

import pytest
import torch

from tests.command_line import CommandLine, new_process
from tests.whole_runs import IMAGES, Left, read_results

SIGKILL = int(signal.SIGKILL)
STAGES = ("schedule.epochs=[1,2,1]", "schedule.widths=[0.5,0.75,1]", "schedule.batch_growth_rate=0.3")
HUNGRY = (
    *IMAGES,
    "log_rates_every_n_steps=2",
    *STAGES,
    "model=custom",
    "model._target_=tests.whole_runs.HungryMlp",
    "growth=net2net",
)
LINEAR = "schedule.learning_rate.batch_rule=linear"
AUTO = (*HUNGRY, LINEAR, "schedule.batch_size=auto", "schedule.max_memory_gib_per_device=1")
# 480 // 12 = 40 images at full width; by Eq. 8 40 + 12 = 52 before it, but 480 // 10 = 48; and 52 + 16 = 68 < 480 // 6.
FOUND = [68, 48, 40]
LITTLE = {"HUNGRY": "480"}


def test_sizes_are_found_and_reused_by_a_resumed_run(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*AUTO, "hydra.run.dir=run", cwd=tmp_path, fault=("at_step", 4, SIGKILL), environment=LITTLE)
    assert outcome.code == -SIGKILL, outcome.err
    assert outcome.err.startswith("batch sizes that fit, stage by stage: 68 48 40\n")
    # More memory would allow other sizes.
    cli.done(*AUTO, "hydra.run.dir=run", "ckpt_path=last", cwd=tmp_path, environment={"HUNGRY": "960"})
    assert read_results(tmp_path / "run")["batch_fit"] == [
        {"stage": stage, "eq8": eq8, "batch_size": size}
        for stage, (eq8, size) in enumerate(zip([68, 52, 40], FOUND, strict=True))
    ]
    # Equal to a run with these sizes configured: trials have no effect, and the rate refers to data.batch_size.
    given = (*HUNGRY, LINEAR, "schedule.learning_rate.batch_size=32", f"schedule.batch_sizes={FOUND}")
    cli.done(*given, "hydra.run.dir=given", cwd=tmp_path)
    left = Left.by(tmp_path / "run")
    differences = left.differences(Left.by(tmp_path / "given"))
    assert differences == ["results"], "the schedule's settings and batch_fit"
    assert [int(row["batch_size"]) for row in left.metrics] == [68, 48, 48, 40]
    # Before the decay the rate is 0.1 B / 32.
    assert float(left.metrics[0]["lr"]) == pytest.approx(0.1 * 68 / 32)


def test_two_processes_use_sizes_that_fit_on_both_devices(cli: CommandLine, tmp_path: Path) -> None:
    cli.done(*AUTO, "trainer=ddp_cpu", "hydra.run.dir=run", cwd=tmp_path, environment={"HUNGRY": "480,240"})
    # Twice 240 // 12 = 20; 40 + 12; 52 + 16 = 68.
    results = read_results(tmp_path / "run")
    sizes = [(stage["eq8"], stage["batch_size"]) for stage in results["batch_fit"]]
    assert sizes == [(68, 68), (52, 48), (40, 40)] and results["world_size"] == 2


@pytest.mark.gpu
def test_a_gpu_is_filled(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = ("schedule.batch_size=auto", "schedule.max_memory_gib_per_device=0.25", "trainer=gpu")
    outcome = new_process(
        "-m", "growlab", *IMAGES, *STAGES, *found, "data.limit_train=1200", "hydra.run.dir=run", cwd=tmp_path
    )
    assert outcome.code == 0, outcome.err
    stages = read_results(tmp_path / "run")["stages"]
    assert stages[0]["batch_size"] >= stages[1]["batch_size"] >= stages[2]["batch_size"] > 2
    assert all(stage["peak_memory_bytes"] < 1.1 * 2**28 for stage in stages)
