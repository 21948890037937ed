"""Runs of an entry: finished ones are skipped; at a deadline or signal the others save, to resume later."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from growlab.base.files import write_json
from growlab.recipes.papers import __main__ as runs
from growlab.recipes.papers.__main__ import Place, Training, _write_results, command, main
from growlab.recipes.papers.registry import Job, registry
from tests.command_line import ROOT
from tests.lab.analysis.fake_runs import write_run

REGISTRY = registry()
JOBS = [Job("digits", (f"seed={seed}",), 2, "digits", False) for seed in range(3)]
# Imitates a run: counts to a number, ten per second, saves at SIGTERM, and resumes.
COUNTER = """
import json, pathlib, signal, sys, time
folder, last = pathlib.Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
state = folder / "state"
done = int(state.read_text()) if state.exists() else 0
def save(*_):
    state.write_text(str(done))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(folder / "begun").touch()
while done < last:
    time.sleep(0.1)
    done += 1
(folder / "results.json").write_text(json.dumps(done))
"""


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    count_to(8, monkeypatch)
    return Place(tmp_path / "runs")


def count_to(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runs, "command", lambda job, place, *_: [sys.executable, "-c", COUNTER, str(place.runs / job.folder), str(last)]
    )


def lay_out(folder: Path, name: str) -> None:
    """Make a fake folder of a data set."""
    (folder / name).mkdir(parents=True)
    (folder / name / "train.parquet").touch()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def test_at_a_deadline_runs_save_and_later_resume(counting: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    count_to(10_000, monkeypatch)
    training = Training(counting, REGISTRY, at_once=2)

    def stop_when_begun() -> None:
        for job in JOBS[:2]:
            wait_for(counting.runs / job.folder / "begun")
        training.stop()

    stopping = threading.Thread(target=stop_when_begun)
    stopping.start()
    assert training.train(JOBS, 60) == [] and training.stopped
    stopping.join()
    states = [counting.runs / job.folder / "state" for job in JOBS]
    assert [state.exists() for state in states] == [True, True, False]
    assert Training(counting, REGISTRY).train(JOBS, 0.01) == []
    assert not any(map(counting.done, JOBS))
    count_to(8, monkeypatch)
    states[0].write_text("20")
    assert Training(counting, REGISTRY, at_once=2).train(JOBS, 60) == []
    counted = [json.loads((state.parent / "results.json").read_text()) for state in states]
    assert counted == [20, 8, 8]


@pytest.fixture
def busy(counting: Place) -> Iterator[Path]:
    """Folder of the first job, locked by another process."""
    folder = counting.runs / JOBS[0].folder
    folder.mkdir(parents=True)
    holding = "import fcntl, os, sys, time; folder = os.open(sys.argv[1], os.O_RDONLY)\n"
    holding += "fcntl.flock(folder, fcntl.LOCK_EX); print(flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", holding, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield folder
        process.kill()


def test_locked_runs_are_skipped_and_a_failure_does_not_stop_others(
    counting: Place, busy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counting_command, failing = runs.command, [sys.executable, "-c", "import sys; sys.exit(2)"]
    monkeypatch.setattr(runs, "command", lambda job, *at: failing if job is JOBS[1] else counting_command(job, *at))
    write_json(counting.runs / JOBS[1].folder / "failure.json", {"reason": "it diverged."})
    assert Training(counting, REGISTRY).train(JOBS, 60) == ["digits/seed=1"]
    said = capsys.readouterr().out
    assert "digits/seed=0: another process is training it\n" in said and list(busy.iterdir()) == []
    assert "digits/seed=1 failed (exit code 2): it diverged.\n" in said and counting.done(JOBS[2])


def test_a_jobs_command_names_its_folder_data_and_device(tmp_path: Path) -> None:
    """A resumed run keeps its precision; a study has no device."""
    lay_out(tmp_path, "cifar10")
    place = Place(tmp_path / "runs", tmp_path, ("trainer=gpu", "compile=true"))
    job = REGISTRY.items["table11"].jobs([4])[0]
    line = command(job, place, REGISTRY, num_threads=2)
    assert line[1:5] == ["-m", "growlab", "-m", "experiment=papers/table11"]
    assert set(line[5:]) == {
        *("method=growing_vt", "seed=4", "trainer=gpu", "compile=true", "ckpt_path=last", "num_threads=2"),
        *("hydra.sweeper.params=null", f"hydra.sweep.dir={tmp_path}/runs/table11"),
        *(f"data.root={tmp_path}/cifar10", "hydra.sweep.subdir='method=growing_vt,seed=4'"),
    }
    (place.runs / job.folder).mkdir(parents=True)
    (place.runs / job.folder / "config.yaml").write_text("trainer: {precision: 32-true}\n")
    assert "trainer.precision=32-true" in command(job, place, REGISTRY)
    study = REGISTRY.items["hyperfan_continual_regression"].jobs()[0]
    assert not any(word.startswith(("ckpt_path", "trainer", "data.root")) for word in command(study, place, REGISTRY))


@pytest.mark.parametrize(
    ("capabilities", "precision"), [({"avx2": True}, []), ({"avx512_bf16": True}, ["x"]), ({}, [])]
)
def test_the_device_is_a_gpu_or_a_cpu_that_may_multiply_in_bfloat16(
    capabilities: dict[str, bool], precision: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    assert runs.device({"cpu_bfloat16": ["x"]}) == ("trainer=cpu", *precision)
    assert runs.device({}) == ("trainer=cpu",)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert runs.device({"gpu": ["y"], "cpu_bfloat16": ["x"]}) == ("y",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table3", "--data", "."], "cifar100 is not in .: name the folder above it with --data"),
        (["tabel3"], "there is no entry called tabel3; did you mean table3?"),
        (["zzzz"], "--list names them"),
        (["table3", "--minutes", "0"], "argument --minutes: '0' is no number above 0"),
        (["table3", "--seeds", "0,-2"], "0,-2 is not a list of seeds, numbers from 0 to 4294967295"),
    ],
)
def test_invalid_arguments_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_list_counts_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job in REGISTRY.items["table7"].jobs()[:2]:
        (tmp_path / "runs" / job.folder).mkdir(parents=True)
        (tmp_path / "runs" / job.folder / "results.json").touch()
    assert main(["--list", "table7", "--runs", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert "2 of   9  Table 7" in out and " ".join(out.split()).endswith(REGISTRY.items["table7"].title)
    assert main(["--list", "table7", "--seeds", "7", "--runs", str(tmp_path / "runs")]) == 0
    assert "0 of   3  Table 7" in capsys.readouterr().out


def test_a_dry_run_estimates_from_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lay_out(tmp_path, "cifar10")
    words = ["table7", "--dry-run", "--data", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert main(words) == 0
    assert "9 run(s) to go: no finished run in this folder" in capsys.readouterr().out
    write_run(tmp_path / "runs" / REGISTRY.items["table7"].jobs()[0].folder, seconds=3600.0)
    assert main(words) == 0
    # 16 epochs took an hour, and 8 runs of 160 epochs remain.
    assert "8 run(s) to go: about 80.0 hours at the pace of 1 finished run(s)\n" in capsys.readouterr().out


def test_figures_are_drawn_of_chosen_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures 4, 5 and 9: a comparison of nine runs, rate factors of one; the table has the other seed too."""
    item, place = REGISTRY.items["figure4"], Place(tmp_path)
    for job in item.jobs([0, 1, 7]):
        seed = int(job.overrides[-1].removeprefix("seed="))
        methods = {"growing": ("pairs", "none"), "growing_vt": ("ours", "none"), "ours": ("ours", "stagewise_norm")}
        growth, lr_adapt = methods[job.overrides[0].removeprefix("method=")]
        about = {"groups": {"a": {"full_width": 8, "widths": [4, 8]}}, "stage_epochs": (2, 2)}
        write_run(tmp_path / job.folder, growth=growth, lr_adapt=lr_adapt, seed=seed, **about)
    _write_results(item, place, [7])
    assert {path.name for path in tmp_path.glob("*.png")} >= {"figure4_compare.png", "figure4_rate_factors_ours_0.png"}
    assert "(3)" in (tmp_path / "figure4.md").read_text()
    assert "shows one run" not in capsys.readouterr().err


def test_missing_data_leaves_out_only_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_out(tmp_path / "data", "mnist10k")
    taken: list[Job] = []
    monkeypatch.setattr(Training, "train", lambda self, jobs, seconds: taken.extend(jobs) or ["a/seed=0"])
    assert main(["isotropic_data_sets", "--data", str(tmp_path / "data"), "--runs", str(tmp_path)]) == 2
    every = REGISTRY.items["isotropic_data_sets"].jobs()
    assert [job.folder for job in taken] == [job.folder for job in every if job.data in ("digits", "mnist")]
    left_out, _, failed = capsys.readouterr().err.splitlines()
    assert "12 run(s) left out: cifar10 is not in" in left_out
    assert failed == "error: 1 run(s) failed, for the reasons above: a/seed=0."


# The command with imitated runs.
COMMAND = f"""
import sys
from growlab.recipes.papers import __main__ as command
line = lambda job, place, *_: [sys.executable, "-c", {COUNTER!r}, str(place.runs / job.folder), "10000"]
command.command = line
command.device = lambda paper: ("trainer=cpu",)
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "nohup"),
    [(signal.SIGINT, True), (signal.SIGHUP, False)],
    ids=["Ctrl-C under nohup", "a terminal that closes"],
)
def test_a_signal_lets_the_run_save(tmp_path: Path, number: signal.Signals, nohup: bool) -> None:
    """Sent to the process group, as from a terminal; with `nohup` the command ignores SIGHUP."""
    lay_out(tmp_path / "data", "cifar10")
    first, second = REGISTRY.items["table7"].jobs([0])[:2]
    write_run(tmp_path / "runs" / first.folder)

    def handlers() -> None:
        """Reset handlers: commands in a shell's background ignore SIGINT, which their children inherit."""
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_DFL)
        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    where = ("--data", str(tmp_path / "data"), "--runs", str(tmp_path / "runs"))
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "table7", "--seeds", "0", *where],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=handlers,
    )
    try:
        wait_for(tmp_path / "runs" / second.folder / "begun")
        if nohup:
            os.killpg(process.pid, signal.SIGHUP)
            time.sleep(0.3)
            assert process.poll() is None
        os.killpg(process.pid, number)
        error = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert (tmp_path / "runs" / second.folder / "state").exists()
    assert (tmp_path / "runs" / "table7.md").is_file() == (number != signal.SIGHUP), error
    assert error.splitlines()[-1] == f"{number.name}; the same command resumes"


@pytest.mark.slow
def test_real_runs_are_stopped_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest entry: until a deadline, then the rest; a table and a figure are written."""
    monkeypatch.chdir(tmp_path)
    words = ["isotropic_task_change", "--seeds", "0", "--minutes", "9"]
    run = tmp_path / "runs" / "isotropic_task_change" / "model.width=2,seed=0"

    class AtFirstCheckpoint(threading.Timer):
        """Deadline after the first checkpoint, on machines of any speed."""

        def run(self) -> None:
            assert 500 < self.interval <= 540
            wait_for(run / "checkpoints" / "last.ckpt")
            self.function()

    with monkeypatch.context() as patch:
        patch.setattr(runs, "Timer", AtFirstCheckpoint)
        assert main(words) == 0
    out = capsys.readouterr().out
    assert "1 run(s) to go: " in out and "0 of 1 runs are done\nthe same command resumes" in out
    epochs = (run / "metrics.csv").read_text().splitlines()
    assert 1 < len(epochs) < 100
    assert main(words) == 0
    assert "1 of 1 runs are done" in capsys.readouterr().out
    assert (run / "metrics.csv").read_text().splitlines()[: len(epochs)] == epochs
    assert (tmp_path / "runs" / "isotropic_task_change.md").is_file()
    assert (tmp_path / "runs" / "isotropic_task_change_width_paths.png").is_file()
    assert main(words) == 0
    assert "to go" not in capsys.readouterr().out
