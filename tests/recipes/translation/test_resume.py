"""Runs on sentence pairs resume exactly on two processes, which train as one does."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from growlab.lab.training.checkpoints import LAST
from growlab.recipes.translation.data import TranslationData
from tests.command_line import CommandLine
from tests.recipes.translation.test_run import SMALL
from tests.whole_runs import Left, read_results

# Two epochs of 5 steps, one at half width and one at full width, with dropout.
SHORT = (
    *(*SMALL, "data.limit_train=120", "model.dropout=0.1", "schedule.epochs=[1,1]", "objective.beam_size=2"),
    *("data.limit_test=8", "objective.bleu_every_n_epochs=null"),
)


def arguments(data: TranslationData, *more: str) -> tuple[str, ...]:
    return (*SHORT, f"data.root={data.pairs.folder}", *more)


@pytest.mark.slow  # test_processes.py tests the same with images
def test_two_processes_resume_in_the_middle_of_an_epoch(
    cli: CommandLine, uninterrupted: Callable[..., Left], data: TranslationData, tmp_path: Path
) -> None:
    """Ranks have different sentences and random numbers for dropout."""
    two = arguments(data, "trainer=ddp_cpu")
    whole = uninterrupted(*two)
    command = (*two, "hydra.run.dir=run", "checkpoint.every_n_steps=1")
    outcome = cli(*command, cwd=tmp_path, fault=("on_rank", 1, "at_step", 3, int(signal.SIGKILL)))
    assert "process 1 of 2 was ended by SIGKILL" in outcome.err
    # In the first epoch, of five steps.
    header = torch.load(tmp_path / "run/checkpoints" / LAST, weights_only=True)
    assert header["global_step"] in (2, 3)
    cli.done(*command, "ckpt_path=last", cwd=tmp_path)
    assert Left.by(tmp_path / "run").differences(whole) == []


@pytest.mark.slow
def test_two_processes_train_as_one_does(cli: CommandLine, data: TranslationData, tmp_path: Path) -> None:
    """All tokens have the same weight, although ranks have different numbers of them."""
    results, precise = {}, ("model.dropout=0", "trainer.precision=64-true")
    for name, more in (("one", ()), ("two", ("trainer=ddp_cpu",))):
        cli.done(*arguments(data, *precise, f"hydra.run.dir={name}", *more), cwd=tmp_path)
        results[name] = read_results(tmp_path / name)
    assert results["two"]["world_size"] == 2
    for key in ("train_loss", "test_loss", "test_perplexity"):
        assert results["two"][key] == pytest.approx(results["one"][key], rel=1e-6)
