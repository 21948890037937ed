"""Registry of reproducible tables and figures (`registry.yaml`, `entries/`) and their runs."""

import difflib
import itertools
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic.dataclasses import dataclass

from growlab.base.errors import UserError
from growlab.lab.training.configuration import config_dir

# Overrides omitted from a job's folder name, as in `hydra.job.config.override_dirname` of conf/config.yaml.
_NOT_IN_FOLDER = ("experiment=", "data.root=", "ckpt_path=")


@dataclass(frozen=True)
class Rows:
    """Archived runs in `notebooks/results`.

    Attributes:
        folder: folder there.
        select: pattern of run folders in it, or several joined by " + ".
        kind: "whole" (the paper's length and size), "shortened", or "other" (not made by the entry's commands).
        note: other differences from the paper.
    """

    folder: str
    select: str = "*"
    kind: str = "shortened"
    note: str | None = None


@dataclass(frozen=True)
class Job:
    """Run of an entry; a study has no epochs and cannot be resumed."""

    experiment: str
    overrides: tuple[str, ...]
    epochs: int | None
    data: str | None
    is_study: bool

    @property
    def folder(self) -> str:
        """Folder of the run in the sweep `python -m growlab -m experiment=...`."""
        kept = sorted(o for o in self.overrides if not o.startswith(_NOT_IN_FOLDER))
        return f"{self.experiment.rpartition('/')[2]}/{','.join(kept) or 'run'}"


@dataclass(frozen=True)
class Item:
    """Table, figure or experiment of a paper; `registry.yaml` documents the attributes."""

    name: str
    paper: str
    title: str
    claim: str
    commands: tuple[str, ...]
    data: tuple[str, ...] = ()
    table: str | None = None
    rows: tuple[Rows, ...] = ()
    figures: tuple[str, ...] = ()
    minutes: float | None = None
    gpu_runs: int | None = None
    checks: tuple[dict[str, Any], ...] = ()

    def jobs(self, seeds: Sequence[int] | None = None) -> list[Job]:
        """Return the runs of all commands, without duplicates."""
        return list({job.folder: job for command in self.commands for job in _expand(command, seeds)}.values())

    def is_added(self, job: Job) -> bool:
        """True for fixed-size runs at equal FLOPs, which we add to the papers' tables."""
        return self.table is not None and "method=equal_flops" in job.overrides


@dataclass(frozen=True)
class Registry:
    """All entries.

    Attributes:
        items: entries by name.
        papers: title of each paper, a `note` on parts that need no run, overrides for a GPU (`gpu`) and for a CPU with
            fast bfloat16 (`cpu_bfloat16`), and the number of runs that share a GPU (`gpu_runs`).
        data: by name of the data set: other names of its folder (`also`), and `built_in` if it needs no files.
    """

    items: dict[str, Item]
    papers: dict[str, dict[str, Any]]
    data: dict[str, dict[str, Any]]

    def find(self, name: str) -> Item:
        """Find an entry by name."""
        if name not in self.items:
            near = difflib.get_close_matches(name, self.items, 1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else "--list names them all."
            raise UserError(f"there is no entry called {name}; {hint}")
        return self.items[name]


def drawn(figure: str) -> tuple[str, tuple[str, ...]]:
    """Split an entry's figure into its name and the overrides that select its runs.

    Example:
        >>> drawn("rate_factors method=ours seed=0"), drawn("compare")
        (('rate_factors', ('method=ours', 'seed=0')), ('compare', ()))
    """
    name, *overrides = figure.split()
    return name, tuple(overrides)


@cache
def registry() -> Registry:
    """Load the package's registry."""
    here = resources.files("growlab.recipes.papers")
    data = yaml.safe_load(here.joinpath("registry.yaml").read_text(encoding="utf-8"))["data"]
    papers: dict[str, dict[str, Any]] = {}
    items: list[Item] = []
    for path in sorted(here.joinpath("entries").iterdir(), key=lambda path: path.name):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        paper, entries = content.pop("paper"), content.pop("items")
        papers.setdefault(paper, {}).update(content)
        items += [Item(paper=paper, **entry) for entry in entries]
    return Registry({item.name: item for item in items}, papers, data)


def _expand(command: str, seeds: Sequence[int] | None) -> list[Job]:
    """List the jobs of `experiment=NAME override...`: all combinations of values, including the experiment's sweep."""
    words = command.split()
    name = words[0].removeprefix("experiment=")
    settings = experiment(name)
    overrides = dict(word.split("=", 1) for word in words[1:] if not word.startswith("hydra."))
    swept = {} if "hydra.sweeper.params=null" in words else dict(settings.swept)
    swept.update({key: _split(value) for key, value in overrides.items()})
    has_seed = "seed" in swept
    if seeds is not None:
        swept["seed"] = [str(seed) for seed in seeds]
    jobs = []
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        if not has_seed and chosen.get("seed") == str(settings.seed):
            # The command has no seed, and this is the experiment's own.
            del chosen["seed"]
        epochs = data = None
        if not settings.is_study:
            epochs = int(chosen.get("schedule.total_epochs") or settings.epochs or 0)
            # Data sets in conf/data have the names of their folders; incremental ones read those of another.
            data = str(chosen.get("data", settings.data)).removesuffix("_incremental")
        jobs.append(Job(name, tuple(f"{k}={v}" for k, v in chosen.items()), epochs, data, settings.is_study))
    return jobs


def _split(value: str) -> list[str]:
    """Split a sweep's values: `a,b` are two values, `[1,2]` is one."""
    return re.findall(r"(?:\[[^\]]*\]|[^,\[])+", value)


@dataclass(frozen=True)
class Experiment:
    """Length, data, seed and sweep of an experiment, from its file in conf/experiment and its defaults."""

    epochs: int | None
    data: str
    swept: dict[str, list[str]]
    is_study: bool
    seed: int


@cache
def experiment(name: str) -> Experiment:
    """Read an experiment's file without composing it, which takes a second."""
    folder = config_dir() / "experiment"
    content = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    seed = yaml.safe_load((config_dir() / "config.yaml").read_text(encoding="utf-8"))["seed"]
    base = Experiment(None, "digits", {}, False, seed)
    defaults = content.get("defaults", ())
    for entry in defaults:
        if isinstance(entry, str) and (folder / f"{entry.removeprefix('/experiment/')}.yaml").is_file():
            base = experiment(entry.removeprefix("/experiment/"))
    chosen = [entry for entry in defaults if isinstance(entry, dict)]
    data = [entry["override /data"] for entry in chosen if "override /data" in entry]
    schedule = content.get("schedule") or {}
    params = ((content.get("hydra") or {}).get("sweeper") or {}).get("params") or {}
    return Experiment(
        epochs=sum(schedule.get("epochs") or ()) or schedule.get("total_epochs") or base.epochs,
        data=data[-1] if data else base.data,
        swept={key: _split(str(value)) for key, value in params.items()},
        is_study="experiment_function" in content or base.is_study,
        seed=content.get("seed", base.seed),
    )
