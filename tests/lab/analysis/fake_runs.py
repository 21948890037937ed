"""Fake run folders for tests of the analysis, written in milliseconds.

The curves resemble those of a small network on CIFAR-10; never report them as results.
"""

import json
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pandas
from omegaconf import OmegaConf

from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.tables import Row, summarise

NUM_TRAIN, RATE_STEPS = 50_000, 200
STAGE_EPOCHS = (1, 1, 1, 1, 1, 1, 2, 2, 6)
STAGE_WIDTHS = {16: (4, 4, 6, 6, 8, 10, 12, 14, 16), 32: (8, 10, 12, 14, 16, 20, 24, 28, 32)}
STAGE_WIDTHS[64] = (16, 20, 24, 28, 34, 40, 48, 58, 64)
PARAMETERS = ("conv1.weight", "layer1.0.conv1.weight", "fc.weight")
CHOICES = ("model", "data", "optimizer")
FIXED = {"growth": "none", "lr_adapt": "none"}


def rows_of(folder: Path) -> list[Row]:
    """Summarise all runs below a folder, without warnings."""
    return summarise(load_runs(folder), lambda sentence: None)


def changed(folder: Path, **values: Any) -> None:
    """Replace entries of a run's `results.json`; `...` removes an entry."""
    path = folder / "results.json"
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def resnet20_groups() -> dict[str, dict[str, Any]]:
    """Width groups of ResNet-20: residual streams and the inner channels of each block."""
    return {
        f"layer{layer}.{name}": {"full_width": full_width, "widths": widths}
        for layer, (full_width, widths) in enumerate(STAGE_WIDTHS.items(), start=1)
        for name in ("stream", "0.conv1", "1.conv1", "2.conv1")
    }


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
    groups = resnet20_groups() if groups is None else groups
    if growth == "none":
        stage_epochs = (sum(stage_epochs),)
        groups = {name: {**group, "widths": [group["full_width"]]} for name, group in groups.items()}
    num_epochs, num_stages = sum(stage_epochs), len(stage_epochs)
    full = sum(group["full_width"] for group in groups.values())
    shares = [sum(group["widths"][stage] for group in groups.values()) / full for stage in range(num_stages)]
    starts = [0, *accumulate(stage_epochs)]
    of_stages = [
        {
            **{"stage": stage, "batch_size": 128 + 32 * (num_stages - 1 - stage)},
            **{"num_params": round(272_000 * share**2), "samples_per_sec": 1500 / share},
        }
        for stage, share in enumerate(shares)
    ]
    metrics, steps = [], [0]
    for epoch, stage in enumerate(stage for stage, n in enumerate(stage_epochs) for _ in range(n)):
        steps.append(steps[-1] + math.ceil(NUM_TRAIN / of_stages[stage]["batch_size"]))
        loss = 2.3 * (epoch + 1.5) ** -0.55 + 0.01 * seed
        held_out = {"val_loss": loss + 0.08, "val_accuracy": math.exp(-loss / 2.2) - 0.02}
        row = {"epoch": epoch, "step": steps[-1], "lr": 0.05 * (1 + math.cos(math.pi * epoch / num_epochs))}
        row |= {"train_loss": loss, "train_accuracy": math.exp(-loss / 2.2)}
        row |= held_out if validation else dict.fromkeys(held_out, "")
        metrics.append({**row, **of_stages[stage], "seconds": NUM_TRAIN * shares[stage] / 1500})
    _write_csv(folder / "metrics.csv", metrics)
    widths = [{name: group["widths"][stage] for name, group in groups.items()} for stage in range(num_stages)]
    events = [
        {
            **{"stage": stage, "epoch": starts[stage], "step": steps[starts[stage]], "method": "VarianceTransfer"},
            **{"widths_before": widths[stage - 1], "widths_after": widths[stage], "seconds": 0.05},
            **{"num_params_before": of_stages[stage - 1]["num_params"], "num_params": of_stages[stage]["num_params"]},
            **{"batch_size": of_stages[stage]["batch_size"], "noise_error_eval": 1.3e-3},
            **{"parity_error_eval": 2.1e-7, "parity_error_train": 3.4e-7},
            **{"parity_tolerance_eval": 1e-5, "parity_tolerance_train": 1e-5},
        }
        for stage in range(1, num_stages)
    ]
    _write_json(folder / "growth.json", {"events": events, "groups": groups})
    if lr_adapt != "none":
        _write_csv(folder / "rates.csv", _rates(metrics, [steps[start] for start in starts[:-1]]))
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
            **{**one, "epochs": n, "peak_memory_bytes": None, "widths": widths[one["stage"]]},
            **{"flops_per_sample": round(8.1e7 * share**2), "seconds": n * NUM_TRAIN * share / 1500},
        }
        for one, n, share in zip(of_stages, stage_epochs, shares, strict=True)
    ]
    content = {
        **{"experiment": "resnet20_cifar10", "model": "resnet20", "data": "cifar10", "growth": growth},
        **{"lr_adapt": lr_adapt, "optimizer": "sgd", "seed": seed, "epochs": num_epochs, "precision": "32-true"},
        **{"stages": stages, "train_cost_percent": cost_percent, "test_accuracy": test_accuracy},
        "train_flops": sum(s["epochs"] * s["flops_per_sample"] * NUM_TRAIN for s in stages),
        "test_loss": metrics[-1]["train_loss"] + 0.05,
        **{key: metrics[-1][key] for key in ("train_loss", "train_accuracy")},
        **{"seconds": seconds, "parity_max_error": 3.4e-7 if events else None, "git_commit": None},
        "versions": {"python": "3.11", "torch": "2.15", "lightning": "2.6.6", "growlab": "0.1.0"},
        "command": f"python -m growlab experiment=resnet20_cifar10 growth={growth} seed={seed}",
        "overrides": ["experiment=resnet20_cifar10", f"growth={growth}", f"seed={seed}", *overrides],
        "machine": {"name": "fake machine", "threads": 2},
        "schedule": {"total_epochs": num_epochs, "num_stages": num_stages, **(schedule or {})},
        **results,
    }
    _write_json(folder / "results.json", content)
    return folder


def _rates(metrics: list[dict[str, Any]], births: list[int]) -> list[dict[str, Any]]:
    """Rows of rates.csv: rates of new regions decay towards that of region 0, which is 1."""
    rows = []
    for step in range(0, metrics[-1]["step"], RATE_STEPS):
        at = next(row for row in metrics if step < row["step"])
        for name in PARAMETERS:
            for region in range(at["stage"] + 1):
                factor = 1 + 0.1 * region + 0.9 * (region > 0) * math.exp(-(step - births[region]) / 400)
                row = {"step": step, "epoch": at["epoch"], "stage": at["stage"], "parameter": name, "region": region}
                rows.append(row | {"rate_factor": factor, "weight_norm": 3.0 * factor, "grad_norm": 0.2 * factor})
    return rows


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_csv(path, index=False)


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
