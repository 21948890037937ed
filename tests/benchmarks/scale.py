"""Exponents of cost over size: slopes of log seconds over log size."""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import log
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
from torch import nn

from growlab import Grower
from growlab.base.files import write_json
from growlab.inspect import matrix
from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.tables import summarise, table
from growlab.widths import trace
from tests.benchmarks.ratios import Ratio, Setting, in_turns, llama, timed, tokens
from tests.command_line import ROOT, new_process

LIMIT, TARGET = 1.0, 1.1
RUN = ROOT / "notebooks" / "results" / "digits"


def scales(setting: Setting) -> Iterator[Ratio]:
    """Traces, events, checkpoints, resuming, `growlab widths`, tables and sweeps."""
    yield from _traces(setting)
    yield from _events(setting)
    yield from _widths(setting)
    yield from _tables(setting)
    yield from _sweeps(setting)


def _ratio(what: str, of: str, sizes: Sequence[int], seconds: Sequence[float]) -> Ratio:
    # Of the three largest sizes, where constant costs matter least.
    slope = linear_regression([*map(log, sizes[-3:])], [*map(log, seconds[-3:])]).slope
    on = f"{_number(sizes[0])} to {_number(sizes[-1])} {of}"
    return Ratio(f"exponent of {what}", on, slope, LIMIT, TARGET, seconds[-1])


def _number(size: int) -> str:
    for unit, name in ((10**6, " M"), (10**3, " k")):
        if size >= unit:
            return f"{size / unit:.0f}{name}"
    return str(size)


def _on_meta(layers: int, width: int) -> nn.Module:
    with torch.device("meta"):
        return llama(layers, width, 100)


def _traces(setting: Setting) -> Iterator[Ratio]:
    x = tokens(16, 100, 2)().to("meta")
    for of, sizes, make in (
        ("layers", (1, 2, 4) if setting.small else (2, 4, 8, 16, 32, 64, 96), lambda size: _on_meta(size, 64)),
        ("channels", (64, 128) if setting.small else (64, 256, 1024, 4096), lambda size: _on_meta(2, size)),
    ):
        seconds = [in_turns(setting, partial(trace, make(size), x), repeats=1)[0] for size in sizes]
        yield _ratio("a trace", of, sizes, seconds)


def _events(setting: Setting) -> Iterator[Ratio]:
    x = tokens(16, 100, 2)().to(setting.device)
    sizes, event, saving, loading = list[int](), list[float](), list[float](), list[float]()
    for width in (64, 128) if setting.small else (256, 512, 1024, 2048, 4096):
        network = llama(2, width, 100).to(setting.device)
        graph = trace(network, x)
        grower = Grower(network, x, graph=graph, trigger={0: 0.5, 1: 1.0}, verbose=False)
        event.append(timed(setting.device, partial(grower.step, epoch=1)))
        sizes.append(sum(p.numel() for p in network.parameters()))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "checkpoint.pt"
            state = {"network": network.state_dict(), "grower": grower.state_dict()}
            saving.append(timed(setting.device, partial(torch.save, state, file)))
            del state, network, grower
            network = llama(2, width, 100).to(setting.device)
            grower = Grower(network, x, graph=graph, trigger={0: 0.5, 1: 1.0}, verbose=False)

            def load(network: nn.Module = network, grower: Grower = grower, file: Path = file) -> None:
                saved = torch.load(file, mmap=True)
                grower.load_state_dict(saved["grower"])
                network.load_state_dict(saved["network"])

            loading.append(timed(setting.device, load))
    for what, seconds in (("an event", event), ("a checkpoint", saving), ("resuming", loading)):
        yield _ratio(what, "parameters", sizes, seconds)


def network() -> nn.Module:
    """Return a network of a matrix."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def __getattr__(name: str) -> Callable[[], nn.Module]:
    # `network0`, `network1` and so on.
    if name.startswith("network"):
        return network
    raise AttributeError(name)


def _widths(setting: Setting) -> Iterator[Ratio]:
    """Time of the parent process only: the cost per network is constant."""
    sizes, seconds = (2, 4) if setting.small else (8, 16, 32), []
    for size in sizes:
        names = [f"{__name__}:network{number}" for number in range(size)]
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            with contextlib.redirect_stdout(None):
                matrix(names, Path(folder) / "matrix", ["pairs"], [4])
            seconds.append(time.process_time() - began)
    yield _ratio("growlab widths --matrix", "networks", sizes, seconds)


def _tables(setting: Setting) -> Iterator[Ratio]:
    kept = [json.loads((RUN / name / "results.json").read_text()) for name in ("ours_s0", "fixed_s0")]
    sizes, seconds = (20, 40) if setting.small else (100, 1000, 10000), []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(size):
                width = f"model.width={number // 10}"
                results = {**kept[number % 2], "seed": number // 2 % 5}
                results["overrides"] = [*results["overrides"], width]
                path = Path(folder) / str(number)
                path.mkdir()
                (path / "results.json").write_text(json.dumps(results))

            def made(folder: str = folder) -> str:
                return table(summarise(load_runs(folder))).shown()

            seconds.append(min(timed("cpu", made) for _ in range(2)))
    yield _ratio("growlab table", "runs", sizes, seconds)


def job(run_dir: Path, seed: int, **_: Any) -> None:
    """Job of a sweep that does nothing."""
    write_json(run_dir / "job.json", {"seed": seed})


def _sweeps(setting: Setting) -> Iterator[Ratio]:
    sizes, seconds = (2, 4) if setting.small else (8, 32, 128), []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", "growlab", "-m", f"seed=range({size})", f"hydra.sweep.dir={folder}/sweep"]
            command += [f"+experiment_function._target_={__name__}.job"]
            began = os.times()
            done = new_process(*command, cwd=Path(folder), limit_sec=3600.0)
            assert done.code == 0, done.err
            now = os.times()
            seconds.append(sum(now[2:4]) - sum(began[2:4]))
    yield _ratio("a sweep, but for its jobs", "jobs", sizes, seconds)
