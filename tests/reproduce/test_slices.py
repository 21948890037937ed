"""Training in slices: what is skipped, what ends in time and goes on, and what is said where something is missing."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from growlab.lab.training.configuration import PRIMARY, config_dir, register_schemas
from growlab.lab.training.ineffective_settings import check_overruled
from growlab.recipes.papers import slices
from growlab.recipes.papers.__main__ import _tell, main
from growlab.recipes.papers.paces import Forecast, measuring, network_of
from growlab.recipes.papers.registry import Job, Registry, registry
from growlab.recipes.papers.slices import Place, command, missing, train
from tests.analysis.fake_runs import write_run
from tests.command_line import ROOT
from tests.parts_here import needs

REGISTRY = registry()
JOBS = [Job("digits", (f"seed={seed}",), 2, "digits", False) for seed in range(3)]
# Counts to a number in its folder, a tenth of a second each, saves at SIGTERM and goes on from there, as a run does.
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
while done < last:
    time.sleep(0.1)
    done += 1
print("counted to", done, file=sys.stderr)
(folder / "results.json").write_text(json.dumps(done))
"""


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path / "runs", None, ())
    monkeypatch.setattr(
        slices,
        "command",
        lambda job, place, registry: [sys.executable, "-c", COUNTER, str(place.runs / job.folder), "8"],
    )
    return place


def test_a_slice_ends_in_time_and_the_next_goes_on(counting: Place) -> None:
    started = time.monotonic()
    assert train(JOBS, counting, REGISTRY, minutes=0.5 / 60) == (0, [], [])
    assert time.monotonic() - started < 10
    state = counting.runs / JOBS[0].folder / "state"
    assert 0 <= int(state.read_text()) < 8 and not counting.done(JOBS[0])
    assert train(JOBS[:1], counting, REGISTRY, minutes=1) == (1, [], [])
    assert json.loads((state.parent / "results.json").read_text()) == 8
    assert train(JOBS, counting, REGISTRY, minutes=0.1 / 60) == (0, [], [])


def test_several_runs_train_at_the_same_time(
    counting: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, ended = slices.command, []

    def noted(job: Job, place: Place, registry: Registry) -> list[str]:
        ended.append(sum(map(place.done, JOBS)))
        return whole(job, place, registry)

    monkeypatch.setattr(slices, "command", noted)
    assert train(JOBS, counting, REGISTRY, minutes=1, at_once=2) == (3, [], [])
    # Two begin at once, the third when one of them has ended.
    assert ended[:2] == [0, 0] and ended[2] >= 1
    told = capfd.readouterr()
    assert all(f"{job.folder}: counted to 8\n" in told.err for job in JOBS)


def test_a_slice_of_several_runs_saves_them_all(counting: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = slices.command
    monkeypatch.setattr(slices, "command", lambda *about: [*whole(*about)[:-1], "1000"])
    assert train(JOBS, counting, REGISTRY, minutes=4 / 60, at_once=2) == (0, [], [])
    states = [counting.runs / job.folder / "state" for job in JOBS]
    assert [state.exists() for state in states] == [True, True, False]
    monkeypatch.setattr(slices, "command", whole)
    assert train(JOBS, counting, REGISTRY, minutes=1, at_once=2) == (3, [], [])


def test_what_another_machine_has_begun_goes_on(counting: Place, tmp_path: Path) -> None:
    kept = tmp_path / "unfinished" / JOBS[0].folder
    kept.mkdir(parents=True)
    # It counts from there, and 20 is past its end.
    (kept / "state").write_text("20")
    place, results = (
        replace(counting, begun=tmp_path / "unfinished"),
        counting.runs / JOBS[0].folder / "results.json",
    )
    assert train(JOBS[:1], place, REGISTRY, minutes=1) == (1, [], [])
    assert json.loads(results.read_text()) == 20
    assert (kept / "state").read_text() == "20" and not (kept / "results.json").exists()
    # What has gone on here is not overwritten.
    results.unlink()
    (results.parent / "state").write_text("30")
    assert train(JOBS[:1], place, REGISTRY, minutes=1) == (1, [], [])
    assert json.loads(results.read_text()) == 30


def test_what_two_processes_copy_at_the_same_time_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, folder = tmp_path / "unfinished" / "a", tmp_path / "runs" / "a"
    begun.mkdir(parents=True)
    (begun / "state").write_text("20")
    copied = shutil.copytree

    def slowly(source: Path, whole: Path) -> Path:
        folder.mkdir()
        (folder / "state").write_text("the other one's")
        return copied(source, whole)

    monkeypatch.setattr(shutil, "copytree", slowly)
    slices._copy(begun, folder)
    assert (folder / "state").read_text() == "the other one's"
    assert [path.name for path in folder.parent.iterdir()] == ["a"]


@pytest.fixture
def held(counting: Place) -> Iterator[Path]:
    """The folder of the first job, which another process holds."""
    folder = counting.runs / JOBS[0].folder
    folder.mkdir(parents=True)
    holding = "import sys, time; from growlab.lab.training.run_folder import held_alone\n"
    holding += "with held_alone(__import__('pathlib').Path(sys.argv[1])): print(flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", holding, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield folder
        process.kill()


def test_what_another_process_is_at_work_on_is_left_to_it(
    counting: Place, held: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(JOBS, counting, REGISTRY, minutes=1) == (2, [], ["digits/seed=0"])
    assert "digits/seed=0: another process is at work on it\n" in capsys.readouterr().out
    assert list(held.iterdir()) == []


def test_a_run_that_finds_its_folder_taken_has_not_failed(
    counting: Place, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that start in the same moment the slower one."""
    monkeypatch.setattr(
        slices,
        "command",
        lambda *_: [sys.executable, "-c", "import time; time.sleep(1); raise SystemExit(2)"],
    )
    told = iter([False])
    whole = slices._at_work_elsewhere
    monkeypatch.setattr(slices, "_at_work_elsewhere", lambda *about: next(told, True) and whole(*about))
    assert train(JOBS[:1], counting, REGISTRY, minutes=1) == (0, [], ["digits/seed=0"])


def test_the_command_says_what_is_left_to_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train.parquet").touch()
    monkeypatch.setattr("growlab.recipes.papers.__main__.forecast", lambda *_: Forecast(60.0, 1, ()))
    monkeypatch.setattr("growlab.recipes.papers.__main__.train", lambda *_: (7, [], ["a", "b"]))
    assert main(["table7", "--data", str(tmp_path), "--runs", str(tmp_path / "runs")]) == 0
    told = capsys.readouterr().out
    assert "2 runs are left to another process, which is at work there\n" in told and "goes on" not in told


def test_what_has_begun_goes_first(tmp_path: Path) -> None:
    item = REGISTRY.items["table7"]
    jobs = item.jobs()
    here, there, done = jobs[3], jobs[5], jobs[4]
    place = Place(tmp_path / "runs", None, (), tmp_path / "unfinished")
    (place.runs / here.folder / "checkpoints").mkdir(parents=True)
    (tmp_path / "unfinished" / there.folder / "checkpoints").mkdir(parents=True)
    (place.runs / done.folder / "checkpoints").mkdir(parents=True)
    (place.runs / done.folder / "results.json").touch()
    others = [job for job in jobs if job not in (here, there, done)]
    assert missing(item, place, None) == [here, there, *others]


def test_a_run_that_has_begun_keeps_its_precision(tmp_path: Path) -> None:
    place = Place(tmp_path / "runs", None, ("trainer=cpu", "trainer.precision=bf16-mixed"))
    begun, other = JOBS[:2]
    (place.runs / begun.folder).mkdir(parents=True)
    (place.runs / begun.folder / "config.yaml").write_text("trainer: {precision: 32-true}\n")
    assert "trainer.precision=32-true" in command(begun, place, REGISTRY)
    assert "trainer.precision=bf16-mixed" not in command(begun, place, REGISTRY)
    assert "trainer.precision=bf16-mixed" in command(other, place, REGISTRY)


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [({"avx2": True}, []), ({"avx512_bf16": True}, ["x"]), ({"amx_bf16": True}, ["x"]), ({}, [])],
)
def test_a_processor_that_multiplies_in_bfloat16_does(
    capabilities: dict[str, bool], precision: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    assert slices.device({"cpu_bfloat16": ["x"]}) == ("trainer=cpu", *precision)
    assert slices.device({}) == ("trainer=cpu",)


def test_a_gpu_trains_several_small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(name: str) -> int:
        item = REGISTRY.items[name]
        return slices.runs_at_once(item, REGISTRY.papers[item.paper])

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert at_once("table2") == 4 and at_once("table4") == 1
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert at_once("table2") == at_once("table4") == 1


@needs("isotropic", "depth")
def test_a_run_that_fails_is_told_and_leaves_the_others_alone(
    counting: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, failing = slices.command, [sys.executable, "-c", "import sys; sys.exit(2)"]
    monkeypatch.setattr(slices, "command", lambda job, *at: failing if job is JOBS[1] else whole(job, *at))
    assert train(JOBS, counting, REGISTRY, minutes=1) == (2, ["digits/seed=1"], [])
    assert "digits/seed=1 failed (exit code 2)" in capsys.readouterr().out
    monkeypatch.setattr("growlab.recipes.papers.__main__.forecast", lambda *_: Forecast(60.0, 1, ()))
    monkeypatch.setattr("growlab.recipes.papers.__main__.train", lambda *_: (0, ["a/seed=0", "a/seed=1"], []))
    assert main(["isotropic_depth", "--runs", str(counting.runs)]) == 2
    told = capsys.readouterr()
    assert told.err == "error: 2 runs failed, for reasons that stand above: a/seed=0; a/seed=1.\n"
    assert "of 6 runs are there" in told.out and "the same command goes on" in told.out


@needs("hypernets")
def test_a_jobs_command_names_its_folder_data_and_device(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "train.parquet").touch()
    place = Place(tmp_path / "runs", tmp_path, ("trainer=gpu", "compile=true"))
    job = REGISTRY.items["table11"].jobs([4])[0]
    line = command(job, place, REGISTRY)
    assert line[1:5] == ["-m", "growlab", "-m", "experiment=table11"]
    expected = {
        *("method=growing_vt", "seed=4", "trainer=gpu", "compile=true", "ckpt_path=last"),
        *(
            f"data.root={tmp_path}/cifar10",
            "hydra.sweeper.params=null",
            f"hydra.sweep.dir={tmp_path}/runs/table11",
        ),
        "hydra.sweep.subdir='method=growing_vt,seed=4'",
    }
    assert expected == set(line[5:])
    study = REGISTRY.items["hyperfan_continual_regression"].jobs()[0]
    assert not any(
        word.startswith(("ckpt_path", "trainer", "data.root")) for word in command(study, place, REGISTRY)
    )


@needs("isotropic")
def test_a_study_that_is_ended_is_not_said_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("growlab.recipes.papers.__main__.train", lambda *_: (0, [], []))
    assert main(["isotropic_invariance", "--runs", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "begins anew, and needs 2 minutes a run\n" in told and "goes on" not in told


def test_missing_data_and_wrong_words_are_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for words, told in (
        (
            ["table3", "--data", str(tmp_path)],
            f"cifar100 is not in {tmp_path}: name the folder above it with --data",
        ),
        (["tabel3"], "there is nothing to reproduce that is called tabel3; did you mean table3?"),
        (["table3", "--minutes", "0"], "argument --minutes: '0' is no number above 0"),
        (["table3", "--minutes", "soon"], "--minutes"),
        (["table3", "--at-once", "0"], "argument --at-once: '0' is no number above 0"),
        (["table3", "--seeds", "a"], "a is no list of seeds, numbers from 0 to 4294967295, such as 0,1"),
        (["table3", "--seeds", "-1"], "-1 is no list of seeds, numbers from 0 to 4294967295, such as 0,1"),
        (
            ["table3", "--seeds", "0,-2"],
            "0,-2 is no list of seeds, numbers from 0 to 4294967295, such as 0,1",
        ),
        (["table3", "--seeds", "4294967296"], "4294967296 is no list of seeds"),
        (["table3", "--runs", str(tmp_path / "file")], f"{tmp_path / 'file'} cannot take runs: "),
        (
            ["--runs", str(tmp_path / "file" / "runs")],
            "cannot take runs: Not a directory; name another folder",
        ),
        (["table3", "-o", "table.md"], "-o goes with --page"),
        (["table3", "--page", str(tmp_path)], "leave NAME, --list and --dry-run out"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1


def test_the_list_counts_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for job in REGISTRY.items["table7"].jobs()[:2]:
        (tmp_path / "runs" / job.folder).mkdir(parents=True)
        (tmp_path / "runs" / job.folder / "results.json").touch()
    assert main(["--list", "table7"]) == 0
    out = capsys.readouterr().out
    assert "2 of   9 in runs; kept: 0 of 9" in out and "not run; it takes 9 runs of 160 epochs" in out
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.count(" in runs; kept: ") == len(REGISTRY.items)


@needs("isotropic")
def test_the_list_counts_the_asked_seeds_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["--list", "isotropic_overabundance", "--seeds", "0,1"]) == 0
    assert "kept: 4 of 4; 4 others" in capsys.readouterr().out


def test_figures_are_drawn_of_the_runs_that_they_can_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures 4, 5 and 9: nine runs compared, and the rate factors of one of them; another seed is in the table."""
    item, place = REGISTRY.items["figure4"], Place(tmp_path, None, ())
    for job in item.jobs([0, 1, 7]):
        seed = int(job.overrides[-1].removeprefix("seed="))
        methods = {
            "growing": ("pairs", "none"),
            "growing_vt": ("ours", "none"),
            "ours": ("ours", "stagewise_norm"),
        }
        growth, lr_adapt = methods[job.overrides[0].removeprefix("method=")]
        write_run(tmp_path / job.folder, growth=growth, lr_adapt=lr_adapt, seed=seed)
    _tell(item, place, [7])
    assert {path.name for path in tmp_path.glob("*.png")} >= {
        "figure4_compare.png",
        "figure4_rate_factors_ours_0.png",
    }
    assert "(3)" in (tmp_path / "figure4.md").read_text()
    assert "shows one run" not in capsys.readouterr().err


NETWORKS = sorted(
    {
        (job.data, network_of(job))
        for item in REGISTRY.items.values()
        for job in item.jobs()
        if job.data is not None and item.minutes is None
    }
)


@pytest.mark.parametrize(("data", "network"), NETWORKS, ids=lambda value: str(value)[:60])
def test_the_steps_that_are_measured_are_a_run_that_can_be_had(data: str, network: tuple[str, ...]) -> None:
    """What is typed of any network of the registry composes, is in force and fits its data."""
    typed = measuring(network)
    register_schemas()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose(PRIMARY, overrides=[*typed, "name=measured", "data.root=somewhere"])
    check_overruled(cfg, [*typed, "data.root=somewhere"])
    assert instantiate(cfg.data).name.removesuffix("_incremental") == data
    assert cfg.data.get("incremental") is None
    assert (
        cfg.schedule.total_epochs == 2 and cfg.schedule.epochs is None and cfg.schedule.get("budget") is None
    )


@needs("isotropic")
def test_data_that_is_missing_leaves_out_its_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data" / "mnist10k").mkdir(parents=True)
    (tmp_path / "data" / "mnist10k" / "train.parquet").touch()
    taken: list[Job] = []
    monkeypatch.setattr("growlab.recipes.papers.__main__.forecast", lambda *_: Forecast(60.0, 1, ()))
    monkeypatch.setattr(
        "growlab.recipes.papers.__main__.train", lambda jobs, *_: taken.extend(jobs) or (0, [], [])
    )
    assert main(["isotropic_data_sets", "--data", str(tmp_path / "data"), "--runs", str(tmp_path)]) == 0
    every = REGISTRY.items["isotropic_data_sets"].jobs()
    assert [job.folder for job in taken] == [job.folder for job in every if job.data in ("digits", "mnist")]
    told = capsys.readouterr().err
    assert told.count("\n") == 2 and "12 runs left out: cifar10 is not in" in told and "fashion_mnist" in told
    place = Place(tmp_path, tmp_path / "data", ())
    assert place.num_train(REGISTRY, "mnist") == 8000 and place.num_train(REGISTRY, "digits") == 1437


@needs("isotropic")
@pytest.mark.slow
def test_real_runs_are_measured_stopped_and_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest entry: first a slice too short for it, then the rest; rows and a figure are written."""
    monkeypatch.chdir(tmp_path)
    words = ["isotropic_task_change", "--seeds", "0"]
    assert main([*words, "--minutes", "0.4"]) == 0
    out = capsys.readouterr().out
    assert "1 run to go: " in out and "0 of 1 runs are there" in out and "the same command goes on" in out
    assert main([*words, "--minutes", "9"]) == 0
    assert "1 of 1 runs are there" in capsys.readouterr().out
    assert (tmp_path / "runs" / "isotropic_task_change.md").is_file()
    assert (tmp_path / "runs" / "isotropic_task_change_width_paths.png").is_file()
    assert main(words) == 0
    assert "to go" not in capsys.readouterr().out
