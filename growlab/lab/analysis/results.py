"""Run folders as objects: files of a finished run, read when asked for, and the metric that runs are compared by."""

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

# Folders that have no runs in them and can be large.
_PRUNED = {"checkpoints", "figures", "wandb", "tensorboard", "__pycache__", "node_modules"}
# Names of several overrides together.
_TOGETHER = {
    ("depth.blocks=auto", "growth.depth_multiple=0"): "fewer blocks",
    ("depth.blocks=auto", "schedule.initial_width=0.5"): "grown in depth and from 1/2 of the width",
    ("depth.blocks=auto", "schedule.initial_width=1"): "grown in depth",
}
# Entries of `results.json` that are read of every run; older ones lack others.
_OF_RESULTS = ("model", "data", "growth", "lr_adapt", "seed", "epochs", "train_cost_percent", "test_loss", "seconds")
Report = Callable[[str], None]


@dataclass(frozen=True, order=True)
class Metric:
    """A number of `results.json` by which runs of a task are compared.

    Attributes:
        key: its name there, after the split's ("test_bleu").
        scale: factor of tables and figures.
        digits: format of the scaled number.
    """

    key: str
    name: str
    scale: float = 1.0
    unit: str = ""
    higher_is_better: bool = True
    digits: str = ".2f"

    @property
    def label(self) -> str:
        """Name and unit, for the head of a column."""
        return f"{self.name} {self.unit}".strip()

    @property
    def axis(self) -> str:
        """Name and unit of the test value, for an axis."""
        return f"test {self.name}" + (f" ({self.unit})" if self.unit else "")

    @property
    def difference(self) -> str:
        """Unit in which differences are printed."""
        return f"{self.name} in percentage points" if self.unit == "%" else self.name

    def quality(self, value: float | None) -> float:
        """A number that is larger for better values; None is the worst."""
        if value is None:
            return float("-inf")
        return value if self.higher_is_better else -value

    def text(self, value: float) -> str:
        """The value as tables show it, without its unit."""
        return format(self.scale * value, self.digits)


ACCURACY = Metric("accuracy", "accuracy", 100.0, "%")
BLEU = Metric("bleu", "BLEU")
BITS = Metric("bits_per_character", "bits per character", higher_is_better=False)


def metric_of(results: Iterable[Mapping[str, Any]]) -> Metric:
    """The metric that all of these `results.json` share; accuracy if there is no common one.

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
    """Row of a table: the fields that runs share which differ only by their seed."""

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
        """A short name: growth method, rate adaptation and the overrides that set the group apart."""
        return self.name_without(())

    def name_without(self, shared: Collection[str]) -> str:
        """The same name without overrides that every group it is compared with has too."""
        return ", ".join([self.plain_method, *in_words(self.overrides, shared)])


@dataclass(frozen=True)
class Run:
    """One run folder. `results` is read at once; the rest when it is first asked for.

    Attributes:
        path: the run folder.
        results: content of `results.json`; empty for a run that has not finished.
    """

    path: Path
    results: dict[str, Any] = field(repr=False)

    @cached_property
    def group(self) -> Group:
        """The row of a table that this run belongs to."""
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
        """Composed settings that decide the numbers of its row; None if no configuration was kept."""
        if "settings" in self.results or not (self.path / "config.yaml").exists():
            return self.results.get("settings")
        with _reading(self.path / "config.yaml"):
            return row_settings(self.config, **{key: str(self.results[key]) for key in ("data", "optimizer", "growth")})

    @property
    def reference_epochs(self) -> float:
        """Epochs of the fixed-size training that `train_cost_percent` is relative to.

        Not the run's own for a fixed-size run cut short to the cost of a grown one.
        """
        return self.results.get("reference_epochs") or self.results["epochs"]

    @property
    def reference_passes(self) -> float:
        """The same in passes over the training data, also where epochs are parts of them (`schedule.budget`)."""
        return self.budget or self.reference_epochs

    @property
    def pass_flops(self) -> float | None:
        """FLOPs of the fixed-size training for one pass over the training data; None where the cost is not known."""
        cost, flops = self.results["train_cost_percent"], self.results.get("train_flops")
        return 100 * flops / (cost * self.reference_passes) if cost and flops else None

    @property
    def budget(self) -> float | None:
        """Passes over the training data whose cost at full width was there for the run; None: not `schedule.budget`."""
        return (self.results.get("schedule") or {}).get("budget")

    @property
    def machine(self) -> dict[str, Any]:
        """Machine that its seconds were measured on: the device's name, threads, and how many devices and machines."""
        devices = {name: self.results.get(name) or 1 for name in ("world_size", "num_nodes")}
        return {**(self.results.get("machine") or {}), **devices}

    @property
    def keeps_full_width(self) -> bool:
        """True if each epoch cost as much as one of the fixed-size network at full width."""
        cost = self.results["train_cost_percent"]
        share = None if cost is None else cost * self.reference_epochs / (100 * self.results["epochs"])
        return self.group.is_fixed_size and share is not None and math.isclose(share, 1, rel_tol=1e-3)

    @cached_property
    def metrics(self) -> "pandas.DataFrame":
        """`metrics.csv`: one row an epoch; `epoch` counts from 0, values are those at that epoch's end."""
        # An epoch that was trained again counts as it was trained last.
        return self._table("metrics.csv", "epoch", "step", "stage").drop_duplicates(
            "epoch", keep="last", ignore_index=True
        )

    def curve(self, column: str) -> "numpy.ndarray | None":
        """A column of `metrics` as floats, one an epoch (nan where absent); None if it has no number."""
        import numpy
        import pandas

        if column not in self.metrics.columns:
            return None
        values = pandas.to_numeric(self.metrics[column], errors="coerce").to_numpy(dtype=float)
        return values if numpy.isfinite(values).any() else None

    def held_out(self, quantity: str) -> "numpy.ndarray | None":
        """The curve of a quantity on data that was not trained on: validation's, else that of a test set watched."""
        found = self.curve(f"val_{quantity}")
        return self.curve(f"test_{quantity}") if found is None else found

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
        """The growth events, in the order in which they happened."""
        return self.growth["events"]

    @property
    def growth_epochs(self) -> list[float]:
        """Epochs done at each growth event: its place on an axis of epochs."""
        return [float(event["epoch"]) for event in self.events]

    @property
    def width_path(self) -> list[int]:
        """Channels of all groups in each epoch."""
        groups = self.groups.values()
        return [sum(group["widths"][stage] for group in groups) for stage in self.metrics["stage"]]

    @property
    def class_schedule(self) -> dict[int, list[int]]:
        """The classes from each epoch on, `data.class_schedule`; empty where the data have all from the start."""
        return (self.config.get("data") or {}).get("class_schedule") or {}

    def _table(self, name: str, *columns: str) -> "pandas.DataFrame":
        import pandas

        with _reading(self.path / name):
            table = pandas.read_csv(self.path / name)
            table[list(columns)].iloc[[0]]
            return table


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context in which errors of reading name the file."""
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
    """Find every finished run in the given folders and below, each once, sorted by path.

    Args:
        paths: run folders or any folders above them.
        report: called with one sentence for each `results.json` that is torn or not a run's, and for each
            reason why jobs of sweeps failed; by default the sentence is issued as a warning.
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
    """Overrides in words where there are any, without those that every group it is compared with has too."""
    left, words = list(overrides), list[str]()
    for together, name in _TOGETHER.items():
        if set(together) <= set(left):
            words.append(name)
            left = [override for override in left if override not in together]
    return [*words, *(override for override in left if override not in shared)]


def _reason(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path.name} does not say why."


def _read_results(path: Path) -> dict[str, Any]:
    """Read a `results.json`; ValueError, with half a sentence, if it is torn or not a run's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError("it is torn or not JSON.") from error
    missing = [key for key in _OF_RESULTS if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"it is not the result of a growlab run ({missing[0]} is missing).")
    return content
