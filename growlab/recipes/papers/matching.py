"""Which of an entry's jobs a run that is kept is: whole, shortened, or none of them."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from growlab.base.files import FAILURE
from growlab.lab.analysis.results import Run
from growlab.lab.training.configuration import config_dir
from growlab.recipes.papers.registry import Job, Rows, experiment

_GROUPS = ("model", "data", "growth", "lr_adapt", "optimizer")
# Where, on what and with which records a run trains.
_ELSEWHERE = (
    *("seed", "name", "experiment", "method", "ckpt_path", "checkpoint.", "hydra", "trainer", "logger"),
    *("callbacks", "num_threads", "compile", "log_", "probe_size", "check_ranks", "statistics_images"),
    *("data.root", "data.download", "data.in_memory", "data.num_workers", "data.validation", "data.eval_"),
)
# How long and on how much; what a job itself says of its schedule, as a sweep over schedules does, is no length.
_LENGTH = ("schedule.", "data.limit_", "model.network.width")
_LENGTH_OF_JOB = ("schedule.total_epochs",)
_NO_LENGTH = ("schedule.equal_flops", "schedule.batch_growth_rate")
# What a study's command may have beside the study.
_NO_SETTING = ("hydra", "trainer", "num_threads", "logger", "ckpt_path")
_ABSENT = object()


@dataclass(frozen=True)
class Settings:
    """What is trained: a choice of each group, and single settings by their dotted names.

    Attributes:
        choices: by group.
        fixed: settings that a command or a method gives.
        others: settings that files give.
    """

    choices: dict[str, str]
    fixed: dict[str, Any]
    others: dict[str, Any]


def settings_of(overrides: Iterable[str]) -> Settings:
    """What a command line trains, read from the files that it names without composing them, which takes a second."""
    words = dict(o.lstrip("+").split("=", 1) for o in overrides if "=" in o)
    name = words.get("experiment")
    choices, others = (dict(part) for part in (_file("experiment", name) if name else ({}, {})))
    if "method" in words:
        of_method, fixed = (dict(part) for part in _file("method", words["method"]))
        choices.update(of_method)
    else:
        fixed = {}
    for key, value in words.items():
        if key in _GROUPS:
            choices[key] = value
        elif not key.startswith(_ELSEWHERE):
            fixed[key] = yaml.safe_load(value)
    for group in _GROUPS:
        choices.setdefault(group, _default(group))
    of_groups = (_file(group, choice)[1].items() for group, choice in choices.items())
    below = {
        f"{group}.{key}": value
        for group, items in zip(choices, of_groups, strict=True)
        for key, value in items
    }
    return Settings(choices, fixed, {**below, **others})


@cache
def _file(group: str, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Choices and settings of a file of a group, and of those that it builds on."""
    path = config_dir() / group / f"{name}.yaml"
    choices: dict[str, str] = {}
    settings: dict[str, Any] = {}
    if not path.is_file():
        return choices, settings
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for entry in content.pop("defaults", ()):
        if isinstance(entry, str) and entry != "_self_":
            below = _file(group, entry)
            choices.update(below[0])
            settings.update(below[1])
        elif isinstance(entry, Mapping):
            (key, value), *_ = entry.items()
            choices[str(key).removeprefix("override ").removeprefix("/")] = str(value)
    settings.update(_flat({key: value for key, value in content.items() if key != "hydra"}))
    return {group: choice for group, choice in choices.items() if group in _GROUPS}, settings


@cache
def _default(group: str) -> str:
    content = yaml.safe_load((config_dir() / "config.yaml").read_text(encoding="utf-8"))
    return next(
        str(entry[group]) for entry in content["defaults"] if isinstance(entry, Mapping) and group in entry
    )


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names; lists are values."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


@dataclass(frozen=True)
class Kept:
    """Runs that are kept, beside the jobs of an entry.

    Attributes:
        whole: jobs of which there is a run, or a study, in full length.
        shortened: runs that are one of the jobs but for their length or size.
        others: runs that are none of the jobs, or one of which there is another run.
        diverged: jobs of which there is a run in full length that ended in a loss that is not finite.
    """

    whole: tuple[Job, ...] = ()
    shortened: tuple[Run, ...] = ()
    others: tuple[Run, ...] = ()
    diverged: tuple[Job, ...] = ()


def kept_of(jobs: Sequence[Job], kept: Iterable[tuple[Rows, Sequence[Run]]], results: Path) -> Kept:
    """Tell runs that are kept apart.

    Args:
        jobs: of an entry.
        kept: its rows, each with the runs that they are of; a study's folder has none.
        results: the folder of all rows.
    """
    whole, shortened, others, diverged = list[Job](), list[Run](), list[Run](), list[Job]()
    at_length, shorter = Matching(jobs), Matching(jobs)
    for rows, runs in kept:
        if rows.whole:
            diverged += _diverged(jobs, results / rows.folder)
        if not runs and rows.whole and (study := _study(jobs, results / rows.folder)):
            whole.append(study)
        for run in runs:
            job = (at_length if rows.whole else shorter).take(run)
            if job is None:
                others.append(run)
            elif rows.whole:
                whole.append(job)
            else:
                shortened.append(run)
    return Kept(tuple(dict.fromkeys(whole)), tuple(shortened), tuple(others), tuple(diverged))


def _diverged(jobs: Sequence[Job], folder: Path) -> list[Job]:
    """The jobs whose runs in a folder ended in a loss that is not finite."""
    failures = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"*/{FAILURE}"))]
    given = [set(failure["overrides"]) for failure in failures if "NaN or infinite" in failure["reason"]]
    return [
        job
        for job in jobs
        if any({f"experiment={job.experiment}", *job.overrides} <= overrides for overrides in given)
    ]


def _study(jobs: Sequence[Job], folder: Path) -> Job | None:
    """The job whose study a folder holds."""
    path = folder / "provenance.json"
    if not (folder / "summary.json").is_file() or not path.is_file():
        return None
    words = shlex.split(json.loads(path.read_text(encoding="utf-8"))["command"])
    given = {word for word in words if "=" in word and not word.startswith(_NO_SETTING)}
    for job in jobs:
        if job.is_study and given == {f"experiment={job.experiment}", *job.overrides}:
            return job
    return None


class Matching:
    """The jobs of an entry, to be found by runs that are kept."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._free: dict[tuple[str, ...], list[tuple[Job, Settings]]] = {}
        for job in jobs:
            if not job.is_study:
                settings = settings_of([f"experiment={job.experiment}", *job.overrides])
                self._free.setdefault(_key(settings.choices, _seed(job)), []).append((job, settings))

    def take(self, run: Run) -> Job | None:
        """The job that a run is, in full length or shortened, which no other run is then; None: it is none of them."""
        results = run.results
        key = _key({group: str(results[group]) for group in _GROUPS}, int(results["seed"]))
        free = self._free.get(key, [])
        # Of jobs that differ by their length alone the one of the run's.
        for job, settings in sorted(free, key=lambda one: one[0].epochs != results["epochs"]):
            if _is(run, settings):
                free.remove((job, settings))
                return job
        return None


def _key(choices: Mapping[str, str], seed: int) -> tuple[str, ...]:
    """What has to be the same by name; settings of a growth method may stand in a file that builds on the method's."""
    growth = choices["growth"]
    return (*(choices[group] for group in _GROUPS if group != "growth"), _base("growth", growth), str(seed))


@cache
def _base(group: str, name: str) -> str:
    path = config_dir() / group / f"{name}.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    below = [entry for entry in content.get("defaults", ()) if isinstance(entry, str)]
    return next((_base(group, entry) for entry in below if entry != "_self_" and "/" not in entry), name)


def _seed(job: Job) -> int:
    named = (o.removeprefix("seed=") for o in job.overrides if o.startswith("seed="))
    return int(next(named, experiment(job.experiment).seed))


def _is(run: Run, job: Settings) -> bool:
    """Whether a run trains what a job does, but for the length."""
    of_run = _configuration(run.path)
    for key, value in job.fixed.items():
        if key not in _LENGTH_OF_JOB and not _equal(of_run.get(key, _ABSENT), value):
            return False
    known = {**job.others, **job.fixed}
    for key, value in job.others.items():
        if key not in job.fixed and not _may_differ(key) and key in of_run and not _equal(of_run[key], value):
            return False
    given = settings_of(map(str, run.results.get("overrides") or ())).fixed
    return all(_may_differ(key) or (key in known and _equal(known[key], given[key])) for key in given)


def _may_differ(key: str) -> bool:
    # Classes may have moved since.
    shortens = key.startswith(_LENGTH) and key not in _NO_LENGTH
    return shortens or key.endswith("_target_") or key.startswith(_ELSEWHERE)


def _equal(first: Any, second: Any) -> bool:
    # What refers to another setting is known where it is composed alone.
    referred = any(isinstance(value, str) and "${" in value for value in (first, second))
    return referred or first == second or str(first) == str(second)


@cache
def _configuration(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    found = _flat(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    if found.get("optimizer_state") == "auto":
        is_sgd = "SGD" in str(found.get("optimizer._target_")) and "sotropic" not in str(
            found.get("growth._target_")
        )
        found["optimizer_state"] = "reset" if is_sgd else "inherit"
    return found
