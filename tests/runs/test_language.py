"""Language models over characters from the command line: exact resuming, and results."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from growlab.lab.data import TextData
from growlab.lab.networks import CausalTransformer
from tests.command_line import CommandLine
from tests.whole_runs import Left, Whole, assert_resumes

# 5 steps an epoch; norms are annealed in 9 of the last stage's 10 steps.
TEXT = ("data.context=8", "data.limit_characters=1200", "data.batch_size=32")
SIZES = {"num_layers": 1, "width": 16, "num_heads": 2, "head_dim": 8, "rotary_dim": 2, "hidden": 20}
GPT = (
    *("experiment=gpt_char", *TEXT, *(f"model.{name}={size}" for name, size in SIZES.items())),
    *("schedule.epochs=[1,2]", "schedule.widths=[0.5,1]", "norm_anneal_fraction=0.9", "trainer=cpu"),
)
DROPOUT = (*GPT, "model.dropout=0.2", "ema.decay=0.9")


def test_resumed_in_the_middle_of_an_epoch_and_of_annealing(
    cli: CommandLine, whole: Callable[..., Whole], tmp_path: Path
) -> None:
    run = whole(*DROPOUT)
    for step in (3, 8, 12):
        saved = torch.load(run.checkpoints[step], weights_only=True)
        state = saved["growlab"]["grower"]["growth"]
        # Progress for the next step; the event was after the fifth.
        progress = max(0, step - 5) / 9
        assert (state["norm_progress"], bool(state["norm_weights"])) == (pytest.approx(progress), step > 5)
    assert_resumes(cli, tmp_path, DROPOUT, run.checkpoints[8], run.left)
    (event,) = run.left.growth["events"]
    assert event["weighted_norms"] == ["blocks.0.norm1", "blocks.0.norm2", "norm"]
    assert event["parity_error_train"] < 1e-5


def test_results_are_in_bits_and_the_weights_load_into_a_plain_network(
    cli: CommandLine, uninterrupted: Callable[..., Left]
) -> None:
    left = uninterrupted(*DROPOUT)
    for split in ("train", "val", "test"):
        bits = left.results[f"{split}_bits_per_character"]
        assert bits == pytest.approx(math.log2(left.results[f"{split}_perplexity"]))
    assert float(left.metrics[-1]["train_loss"]) < float(left.metrics[0]["train_loss"])
    text = TextData(context=8, limit_characters=1200)
    text.setup()
    network = CausalTransformer(**text.network_arguments, **SIZES)
    network.load_state_dict(left.weights, strict=True)
    network.requires_grad_(False)
    losses = [
        torch.nn.functional.cross_entropy(network.eval()(x).flatten(0, 1), y.flatten(), reduction="none")
        for x, y in text.test_dataloader()
    ]
    assert float(torch.cat(losses).mean()) == pytest.approx(left.results["test_loss"], rel=1e-5)
