"""Steps of `tests/gpu/run.sh`: processes with time limits, whose results are written as soon as they end."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from growlab.base.files import write_json

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "tests/gpu/test_engine.py"
# Files with GPU tests: collecting all tests needs more packages.
OTHERS = (
    "tests/gpu/test_cuda_graphs.py",
    "tests/unit/optim/test_gpu.py",
    "tests/lab/data/test_image_data.py",
    "tests/lab/data/test_streaming.py",
    "tests/lab/training/test_batch_fit.py",
    "tests/lab/training/test_batch_sizes.py",
    "tests/runs/test_process_sweeps.py",
)
# Without comparisons to a CPU, which are trivial on a CPU.
FEW = "ours or gradmax or averages or compiled or checkpoints or recurrent"


@dataclass
class Step:
    """A command and its time limit in seconds."""

    name: str
    command: tuple[str, ...]
    limit: int


def steps(device: str, small: bool, out: Path) -> list[Step]:
    """All steps, the most important first; 480 seconds in total without "rows"."""
    size = ("--small",) * small
    pytest = ("pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")
    pytest = (*pytest, "--continue-on-collection-errors")
    few = ("-k", FEW) if small else ()
    # Without a device these tests are only collected.
    others = ("--collect-only",) if device == "cpu" else ()
    where = ("--device", device, *size, "--write")
    measures = "event,optimizer" if small else "event,callback,optimizer,loop,trace"
    measured = ("-k", measures, "--repeats", "1" if small else "2", *where, str(out / "ratios.json"))
    return [
        Step("engine", (*pytest, *few, ENGINE, f"--junitxml={out / 'engine.xml'}"), 100),
        Step("ratios", ("tests.benchmarks", *measured), 110),
        Step("training", ("tests.gpu.training", *where, str(out / "training.json")), 100),
        Step("sharded", ("tests.gpu.sharded", "--device", device, "--write", str(out / "sharded.json")), 30),
        Step("rows", ("tests.gpu.rows", "--device", device, "--write", str(out / "rows")), 560),
        Step("tests", (*pytest, *others, *OTHERS, f"--junitxml={out / 'tests.xml'}"), 140),
    ]


def run(step: Step, out: Path) -> dict[str, object]:
    """Run a step in a process group, kill the group, and return exit code, seconds and last lines."""
    began, log = time.perf_counter(), out / f"{step.name}.log"
    with log.open("w") as output:
        command, streams = [sys.executable, "-m", *step.command], {"stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, **streams, start_new_session=True)
        try:
            code: int | str = process.wait(timeout=step.limit)
        except subprocess.TimeoutExpired:
            code = f"ended after {step.limit} s"
            # pytest prints its results when interrupted.
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    return {"code": code, "seconds": round(time.perf_counter() - began, 1), "last_lines": lines[-15:]}


def main() -> None:
    """Run the steps and write a summary."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="tiny networks and few seconds")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--steps", help="names of steps, separated by commas")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("tests/gpu/run.sh: torch sees no CUDA device; --device cpu --small tries the script without one.")
    card = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    place = "notebooks/results/gpu" if given.device == "cuda" else "build/gpu"
    out = (given.out or ROOT / place / re.sub(r"\W+", "-", card).strip("-")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["GROWLAB_TEST_DEVICE"] = given.device
    done: dict[str, object] = {}
    summary = {"device": card, "torch": torch.__version__, "cuda": torch.version.cuda, "steps": done}
    summary |= {"python": sys.version.split()[0], "small": given.small}
    for step in steps(given.device, given.small, out):
        # CPUs are slower.
        step.limit *= 3 if given.device == "cpu" else 1
        # By default without "rows", which takes the whole time of a borrowed machine.
        if step.name not in given.steps.split(",") if given.steps else step.name == "rows" and not given.small:
            continue
        done[step.name] = found = run(step, out)
        write_json(out / "summary.json", summary)
        print(f"{step.name}: {'good' if found['code'] == 0 else found['code']}, {found['seconds']} s", flush=True)
        print(*(f"    {line}" for line in found["last_lines"]), sep="\n", flush=True)
    sys.exit(any(found["code"] != 0 for found in done.values()))


if __name__ == "__main__":
    main()
