"""Run folders: locks, commands on a folder, names, and removal of results of earlier runs."""

import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from growlab.base.errors import UserError
from growlab.base.files import FAILURE
from growlab.lab.data.arrival import first_balanced
from growlab.lab.data.image_files import load_digits
from growlab.lab.training.configuration import resume_override, set_plugin_defaults
from growlab.lab.training.processes import forget_results, in_folder, is_locked, lock_folder, name_of
from tests.command_line import CommandLine
from tests.whole_runs import MLP, Whole, table

SIGKILL = int(signal.SIGKILL)


def test_a_folder_is_locked_by_one_process_until_it_ends(tmp_path: Path) -> None:
    """A killed process releases the lock although its child, such as a data worker, is still running."""
    reading, writing = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            with lock_folder(tmp_path):
                forked = os.fork()
                if forked:
                    os.write(writing, str(forked).encode())
                signal.pause()
        finally:
            os._exit(1)
    forked = int(os.read(reading, 20))
    try:
        assert is_locked(tmp_path) and not is_locked(tmp_path / "nothing")
        with pytest.raises(UserError, match="another process is at work in "), lock_folder(tmp_path, wait_sec=0.2):
            pass
        os.kill(holder, SIGKILL)
        for _ in range(2):
            with lock_folder(tmp_path, wait_sec=5.0):
                pass
        assert not is_locked(tmp_path) and list(tmp_path.iterdir()) == []
    finally:
        for process in (holder, forked):
            os.kill(process, SIGKILL)
        os.waitpid(holder, 0)


@pytest.mark.slow  # waits for the lock twice for five seconds
def test_a_second_run_in_a_folder_is_refused_and_writes_nothing(cli: CommandLine, tmp_path: Path) -> None:
    """A job of a sweep does not record its failure there either."""
    run = tmp_path / "run"
    run.mkdir()
    with lock_folder(run):
        # Both the job and its run wait five seconds for the lock.
        outcome = cli("-m", *MLP, "hydra.sweep.dir=.", "hydra.sweep.subdir=run", cwd=tmp_path)
        assert outcome.code == 2 and "another process is at work in " in outcome.err
    assert not (run / "config.yaml").exists() and not (run / FAILURE).exists()


def test_a_run_is_shown_tested_again_and_resumed_by_its_folder(
    cli: CommandLine, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run, done = tmp_path / "run", whole(*MLP)
    shutil.copytree(done.folder, run)
    shown = cli("show", "run", cwd=tmp_path)
    assert shown.code == 0 and "stage 2 at step 12" in shown.out and "schedule.widths=[0.5,0.75,1]" in shown.out
    tested = cli("eval", "run", "-o", "numbers.json", cwd=tmp_path)
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert tested.code == 0 and numbers["accuracy"] == pytest.approx(done.results["test_accuracy"])
    assert numbers["loss"] == pytest.approx(done.results["test_loss"]) and 0 <= numbers["calibration_error"] <= 1
    # Test on the same images in a folder without parts, with the run's normalisation.
    test = load_digits()["test"]
    for place in first_balanced(test.labels, 40):
        file = tmp_path / "copies" / test.classes[test.labels[place]] / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(test.images_NHWC[place, :, :, 0].numpy()).save(file)
    cli.done("eval", "run", "data=folder", "data.root=copies", "-o", "copies.json", cwd=tmp_path)
    assert json.loads((tmp_path / "copies.json").read_text()) == pytest.approx(numbers)
    (tmp_path / "copies" / "9").rename(tmp_path / "copies" / "nine")
    refused = cli("eval", "run", "data=folder", "data.root=copies", cwd=tmp_path)
    assert refused.code == 2 and "these images are of 10 classes (0, 1, 2, 3, 4 ...)" in refused.err
    (run / "results.json").unlink()
    assert cli("resume", "run", cwd=tmp_path).code == 0 and (run / "results.json").exists()
    assert cli("resume", ".", cwd=tmp_path).code == 2
    # A run without its command still has results to show.
    shutil.rmtree(run / ".hydra")
    kept = cli("show", "run", cwd=tmp_path)
    assert kept.code == 0 and "test accuracy" in kept.out and "schedule.widths" not in kept.out and not kept.err


def test_a_refused_run_leaves_no_folder_and_a_job_is_named_by_what_differs(cli: CommandLine, tmp_path: Path) -> None:
    assert cli(*MLP, "optimizer.lr=-1", cwd=tmp_path).code == 2 and not list(tmp_path.iterdir())
    long = "x" * 120
    given = ["seed=0,1", f"data.root=/a/{long}", f"+note=/b/{long}", f"+other={long},y", "optimizer.lr=-1"]
    assert cli("-m", *MLP, *given, "hydra.sweep.dir=jobs", cwd=tmp_path).code == 2
    names = sorted(path.name for path in (tmp_path / "jobs").iterdir() if path.is_dir())
    assert names[1] == "1_+other=y,seed=0" and names[0] == f"0_+other={long},seed=0" and len(names) == 4


def test_a_killed_run_does_not_keep_results_of_an_earlier_one(
    cli: CommandLine, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole(*MLP).folder, run)
    before = (run / "results.json").read_bytes()
    # Invalid input changes no file.
    assert cli(*MLP, "hydra.run.dir=run", "optimizer.lr=-1", cwd=tmp_path).code == 2
    assert (run / "results.json").read_bytes() == before
    fault = ("at_step", 7, SIGKILL)
    assert cli(*MLP, "hydra.run.dir=run", "seed=5", cwd=tmp_path, fault=fault).code == -SIGKILL
    assert not list(run.glob("model*.pt")) and not (run / "report.html").exists()
    assert not (run / "results.json").exists() and len(table(run / "metrics.csv")) < 6


def test_only_results_are_removed(tmp_path: Path) -> None:
    kept = ("metrics.csv", "config.yaml", "notes.txt", "mine.pt")
    for name in (*kept, "results.json", "report.html", "model.pt", "model_ema.pt", "steps.csv", "layers.csv"):
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
def test_folder_names_are_quoted_in_overrides(folder: str) -> None:
    override = in_folder(Path(folder))
    (typed,) = shlex.split(shlex.quote(override))
    parsed = OverridesParser.create().parse_override(typed)
    assert (parsed.get_key_element(), parsed.value()) == ("hydra.run.dir", folder)


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_given_folder_is_not_replaced_by_the_last_one(
    plus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name_of(f"{plus}hydra.run.dir=here") == "hydra.run.dir"
    assert resume_override([f"{plus}ckpt_path=last", f"{plus}hydra.run.dir=here"]) is None
    monkeypatch.chdir(tmp_path)
    set_plugin_defaults()
    with pytest.raises(UserError, match="has no earlier run"):
        resume_override([f"{plus}ckpt_path=last", "name=nothing"])
