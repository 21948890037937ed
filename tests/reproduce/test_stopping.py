"""A signal that ends the command: the run at work saves and ends, the table is written, and the exit code says so."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from growlab.recipes.papers.registry import registry
from growlab.recipes.papers.stopping import Ended, EndingSignals
from tests.analysis.fake_runs import write_run
from tests.command_line import ROOT

# The command itself, with a run that waits in its folder, saves at SIGTERM and ends; SIGHUP would end it at once.
COMMAND = """
import sys
from growlab.recipes.papers import __main__ as command, slices
from growlab.recipes.papers.paces import Forecast
RUN = '''
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
def save(*_):
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(folder / "process.unfinished").write_text(str(os.getpid()))
os.rename(folder / "process.unfinished", folder / "process")
time.sleep(300)
'''
slices.command = lambda job, place, registry: [sys.executable, "-c", RUN, str(place.runs / job.folder)]
command.device = lambda paper: ()
command.runs_at_once = lambda item, paper: 1
command.forecast = lambda *about: Forecast(60.0, 1, ())
sys.exit(command.main(sys.argv[1:]))
"""
FIRST, SECOND = registry().items["table7"].jobs([0])[:2]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """One run of Table 7 is there, the others are missing."""
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    (tmp_path / "data" / "cifar10" / "train.parquet").touch()
    write_run(tmp_path / "runs" / FIRST.folder)
    return tmp_path / "data"


def heard() -> None:
    """A shell lets commands in the background ignore SIGINT, such as pytest's own, and they hand that on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def started(data: Path, before: Callable[[], None] = heard) -> tuple[subprocess.Popen[str], int]:
    """The command in a session of its own, and the number of its run's process."""
    line = [sys.executable, "-c", COMMAND, "table7", "--seeds", "0", "--data", str(data)]
    process = subprocess.Popen(
        [*line, "--runs", str(data.parent / "runs")],
        cwd=data,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=before,
    )
    told = data.parent / "runs" / SECOND.folder / "process"
    while not told.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return process, int(told.read_text())


def ended(process: subprocess.Popen[str]) -> str:
    """What the command has said on stderr at its end; one that does not end is killed with its run."""
    try:
        return process.communicate(timeout=120)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def gone(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [(signal.SIGTERM, False), (signal.SIGHUP, True), (signal.SIGINT, False)],
    ids=["SIGTERM", "a terminal that closes", "SIGINT"],
)
def test_a_signal_lets_the_run_save_and_writes_the_table(
    data: Path, number: signal.Signals, whole_group: bool
) -> None:
    process, run = started(data)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    error = ended(process)
    assert process.returncode == 128 + number
    assert (data.parent / "runs" / SECOND.folder / "saved").exists() and gone(run)
    assert (data.parent / "runs" / "table7.md").is_file(), error
    named = "interrupted" if number == signal.SIGINT else number.name
    assert error.splitlines()[-1] == f"{named}; the same command goes on"


def test_a_command_that_is_to_outlive_its_terminal_does(data: Path) -> None:
    def as_nohup() -> None:
        heard()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process, run = started(data, as_nohup)
    os.killpg(process.pid, signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None and not gone(run)
    process.terminate()
    ended(process)
    assert process.returncode == 128 + signal.SIGTERM and gone(run)


def test_a_reader_that_has_gone_is_no_error(data: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "growlab.recipes.papers",
        "--list",
        "table7",
        "--runs",
        str(data.parent / "runs"),
    ]
    with subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_signal_is_noted_where_it_is_awaited_and_raised_elsewhere() -> None:
    of_pytest = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    with EndingSignals() as signals:
        assert not signals.came
        with signals.awaited():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.came and signals.received == [signal.SIGTERM]
        with pytest.raises(Ended) as ended:
            signals.check()
        assert ended.value.signal == signal.SIGTERM
        with pytest.raises(Ended):
            os.kill(os.getpid(), signal.SIGINT)
    for number, handler in of_pytest.items():
        assert signal.signal(number, handler) == signal.SIG_DFL
