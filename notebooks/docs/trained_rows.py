"""Compare ways to continue from a small trained Llama at equal FLOPs, among them enlarging it.

`python notebooks/docs/trained_rows.py` trains all runs missing from notebooks/results/trained, in half an hour on one
CPU core, and keeps the small networks in runs/trained_rows; with a pattern, such as "300_*", only those that it fits,
so several processes can share the work. Text: the source of Python's standard library (30 MB), as bytes, split by file.
The rate of each kind of run, the small one's too, is the one of three that has the lowest loss on validation files with
seed 0; losses are those of the test files.
"""

import argparse
import hashlib
import json
import logging
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from growlab import Grower
from growlab.base.files import write_json
from growlab.grower.cost import forward_flops
from growlab.lab.training.run import provenance
from growlab.parts import Warmup

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "notebooks" / "results" / "trained"
KEPT = ROOT / "runs" / "trained_rows"
SEEDS = range(3)
#: Two rates, and those tried next if the first or the second of them is better.
RATES, NEXT = (3e-3, 1e-2), (1e-3, 3e-2)
#: Steps of the small network before, and FLOPs afterwards as steps of the small network.
SMALL_STEPS, BUDGETS = 800, (300, 900)
BATCH, LENGTH = 8, 128
#: Shares of the steps in which rates rise, newborn entries' too.
WARMUP, NEWBORN = 0.05, 0.25
SIZES = {"width": (2, 1), "depth": (1, 2), "both": (2, 2)}
STATES = ("inherit", "reset", "newborn")


@dataclass(frozen=True)
class Arm:
    """A way to spend a budget.

    Attributes:
        start: "small": the trained small network; "scratch": new weights, with the small network's FLOPs as well.
        size: key of `SIZES`, or "small".
        state: the optimizer's state in growth, "newborn" for a rate that rises again for new entries.
    """

    start: str
    size: str
    state: str = "inherit"

    def __str__(self) -> str:
        return f"{self.start}_{self.size}" + f"_{self.state}" * (self.start == "small" != self.size)


ARMS = (
    Arm("small", "small"),
    *(Arm("small", size, state) for size in SIZES for state in STATES),
    *(Arm("scratch", size) for size in SIZES),
)


@cache
def text() -> dict[str, Tensor]:
    """The files of each split, one after the other in an order of their own, as bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    names = {path: path.relative_to(library).as_posix() for path in library.rglob("*.py")}
    by_hash = {
        hashlib.sha256(name.encode()).digest(): path for path, name in names.items() if "site-packages" not in name
    }
    found = {"validation": bytearray(), "test": bytearray(), "train": bytearray()}
    for key in sorted(by_hash):
        found[{0: "validation", 1: "test"}.get(key[-1] % 20, "train")] += by_hash[key].read_bytes()
    return {split: torch.frombuffer(each, dtype=torch.uint8) for split, each in found.items()}


def llama(size: str) -> Any:
    """A Llama over bytes: 32 wide with two layers, or larger."""
    width, depth = SIZES.get(size, (1, 1))
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=32 * width, intermediate_size=96 * width, num_hidden_layers=2 * depth,
            num_attention_heads=2 * width, num_key_value_heads=2 * width, head_dim=16, use_cache=False,
        )
    )  # fmt: skip


@cache
def flops(size: str) -> int:
    """Forward FLOPs on one window; a step costs three times as many for each window."""
    return forward_flops(llama(size), {"input_ids": torch.zeros(1, LENGTH, dtype=torch.long)})


def train(model: Any, optimizer: torch.optim.Optimizer, lr: float, steps: int, seed: int) -> None:
    """Train on random windows; the rate rises linearly and then falls to 0."""
    random, data = torch.Generator().manual_seed(seed), text()["train"]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / (WARMUP * steps), (steps - step) / steps)
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=random)
        x = data[starts[:, None] + torch.arange(LENGTH)].long()
        optimizer.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()


@torch.no_grad()
def bits_per_byte(model: Any, split: str, windows: int) -> float:
    """Mean loss over windows in equal distances, in bits."""
    data = text()[split]
    starts = torch.arange(windows) * ((len(data) - LENGTH) // windows)
    x = data[starts[:, None] + torch.arange(LENGTH)].long()
    losses = [model(input_ids=each, labels=each).loss.item() for each in x.split(64)]
    return sum(losses) / len(losses) / math.log(2)


def scores(model: Any) -> dict[str, float]:
    """Losses of the validation and test files."""
    return {"validation": bits_per_byte(model, "validation", 256), "test": bits_per_byte(model, "test", 1024)}


def small(seed: int, lr: float) -> tuple[Any, torch.optim.Optimizer]:
    """The small network after its training, and its optimizer."""
    path = KEPT / f"small_s{seed}_lr{lr:g}.pt"
    torch.manual_seed(seed)
    model = llama("small")
    optimizer = torch.optim.AdamW(model.parameters())
    if path.exists():
        for each, state in zip((model, optimizer), torch.load(path, weights_only=True), strict=True):
            each.load_state_dict(state)
    else:
        train(model, optimizer, lr, SMALL_STEPS, seed)
        KEPT.mkdir(parents=True, exist_ok=True)
        torch.save((model.state_dict(), optimizer.state_dict()), path)
    return model, optimizer


def run(arm: Arm, budget: int, small_lr: float, seed: int, lr: float) -> dict[str, Any]:
    """Train on within a budget."""
    spent = budget + SMALL_STEPS * (arm.start == "scratch")
    steps = round(spent * flops("small") / flops(arm.size))
    torch.manual_seed(100 + seed)
    model = llama(arm.size)
    if arm.start == "scratch":
        train(model, torch.optim.AdamW(model.parameters()), lr, steps, 1000 + seed)
    elif arm.size == "small":
        model, optimizer = small(seed, small_lr)
        train(model, optimizer, lr, steps, 1000 + seed)
    else:
        start, optimizer = small(seed, small_lr)
        warm = arm.state == "newborn"
        grower = Grower.from_trained(
            start, model, {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}, optimizer=optimizer, verbose=False,
            state="inherit" if warm else arm.state, parts=[Warmup(round(NEWBORN * steps))] if warm else [], seed=seed,
        )  # fmt: skip
        grower.step()
        train(model, optimizer, lr, steps, 1000 + seed)
        model = grower.finish()
    return {"steps": steps, "flops": 3 * BATCH * steps * flops(arm.size), **scores(model)}


def rows(name: str, run: Callable[[int, float], dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a kind of run in its file: with seed 0 at three rates, with others at the best one."""
    path = ROWS / f"{name}.json"
    found = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    settings = {
        "command": "python notebooks/docs/trained_rows.py", "small_steps": SMALL_STEPS, "batch": BATCH,
        "length": LENGTH, "bytes": {split: len(each) for split, each in text().items()},
        **provenance(torch.device("cpu")),
    }  # fmt: skip

    def add(seed: int, lr: float) -> None:
        if not any((row["seed"], row["lr"]) == (seed, lr) for row in found):
            found.append({"seed": seed, "lr": lr, **run(seed, lr)})
            write_json(path, {**settings, "rows": found})
            print(name, found[-1], flush=True)

    def best() -> float:
        lr: float = min((row for row in found if row["seed"] == 0), key=itemgetter("validation"))["lr"]
        return lr

    for lr in RATES:
        add(0, lr)
    add(0, NEXT[best() >= RATES[1]])
    chosen = best()
    for seed in SEEDS[1:]:
        add(seed, chosen)
    return [row for row in found if row["lr"] == chosen]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="*", metavar="PATTERN")
    pattern = parser.parse_args().pattern
    torch.set_num_threads(1)
    logging.getLogger("growlab").setLevel(logging.WARNING)
    ROWS.mkdir(parents=True, exist_ok=True)
    small_lr = rows("small", lambda seed, lr: scores(small(seed, lr)[0]))[0]["lr"]
    for budget in BUDGETS:
        for arm in ARMS:
            if fnmatch(name := f"{budget}_{arm}", pattern):
                rows(name, partial(run, arm, budget, small_lr))
