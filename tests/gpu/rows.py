"""Runs that a GPU makes affordable and whose rows are not kept yet, as many at a time as cores allow.

    tests/gpu/run.sh --steps rows --out FOLDER
    python -m tests.gpu.rows --only table2_short/whole_ --seeds 1 --write FOLDER/rows   # ResNet-20 at 160 epochs

What ends in time lies in FOLDER/rows, by the folder in `notebooks/results` that it is to be copied to; the others begin
again on the next machine. NVIDIA's MPS, where it is installed, lets the kernels of several processes run at once.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "notebooks/results"
CLOCK = "schedule.learning_rate.progress_unit=cost"
WHOLE = "model=resnet20 data.image_size=null data.shift=4 schedule.total_epochs=160"
SIZES = "method=grown_resolution resolution.sizes"
TWO_BLOCKS = "model=resnet14 model.stem_stride=1"
# What all runs of a folder have in common.
COMMON = {
    "resnet20_cifar10_inputs": "experiment=papers/frontier_resnet20 optimizer.lr=0.1 trainer.precision=bf16-mixed",
    "testbed_cifar10_depth": "experiment=papers/frontier_testbed schedule.budget=17",
    "table2_short": "experiment=papers/table2_short",
}
# Settings by folder and name, each of several seeds, in the order of what they decide. Kept rows have their command.
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
SMALL = (
    "data.name=digits",
    "data.root=null",
    "data.image_size=null",
    "schedule.budget=null",
    "schedule.total_epochs=10",
)


def command(name: str, seed: int, folder: Path, device: str, data: str) -> list[str]:
    """The command line of a run."""
    given = [COMMON[name.partition("/")[0]], ARMS[name], f"seed={seed} num_threads=1 logger=csv ckpt_path=null"]
    given.append(f"data.root={data} trainer=gpu callbacks=cuda_graphs" if device == "cuda" else "trainer=cpu")
    words = [*" ".join(given).split(), f"hydra.run.dir={folder}"]
    return [sys.executable, "-m", "growlab", *words, *(SMALL if device == "cpu" else ())]


def trained(name: str, seed: int, out: Path, device: str, data: str, until: float) -> None:
    """Train one, and keep what says how it went."""
    folder = out / f"{name}_s{seed}"
    if time.monotonic() >= until or ((KEPT / f"{name}_s{seed}/results.json").is_file() and device == "cuda"):
        return
    try:
        done = subprocess.run(
            command(name, seed, folder, device, data), capture_output=True, text=True, timeout=until - time.monotonic()
        )
    except subprocess.TimeoutExpired:
        return shutil.rmtree(folder, ignore_errors=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("test accuracy")]
    print(f"{name}_s{seed}", *(told or [f"exit code {done.returncode}: {done.stderr[-300:]}"]), flush=True)
    for path in folder.iterdir():
        if path.name not in ("config.yaml", "growth.json", "metrics.csv", "results.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    """Train all that are missing until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--write", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", default="", help="names begin with this")
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args()
    data = str(Path(os.environ.get("GROWLAB_DATA", ROOT.parent / "shared/data")) / "cifar10")
    wanted = [name for name in ARMS if name.startswith(given.only)]
    names = [(name, int(seed)) for name in wanted for seed in given.seeds.split(",")]
    if given.device == "cpu":
        # One of each folder.
        names = list({name.partition("/")[0]: (name, seed) for name, seed in reversed(names)}.values())
    elif shutil.which("nvidia-cuda-mps-control"):
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    until = time.monotonic() + given.seconds
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, cores - 1)) as pool:
        for name, seed in names:
            pool.submit(trained, name, seed, given.write, given.device, data, until)
    print(f"{len(list(given.write.glob('*/*/results.json')))} runs")


if __name__ == "__main__":
    main()
