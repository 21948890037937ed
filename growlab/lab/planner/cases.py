"""Turn finished runs into cases of `growlab.plan`: the full network, a smaller one and a grown one at equal cost."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from statistics import mean
from typing import Any

from growlab.base.errors import UserError
from growlab.lab.analysis.grid import as_csv
from growlab.lab.analysis.results import Run, load_runs
from growlab.plan import Case, read_cases

# Largest difference in cost of compared runs, in percent of the full network's.
_EQUAL_COST = 10.0


def read(sources: Sequence[str]) -> list[Case]:
    """Read the package's cases, and those in a user's CSV files and folders of runs."""
    folders = [Path(source) for source in sources if Path(source).is_dir()]
    cases = read_cases(*(source for source in sources if Path(source) not in folders))
    for folder in folders:
        cases += (of_runs := cases_of(folder))
        if not of_runs:
            raise UserError(
                f"{folder} has no case: that takes finished runs of one experiment and budget with growth=none, of the "
                "full network and of a smaller one (growth.width_multiple=0.5)."
            )
    return cases


def written(cases: Iterable[Case]) -> str:
    """The cases as CSV, which `read` accepts."""
    return as_csv([[field.name for field in fields(Case)], *map(astuple, cases)])


def cases_of(folder: Path) -> list[Case]:
    """Cases among the finished runs of a folder.

    A case needs runs of one experiment and budget for the full network and for a smaller one, neither of which grows.
    Seeds are averaged; of several smaller or grown networks the best one counts.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in load_runs([folder]):
        if run.results.get("stages") and run.results.get("train_flops"):
            key = (run.path.parent, run.group.experiment, *run.group.task, run.reference_passes)
            groups.setdefault(key, []).append(run)
    return [case for key, runs in groups.items() if (case := _case(key[0].name, runs)) is not None]


def _case(folder: str, runs: Sequence[Run]) -> Case | None:
    full_width = [run for run in runs if run.keeps_full_width]
    if not full_width:
        return None
    first, params = full_width[0], max(map(_params, full_width))
    cost = mean(run.results["train_cost_percent"] for run in full_width if _params(run) == params)
    arms: dict[str, dict[tuple[str, ...], list[Run]]] = {"full": {}, "smaller": {}, "grown": {}}
    for run in runs:
        fixed, size = run.group.is_fixed_size, _params(run)
        arm = ("full" if size == params else "smaller") if fixed else "grown"
        same_cost = abs(run.results["train_cost_percent"] - cost) <= _EQUAL_COST
        # Without runs in which only the inputs grow.
        grows = size == params > run.results["stages"][0]["num_params"]
        if same_cost and (fixed or grows):
            arms[arm].setdefault(run.group.overrides, []).append(run)
    if not arms["full"] or not arms["smaller"]:
        return None
    best = {arm: min(by_overrides.values(), key=_error) for arm, by_overrides in arms.items() if by_overrides}
    results, text = first.results, _metric(first) != "accuracy"
    samples = results["train_flops"] / (3 * results["stages"][0]["flops_per_sample"])
    # In tokens for text.
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
    """Mean test error over seeds; for text the metric itself, which is a loss."""
    name = _metric(runs[0])
    values = [float(run.results[f"test_{name}"]) for run in runs]
    return round(mean(1 - value if name == "accuracy" else value for value in values), 5)
