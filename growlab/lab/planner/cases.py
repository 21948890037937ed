"""Finished runs as cases of `growlab.plan`: the full network, a smaller one and a grown one at equal cost."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from statistics import mean
from typing import Any

from growlab.base.errors import UserError
from growlab.lab.analysis.grid import as_csv
from growlab.lab.analysis.results import Run, load_runs
from growlab.plan import Case, read_cases

# Runs whose costs differ by more, in percent of the full network's, are not compared.
_EQUAL_COST = 10.0


def read(sources: Sequence[str]) -> list[Case]:
    """Cases of the package, and of a user's CSV files and folders of runs."""
    folders = [Path(source) for source in sources if Path(source).is_dir()]
    found = read_cases(*(source for source in sources if Path(source) not in folders))
    for folder in folders:
        found += (own := cases_of(folder))
        if not own:
            raise UserError(
                f"{folder} has no case: that takes finished runs of one experiment and budget with growth=none, of the "
                "full network and of a smaller one (growth.width_multiple=0.5)."
            )
    return found


def written(cases: Iterable[Case]) -> str:
    """The table of cases as a file that `read` takes."""
    return as_csv([[field.name for field in fields(Case)], *map(astuple, cases)])


def cases_of(folder: Path) -> list[Case]:
    """Cases among the finished runs of a folder.

    A case needs runs of one experiment and budget of the full network and of a smaller one that never grow. Seeds are
    averaged; the best of several smaller or grown networks counts.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in load_runs([folder]):
        if run.results.get("stages") and run.results.get("train_flops"):
            key = (run.path.parent, run.group.experiment, *run.group.task, run.reference_passes)
            groups.setdefault(key, []).append(run)
    return [case for key, runs in groups.items() if (case := _case(key[0].name, runs)) is not None]


def _case(folder: str, runs: Sequence[Run]) -> Case | None:
    whole = [run for run in runs if run.keeps_full_width]
    if not whole:
        return None
    first, params = whole[0], max(map(_params, whole))
    cost = mean(run.results["train_cost_percent"] for run in whole if _params(run) == params)
    arms: dict[str, dict[tuple[str, ...], list[Run]]] = {"full": {}, "smaller": {}, "grown": {}}
    for run in runs:
        still, size = run.group.is_fixed_size, _params(run)
        arm = ("full" if size == params else "smaller") if still else "grown"
        near = abs(run.results["train_cost_percent"] - cost) <= _EQUAL_COST
        # Not those whose inputs alone grow.
        grows = size == params > run.results["stages"][0]["num_params"]
        if near and (still or grows):
            arms[arm].setdefault(run.group.overrides, []).append(run)
    if not arms["full"] or not arms["smaller"]:
        return None
    best = {arm: min(found.values(), key=_error) for arm, found in arms.items() if found}
    results, text = first.results, _metric(first) != "accuracy"
    samples = results["train_flops"] / (3 * results["stages"][0]["flops_per_sample"])
    # Text is counted in tokens.
    samples *= first.config["data"]["context"] if text and "context" in first.config.get("data", {}) else 1
    return Case(
        case=f"{folder}, {first.reference_passes:g} epochs",
        family=f"{first.group.model} on {first.group.data}",
        kind="language" if text else "classes",
        params=params,
        smaller_params=_params(best["smaller"][0]),
        samples=round(samples),
        full=_error(best["full"]),
        smaller=_error(best["smaller"]),
        grown=_error(best["grown"]) if "grown" in best else None,
    )


def _params(run: Run) -> int:
    return int(run.results["stages"][-1]["num_params"])


def _metric(run: Run) -> str:
    return str((run.results.get("metric") or {}).get("name", "accuracy"))


def _error(runs: Sequence[Run]) -> float:
    """Mean test error over seeds; of text, the metric itself, which is a loss."""
    name = _metric(runs[0])
    values = [float(run.results[f"test_{name}"]) for run in runs]
    return round(mean(1 - value if name == "accuracy" else value for value in values), 5)
