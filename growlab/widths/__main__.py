"""`python -m growlab.widths MODEL`: what of a network can grow, what cannot and why, and how exactly.

MODEL is `growlab/NAME`, `torchvision/NAME`, `timm/NAME`, or `package.module:factory` with `--input-shape C,H,W`.
A matrix also takes `torchvision/*` and `timm/*`.
"""

import argparse
import copy
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growlab.analysis.flops import forward_flops
from growlab.errors import UserError
from growlab.files import write_json, write_text
from growlab.growth import GrowthMethod, Net2Net, PairGrowth, VarianceTransfer, grow, make_schedule, plant
from growlab.widths import UnsupportedOperation, WidthGraph, resize, trace

METHODS = {"ours": VarianceTransfer, "pairs": PairGrowth, "net2net": Net2Net}


@dataclass
class Report:
    """What is known of one network.

    Attributes:
        model: as it was named.
        error: why it was refused; nothing else is known then.
        groups: name -> full width.
        fixed: module path -> reason why its channels keep their width.
        growing_share: parameters in tensors that grow, over all parameters.
        seed_params, full_params: number of parameters.
        seed_flops, full_flops: forward FLOPs per sample.
        trace_sec: seconds of tracing.
        event_sec: longest growth event.
        parity: method -> largest relative output error over the stages, eval and train mode.
    """

    model: str
    error: str | None = None
    groups: dict[str, int] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    growing_share: float = 0.0
    seed_params: int = 0
    full_params: int = 0
    seed_flops: int = 0
    full_flops: int = 0
    trace_sec: float = 0.0
    event_sec: float = 0.0
    parity: dict[str, dict[str, float]] = field(default_factory=dict)


def load(
    name: str, input_shape: Sequence[int] | None, num_classes: int = 10
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Make a network and example inputs from its name.

    Raises:
        UserError: there is no such network, or its package is not installed.
    """
    source, slash, model = name.partition("/")
    shape = tuple(input_shape or (3, 224, 224))
    if source == "growlab" and slash:
        networks = importlib.import_module("growlab.networks")
        shape = tuple(input_shape or (3, 32, 32))
        factory = getattr(networks, model, None)
        if factory is None:
            raise UserError(
                f"growlab has no network {model!r}; it has {', '.join(n for n in networks.__all__ if n.islower())}."
            )
        return factory(image_shape=shape, num_classes=num_classes), (torch.randn(2, *shape),)
    if source == "torchvision" and slash:
        models = importlib.import_module("torchvision.models")
        try:
            network = models.get_model(model, weights=None)
        except ValueError as error:
            raise UserError(f"torchvision has no network {model!r}: {error}.") from error
        return network, (torch.randn(2, *shape),)
    if source == "timm" and slash:
        try:
            timm = importlib.import_module("timm")
        except ImportError as error:
            raise UserError("timm is not installed; pip install 'growlab[timm]'.") from error
        try:
            network = timm.create_model(model, pretrained=False)
        except RuntimeError as error:
            raise UserError(f"timm has no network {model!r}: {error}.") from error
        return network, (torch.randn(2, *shape),)
    module, colon, factory_name = name.partition(":")
    if not colon:
        raise UserError(
            f"{name!r} is no network's name; write growlab/NAME, torchvision/NAME, timm/NAME or "
            "package.module:factory."
        )
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), factory_name)()
    except (ImportError, AttributeError) as error:
        raise UserError(f"cannot make {name}: {error}.") from error
    if isinstance(made, nn.Module):
        if input_shape is None:
            raise UserError(
                f"{name} returned a module without inputs; add --input-shape C,H,W, or return (module, inputs)."
            )
        return made, (torch.randn(2, *input_shape),)
    network, inputs = made
    return network, inputs if isinstance(inputs, tuple) else (inputs,)


def examine(
    name: str,
    input_shape: Sequence[int] | None = None,
    stages: int = 3,
    opaque: Sequence[str] = (),
    check: bool = True,
) -> Report:
    """Trace a network, grow it with every method on random data, and measure parity in float64."""
    torch.manual_seed(0)
    network, inputs = load(name, input_shape)
    began = time.perf_counter()
    try:
        graph = trace(network, inputs, opaque=opaque)
    except UnsupportedOperation as error:
        return Report(name, error=str(error))
    report = Report(name, trace_sec=time.perf_counter() - began)
    report.groups = graph.full_widths
    report.fixed = dict(graph.fixed)
    tensors = dict(network.named_parameters())
    report.full_params = sum(p.numel() for p in tensors.values())
    report.growing_share = sum(p.numel() for n, p in tensors.items() if graph.grows(n)) / report.full_params
    sample = tuple(x[:1] if isinstance(x, Tensor) else x for x in inputs)
    schedule = make_schedule(stages, 1, num_stages=stages, width_growth_rate=None)
    widths = schedule.widths(graph)
    seed = copy.deepcopy(network)
    resize(seed, graph, graph.full_widths, widths[0])
    report.seed_params = sum(p.numel() for p in seed.parameters())
    report.full_flops, report.seed_flops = forward_flops(network, *sample), forward_flops(seed, *sample)
    if not check:
        return report
    double = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    for method_name, method in METHODS.items():
        report.parity[method_name] = _parity(report, network, graph, method(), widths, double)
    return report


def _parity(
    report: Report,
    network: nn.Module,
    graph: WidthGraph,
    method: GrowthMethod,
    widths: list[dict[str, int]],
    inputs: tuple[Any, ...],
) -> dict[str, float]:
    grown = copy.deepcopy(network).double()
    state = plant(grown, graph, method, widths[0], seed=0)
    worst = {"eval": 0.0, "train": 0.0}
    for stage in widths[1:]:
        event = grow(grown, graph, method, state, stage, seed=0, probe=inputs)
        worst["eval"] = max(worst["eval"], event.parity_error_eval)
        worst["train"] = max(worst["train"], event.parity_error_train or 0.0)
        report.event_sec = max(report.event_sec, event.seconds)
    fresh = copy.deepcopy(network).double()
    fresh.load_state_dict(grown.state_dict(), strict=True)
    return worst


def describe(report: Report) -> str:
    """The report as text for a person."""
    if report.error is not None:
        return f"{report.model}: refused\n  {report.error}"
    lines = [
        f"{report.model}: {len(report.groups)} width groups, traced in {report.trace_sec:.1f} s",
        f"  {report.growing_share:.0%} of {report.full_params:,} parameters grow; the seed has {report.seed_params:,}",
        f"  forward FLOPs per sample: seed {report.seed_flops:,}, full {report.full_flops:,}",
    ]
    lines += [f"  grows   {name}: {width}" for name, width in report.groups.items()]
    lines += [f"  stays   {name}: {reason}" for name, reason in report.fixed.items()]
    lines += [
        f"  parity  {method}: {errors['eval']:.1e} in eval mode, {errors['train']:.1e} in train mode"
        for method, errors in report.parity.items()
    ]
    return "\n".join(lines)


def expand(names: Sequence[str]) -> list[str]:
    """Replace `torchvision/*` by its classification networks and `timm/*` by the smallest of each of its families.

    Of timm only networks that take 3x224x224 images count.
    """
    expanded: list[str] = []
    for name in names:
        if name == "torchvision/*":
            models = importlib.import_module("torchvision.models")
            expanded += [f"torchvision/{model}" for model in models.list_models(module=models)]
        elif name == "timm/*":
            expanded += [f"timm/{model}" for model in _smallest_of_families()]
        else:
            expanded.append(name)
    return expanded


def _smallest_of_families() -> list[str]:
    timm = importlib.import_module("timm")
    chosen = []
    for family in timm.list_modules():
        sizes = {}
        for model in timm.list_models(module=family):
            settings = timm.get_pretrained_cfg(model)
            if settings is None or tuple(settings.input_size or ()) != (3, 224, 224):
                continue
            with torch.device("meta"):
                try:
                    sizes[model] = sum(p.numel() for p in timm.create_model(model).parameters())
                except (RuntimeError, NotImplementedError, ValueError, TypeError):
                    continue  # it needs numbers to be built: another of its family will do
        if sizes:
            chosen.append(min(sizes, key=sizes.__getitem__))
    return chosen


def matrix(
    names: Sequence[str], time_limit_sec: float, jobs: int, input_shape: Sequence[int] | None = None
) -> list[Report]:
    """Examine many networks, each in a process of its own with a time limit."""

    def one(name: str) -> Report:
        command = [sys.executable, "-m", "growlab.widths", name, "--json"]
        if input_shape is not None:
            command += ["--input-shape", ",".join(map(str, input_shape))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=time_limit_sec)
        except subprocess.TimeoutExpired:
            return Report(name, error=f"took longer than {time_limit_sec:.0f} s")
        try:
            return Report(**json.loads(done.stdout))
        except (json.JSONDecodeError, TypeError):
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return Report(name, error=last)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, names))


def matrix_table(reports: Sequence[Report]) -> str:
    """The matrix as a Markdown table."""
    lines = [
        "| network | groups | parameters that grow | trace (s) | event (s) | parity ours | parity net2net | refused |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for report in reports:
        if report.error is not None:
            lines.append(f"| {report.model} | | | | | | | {report.error.replace('|', '/')} |")
            continue
        ours, net2net = (f"{report.parity[m]['eval']:.0e}" for m in ("ours", "net2net"))
        lines.append(
            f"| {report.model} | {len(report.groups)} | {report.growing_share:.0%} | {report.trace_sec:.1f} | "
            f"{report.event_sec:.2f} | {ours} | {net2net} | |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m growlab.widths", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--input-shape", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument(
        "--keep-full", nargs="*", default=[], metavar="OP", help="operations growth need not pass"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--matrix", type=Path, metavar="FILE", help="write a table of all models to FILE.md, FILE.json"
    )
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SEC", help="for each model of a matrix"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of a matrix")
    args = parser.parse_args(arguments)
    try:
        if args.matrix is not None:
            reports = matrix(expand(args.models), args.time_limit, args.jobs, args.input_shape)
            write_text(args.matrix.with_suffix(".md"), matrix_table(reports))
            write_json(args.matrix.with_suffix(".json"), [asdict(report) for report in reports])
            print(matrix_table(reports))
            return 0
        reports = [examine(name, args.input_shape, opaque=args.keep_full) for name in args.models]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for report in reports:
        print(json.dumps(asdict(report)) if args.json else describe(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
