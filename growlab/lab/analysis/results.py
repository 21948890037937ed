"""Run folders as objects that read their files lazily, and the metric that runs are compared by."""

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from growlab.base.errors import UserError
from growlab.base.files import FAILURE
from growlab.lab.analysis.identity import choice_of, row_overrides, row_settings

if TYPE_CHECKING:
    import numpy
    import pandas

# Folders without runs, which can be large.
_PRUNED = {"checkpoints", "figures", "wandb", "tensorboard", "__pycache__", "node_modules"}
# Names for combinations of overrides.
_TOGETHER = {
    ("depth.blocks=auto", "growth.depth_multiple=0"): "fewer blocks",
    ("depth.blocks=auto", "schedule.initial_width=0.5"): "grown in depth and from 1/2 of the width",
    ("depth.blocks=auto", "schedule.initial_width=1"): "grown in depth",
}
# Required entries of `results.json`; older runs may lack others.
_OF_RESULTS = ("model", "data", "growth", "lr_adapt", "seed", "epochs", "train_cost_percent", "test_loss", "seconds")
Report = Callable[[str], None]


@dataclass(frozen=True, order=True)
class Metric:
    """Number in `results.json` that runs of a task are compared by.

    Attributes:
        key: its name there without the split's prefix: "bleu" for "test_bleu".
        scale: factor for tables and figures.
        digits: format specification of the scaled number.
    """

    key: str
    name: str
    scale: float = 1.0
    unit: str = ""
    higher_is_better: bool = True
    digits: str = ".2f"

    @property
    def label(self) -> str:
        """Name and unit for the header of a column."""
        return f"{self.name} {self.unit}".strip()

    @property
    def axis(self) -> str:
        """Name and unit of the test value for an axis."""
        return f"test {self.name}" + (f" ({self.unit})" if self.unit else "")

    @property
    def difference(self) -> str:
        """Unit in which differences are printed."""
        return f"{self.name} in percentage points" if self.unit == "%" else self.name

    def quality(self, value: float | None) -> float:
        """Return a number that is larger for better values; None is the worst."""
        if value is None:
            return float("-inf")
        return value if self.higher_is_better else -value

    def text(self, value: float) -> str:
        """Format a value for tables, without its unit."""
        return format(self.scale * value, self.digits)


ACCURACY = Metric("accuracy", "accuracy", 100.0, "%")
BLEU = Metric("bleu", "BLEU")
BITS = Metric("bits_per_character", "bits per character", higher_is_better=False)


def metric_of(results: Iterable[Mapping[str, Any]]) -> Metric:
    """Return the metric that all of these `results.json` share; accuracy if there is no common one.

    Examples:
        >>> metric_of([{"test_accuracy": 0.6, "test_bleu": 31.8}]).label, metric_of([{"test_accuracy": 0.9}]).label
        ('BLEU', 'accuracy %')
    """
    results = list(results)
    for metric in (BLEU, BITS):
        if results and all(row.get(f"test_{metric.key}") is not None for row in results):
            return metric
    metrics = [row.get("metric") or {"name": "accuracy", "higher_is_better": True} for row in results]
    named = {(str(metric["name"]), bool(metric["higher_is_better"])) for metric in metrics}
    if len(named) == 1 and (ACCURACY.key, True) not in named:
        ((key, higher_is_better),) = named
        return Metric(key, key.replace("_", " "), higher_is_better=higher_is_better, digits=".4g")
    return ACCURACY


@dataclass(frozen=True, order=True)
class Group:
    """Row of a table: the fields shared by runs that differ only in their seed."""

    experiment: str
    model: str
    data: str
    growth: str
    lr_adapt: str
    optimizer: str
    epochs: float
    precision: str
    overrides: tuple[str, ...] = ()

    @property
    def is_fixed_size(self) -> bool:
        """True if the network keeps one width from start to end."""
        return self.growth == "none"

    @property
    def task(self) -> tuple[str, str]:
        """Network and data, within which rows are compared."""
        return self.model, self.data

    @property
    def plain_method(self) -> str:
        """Growth method and rate adaptation."""
        name = "fixed-size" if self.is_fixed_size else self.growth
        return name if self.lr_adapt == "none" else f"{name} + {self.lr_adapt}"

    @property
    def method(self) -> str:
        """Short name: growth method, rate adaptation and the overrides that distinguish the group."""
        return self.name_without(())

    def name_without(self, shared: Collection[str]) -> str:
        """Return `method` without the overrides `shared` by all compared groups."""
        return ", ".join([self.plain_method, *in_words(self.overrides, shared)])


@dataclass(frozen=True)
class Run:
    """Run folder, whose files other than `results.json` are read on first access.

    Attributes:
        path: the run folder.
        results: content of `results.json`; empty for an unfinished run.
    """

    path: Path
    results: dict[str, Any] = field(repr=False)

    @cached_property
    def group(self) -> Group:
        """Row of a table that this run belongs to."""
        r = self.results
        overrides = [str(override) for override in r.get("overrides") or ()]
        experiment, optimizer, precision = (str(r.get(key) or "") for key in ("experiment", "optimizer", "precision"))
        model, data = (choice_of(key, r[key], overrides) for key in ("model", "data"))
        kept = row_overrides(overrides, optimizer)
        return Group(experiment, model, data, r["growth"], r["lr_adapt"], optimizer, r["epochs"], precision, kept)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of `config.yaml`, the composed configuration; empty without the file."""
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        path = self.path / "config.yaml"
        with _reading(path):
            return dict(yaml.load(path.read_text(encoding="utf-8"), loader)) if path.exists() else {}

    @cached_property
    def settings(self) -> dict[str, str] | None:
        """Composed settings that determine the numbers of its row; None if no configuration was saved."""
        if "settings" in self.results or not (self.path / "config.yaml").exists():
            return self.results.get("settings")
        with _reading(self.path / "config.yaml"):
            return row_settings(self.config, **{key: str(self.results[key]) for key in ("data", "optimizer", "growth")})

    @property
    def reference_epochs(self) -> float:
        """Epochs of the fixed-size training that `train_cost_percent` is relative to.

        More than the run's own for a fixed-size run that is cut to the cost of a grown one.
        """
        return self.results.get("reference_epochs") or self.results["epochs"]

    @property
    def reference_passes(self) -> float:
        """The same in passes over the training data; they differ from epochs with `schedule.budget`."""
        return self.budget or self.reference_epochs

    @property
    def pass_flops(self) -> float | None:
        """FLOPs of one pass of the fixed-size training over the data; None if the cost is unknown."""
        cost, flops = self.results["train_cost_percent"], self.results.get("train_flops")
        return 100 * flops / (cost * self.reference_passes) if cost and flops else None

    @property
    def budget(self) -> float | None:
        """`schedule.budget`: the run's cost in passes over the training data at full width; None without it."""
        return (self.results.get("schedule") or {}).get("budget")

    @property
    def machine(self) -> dict[str, Any]:
        """Machine that its seconds were measured on: device name, threads, numbers of processes and nodes."""
        devices = {name: self.results.get(name) or 1 for name in ("world_size", "num_nodes")}
        return {**(self.results.get("machine") or {}), **devices}

    @property
    def keeps_full_width(self) -> bool:
        """True if each epoch cost as much as an epoch of the fixed-size network at full width."""
        cost = self.results["train_cost_percent"]
        share = None if cost is None else cost * self.reference_epochs / (100 * self.results["epochs"])
        return self.group.is_fixed_size and share is not None and math.isclose(share, 1, rel_tol=1e-3)

    @cached_property
    def metrics(self) -> "pandas.DataFrame":
        """`metrics.csv`: one row per epoch with the values at its end; `epoch` counts from 0."""
        # Of an epoch that was trained again, the last values count.
        return self._table("metrics.csv", "epoch", "step", "stage").drop_duplicates(
            "epoch", keep="last", ignore_index=True
        )

    def curve(self, column: str) -> "numpy.ndarray | None":
        """Return a column of `metrics` as floats, one per epoch (nan if missing); None if it has no number."""
        import numpy
        import pandas

        if column not in self.metrics.columns:
            return None
        values = pandas.to_numeric(self.metrics[column], errors="coerce").to_numpy(dtype=float)
        return values if numpy.isfinite(values).any() else None

    def held_out(self, quantity: str) -> "numpy.ndarray | None":
        """Return the curve of a quantity on the validation set, else on the monitored test set, else None."""
        validation = self.curve(f"val_{quantity}")
        return self.curve(f"test_{quantity}") if validation is None else validation

    @cached_property
    def rates(self) -> "pandas.DataFrame | None":
        """`rates.csv`: rate factor, weight and gradient norm of every region over steps; None without the file."""
        if not (self.path / "rates.csv").exists():
            return None
        return self._table("rates.csv", "step", "epoch", "parameter", "region", "rate_factor")

    @cached_property
    def layers(self) -> "pandas.DataFrame":
        """`layers.csv`: statistics of layers over steps."""
        if not (self.path / "layers.csv").is_file():
            raise UserError(f"{self.path} has no layers.csv; train with log_layers_every_n_steps=N.")
        return self._table("layers.csv", "step", "layer", "quantity", "mean", "std", "low", "high", "counts")

    @cached_property
    def growth(self) -> dict[str, Any]:
        """`growth.json`: `events` and `groups`; both empty if the file is missing."""
        path = self.path / "growth.json"
        with _reading(path):
            content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            groups = {name: dict(group) for name, group in (content.get("groups") or {}).items()}
            return {"events": list(map(dict, content.get("events", ()))), "groups": groups}

    @property
    def groups(self) -> dict[str, Any]:
        """Width groups of `growth.json`."""
        if not self.growth["groups"]:
            raise UserError(f"{self.path} has no width groups in growth.json, so no widths to draw.")
        return self.growth["groups"]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Growth events in chronological order."""
        return self.growth["events"]

    @property
    def growth_epochs(self) -> list[float]:
        """Number of completed epochs at each growth event."""
        return [float(event["epoch"]) for event in self.events]

    @property
    def width_path(self) -> list[int]:
        """Channels of all groups in each epoch."""
        groups = self.groups.values()
        return [sum(group["widths"][stage] for group in groups) for stage in self.metrics["stage"]]

    @property
    def class_schedule(self) -> dict[int, list[int]]:
        """Classes from each epoch on (`data.class_schedule`); empty if all are there from the start."""
        return (self.config.get("data") or {}).get("class_schedule") or {}

    def _table(self, name: str, *columns: str) -> "pandas.DataFrame":
        import pandas

        with _reading(self.path / name):
            table = pandas.read_csv(self.path / name)
            table[list(columns)].iloc[[0]]
            return table


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into a UserError that names it."""
    try:
        yield
    except (OSError, yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot read {path}: {reason}; restore it or leave out this run.") from error


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Open one run folder, finished or not (without a usable `results.json`, `results` is empty)."""
    path = Path(folder)
    if not (path / "metrics.csv").exists() and not (path / "results.json").exists():
        raise UserError(f"{path} is not a run folder: neither results.json nor metrics.csv is in it.")
    try:
        return Run(path, _read_results(path / "results.json"))
    except (OSError, ValueError):
        return Run(path, {})


def load_runs(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], report: Report | None = None
) -> list[Run]:
    """Find all finished runs in the given folders and below, without duplicates, sorted by path.

    Args:
        paths: run folders or any folders above them.
        report: called with one sentence for each `results.json` that is damaged or not a run's, and for each reason
            for which jobs of sweeps failed; a warning by default.
    """
    report = report or (lambda message: warnings.warn(message, stacklevel=3))
    folders = [Path(p) for p in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    runs: dict[Path, Run] = {}
    failed: dict[str, list[Path]] = {}
    num_skipped = num_unfinished = 0
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; name run folders or a folder above them.")
        for place, below, files in os.walk(folder):
            below[:] = sorted(name for name in below if name not in _PRUNED and not name.startswith("."))
            path = Path(place)
            if "results.json" not in files:
                num_unfinished += "metrics.csv" in files
                if FAILURE in files:
                    failed.setdefault(_reason(path / FAILURE), []).append(path)
            elif path.resolve() not in runs:
                try:
                    runs[path.resolve()] = Run(path, _read_results(path / "results.json"))
                except (OSError, ValueError) as error:
                    num_skipped += 1
                    report(f"skipped {path / 'results.json'}: {error}")
    for reason, places in failed.items():
        more = "" if len(places) == 1 else f" and {len(places) - 1} more"
        report(f"{places[0]}{more} failed: {reason}")
    if not runs:
        where = " or ".join(str(folder) for folder in folders)
        detail = f" ({num_unfinished} unfinished)" if num_unfinished else ""
        detail += f" ({num_skipped} unreadable)" if num_skipped else ""
        raise UserError(f"no finished run under {where}{detail}: a run folder contains results.json.")
    return sorted(runs.values(), key=lambda run: run.path)


def in_words(overrides: Sequence[str], shared: Collection[str] = ()) -> list[str]:
    """Replace known combinations of overrides by their names; drop those `shared` by all compared groups."""
    rest, words = list(overrides), list[str]()
    for together, name in _TOGETHER.items():
        if set(together) <= set(rest):
            words.append(name)
            rest = [override for override in rest if override not in together]
    return [*words, *(override for override in rest if override not in shared)]


def _reason(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path.name} does not say why."


def _read_results(path: Path) -> dict[str, Any]:
    """Read a `results.json`; raise ValueError, with half a sentence, if it is damaged or not a run's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError("it is damaged or not JSON.") from error
    missing = [key for key in _OF_RESULTS if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"it is not the result of a growlab run ({missing[0]} is missing).")
    return content
