"""Run folders as training writes them, made in milliseconds from formulas: for tests of the analysis.

The curves are shaped like those of a small network on CIFAR-10 (the loss falls by a power law, jumps a little
at growth); the numbers are invented and must never be reported as results.
"""

import json
import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas
from omegaconf import OmegaConf

from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.tables import Row, summarise

NUM_TRAIN = 50_000
STEPS_BETWEEN_RATES = 200
STAGE_EPOCHS = (1, 1, 1, 1, 1, 1, 2, 2, 6)
STAGE_WIDTHS = {16: (4, 4, 6, 6, 8, 10, 12, 14, 16), 32: (8, 10, 12, 14, 16, 20, 24, 28, 32)}
STAGE_WIDTHS[64] = (16, 20, 24, 28, 34, 40, 48, 58, 64)
PARAMETERS = (
    "conv1.weight",
    *(f"layer{i}.{j}.conv{k}.weight" for i in (1, 2, 3) for j in (0, 1, 2) for k in (1, 2)),
    "fc.weight",
)


CHOICES = ("model", "data", "optimizer")
FIXED = {"growth": "none", "lr_adapt": "none"}


def rows_of(folder: Path) -> list[Row]:
    """Rows of all runs below a folder, without a word about those left out."""
    return summarise(load_runs(folder), lambda sentence: None)


def changed(folder: Path, **values: Any) -> None:
    """Replace entries of a run's `results.json`; those that are ... go."""
    path = folder / "results.json"
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def resnet20_groups() -> dict[str, dict[str, Any]]:
    """Width groups of ResNet-20: a residual stream a layer and the inner channels of each block."""
    groups = {}
    for layer, full_width in enumerate((16, 32, 64), start=1):
        for name in ("stream", "0.conv1", "1.conv1", "2.conv1"):
            groups[f"layer{layer}.{name}"] = {"full_width": full_width, "widths": STAGE_WIDTHS[full_width]}
    return groups


def write_run(
    folder: Path,
    *,
    growth: str = "ours",
    lr_adapt: str = "stagewise_norm",
    seed: int = 0,
    stage_epochs: Sequence[int] = STAGE_EPOCHS,
    groups: dict[str, dict[str, Any]] | None = None,
    test_accuracy: float | None = 0.82,
    seconds: float = 600.0,
    cost_percent: float | None = None,
    validation: bool = True,
    finished: bool = True,
    overrides: Sequence[str] = (),
    schedule: dict[str, Any] | None = None,
    **results: Any,
) -> Path:
    """Write a run folder and return it; `results` replaces entries of results.json.

    With growth "none" there is one stage of sum(stage_epochs) epochs at full width.
    """
    random_numbers = random.Random(f"{growth} {lr_adapt} {seed}")
    groups = resnet20_groups() if groups is None else groups
    if growth == "none":
        stage_epochs = (sum(stage_epochs),)
        groups = {name: {**group, "widths": [group["full_width"]]} for name, group in groups.items()}
    shares = [
        sum(group["widths"][stage] for group in groups.values()) / sum(group["full_width"] for group in groups.values())
        for stage in range(len(stage_epochs))
    ]
    num_epochs = sum(stage_epochs)
    stage_of_epoch = [stage for stage, n in enumerate(stage_epochs) for _ in range(n)]
    metrics, step = [], 0
    for epoch, stage in enumerate(stage_of_epoch):
        grew = epoch > 0 and stage_of_epoch[epoch - 1] != stage
        batch_size = 128 + 32 * (len(stage_epochs) - 1 - stage)
        step += math.ceil(NUM_TRAIN / batch_size)
        loss = 2.3 * (epoch + 1.5) ** -0.55 * (1.25 - 0.25 * shares[stage]) + 0.08 * grew
        loss += random_numbers.gauss(0, 0.015)
        accuracy, lr = math.exp(-loss / 2.2), 0.05 * (1 + math.cos(math.pi * epoch / num_epochs))
        row = {"epoch": epoch, "step": step, "stage": stage, "batch_size": batch_size, "lr": lr}
        row |= {"num_params": round(272_000 * shares[stage] ** 2), "train_loss": loss, "train_accuracy": accuracy}
        held_out = (loss + 0.06 + abs(random_numbers.gauss(0, 0.03)), accuracy - 0.02) if validation else ("", "")
        row |= dict(zip(("val_loss", "val_accuracy"), held_out, strict=True))
        row |= {"samples_per_sec": 1500 / shares[stage], "seconds": NUM_TRAIN * shares[stage] / 1500}
        metrics.append(row)
    _write_csv(folder / "metrics.csv", metrics)
    steps = [0] + [row["step"] for row in metrics]
    starts = [sum(stage_epochs[:stage]) for stage in range(len(stage_epochs))]
    events = [
        {
            **{"stage": stage, "epoch": starts[stage], "step": steps[starts[stage]], "method": "VarianceTransfer"},
            "widths_before": {name: group["widths"][stage - 1] for name, group in groups.items()},
            "widths_after": {name: group["widths"][stage] for name, group in groups.items()},
            "num_params_before": round(272_000 * shares[stage - 1] ** 2),
            "num_params": round(272_000 * shares[stage] ** 2),
            "batch_size": metrics[starts[stage]]["batch_size"],
            **{"parity_error_eval": 2.1e-7, "parity_error_train": 3.4e-7, "noise_error_eval": 1.3e-3},
            **{"parity_tolerance_eval": 1e-5, "parity_tolerance_train": 1e-5, "seconds": 0.05},
        }
        for stage in range(1, len(stage_epochs))
    ]
    _write_json(folder / "growth.json", {"events": events, "groups": groups})
    if lr_adapt != "none":
        (folder / "rates.csv").write_text(_rates(tuple(stage_of_epoch), tuple(steps), seed))
    choices = {"growth": growth, "lr_adapt": lr_adapt, **{key: results.get(key) for key in CHOICES}}
    config = OmegaConf.create({"seed": seed, **{key: {"choice": value} for key, value in choices.items()}})
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config), encoding="utf-8")
    if not finished:
        return folder
    if cost_percent is None:
        cost_percent = 100 * sum(n * s**2 for n, s in zip(stage_epochs, shares, strict=True)) / num_epochs
    stages = [
        {
            **{"stage": stage, "epochs": n, "peak_memory_bytes": None, "samples_per_sec": 1500 / shares[stage]},
            **{key: metrics[starts[stage]][key] for key in ("batch_size", "num_params")},
            "flops_per_sample": round(8.1e7 * shares[stage] ** 2),
            "seconds": n * NUM_TRAIN * shares[stage] / 1500,
            "widths": {name: group["widths"][stage] for name, group in groups.items()},
        }
        for stage, n in enumerate(stage_epochs)
    ]
    content = {
        **{"experiment": "resnet20_cifar10", "model": "resnet20", "data": "cifar10", "growth": growth},
        **{"lr_adapt": lr_adapt, "optimizer": "sgd", "seed": seed, "epochs": num_epochs, "precision": "32-true"},
        **{"stages": stages, "train_cost_percent": cost_percent, "test_accuracy": test_accuracy},
        "train_flops": sum(s["epochs"] * s["flops_per_sample"] * NUM_TRAIN for s in stages),
        "test_loss": metrics[-1]["train_loss"] + 0.05,
        **{key: metrics[-1][key] for key in ("train_loss", "train_accuracy")},
        "seconds": seconds,
        "parity_max_error": 3.4e-7 if events else None,
        "versions": {"python": "3.11", "torch": "2.15", "lightning": "2.6.6", "growlab": "0.1.0"},
        "git_commit": None,
        "command": f"python -m growlab experiment=resnet20_cifar10 growth={growth} seed={seed}",
        "overrides": ["experiment=resnet20_cifar10", f"growth={growth}", f"seed={seed}", *overrides],
        "machine": {"name": "a test's invention", "threads": 2},
        "schedule": {"total_epochs": num_epochs, "num_stages": len(stage_epochs), **(schedule or {})},
        **results,
    }
    _write_json(folder / "results.json", content)
    return folder


@cache
def _rates(stage_of_epoch: tuple[int, ...], steps: tuple[int, ...], seed: int) -> str:
    """New regions start near 1.5 to 2.2 and settle; region 0 is the reference, at 1."""
    rows, noise = [], random.Random(f"rates {seed}")
    last = len(PARAMETERS) - 1
    births = [stage_of_epoch.index(region) for region in range(stage_of_epoch[-1] + 1)]
    for step in range(0, steps[-1], STEPS_BETWEEN_RATES):
        epoch = max(i for i, end in enumerate(steps[:-1]) if end <= step)
        for index, name in enumerate(PARAMETERS):
            for region in range(stage_of_epoch[epoch] + 1):
                age = (step - steps[births[region]]) / 400
                new = 0.7 + 0.1 * region + (0.9 - 0.4 * index / last) * math.exp(-age)
                factor = (1.0 if region == 0 else new) * (1 + (region > 0) * noise.gauss(0, 0.01))
                factor /= 16 if index == last else 1
                row = {"step": step, "epoch": epoch, "stage": stage_of_epoch[epoch], "parameter": name}
                row |= {"region": region, "rate_factor": factor, "weight_norm": 3.0 * factor}
                rows.append(row | {"grad_norm": 0.2 * factor / (1 + step / 1000)})
    return pandas.DataFrame(rows).to_csv(index=False)


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_csv(path, index=False)


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
