"""Train runs that need a GPU and have no results in the repository yet, in parallel on all cores.

    tests/gpu/run.sh --steps rows --out FOLDER
    python -m tests.gpu.rows --only table2_short/whole_ --seeds 1 --write FOLDER/rows   # ResNet-20 at 160 epochs

Copy finished runs from FOLDER/rows to `notebooks/results`; the others start again on the next machine. With NVIDIA's
MPS, kernels of several processes run concurrently. Each arm on text uses its best rate by validation with seed 0.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "notebooks/results"
CLOCK = "schedule.learning_rate.progress_unit=cost"
WHOLE = "model=resnet20 data.image_size=null data.shift=4 schedule.total_epochs=160"
SIZES = "method=grown_resolution resolution.sizes"
TWO_BLOCKS = "model=resnet14 model.stem_stride=1"
ONE_LAYER = "method=fixed_size model.num_hidden_layers=1"
LOOPED = "model=gpt model._target_=tests.gpu.looped.Looped model.num_layers=2 " + " ".join(
    f"~model.{name}" for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                  "num_key_value_heads", "config")
)  # fmt: skip
THREE = f"{SIZES}=null schedule.num_stages=3 schedule.initial_fraction=0.3 schedule.epoch_growth_rate=0"
TEXT = "llama_text_inputs"
# Passes of the full Llama over the text, and epochs per pass: thirty epochs in each budget.
BUDGETS = {0.03: 1000, 0.1: 300, 0.3: 100}
# FLOPs per token of the full Llama relative to windows of 32 tokens and to one layer of six; of two shared blocks that
# are applied four times relative to twice.
SHORTER, SHALLOWER, FEWER = 1.0973, 3.3554, 1.7576
# Common settings of a folder's runs.
COMMON = {
    "resnet20_cifar10_inputs": "experiment=papers/frontier_resnet20 optimizer.lr=0.1 trainer.precision=bf16-mixed",
    "testbed_cifar10_depth": "experiment=papers/frontier_testbed schedule.budget=17",
    "table2_short": "experiment=papers/table2_short",
    TEXT: "experiment=papers/frontier_llama_text data.validation_fraction=0.003 data.batch_size=16",
}
# Settings by folder and name, the most important first.
ARMS = {
    "resnet20_cifar10_inputs/blocks2_24": f"schedule.budget=27.3115 {TWO_BLOCKS} method=fixed_size data.image_size=24",
    "resnet20_cifar10_inputs/grown_16_24_32": (
        f"schedule.budget=10 {SIZES}=[16,24,32] schedule.num_stages=3 schedule.initial_fraction=0.3"
    ),
    "resnet20_cifar10_inputs/grown_24_32": f"schedule.budget=10 {SIZES}=[24,32]",
    "resnet20_cifar10_inputs/blocks2_24_32": f"schedule.budget=15.363 {TWO_BLOCKS} {SIZES}=[24,32]",
    "testbed_cifar10_depth/full": "method=fixed_size",
    "testbed_cifar10_depth/smaller": "method=smaller",
    # At 20, 30 and 40 % of the cost: a step of the smaller network costs 0.464 of one of the full network.
    "testbed_cifar10_depth/grown_20": "method=grown_depth schedule.initial_fraction=0.35",
    "testbed_cifar10_depth/grown_30": "method=grown_depth schedule.initial_fraction=0.48",
    "testbed_cifar10_depth/grown_40": "method=grown_depth schedule.initial_fraction=0.59",
    "table2_short/net2net_80": "method=net2net schedule.total_epochs=80",
    "table2_short/pairs_80": "method=growing schedule.total_epochs=80",
    "table2_short/whole_fixed": f"method=fixed_size {WHOLE}",
    "table2_short/whole_flops": f"method=equal_flops {WHOLE}",
    "table2_short/whole_ours": f"method=ours {WHOLE}",
    "table2_short/whole_vt_cost": f"method=growing_vt {WHOLE} {CLOCK}",
    "table2_short/whole_net2net": f"method=net2net {WHOLE}",
}
# Arms on text: settings, and the number of passes that cost as much as one of the full network.
ON_TEXT = {
    "full": ("method=fixed_size", 1.0),
    "smaller": (ONE_LAYER, SHALLOWER),
    "grown_depth": ("method=grown_depth", 1.0),
    "context_32": ("method=fixed_size data.context=32 data.batch_size=64", SHORTER),
    "grown_context": (f"{SIZES}=[32,128] schedule.batch_sizes=[64,16]", 1.0),
    "smaller_grown_context": (f"{SIZES}=[32,128] schedule.batch_sizes=[64,16] model.num_hidden_layers=1", SHALLOWER),
    "batch_4": ("method=fixed_size data.batch_size=4", 1.0),
    "grown_batch": (f"{THREE} schedule.batch_sizes=[4,8,16]", 1.0),
    "repeats_4": (f"method=fixed_size {LOOPED}", 1.0),
    "repeats_2": (f"method=fixed_size {LOOPED} +model.repeats=2", FEWER),
    "grown_repeats": (f"{THREE} {LOOPED} setting.names=repeats setting.values=[2,3,4]", 1.0),
}  # fmt: skip
ARMS |= {
    f"{TEXT}/b{budget}_{name}": f"{given} schedule.budget={budget * passes:.6g} data.epochs_per_pass={epochs}"
    for budget, epochs in BUDGETS.items()
    for name, (given, passes) in ON_TEXT.items()
}
# Common settings of runs that failed with CUDA graphs.
WITHOUT_GRAPHS: set[str] = set()
SMALL = (
    "data.name=digits",
    "data.root=null",
    "data.image_size=null",
    "schedule.budget=null",
    "schedule.total_epochs=10",
)


def command(name: str, seed: int, rate: float | None, folder: Path, device: str, data: Path) -> list[str]:
    """Command line of a run."""
    common, text = COMMON[name.partition("/")[0]], name.startswith(TEXT)
    given = [common, ARMS[name], f"seed={seed} num_threads=1 logger=csv ckpt_path=null"]
    given += [] if rate is None else [f"optimizer.lr={rate:g}"]
    given.append(f"data.path={data / 'doc'}" if text else f"data.root={data / 'cifar10'}")
    given.append("trainer=gpu" if device == "cuda" else "trainer=cpu")
    given += ["callbacks=cuda_graphs"] if device == "cuda" and common not in WITHOUT_GRAPHS else []
    words = [*" ".join(given).split(), f"hydra.run.dir={folder}"]
    if device == "cpu":
        words += ["schedule.budget=0.01", "data.epochs_per_pass=1000"] if text else SMALL
    return [sys.executable, "-m", "growlab", *words]


def searched(name: str, seeds: list[int], *where: Any) -> None:
    """Find the best rate of an arm with seed 0, by factors of 2, and train all seeds with it."""

    def error(rate: float) -> float:
        found = [folder / "results.json" for folder in trained(name, 0, *where, rate=rate)]
        found = [path for path in found if path.is_file()]
        return json.loads(found[0].read_text())["val_bits_per_byte"] if found else math.inf

    errors = {0.004: error(0.004)}
    while True:
        best = min(errors, key=lambda rate: errors[rate])
        neighbours = [rate for rate in (best / 2, best * 2) if rate not in errors]
        if not neighbours or math.isinf(errors[best]):
            break
        errors |= {rate: error(rate) for rate in neighbours}
    for seed in seeds:
        trained(name, seed, *where, rate=best)


def trained(
    name: str, seed: int, out: Path, device: str, data: Path, until: float, rate: float | None = None
) -> list[Path]:
    """Train a run, delete its large files, and return the folders that may contain it."""
    own = f"{name}{'' if rate is None else f'_lr{rate:g}'}_s{seed}"
    folder = out / own
    # Other rates than the best are in a separate folder of the repository.
    kept = KEPT / f"{name}_s{seed}" / "results.json"
    best = rate is None or (kept.is_file() and f"optimizer.lr={rate:g} " in kept.read_text())
    places = [kept.parent if best else KEPT / own.replace("/", "_rates/", 1), folder]
    if time.monotonic() >= until or (device == "cuda" and any((place / "results.json").is_file() for place in places)):
        return places
    words = command(name, seed, rate, folder, device, data)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=until - time.monotonic())
    except subprocess.TimeoutExpired:
        shutil.rmtree(folder, ignore_errors=True)
        return places
    if done.returncode and "callbacks=cuda_graphs" in words:
        print(own, f"without graphs: {done.stderr[-600:]}", flush=True)
        WITHOUT_GRAPHS.add(COMMON[name.partition("/")[0]])
        shutil.rmtree(folder, ignore_errors=True)
        return trained(name, seed, out, device, data, until, rate)
    printed = [line for line in done.stdout.splitlines() if line.startswith("test ")]
    print(own, *(printed or [f"exit code {done.returncode}: {done.stderr[-300:]}"]), flush=True)
    for path in folder.glob("*"):
        if path.name not in ("config.yaml", "growth.json", "metrics.csv", "results.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return places


def main() -> None:
    """Train missing runs until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--write", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", default="", help="prefixes of names, separated by commas")
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args()
    data = Path(os.environ.get("GROWLAB_DATA", ROOT.parent / "shared/data"))
    wanted = [name for name in ARMS if name.startswith(tuple(given.only.split(",")))]
    seeds = [int(seed) for seed in given.seeds.split(",")]
    names = [(name, seed) for name in wanted if not name.startswith(TEXT) for seed in seeds]
    texts = [name for name in wanted if name.startswith(TEXT)]
    if given.device == "cpu":
        # One run of each folder.
        names = list({name.partition("/")[0]: (name, seed) for name, seed in reversed(names)}.values())
        texts = texts[:1]
    elif shutil.which("nvidia-cuda-mps-control"):
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    until = time.monotonic() + given.seconds
    cores = len(os.sched_getaffinity(0))
    where = given.write, given.device, data, until
    with ThreadPoolExecutor(max(1, cores - 1)) as pool:
        begun = [pool.submit(trained, name, seed, *where) for name, seed in names]
        begun += [pool.submit(searched, name, seeds, *where) for name in texts]
    for one in begun:
        one.result()
    print(f"{len(list(given.write.glob('*/*/results.json')))} runs")


if __name__ == "__main__":
    main()
