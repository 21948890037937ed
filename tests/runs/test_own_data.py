"""Runs on a user's data, networks and losses: growth, resuming, and equal results on two ranks."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from tests.command_line import ROOT, CommandLine
from tests.whole_runs import Left, assert_resumes, kept_run, read_results, slow

STAGES = ("schedule.epochs=[1,2,1]", "schedule.widths=[0.5,0.75,1]", "log_rates_every_n_steps=2")
OWN = ("data=custom", "model=custom", *STAGES, "checkpoint.every_n_steps=1")
KENDALL = "+objective.metrics.order._target_=torchmetrics.KendallRankCorrCoef"
CASES: dict[str, tuple[str, ...]] = {
    # Random transforms, a batch size for each stage, a last batch that does not divide among ranks.
    "numbers": (
        *(*OWN, "data.source._target_=mine.Waves", "model._target_=mine.Net", "objective=regression"),
        *("data.batch_size=16", "schedule.batch_growth_rate=0.5", "trainer.precision=64-true"),
    ),
    "masks": (
        *(*OWN, "data.source._target_=mine.Discs", "data.columns.inputs=[image]", "data.num_workers=1"),
        *("model._target_=mine.Segmenter", "objective=segmentation", "data.batch_size=10", "ema.decay=0.9"),
    ),
    "labels": (*OWN, "data.source._target_=mine.pairs", "model._target_=mine.Two", "objective=multilabel"),
    "module": (
        *("data=custom", "data.source._target_=mine.Images", *STAGES, "checkpoint.every_n_steps=1"),
        *("model=mlp8", "model.width=12", "model.batch_norm=true", "objective.label_smoothing=0.1"),
    ),
    "loaders": (
        *(*OWN, "data.source._target_=mine.loaders", "model._target_=mine.Net", "+model.norm=true"),
        *("objective=custom", "objective.loss._target_=torch.nn.HuberLoss", "+objective.loss.delta=0.5", KENDALL),
        "+objective.metrics.r2._target_=torchmetrics.R2Score",
    ),
    # A metric of all predictions together.
    "order": (
        *(*OWN, "data.source._target_=mine.Waves", "model._target_=mine.Net", "data.batch_size=16"),
        *("objective=custom", "objective.loss._target_=torch.nn.MSELoss", KENDALL),
    ),
    # Read by a worker process; one file is damaged.
    "folder": (
        *("data=folder", "data.root=pictures", "data.on_error=skip", "data.in_memory=false", "data.num_workers=1"),
        *("data.batch_size=8", "model=mlp8", "model.width=12", *STAGES, "checkpoint.every_n_steps=1"),
    ),
}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Folder with a user's module and images."""
    shutil.copy(Path(__file__).parents[1] / "own_data.py", tmp_path / "mine.py")
    pixels = np.random.default_rng(0).integers(0, 256, (41, 6, 6), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        folder = tmp_path / "pictures" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(picture).save(folder / f"{number}.png")
    damaged = folder / "40.png"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "step"), [("module", 10), ("loaders", 8), ("folder", 7), slow("numbers", 9), slow("masks", 5)]
)
def test_resumed_equals_uninterrupted(cli: CommandLine, mine: Path, name: str, step: int) -> None:
    whole, kept = kept_run(cli, mine, CASES[name])
    assert_resumes(cli, mine, CASES[name], kept[step], whole)
    assert len(whole.growth["events"]) == 2 and len(whole.metrics) == 4
    assert max(event["parity_error_eval"] for event in whole.growth["events"]) < 1e-5


@pytest.mark.slow  # test_processes.py tests the same with images
def test_two_ranks_see_the_same_samples(cli: CommandLine, mine: Path) -> None:
    command = (*CASES["order"], "trainer.precision=64-true")
    cli.done(*command, "hydra.run.dir=one", cwd=mine)
    cli.done(*command, "trainer=ddp_cpu", "hydra.run.dir=two", cwd=mine)
    alone, together = (Left.by(mine / folder) for folder in ("one", "two"))
    torch.testing.assert_close(together.weights, alone.weights, rtol=1e-6, atol=1e-8)
    results = {key: value for key, value in alone.results.items() if key.startswith(("test_", "val_"))}
    assert {key: together.results[key] for key in results} == pytest.approx(results, rel=1e-6, nan_ok=True)
    assert "test_order" in results


def test_the_guides_example_runs_as_written(cli: CommandLine, tmp_path: Path) -> None:
    page = (ROOT / "notebooks" / "docs" / "pages" / "guide" / "own_data.md").read_text()
    program, commands = (re.search(rf"^```{name}\n(.*?)^```$", page, re.M | re.S)[1] for name in ("python", "shell"))
    (tmp_path / "mine.py").write_text(program)
    for line in commands.splitlines():
        cli.done(*shlex.split(line)[1:], *STAGES, "hydra.run.dir=run", cwd=tmp_path)
    results = read_results(tmp_path / "run")
    assert results["metric"] == {"name": "mae", "higher_is_better": False} and results["test_mae"] < 1
    for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S):
        file = tmp_path / re.search(r"^# (conf/\S+)$", block, re.M)[1]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block)
    cli.done("-cd", "conf", "experiment=waves", *STAGES, "hydra.run.dir=files", cwd=tmp_path)
    results = read_results(tmp_path / "files")
    assert results["metric"] == {"name": "rmse", "higher_is_better": False}
