"""Trains on what each method of `growlab widen` makes of a small trained Llama, and keeps bits per byte.

`python notebooks/docs/widening_rows.py --data ../shared/data/multi30k` writes notebooks/results/widening/results.json
(about ten minutes on one CPU core). Text: the English captions of Multi30k, as bytes. The rate of each row is the one
of `RATES` with the lowest loss on the validation captions; its loss is that of the test captions.
"""

import argparse
import gzip
import logging
import shutil
import tempfile
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from growlab.base.files import write_json
from growlab.lab.training.run import provenance
from growlab.widen import widen_folder

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "notebooks" / "results" / "widening" / "results.json"
SEEDS, RATES = range(3), (5e-4, 1e-3, 2e-3)
SMALL_STEPS, STEPS, BATCH, LENGTH, WARMUP = 400, 100, 8, 64, 10
#: Width, method, noise.
RUNS = [
    (2.0, "hypercloning", 0.1),
    (2.0, "hypercloning", 0.0),
    (2.0, "pairs", 0.0),
    (1.5, "hypercloning", 0.1),
    (1.5, "pairs", 0.1),
    (1.5, "net2net", 0.1),
]


def text(folder: Path, split: str) -> Tensor:
    """The English captions of a split as bytes."""
    (path,) = folder.glob(f"{split}*.en.gz")
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8).long()


def small_llama() -> Any:
    """A Llama of two layers over bytes."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, use_cache=False,
        )
    )  # fmt: skip


def train(model: Any, data: Tensor, lr: float, steps: int, seed: int) -> None:
    """Train with AdamW on random windows; the rate rises over the first steps and stays."""
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / WARMUP)
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=random)
        x = data[starts[:, None] + torch.arange(LENGTH)]
        optimizer.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()


@torch.no_grad()
def bits_per_byte(model: Any, data: Tensor) -> float:
    """Mean loss over windows that cover the text, in bits."""
    windows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    losses = [model(input_ids=x, labels=x).loss.item() * len(x) for x in windows.split(128)]
    return sum(losses) / len(windows) / torch.log(torch.tensor(2.0)).item()


def rows(folder: Path, seed: int) -> list[dict[str, Any]]:
    """The small network's row and those of the widened ones, with a seed."""
    data, validation, test = (text(folder, split) for split in ("train", "val", "test"))
    torch.manual_seed(seed)
    small = small_llama()
    train(small, data, 4e-3, SMALL_STEPS, seed)
    found: list[dict[str, Any]] = [{"seed": seed, "width": 1.0, "test": bits_per_byte(small, test)}]
    with tempfile.TemporaryDirectory() as place:
        small.save_pretrained(Path(place) / "small")
        for width, method, noise in RUNS:
            out = Path(place) / "out"
            widen_folder(Path(place) / "small", out, width, method=method, seed=seed, noise_std=noise)
            tried = []
            for lr in RATES:
                model = LlamaForCausalLM.from_pretrained(out)
                train(model, data, lr, STEPS, 1000 + seed)
                tried.append((bits_per_byte(model, validation), lr, model))
            best, lr, model = min(tried, key=itemgetter(0))
            shutil.rmtree(out)
            row = {"seed": seed, "width": width, "method": method, "noise_std": noise}
            found.append({**row, "lr": lr, "validation": best, "test": bits_per_byte(model, test)})
            print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("growlab").setLevel(logging.WARNING)
    command = f"python notebooks/docs/widening_rows.py --data {given.data}"
    measured = [row for seed in SEEDS for row in rows(given.data, seed)]
    ROWS.parent.mkdir(exist_ok=True)
    settings = {"small_steps": SMALL_STEPS, "steps": STEPS, "batch": BATCH, "length": LENGTH, "rates": RATES}
    write_json(ROWS, {"command": command, **settings, **provenance(torch.device("cpu")), "rows": measured})
    print(ROWS)
