"""Trace a network, grow it on random data, and measure the parity of its outputs; a table of such reports."""

import importlib.metadata
import json
import multiprocessing
import platform
import re
import resource
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_map_only

from growlab import growth
from growlab.base.errors import UserError, first_line
from growlab.base.files import write_json, write_text
from growlab.grower.cost import forward_flops
from growlab.growth.outputs import observe
from growlab.growth.parity import relative_error
from growlab.inspect.hub import load
from growlab.parts import available
from growlab.widths import FAILURES, Lightened, UnsupportedOperation, WidthGraph, resize, tensors_in, trace
from growlab.widths.groups import layer_name
from growlab.widths.inputs import call_with, named_in, values_of
from growlab.widths.meta import copied

METHODS: Mapping[str, type[growth.GrowthMethod]] = {
    "ours": growth.VarianceTransfer,
    "pairs": growth.PairGrowth,
    "net2net": growth.Net2Net,
    "hypercloning": growth.HyperCloning,
    "lemon": growth.Lemon,
    "random": growth.RandomGrowth,
}
#: Default methods.
USUAL = ("ours", "pairs", "net2net", "random")
# Image sizes to try for measuring parity, before the network's own: the result depends on the weights, and float64
# convolutions over full images would take most of the time.
_SMALL_SIDES = (96, 128)
#: Fraction of the parameters that must be in growing tensors for a network to count as growing.
ENOUGH = 0.5
#: Fraction from which a network counts as growing nearly completely.
NEARLY_ALL = 0.9
#: Relative change of the outputs in float64 up to which growth counts as exact.
EXACT = 1e-10
# Wall time limit as a multiple of the CPU time limit: a process that has not used its CPU time by then hangs.
_WALL_PER_CPU = 30
_PRELOAD = ["growlab.inspect.examine", "torchvision.models", "timm", "transformers"]
# Standard deviation, relative to fan-in scaling, below which a weight counts as nearly zero.
_QUIET = 0.3
# Relative difference in float32 up to which a row computed alone counts as equal.
_SAME = 1e-2


@dataclass
class Report:
    """Result of examining one network.

    Attributes:
        error: reason why it was refused, or error; None if it grows to full width.
        steps: group -> number of channels that its first layer gains per unit of width: those of a head, or one for
            every group of a grouped convolution. Missing if it is 1.
        fixed: module path -> reason why its channels keep their width.
        last: modules of the last affine layers, such as the classifier -> True if the scale of their output may change.
        tied: modules of embeddings whose tables are output layers too; rules for last layers do not apply to them.
        seed_flops: forward FLOPs of the seed per sample, or of the whole example if its rows are not samples.
        samples: number of samples in the example; 1 if its rows are not samples.
        event_sec: CPU seconds of the longest growth event, including its checks in float64.
        probe: shapes of the inputs that parity was measured on.
        parts: name of a part -> lines that it reports about the network.
        parity: method -> largest relative output error over the stages in eval and train mode, and the error of the
            library's full-width network after loading the grown state_dict ("loaded").
    """

    model: str
    error: str | None = None
    groups: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    last: dict[str, bool] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)
    growing_share: float = 0.0
    seed_params: int = 0
    full_params: int = 0
    seed_flops: int = 0
    full_flops: int = 0
    samples: int = 1
    trace_sec: float = 0.0
    event_sec: float = 0.0
    probe: list[list[int]] = field(default_factory=list)
    parts: dict[str, list[str]] = field(default_factory=dict)
    parity: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def grows(self) -> bool:
        """True if most of the network grows, exactly, and its state_dict loads into the library's network."""
        exact = all(
            errors["loaded"] <= EXACT and (errors["eval"] <= EXACT or not METHODS[method].preserves)
            for method, errors in self.parity.items()
        )
        return self.error is None and self.growing_share >= ENOUGH and bool(self.parity) and exact


def examine(
    name: str,
    input_shape: Sequence[int] | None = None,
    stages: int = 3,
    keep_full: Sequence[str] = (),
    methods: Sequence[str] = USUAL,
    parts: bool = True,
) -> Report:
    """Trace a network, grow it with every method on random data, and measure parity in float64.

    The report's `error` is set if the network was refused or a method failed.
    """
    torch.manual_seed(0)
    network, inputs = load(name, input_shape)
    began = time.process_time()
    try:
        graph = trace(network, inputs, keep_full=keep_full)
    except UnsupportedOperation as error:
        return Report(name, error=str(error))
    report = Report(name, trace_sec=time.process_time() - began)
    report.groups = graph.full_widths
    report.steps = {name: step for name in graph.groups if (step := graph.channels_per_unit(name)) > 1}
    report.fixed = dict(graph.fixed)
    report.last = graph.last_layers
    report.tied = [layer_name(weight) for weight in graph.tied_outputs]
    if parts:
        examined = {part.name: part.examine(network, inputs) for part in available() if hasattr(part, "examine")}
        report.parts = {name: lines for name, lines in examined.items() if lines}
    tensors = dict(network.named_parameters())
    report.full_params = sum(p.numel() for p in tensors.values())
    growing = sum(p.numel() for n, p in tensors.items() if graph.grows(n))
    report.growing_share = growing / max(1, report.full_params)
    widths = growth.make_schedule(stages, 1, num_stages=stages, width_growth_rate=None).widths(graph)
    report.samples, sample = _one_sample(network, inputs)
    _count(report, network, graph, widths[0], inputs)
    if not graph.groups:
        return report
    # One sample is enough if there are no batch statistics, in which samples interact.
    inputs = sample if all(norm.per_sample for norm in graph.norms) else inputs
    double = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)
    probe = _probe(network, graph, widths[0], double)
    report.probe = [list(x.shape) for x in values_of(probe) if isinstance(x, Tensor)]
    network = network.double()
    for method in methods:
        try:
            report.parity[method] = _parity(report, network, graph, METHODS[method](), widths, probe)
        except (growth.ParityError, RuntimeError, ValueError) as error:
            report.error = f"{method}: {type(error).__name__}: {first_line(error)}"
            break
    return report


def _one_sample(network: nn.Module, inputs: tuple[Any, ...]) -> tuple[int, tuple[Any, ...]]:
    """Return the number of samples and the inputs of the first one; 1 and all inputs if rows are not samples.

    An input has a row for each sample if it has as many rows as the output, unlike the edges [2, E] of a graph.
    """
    network.eval()
    try:
        with torch.no_grad():
            whole = tensors_in(call_with(network, inputs))
            rows = len(whole[0])
            first = tree_map_only(Tensor, lambda x: x[:1] if x.dim() and len(x) == rows else x, inputs)
            alone = tensors_in(call_with(network, first))
    except FAILURES:
        return 1, inputs
    shapes = [(1, *x.shape[1:]) for x in whole if x.dim()]
    same = rows > 1 and [tuple(x.shape) for x in alone] == shapes
    same = same and all(relative_error(x[:1], row) < _SAME for row, x in zip(alone, whole, strict=True))
    return (rows, first) if same else (1, inputs)


def _count(
    report: Report, network: nn.Module, graph: WidthGraph, seed_widths: Mapping[str, int], inputs: tuple[Any, ...]
) -> None:
    with Lightened(network, inputs) as light:
        report.full_flops = forward_flops(network, light.inputs) // report.samples
        resize(network, graph, graph.full_widths, seed_widths)
        report.seed_params = sum(p.numel() for p in network.parameters())
        report.seed_flops = forward_flops(network, light.inputs) // report.samples


def _probe(
    network: nn.Module, graph: WidthGraph, seed_widths: Mapping[str, int], inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the inputs, or smaller images if the network runs on them at full and at seed width."""
    image = next(iter(inputs), None)
    if len(inputs) > 1 or named_in(inputs) or not isinstance(image, Tensor) or image.dim() != 4:
        return inputs
    # Run for real: the meta device does not check all kernels against the size of the image.
    narrow = copied(network.double())
    resize(narrow, graph, graph.full_widths, seed_widths)
    with Lightened(network, (image,)):
        for side in _SMALL_SIDES:
            small = image[..., :side, :side]
            if small.shape[-1] < image.shape[-1] and _runs(network, small) and _runs(narrow, small):
                return (small,)
    return inputs


def _runs(network: nn.Module, image: Tensor) -> bool:
    try:
        device = next(network.parameters()).device
        with torch.no_grad():
            for training in (True, False):
                network.train(training)(image.to(device))
    except FAILURES:
        return False
    return True


def _parity(
    report: Report,
    network: nn.Module,
    graph: WidthGraph,
    method: growth.GrowthMethod,
    widths: list[dict[str, int]],
    probe: tuple[Any, ...],
) -> dict[str, float]:
    grown = copied(network)
    state = growth.make_seed(grown, graph, method, widths[0], seed=0)
    _roughen(grown, probe)
    worst = {"eval": 0.0, "train": 0.0}
    for stage in widths[1:]:
        began = time.process_time()
        event = growth.grow(grown, graph, method, state, stage, seed=0, probe=probe)
        report.event_sec = max(report.event_sec, time.process_time() - began)
        worst["eval"] = max(worst["eval"], event.parity_error_eval)
        worst["train"] = max(worst["train"], event.parity_error_train)
        growth.anneal_norms(grown, graph, state, 1.0)
    growth.finish(grown, graph, method, state)
    expected = observe(grown, probe).eval
    network.load_state_dict(grown.state_dict(), strict=True)
    return {**worst, "loaded": relative_error(expected, observe(network, probe).eval)}


def _roughen(network: nn.Module, probe: tuple[Any, ...]) -> None:
    """Imitate training: perturb parameters and statistics that start at 0 or 1 (biases, norms, layer scales).

    Weights that start so small that their layer would hardly affect the output are drawn at full scale. Running
    statistics of batch normalisation become the probe's: with others, activations would grow from layer to layer, and a
    hundred layers would turn rounding into errors of 1e-9.
    """
    source = torch.Generator().manual_seed(1)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=source, dtype=torch.float64).to(tensor)

    with torch.no_grad():
        # Some parameters are empty, such as a table of no register tokens.
        for parameter in filter(torch.numel, network.parameters()):
            if max(parameter.shape, default=1) == parameter.numel():
                parameter.add_(0.1 * noise(parameter))
            elif float(parameter.std()) < _QUIET * (usual := parameter[0].numel() ** -0.5):
                parameter.copy_(usual * noise(parameter))
        for name, buffer in network.named_buffers():
            if name.endswith("running_var"):
                buffer *= (0.3 * noise(buffer)).exp()
            elif name.endswith("running_mean"):
                buffer += 0.1 * noise(buffer)
        _take_statistics(network, probe)


def _take_statistics(network: nn.Module, probe: tuple[Any, ...]) -> None:
    norms = [m for m in network.modules() if isinstance(m, (_BatchNorm, _InstanceNorm))]
    momenta = [norm.momentum for norm in norms]
    # Only normalisations are in train mode: with layers dropped at random, statistics would be those of others.
    network.eval()
    for norm in norms:
        norm.train().momentum = 1.0
    call_with(network, probe)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def matrix(
    names: Sequence[str],
    file: Path,
    methods: Sequence[str],
    input_shape: Sequence[int] | None = None,
    time_limit_sec: float = 60.0,
    memory_limit_gb: float | None = None,
    jobs: int = 1,
) -> list[Report]:
    """Examine networks, write FILE.json and FILE.md after each network, and resume from these files.

    Each network has its own process, with limits of `time_limit_sec` seconds of CPU time, not counting imports, and
    `memory_limit_gb` of private memory; None: no limit.
    """
    done = {report.model: report for report in _read(file.with_suffix(".json"))}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    lock = Lock()

    def run(name: str) -> None:
        limits = (time_limit_sec, memory_limit_gb)
        report = _examine_in_process(context, limits, name, input_shape, methods)
        if report.error is not None:
            # Remove this machine's path of installed packages.
            report.error = re.sub(r'"[^"]*/site-packages/', '"', report.error)
        with lock:
            done[name] = report
            reports = [done[known] for known in dict.fromkeys([*names, *done]) if known in done]
            _write(file, reports, time_limit_sec)
            print(_row(report), flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, [name for name in names if name not in done]))
    return [done[name] for name in names]


def _examine_in_process(context: Any, limits: tuple[float, float | None], name: str, *settings: Any) -> Report:
    """Examine a network in a process with limits of CPU seconds and GB."""
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, *limits, name, *settings))
    process.start()
    sending.close()
    report, wall = None, _WALL_PER_CPU * limits[0]
    try:
        if receiving.poll(wall):
            report = receiving.recv()
        else:
            process.kill()
            report = Report(name, error=f"hung: not done after {wall:.0f} s")
    except EOFError:
        pass  # the process ended without a report: its exit code says why
    process.join()
    if report is not None:
        return report
    if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Report(name, error=f"took longer than {limits[0]:.0f} s of CPU time")
    return Report(name, error=f"its process ended with exit code {process.exitcode}")


def _child(
    sending: Connection,
    time_limit_sec: float,
    memory_limit_gb: float | None,
    name: str,
    input_shape: Sequence[int] | None,
    methods: Sequence[str],
) -> None:
    limit = int(time_limit_sec)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_gb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory_limit_gb * 2**30),) * 2)
    torch.set_num_threads(1)
    try:
        report = examine(name, input_shape, methods=methods, parts=False)
    except Exception as error:  # any error of a library goes into the network's row
        report = Report(name, error=f"{type(error).__name__}: {first_line(error)}")
    sending.send(report)


def _read(path: Path) -> list[Report]:
    if not path.exists():
        return []
    try:
        return [Report(**row) for row in json.loads(path.read_text())["networks"]]
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise UserError(f"{path} contains no matrix to resume from; move it away or name another file.") from error


def _write(file: Path, reports: Sequence[Report], time_limit_sec: float) -> None:
    versions = {"python": platform.python_version()}
    for package in ("growlab", "torch", "torchvision", "timm", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    content = {
        "command": shlex.join(["python", "-m", "growlab", "widths", *sys.argv[1:]]),
        "time_limit_sec": time_limit_sec,
        "versions": versions,
        "networks": [asdict(report) for report in reports],
    }
    write_json(file.with_suffix(".json"), content)
    write_text(file.with_suffix(".md"), matrix_table(reports))


def matrix_table(reports: Sequence[Report]) -> str:
    """Format the matrix as Markdown: counts per library, then one row per network."""
    lines = [
        f"A network counts when at least {ENOUGH:.0%} of its parameters are in tensors that grow, the relative change "
        f"of its output in eval mode is at most {EXACT:.0e} (float64) at every event, and the full-width state_dict "
        "loads strictly into the network as its library builds it, with the same outputs.",
        "",
        f"| library | networks | count | at {NEARLY_ALL:.0%} of their parameters or more |",
        "|---|--:|--:|--:|",
    ]
    for library in dict.fromkeys(report.model.partition("/")[0] for report in reports):
        rows = [report for report in reports if report.model.partition("/")[0] == library]
        counted = sum(report.grows for report in rows)
        most = sum(report.grows and report.growing_share >= NEARLY_ALL for report in rows)
        shares = [f"{number} ({number / len(rows):.1%})" for number in (counted, most)]
        lines.append(f"| {library} | {len(rows)} | {' | '.join(shares)} |")
    methods = list(dict.fromkeys(method for report in reports for method in report.parity)) or ["ours"]
    lines += [
        "",
        "| network | counts | parameters | grow | groups | trace (s) | event (s) | probe | "
        + " | ".join(f"{method}: eval, train, loaded" for method in methods)
        + " | refused, or why less than all grows |",
        "|---|---|--:|--:|--:|--:|--:|---|" + "---|" * len(methods) + "---|",
    ]
    return "\n".join([*lines, *(_row(report, methods) for report in reports)]) + "\n"


def _row(report: Report, methods: Sequence[str] | None = None) -> str:
    cells = [report.model, "yes" if report.grows else "no"]
    if report.full_params:
        cells += [f"{report.full_params:,}", f"{report.growing_share:.0%}", str(len(report.groups))]
        cells += [f"{report.trace_sec:.1f}", f"{report.event_sec:.1f}"]
        cells.append(", ".join("x".join(map(str, shape)) for shape in report.probe))
    else:
        cells += [""] * 6
    for method in report.parity if methods is None else methods:
        errors = report.parity.get(method)
        cells.append("" if errors is None else ", ".join(f"{error:.0e}" for error in errors.values()))
    cells.append(report.error or _reasons(report))
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def _reasons(report: Report) -> str:
    """List the most frequent reasons why layers stay at full width, except that of the output layer."""
    counts = Counter(why.partition(": ")[0] for why in report.fixed.values())
    del counts["the network's output"]
    return "; ".join(f"{reason} ({n})" for reason, n in counts.most_common(3))
