"""Runs of the first paper's table 2 on one GPU: those that are not kept yet, as many at a time as cores allow.

    tests/gpu/run.sh --steps table2 --out FOLDER
    python -m tests.gpu.table2 --only whole_ --seeds 1 --write FOLDER/table2   # ResNet-20 at 160 epochs, four runs

What ends in time lies in FOLDER/table2, to be copied to `notebooks/results/table2_short`; the others begin again
on the next machine. NVIDIA's MPS, where it is installed, lets the kernels of several processes run at once.
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
KEPT = ROOT / "notebooks/results/table2_short"
WHOLE = "model=resnet20 data.image_size=null data.shift=4 schedule.total_epochs=160"
CLOCK = "schedule.learning_rate.progress_unit=cost"
READING = "_target_=tests.gpu.readings"
METHODS = (("ours", "ours"), ("fixed", "fixed_size"), ("flops", "equal_flops"))
# Name and settings, each of three seeds, in the order of what they decide.
ARMS = {
    "fixed_40": "method=fixed_size",
    "flops_40": "method=equal_flops",
    "ours_40": "method=ours",
    "net2net_40": "method=net2net",
    "pairs_40": "method=growing",
    "ours_cost_40": f"method=ours {CLOCK}",
    "ours_published_40": "method=ours growth.as_published=true",
    "ours_no_ra_40": "method=growing_vt",
    "ours_no_fan_in_40": "method=ours lr_adapt.divide_output_lr_by_fan_in=false",
    "pairs_ra_40": "method=growing_ra",
    "ours_initial_norm_40": f"method=ours optimizer.{READING}.InitialNorm",
    "ours_per_element_40": f"method=ours optimizer.{READING}.PerElement",
    "ours_decay_at_base_rate_40": f"method=ours optimizer.{READING}.DecayAtBaseRate",
    "ours_usual_output_40": f"method=ours growth.{READING}.UsualOutput",
    "ours_usual_output_no_fan_in_40": (
        f"method=ours growth.{READING}.UsualOutput lr_adapt.divide_output_lr_by_fan_in=false"
    ),
    "ours_momentum_40": "method=ours optimizer_state=inherit",
    "ours_quiet_40": "method=ours growth.noise_std=0",
    "ours_noisy_40": "method=ours growth.noise_std=0.1",
    "ours_constraint_40": "method=ours growth.rule=constraint",
    "ours_as_network_40": "method=ours growth.new_weights=as_network",
    "ours_wider_40": "method=ours schedule.widths=[0.25,0.3125,0.36,0.4375,0.5625,0.625,0.75,0.9375,1]",
    "ours_narrower_40": "method=ours schedule.widths=[0.25,0.28,0.312,0.4,0.5,0.56,0.687,0.875,1]",
    "vt_cost_40": f"method=growing_vt {CLOCK}",
    "ours_shortcut_b_40": "method=ours model.shortcut=B",
    "fixed_shortcut_b_40": "method=fixed_size model.shortcut=B",
    "flops_shortcut_b_40": "method=equal_flops model.shortcut=B",
    "ours_bf16_40": "method=ours trainer.precision=bf16-mixed",
    "fixed_bf16_40": "method=fixed_size trainer.precision=bf16-mixed",
    "flops_bf16_40": "method=equal_flops trainer.precision=bf16-mixed",
    **{
        f"{name}_lr{rate}_40": f"method={method} optimizer.lr={rate}"
        for name, method in METHODS
        for rate in (0.05, 0.2)
    },
    "fixed_80": "method=fixed_size schedule.total_epochs=80",
    "flops_80": "method=equal_flops schedule.total_epochs=80",
    "ours_80": "method=ours schedule.total_epochs=80",
    "net2net_80": "method=net2net schedule.total_epochs=80",
    "ours_cost_80": f"method=ours schedule.total_epochs=80 {CLOCK}",
    "fixed_160": "method=fixed_size schedule.total_epochs=160",
    "flops_160": "method=equal_flops schedule.total_epochs=160",
    "ours_160": "method=ours schedule.total_epochs=160",
    "whole_fixed": f"method=fixed_size {WHOLE}",
    "whole_flops": f"method=equal_flops {WHOLE}",
    "whole_ours": f"method=ours {WHOLE}",
    "whole_net2net": f"method=net2net {WHOLE}",
}
SMALL = ("data.name=digits", "data.root=null", "data.image_size=null", "schedule.total_epochs=10", "model.width=8")


def command(name: str, seed: int, folder: Path, device: str, data: str) -> list[str]:
    """The command line of a run."""
    given = [f"experiment=papers/table2_short {ARMS[name]} seed={seed} num_threads=1 logger=csv hydra.run.dir={folder}"]
    given.append(f"data.root={data} trainer=gpu callbacks=cuda_graphs" if device == "cuda" else "trainer=cpu")
    return [sys.executable, "-m", "growlab", *" ".join(given).split(), *(SMALL if device == "cpu" else ())]


def trained(name: str, seed: int, out: Path, device: str, data: str, until: float) -> None:
    """Train one, and keep what says how it went."""
    folder = out / f"{name}_s{seed}"
    if time.monotonic() >= until or ((KEPT / folder.name / "results.json").is_file() and device == "cuda"):
        return
    try:
        done = subprocess.run(
            command(name, seed, folder, device, data), capture_output=True, text=True, timeout=until - time.monotonic()
        )
    except subprocess.TimeoutExpired:
        return shutil.rmtree(folder, ignore_errors=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("test accuracy")]
    print(folder.name, *(told or [f"exit code {done.returncode}: {done.stderr[-300:]}"]), flush=True)
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
        names = names[:1]
    elif shutil.which("nvidia-cuda-mps-control"):
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    until = time.monotonic() + given.seconds
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, cores - 1)) as pool:
        for name, seed in names:
            pool.submit(trained, name, seed, given.write, given.device, data, until)
    print(f"{len(list(given.write.glob('*/results.json')))} runs")


if __name__ == "__main__":
    main()
