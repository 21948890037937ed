"""Sweeps whose jobs use several processes, launchers, searches, and processes that torchrun starts."""

import contextlib
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from growlab.base.errors import UserError
from growlab.lab.cli.sweeps import gpus_in_turn
from growlab.lab.training import configuration
from growlab.lab.training.processes import apart, is_first, num_devices, run_id, started_elsewhere, to_start
from tests.command_line import CommandLine, Outcome, new_process
from tests.whole_runs import IMAGES, Left, read_results, table

SMALL = (
    *(*IMAGES, "schedule.epochs=[1,1]", "schedule.widths=[0.5,1]"),
    *("model=mlp8", "model.width=12", "num_threads=1"),
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "growlab")
SWEEP = ("-m", *SMALL, "hydra.sweep.dir=sweep", "trainer=ddp_cpu")


def results_below(folder: Path) -> list[dict]:
    return [read_results(path.parent) for path in sorted(folder.glob("*/results.json"))]


def assert_one_table(outcome: Outcome, rows: int) -> None:
    assert outcome.code == 0, outcome.err
    lines = [line for line in outcome.out.splitlines() if line.startswith("| ")]
    assert len(lines) == rows + 1 and sum(line.startswith("| method") for line in lines) == 1


def test_each_job_has_the_devices_that_it_asks_for(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli(*SWEEP, "trainer.devices=2,1", "hydra.sweep.subdir=${trainer.devices}", cwd=tmp_path)
    assert_one_table(outcome, 1)
    one, two = results_below(tmp_path / "sweep")
    assert (one["world_size"], two["world_size"]) == (1, 2)
    # An epoch has the same images with any number of processes; losses differ by the order of sums.
    losses = [[float(row["train_loss"]) for row in table(tmp_path / "sweep" / n / "metrics.csv")] for n in "12"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_launchers(tmp_path: Path, launcher: str) -> None:
    plugin = launcher.partition("_")[0]
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher")
    outcome = new_process("-m", "growlab", *SWEEP, f"hydra/launcher={launcher}", "seed=0,1", cwd=tmp_path)
    assert_one_table(outcome, 1)
    assert [r["world_size"] for r in results_below(tmp_path / "sweep")] == [2, 2]


@pytest.mark.slow
def test_a_search_is_given_the_accuracy_of_every_job(cli: CommandLine, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "optimizer.lr=interval(0.01,0.1)")
    outcome = cli(*SWEEP, *search, "data.validation=split", cwd=tmp_path)
    assert_one_table(outcome, 2)
    best = OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml").best_value
    assert best == max(r["val_accuracy"] for r in results_below(tmp_path / "sweep"))
    assert cli("resume", "sweep", cwd=tmp_path).code == 0
    assert len(results_below(tmp_path / "sweep")) == 2
    turned = cli(*SWEEP, *search, "hydra.sweeper.direction=minimize", "data.validation=split", cwd=tmp_path)
    assert turned.code == 2 and "has another hydra.sweeper.direction" in turned.err and "Traceback" not in turned.err
    both = ("hydra.sweeper.direction=[maximize,minimize]", "hydra.sweep.dir=both", "trainer=cpu")
    cli.done(*SWEEP, *search, *both, "data.validation=split", cwd=tmp_path)
    front = OmegaConf.load(tmp_path / "both" / "optimization_results.yaml").solutions
    runs = [(r["val_accuracy"], r["train_cost_percent"]) for r in results_below(tmp_path / "both")]
    assert len(runs) == 2 and {tuple(solution["values"]) for solution in front} <= set(runs)
    wrong = ("hydra.sweeper.direction=minimize", "hydra.sweep.dir=wrong")
    backwards = cli(*SWEEP, *search, *wrong, "data.validation=split", cwd=tmp_path)
    assert backwards.code == 2 and "direction=minimize does not fit" in backwards.err
    refused = cli(*SWEEP, *search, "data.validation=test", "hydra.sweep.dir=refused", cwd=tmp_path)
    assert refused.code == 2 and refused.err.splitlines()[-1].endswith("set data.validation=split.")
    failing = ("data.batch_size=0", "hydra.sweep.dir=failing")
    failed = cli(*SWEEP, *search, *failing, "data.validation=split", cwd=tmp_path)
    assert failed.code == 2 and failed.err.splitlines()[-1] == "error: 2 jobs of the sweep failed."


@pytest.mark.slow
def test_processes_that_torchrun_has_started(tmp_path: Path) -> None:
    outcome = new_process(*TORCHRUN, *SMALL, "trainer=ddp_cpu", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    (run,) = (tmp_path / "runs").glob("*/*")
    assert read_results(run)["world_size"] == 2
    assert outcome.out.count("test accuracy") == 1
    failed = new_process(*TORCHRUN, *SMALL, "trainer=ddp_cpu", "data.batch_size=33", cwd=tmp_path)
    # torchrun's summary names the reason as the root cause.
    assert failed.code != 0 and re.search(r"Root Cause[^=]*traceback : a batch of 33 does not divide", failed.err)


FAILING = """
import os, signal, time
from pathlib import Path
from torch import nn
class Network(nn.Sequential):
    def __init__(self, image_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, num_classes))
        self.how, self.calls = os.environ["HOW"], 0
    def forward(self, x):
        self.calls += self.training
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if self.how and self.calls == 4 and first and os.environ["RANK"] == "1":
            Path("failed").write_text(str(time.time()))
            if self.how == "raises":
                raise RuntimeError("our own mistake")
            os.kill(os.getpid() if self.how == "killed" else os.getppid(), signal.SIGKILL)
            time.sleep(300)
        return super().forward(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "killed", "torchrun_killed"])
def test_a_failure_under_torchrun_ends_every_process_within_seconds(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", how)
    (tmp_path / "failing.py").write_text(FAILING)
    network = ("model=custom", "model._target_=failing.Network", f"hydra.run.dir={tmp_path}")
    arguments = [a for a in SMALL if not a.startswith("model")]
    outcome = new_process(*TORCHRUN, *arguments, *network, "trainer=ddp_cpu", cwd=tmp_path)
    assert outcome.code == (-signal.SIGKILL if how == "torchrun_killed" else 1), outcome.err
    deadline = float((tmp_path / "failed").read_text()) + 30
    while (left := processes_with(str(tmp_path))) and time.time() < deadline:
        time.sleep(0.05)
    assert not left and time.time() < deadline


@pytest.mark.slow
def test_a_restart_by_torchrun_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    (tmp_path / "failing.py").write_text(FAILING)
    small = [a for a in SMALL if not a.startswith("model")]
    arguments = (*small, "model=custom", "model._target_=failing.Network", "trainer=ddp_cpu")
    for folder, how in (("whole", ""), ("killed", "killed")):
        monkeypatch.setenv("HOW", how)
        resumed = ("ckpt_path=last", f"hydra.run.dir={folder}")
        program = (*TORCHRUN[:3], "--max-restarts=1", *TORCHRUN[3:])
        outcome = new_process(*program, *arguments, *resumed, "checkpoint.every_n_steps=1", cwd=tmp_path)
        assert outcome.code == 0, outcome.err
    assert (tmp_path / "failed").exists()
    assert Left.by(tmp_path / "killed").differences(Left.by(tmp_path / "whole")) == []


def processes_with(argument: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if argument in path.read_text() else []
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_gpus(tmp_path: Path, devices: int, precision: str) -> None:
    """DDP with NCCL, the gradient scaler and synchronised statistics survive growth."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs")
    images = (*IMAGES, "model.width=4")
    stages = ("schedule.epochs=[1,1,1]", "schedule.widths=[0.5,0.75,1]", "trainer.sync_batchnorm=true")
    trainer = ("trainer=ddp", f"trainer.devices={devices}", f"trainer.precision={precision}")
    outcome = new_process("-m", "growlab", *images, *stages, *trainer, "hydra.run.dir=run", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    results = read_results(tmp_path / "run")
    assert results["world_size"] == devices and results["parity_max_error"] < 1e-3


# Functions -----------------------------------------------------------------------------------------------------


def test_plugins_get_growlabs_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ConfigStore.instance()
    monkeypatch.setitem(configuration._PLUGINS, "hydra/sweeper/imagined", {"direction": "maximize"})
    store.store(group="hydra/sweeper", name="imagined", node={"direction": "minimize", "n_trials": 20})
    try:
        configuration.set_plugin_defaults()
        assert store.load("hydra/sweeper/imagined.yaml").node == {"direction": "maximize", "n_trials": 20}
    finally:
        del store.repo["hydra"]["sweeper"]["imagined.yaml"]


@pytest.mark.parametrize(
    ("trainer", "number"),
    [
        ({"accelerator": "cpu", "devices": 3}, 3),
        ({"accelerator": "cpu", "devices": "3"}, 3),
        ({"accelerator": "cpu", "devices": "auto"}, 1),
        ({"accelerator": "gpu", "devices": [0, 2]}, 2),
        ({"accelerator": "gpu", "devices": "0,2"}, 2),
        ({"accelerator": "gpu", "devices": "auto"}, 5),
        ({"accelerator": "gpu", "devices": -1}, 5),
        ({}, 5),
    ],
)
def test_devices_are_counted_as_lightning_does(
    monkeypatch: pytest.MonkeyPatch, trainer: dict[str, object], number: int
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    assert num_devices(trainer) == number


def test_one_device_takes_a_separate_process_only_for_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    one = {"accelerator": "cpu", "devices": 1}
    assert [to_start(one), to_start({**one, "max_restarts": 2})] == [0, 1]
    for value in (-1, 1.5, True, None):
        with pytest.raises(UserError, match="must be a number of restarts"):
            to_start({**one, "max_restarts": value})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id())
    assert to_start({**one, "max_restarts": 2}) == 0 and not started_elsewhere()


JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher."


@pytest.mark.parametrize(
    ("trainer", "launcher", "turns"),
    [
        ({"accelerator": "gpu", "devices": 1}, JOBLIB, [[0], [1], [2], [3], [0]]),
        ({"accelerator": "auto", "devices": 2}, JOBLIB, [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]),
        ({"accelerator": "gpu", "devices": 3}, JOBLIB, [[0, 1, 2]] * 5),
        ({"accelerator": "cuda", "devices": 1}, f"{SUBMITIT}LocalLauncher", [[0], [1], [2], [3], [0]]),
        ({"accelerator": "gpu", "devices": 4}, JOBLIB, [None] * 5),
        ({"accelerator": "gpu", "devices": "auto"}, JOBLIB, [None] * 5),
        ({"accelerator": "gpu", "devices": [3]}, JOBLIB, [None] * 5),
        ({"accelerator": "cpu", "devices": 1}, JOBLIB, [None] * 5),
        # Sequential jobs, and jobs whose scheduler assigns GPUs.
        ({"accelerator": "gpu", "devices": 1}, "hydra._internal.core_plugins.basic_launcher.BasicLauncher", [None] * 5),
        ({"accelerator": "gpu", "devices": 1}, f"{SUBMITIT}SlurmLauncher", [None] * 5),
    ],
)
def test_jobs_side_by_side_take_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, trainer: dict, launcher: str, turns: list
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    given = []
    for number in range(5):
        job = {"mode": RunMode.MULTIRUN, "launcher": {"_target_": launcher}, "job": {"num": number}}
        monkeypatch.setattr(HydraConfig, "get", lambda job=job: OmegaConf.create(job))
        given.append(gpus_in_turn(OmegaConf.create({"trainer": trainer})))
    assert given == turns


def test_processes_started_by_slurm_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {"accelerator": "cpu", "devices": 4}
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert to_start(trainer) == 4 and is_first() and apart([], False) == []
    # A SLURM batch script without srun, or a job of submitit: one task.
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert to_start(trainer) == 4
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert to_start(trainer) == 4
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert started_elsewhere() and to_start(trainer) == 0 and is_first()
    with pytest.raises(UserError, match=r"torchrun has --max-restarts=N"):
        to_start({**trainer, "max_restarts": 1})
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert not is_first()
    given = apart(["hydra.run.dir=here"], False)
    assert given == ["hydra.output_subdir=null", "hydra/job_logging=none"]
    assert [entry.partition("=")[0] for entry in apart([], True)][:2] == ["hydra.sweep.dir", "hydra.sweep.subdir"]
