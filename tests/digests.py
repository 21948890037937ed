"""`make digests`: hashes of small runs that together use every feature, for changes that must not alter numbers.

Write them before such a change and compare after it. They depend on the machine and the library versions, so they are
not committed.

    python -m tests.digests FILE             # run every case and write FILE
    python -m tests.digests FILE --compare   # run again; exit code 1 where a digest differs

Each case has digests of the final weights, the last checkpoint's optimizer state and learning rate, the metrics and
rates of every epoch, and the growth events; measured times and memory are left out.
"""

import argparse
import hashlib
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.command_line import CommandLine
from tests.experiments import EXPERIMENTS, two_steps, write_fake_images
from tests.runs.test_language import DROPOUT
from tests.runs.test_process_growth import CASES as BY_DATA
from tests.runs.test_process_growth import RUN
from tests.runs.test_resume import ACCUMULATED, ADAM, BY_STEPS, CHUNKS, FIREFLY, HYPERFAN, ISOTROPIC, ON_DEMAND, RESNET
from tests.whole_runs import BASE, MLP, MLP3, SMALL, Left

# Depth and width grow in one run.
DEEPENED = (*SMALL, "model.width=4", "depth.blocks=auto", "ema.decay=0.9", "optimizer_state=inherit")
# Classes that arrive with the stages, with OSGD.
INCREMENTAL = (*MLP, "data=digits_incremental", "osgd.anneal=stage", "ema.decay=0.9", "data.validation=test")
_STAGES = ("schedule.epochs=[1,1,1]", "schedule.widths=[0.25,0.5,1]")
_DEMAND = ("schedule.total_epochs=6", "schedule.num_stages=3", "schedule.initial_width=0.5")
_TWO = ("trainer=ddp_cpu", "trainer.devices=2")
_NETWORK = ("data.limit_train=64", "data.limit_test=20", "data.batch_size=32", *_STAGES)
CASES: dict[str, tuple[str, ...]] = {
    "mlp": MLP,
    "resnet_batches": RESNET,
    "adam_zero_new": ADAM,
    "accumulated_bf16": ACCUMULATED,
    "firefly_average": FIREFLY,
    "isotropic": ISOTROPIC,
    "isotropic_by_steps": BY_STEPS,
    "on_demand": ON_DEMAND,
    "deepened_average": DEEPENED,
    "classes_osgd": INCREMENTAL,
    "hyperfan": HYPERFAN,
    "hyperfan_chunks": CHUNKS,
    "gpt_average": DROPOUT,
    "fixed_size": (*SMALL, "model.width=4", "growth=none", "lr_adapt=none"),
    "equal_flops": (*SMALL, "model.width=4", "method=equal_flops"),
    "net2net": (*SMALL, "model.width=4", "method=net2net"),
    "random_lars": (*MLP, "growth=random", "lr_adapt=none", "optimizer=lars"),
    "muon": (*SMALL, "model.width=4", "optimizer=muon"),
    "stagewise_adam": (*MLP, "growth=pairs", "optimizer=adam", "lr_adapt=stagewise_adam"),
    "stagewise_avagrad": (*MLP, "growth=pairs", "optimizer=avagrad", "lr_adapt=stagewise_avagrad"),
    "max_one_constraint": (*SMALL, "model.width=4", "growth.rule=constraint", "lr_adapt=max_one"),
    "budget": (*BASE, *MLP3, *_DEMAND, "schedule=budget", "schedule.grow_when.percent=80"),
    "plateau": (*BASE, *MLP3, *_DEMAND, "schedule=plateau", "schedule.grow_when.patience=1"),
    "mobilenet": (*_NETWORK, "model=mobilenetv1", "model.width=8"),
    "layer_statistics": (*MLP, "log_layers_every_n_steps=3"),
    "task_change": ("experiment=papers/isotropic_task_change", "schedule.total_epochs=6", "data.limit_train=96"),
    "compiled": (*MLP, "compile=true"),
    **{f"looks_{name}": (*RUN, *BY_DATA[name]) for name in ("gradmax", "tiny_expressivity", "splitting")},
    **{f"two_ranks_{name}": (*arguments, *_TWO) for name, arguments in (("mlp", MLP), ("resnet", RESNET))},
    "two_ranks_isotropic": (*ISOTROPIC, *_TWO),
    "two_ranks_classes": (*INCREMENTAL, *_TWO),
}
# Cases that are killed at this step and resumed; their digests equal those without the kill.
RESUMED = {"mlp": 11, "isotropic": 9, "classes_osgd": 11, "deepened_average": 14, "gpt_average": 8}


def digest(content: Any) -> str:
    """Short hash of nested containers of tensors and numbers, by value and dtype."""
    found = hashlib.sha256()
    _feed(found, content)
    return found.hexdigest()[:16]


def _feed(found: Any, content: Any) -> None:
    if isinstance(content, torch.Tensor):
        found.update(f"{content.dtype}{tuple(content.shape)}".encode())
        found.update(content.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(content, dict):
        for key in sorted(content, key=str):
            found.update(str(key).encode())
            _feed(found, content[key])
    elif isinstance(content, list | tuple):
        for value in content:
            _feed(found, value)
    else:
        found.update(repr(content).encode())


def digests(folder: Path) -> dict[str, str]:
    """Digests of a finished run's files."""
    left = Left.by(folder)
    return {
        "weights": digest(left.weights),
        "optimizer": digest([left.checkpoint["optimizer_states"], left.checkpoint["lr_schedulers"]]),
        "metrics": digest(left.metrics),
        "rates": digest(left.rates),
        "events": digest(left.growth["events"]),
    }


def all_cases(images: Path) -> dict[str, tuple[str, ...]]:
    """All cases, and all experiment files on a folder of fake images."""
    # With all eight layers of `mlp8`; tests use three.
    cases = {name: tuple(a for a in arguments if a != MLP3[1]) for name, arguments in CASES.items()}
    return {**cases, **{name: two_steps(name, images) for name in EXPERIMENTS}}


def run_all(cases: dict[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
    """Digests of every case, or the last line of its error."""
    cli, found = CommandLine(), {}
    for name, arguments in cases.items():
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root)
            command = (*arguments, "hydra.run.dir=run")
            if name in RESUMED:
                outcome = cli(
                    *command, cwd=folder, limit_sec=600.0, fault=("at_step", RESUMED[name], int(signal.SIGKILL))
                )
                command = (*command, "ckpt_path=last")
            outcome = cli(*command, cwd=folder, limit_sec=600.0)
            good = outcome.code == 0
            found[name] = (
                digests(folder / "run")
                if good
                else {"error": f"{outcome.code}: " + outcome.err.strip().split("\n")[-1]}
            )
            print(name, *found[name].values(), file=sys.stderr, flush=True)
    cli.close()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--only", nargs="*", help="names of cases")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as images:
        cases = all_cases(write_fake_images(Path(images)))
        found = run_all({name: cases[name] for name in arguments.only or cases})
    if not arguments.compare:
        arguments.file.write_text(json.dumps(found, indent=1))
        return
    known = json.loads(arguments.file.read_text())
    other = {
        name: [kind for kind, value in one.items() if known[name].get(kind) != value]
        for name, one in found.items()
        if known[name] != one
    }
    for name, kinds in other.items():
        print(f"{name}: other {', '.join(kinds)}")
    print(f"{len(found) - len(other)} of {len(found)} runs have the same digests")
    sys.exit(bool(other))


if __name__ == "__main__":
    main()
