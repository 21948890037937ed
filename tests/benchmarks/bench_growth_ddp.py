"""What a growth event costs between two processes: ResNet-18 (11.2 M parameters) on 32 x 32 images, batch 128, gloo.

`make bench` runs it. An event is held against a training step of the stage that it begins.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image

ROOT = Path(__file__).resolve().parents[2]
EPOCHS, NUM_IMAGES, BATCH = 4, 256, 128


def random_images(root: Path) -> None:
    pixels = np.random.default_rng(0)
    for split, number in (("train", NUM_IMAGES), ("test", 20)):
        for image in range(number):
            folder = root / split / f"class{image % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(pixels.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
                folder / f"{image}.png"
            )


def test_parts_of_an_event(tmp_path: Path) -> None:
    random_images(tmp_path / "images")
    command = [
        *(
            sys.executable,
            "-m",
            "growlab",
            "experiment=resnet18_cifar100",
            "trainer=ddp_cpu",
            "num_threads=1",
        ),
        *(f"data.root={tmp_path / 'images'}", "data.download=false", "data.validation=none", "logger=csv"),
        *(f"data.batch_size={BATCH}", "schedule.widths=[0.5,0.7,0.85,1]", "schedule.epochs=[1,1,1,1]"),
        *("schedule.batch_sizes=null", "optimizer_state=inherit", "hydra.run.dir=run"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    events = json.loads((tmp_path / "run" / "growth.json").read_text())["events"]
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert len(events) == EPOCHS - 1
    parts = list(events[0]["seconds_by_part"])
    print(
        "\n"
        + " ".join(f"{name:>12}" for name in ("parameters", *parts, "event", "step", "in steps"))
        + "  (ms)"
    )
    for event, row in zip(events, rows[1:], strict=True):
        step_sec = float(row["seconds"]) / (NUM_IMAGES // BATCH)
        times = [*(event["seconds_by_part"][part] for part in parts), event["seconds"], step_sec]
        cells = [f"{event['num_params']:,}", *(f"{1000 * sec:.0f}" for sec in times)]
        print(" ".join(f"{cell:>12}" for cell in (*cells, f"{event['seconds'] / step_sec:.2f}")))
