"""Resuming from the end of every epoch, both sides of every stage boundary and twenty other steps, bit for bit."""

import random
import shutil
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.runs import Left, kept_run, resumed_from

# 72 steps in 6 epochs and 3 stages, with momentum, statistics, an average and a scheduled rate.
EPOCHS, STEPS = 6, 12
COMMAND = (
    *("data.limit_train=96", "data.limit_test=20", "data.batch_size=8", "model=mlp8", "model.width=12"),
    *("model.batch_norm=true", "schedule.epochs=[2,2,2]", "schedule.widths=[0.5,0.75,1]", "ema.decay=0.9"),
    *("data.validation=none", "log_rates_every_n_steps=1000", "checkpoint.every_n_steps=1"),
)
ENDS = [epoch * STEPS for epoch in range(1, EPOCHS + 1)]
BOUNDARIES = [24, 25, 48, 49]
OTHERS = random.Random(0).sample(sorted({*range(1, EPOCHS * STEPS)} - {*ENDS, *BOUNDARIES}), 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_checkpoint_goes_on_to_the_same_end(cli: CommandLine, tmp_path: Path, ranks: int) -> None:
    command = (*COMMAND, *(["trainer=ddp_cpu", f"trainer.devices={ranks}"] if ranks > 1 else []))
    whole, kept = kept_run(cli, tmp_path, command)
    assert len(whole.growth["events"]) == 2 and whole.checkpoint["global_step"] == EPOCHS * STEPS
    steps = sorted({*ENDS, *BOUNDARIES, *OTHERS})
    assert len(steps) == 6 + 2 + 20
    differences = {}
    for step in steps:
        outcome = resumed_from(cli, tmp_path, command, kept[step])
        assert outcome.code == 0, (step, outcome.err)
        found = Left.by(tmp_path / "run").differences(whole)
        if found:
            differences[step] = found
        shutil.rmtree(tmp_path / "run")
    assert differences == {}
