"""One process writes to a run's folder at a time, and an earlier run's results are not taken for a later one's."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from growlab.base.errors import UserError
from growlab.base.files import FAILURE
from growlab.lab.training.processes import in_folder, name_of
from growlab.lab.training.resuming import resume_override
from growlab.lab.training.run_folder import check_places, forget_results, held_alone, is_held
from tests.command_line import CommandLine
from tests.runs import MLP, table

SIGKILL = int(signal.SIGKILL)
HOLDER = """
import os, sys, time
from pathlib import Path
from growlab.lab.training.run_folder import held_alone
with held_alone(Path(sys.argv[1])):
    if len(sys.argv) > 2 and os.fork() == 0:
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path, *more: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *more], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_folder_is_of_one_process_until_it_ends(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with (
            pytest.raises(UserError, match=r"another process is at work in .*; wait|wait for its end"),
            held_alone(tmp_path, wait_sec=0.2),
        ):
            pass
        process.kill()
    for _ in range(2):
        with held_alone(tmp_path, wait_sec=5.0):
            pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_forked_does_not_hold_its_folder(tmp_path: Path) -> None:
    """As the processes that read data, which notice a moment later that they are alone."""
    with holder(tmp_path, "forks") as process:
        process.kill()
        process.wait()
        # The forked one sleeps for a minute.
        with held_alone(tmp_path, wait_sec=20.0):
            pass


def test_a_second_run_in_the_folder_is_told_and_leaves_the_first_alone(
    cli: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    with holder(tmp_path / "run") as process:
        outcome = cli(*MLP, "hydra.run.dir=run", cwd=tmp_path)
        process.kill()
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "another process is at work in " in outcome.err
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["checkpoints/last.ckpt", "checkpoints/previous.ckpt", "metrics.csv"])
def test_a_folder_where_a_run_will_write_a_file_is_told_before_training(
    name: str, cli: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    for more in ([], ["ckpt_path=last"]):
        outcome = cli(*MLP, "hydra.run.dir=run", *more, cwd=tmp_path)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome.err
        assert f"run/{name} is a folder, and a run has a file there" in outcome.err


def test_a_file_where_a_run_will_make_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "figures").touch()
    with pytest.raises(UserError, match="figures is a file, and a run has a folder there"):
        check_places(tmp_path)


def test_a_job_of_a_second_sweep_leaves_no_failure_in_the_folder(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "sweep" / "run").mkdir(parents=True)
    with holder(tmp_path / "sweep" / "run") as process:
        outcome = cli("-m", *MLP, "hydra.sweep.dir=sweep", "hydra.sweep.subdir=run", cwd=tmp_path)
        process.kill()
    assert outcome.code == 2 and "another process is at work in " in outcome.err
    assert not (tmp_path / "sweep" / "run" / FAILURE).exists()


def test_whether_a_folder_is_held_is_asked_without_holding_it(tmp_path: Path) -> None:
    assert not is_held(tmp_path) and not is_held(tmp_path / "nothing")
    with holder(tmp_path) as process:
        assert is_held(tmp_path)
        process.kill()
    assert not is_held(tmp_path)


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(
    cli: CommandLine, tmp_path: Path
) -> None:
    for seed in range(2):
        assert (
            cli(*MLP, f"seed={seed}", "schedule.total_epochs=2", "schedule.num_stages=1", cwd=tmp_path).code
            == 0
        )
    (first, second) = sorted((tmp_path / "runs").glob("*/*"))
    # Their names tell microseconds.
    assert len(first.name) == len(second.name) == len("2026-11-24_22-10-32_123456")


def test_a_run_that_is_killed_is_not_taken_for_the_one_before_it(cli: CommandLine, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli(*MLP, "hydra.run.dir=run", cwd=tmp_path).code == 0
    before = (run / "results.json").read_bytes()
    # Bad input leaves everything as it is, and so does the same run once more.
    assert cli(*MLP, "hydra.run.dir=run", "optimizer.lr=-1", cwd=tmp_path).code == 2
    assert (run / "results.json").read_bytes() == before
    fault = ("at_step", 7, SIGKILL)
    assert cli(*MLP, "hydra.run.dir=run", "seed=5", cwd=tmp_path, fault=fault).code == -SIGKILL
    assert not list(run.glob("model*.pt")) and not (run / "report.html").exists()
    assert not (run / "results.json").exists() and len(table(run / "metrics.csv")) < 6
    assert cli(*MLP, "hydra.run.dir=run", "seed=5", "ckpt_path=last", cwd=tmp_path).code == 0
    assert json.loads((run / "results.json").read_text())["seed"] == 5


def test_results_are_forgotten_and_nothing_else(tmp_path: Path) -> None:
    kept = ("metrics.csv", "config.yaml", "notes.txt", "mine.pt")
    for name in (*kept, "results.json", "report.html", "model.pt", "model_ema.pt"):
        (tmp_path / name).touch()
    (tmp_path / "pretrained_ema").mkdir()
    (tmp_path / "pretrained_ema" / "config.json").touch()
    forget_results(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


@pytest.mark.parametrize(
    "folder",
    [
        *("runs/digits/2026-11-24_22-10-32_123456", "/tmp/odd (copy), v2={x}", "a=b/c", "null", "1e5", "é/ü"),
        *("it's", "back\\slash", "end\\", "quote\\'d", "two\\\\'", "a:b", "[x]", "~/x", " x"),
    ],
)
def test_an_override_of_a_folder_means_that_folder(folder: str) -> None:
    override = in_folder(Path(folder))
    (typed,) = shlex.split(shlex.quote(override))
    parsed = OverridesParser.create().parse_override(typed)
    assert (parsed.get_key_element(), parsed.value()) == ("hydra.run.dir", folder)


def test_the_command_to_go_on_with_is_one_that_goes_on(cli: CommandLine, tmp_path: Path) -> None:
    place = tmp_path / "odd (copy), v2={x}"
    place.mkdir()
    outcome = cli(*MLP, cwd=place, fault=("at_step", 7, int(signal.SIGTERM)))
    told = outcome.err.splitlines()[-1]
    assert outcome.code == 0 and "resume with: growlab " in told
    outcome = cli(*shlex.split(told.split("resume with: growlab ")[1]), cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    (run,) = (place / "runs").glob("*/*")
    assert (run / "results.json").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_folder_that_is_named_is_the_one(plus: str, cli: CommandLine, tmp_path: Path) -> None:
    assert name_of(f"{plus}hydra.run.dir=here") == "hydra.run.dir"
    assert resume_override([f"{plus}ckpt_path=last", f"{plus}hydra.run.dir=here"]) is None
    if plus == "++":
        outcome = cli(*MLP, "++ckpt_path=last", cwd=tmp_path)
        assert outcome.code == 2 and "holds no earlier run" in outcome.err
