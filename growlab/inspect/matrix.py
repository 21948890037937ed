"""Examine many networks, each in a process with a CPU time limit, and write the results as a table."""

import importlib.metadata
import json
import multiprocessing
import platform
import re
import resource
import shlex
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from growlab.base.errors import UserError
from growlab.base.files import write_json, write_text
from growlab.inspect.examine import ENOUGH, EXACT, NEARLY_ALL, Report, examine

# Wall time limit as a multiple of the CPU limit: a process that has not used up its CPU time by then hangs.
_WALL_PER_CPU = 30
_PRELOAD = ["growlab.inspect.examine", "torchvision.models", "timm", "transformers"]


def matrix(
    names: Sequence[str],
    file: Path,
    methods: Sequence[str],
    input_shape: Sequence[int] | None = None,
    time_limit_sec: float = 60.0,
    memory_limit_gb: float | None = None,
    jobs: int = 1,
) -> list[Report]:
    """Examine many networks and write FILE.json and FILE.md after each one; resume from such a file.

    Args:
        names: networks; those that are in FILE.json already are not examined again.
        file: path of the two files without suffix.
        methods: growth methods that parity is measured for.
        input_shape: shape of one sample; by default that of each library.
        time_limit_sec: CPU seconds of one network (building, tracing, growing; not importing libraries).
        memory_limit_gb: private memory of one network's process; None: no limit.
        jobs: processes at a time.

    Returns:
        The reports in the order of the names.

    Raises:
        UserError: FILE.json exists and is not a matrix.
    """
    done = {report.model: report for report in _read(file.with_suffix(".json"))}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    lock = Lock()

    def one(name: str) -> None:
        report = _examine_apart(context, name, input_shape, methods, time_limit_sec, memory_limit_gb)
        if report.error is not None:
            # Leave out this machine's path of installed packages.
            report.error = re.sub(r'"[^"]*/site-packages/', '"', report.error)
        with lock:
            done[name] = report
            reports = [done[known] for known in dict.fromkeys([*names, *done]) if known in done]
            _write(file, reports, time_limit_sec)
            print(_row(report), flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, [name for name in names if name not in done]))
    return [done[name] for name in names]


def _examine_apart(
    context: Any,
    name: str,
    input_shape: Sequence[int] | None,
    methods: Sequence[str],
    time_limit_sec: float,
    memory_limit_gb: float | None,
) -> Report:
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(sending, name, input_shape, methods, time_limit_sec, memory_limit_gb)
    )
    process.start()
    sending.close()
    report = None
    try:
        if receiving.poll(_WALL_PER_CPU * time_limit_sec):
            report = receiving.recv()
        else:
            process.kill()
            report = Report(name, error=f"hung: not done after {_WALL_PER_CPU * time_limit_sec:.0f} s")
    except EOFError:
        pass  # the process ended without a report: its exit code says why
    process.join()
    if report is not None:
        return report
    if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Report(name, error=f"took longer than {time_limit_sec:.0f} s of CPU time")
    return Report(name, error=f"its process ended with exit code {process.exitcode}")


def _child(
    sending: Connection,
    name: str,
    input_shape: Sequence[int] | None,
    methods: Sequence[str],
    time_limit_sec: float,
    memory_limit_gb: float | None,
) -> None:
    limit = int(time_limit_sec)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_gb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory_limit_gb * 2**30),) * 2)
    torch.set_num_threads(1)
    try:
        report = examine(name, input_shape, methods=methods, parts=False)
    except Exception as error:  # whatever a library raises is this network's row, not the matrix's end
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        report = Report(name, error=f"{type(error).__name__}: {first_line}")
    sending.send(report)


def _read(path: Path) -> list[Report]:
    if not path.exists():
        return []
    try:
        return [Report(**row) for row in json.loads(path.read_text())["networks"]]
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} holds no matrix to go on with; move it away or name another file."
        ) from error


def _write(file: Path, reports: Sequence[Report], time_limit_sec: float) -> None:
    versions = {"python": platform.python_version()}
    for package in ("growlab", "torch", "torchvision", "timm", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    content = {
        "command": shlex.join(["python", "-m", "growlab.widths", *sys.argv[1:]]),
        "time_limit_sec": time_limit_sec,
        "versions": versions,
        "networks": [asdict(report) for report in reports],
    }
    write_json(file.with_suffix(".json"), content)
    write_text(file.with_suffix(".md"), matrix_table(reports))


def matrix_table(reports: Sequence[Report]) -> str:
    """Format the matrix as Markdown: counts per library, then one row per network."""
    lines = [
        f"A network counts when at least {ENOUGH:.0%} of its parameters lie in tensors that grow, the relative change "
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
    """Summarise why layers stay at full width by the most frequent reasons, except that they are the output."""
    counts: dict[str, int] = {}
    for reason in (told.partition(": ")[0] for told in report.fixed.values()):
        if reason != "the network's output":
            counts[reason] = counts.get(reason, 0) + 1
    return "; ".join(f"{reason} ({n})" for reason, n in sorted(counts.items(), key=lambda item: -item[1])[:3])
