"""The registry: entries can be run, and their statements have rows and published values."""

import sys
from collections import Counter
from itertools import product

import pytest
import yaml

from growlab.lab.analysis.figures import FIGURES
from growlab.lab.training.configuration import composed, config_dir
from growlab.recipes.papers.paper_table import published
from growlab.recipes.papers.registry import _split, drawn, experiment, registry
from tests.command_line import ROOT

sys.path.insert(0, str(ROOT / "notebooks" / "docs"))
from paper_pages import Standing
from verdicts import QUANTITIES, checks_of

RESULTS = ROOT / "notebooks" / "results"
REGISTRY = registry()
ITEMS = list(REGISTRY.items.values())
COMMANDS = sorted({command for item in ITEMS for command in item.commands})


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_names_in_an_entry_exist(item) -> None:
    assert item.paper in REGISTRY.papers and set(item.data) <= set(REGISTRY.data)
    assert item.commands and item.claim and item.title
    assert {drawn(figure)[0] for figure in item.figures} <= set(FIGURES)
    assert item.table is None or any(one.table == item.table for one in published())
    for check in checks_of(item):
        assert check.is_bound != (check.at_most is None and check.at_least is None)
        assert (check.study or check.quantity in QUANTITIES) and check.expect in ("more", "less", "equal")
    for rows in item.rows:
        assert rows.kind in ("whole", "shortened", "other")
        for pattern in rows.select.split(" + "):
            assert list((RESULTS / rows.folder).glob(pattern))
    jobs = item.jobs()
    assert len({job.folder for job in jobs}) == len(jobs) > 0
    assert {job.data for job in jobs if job.data} <= set(item.data)


@pytest.mark.parametrize("item", [item for item in ITEMS if item.rows], ids=lambda item: item.name)
def test_whole_rows_are_runs_of_the_entrys_commands(item) -> None:
    """Length, data and seeds are those of the commands; no run occurs twice."""
    standing, jobs = Standing(item, RESULTS), item.jobs()
    runs = [run for rows, of_folder in standing.kept if rows.kind == "whole" for run in of_folder]
    for run in runs:
        assert {run.results["epochs"], run.results.get("reference_epochs")} & {job.epochs for job in jobs}
        assert run.results["data"].removesuffix("_incremental") in item.data
        assert f"seed={run.results['seed']}" in {o for job in jobs for o in (*job.overrides, "seed=0")}
    assert len({(run.results["seed"], *sorted((run.settings or {}).items())) for run in runs}) == len(runs)
    assert standing.num_whole + standing.num_diverged <= len(jobs)


# Most runs in figures with a limit.
MOST_RUNS = {"rate_factors": 1, "norms": 3}


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_figures_have_runs_within_their_limits(item) -> None:
    for figure in item.figures:
        name, overrides = drawn(figure)
        shown = [job for job in item.jobs() if set(overrides) <= set(job.overrides)]
        assert 0 < len(shown) <= MOST_RUNS.get(name, len(shown))
        networks = {(job.data, *(o for o in job.overrides if o.startswith("model="))) for job in shown}
        assert name != "compare" or len(networks) == 1
        # At most as many rows as colours.
        assert name != "compare" or len({_without_seed(job.overrides) for job in shown}) <= 10


def _without_seed(overrides: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for one in overrides if not one.startswith("seed="))


def test_every_published_table_has_an_entry() -> None:
    assert {one.table for one in published()} == {item.table for item in ITEMS if item.table}


def test_every_prepared_sweep_has_an_entry() -> None:
    """Except frontiers, multipliers under Adam and the digits, which are in no paper."""
    papers = config_dir() / "experiment" / "papers"
    presets = {path.stem for path in papers.glob("*.yaml") if "sweeper:" in path.read_text()}
    named = {command.split()[0].removeprefix("experiment=papers/") for command in COMMANDS}
    assert {name for name in presets - named if not name.startswith(("frontier_", "multipliers_"))} == {
        "digits_methods"
    }


@pytest.mark.parametrize("command", COMMANDS[::4])
def test_values_read_without_composing_equal_composed_ones(command: str) -> None:
    words = [word for word in command.split() if not word.startswith("hydra.")]
    given = [f"{key}={_split(value)[-1]}" for key, value in (word.split("=", 1) for word in words)]
    name = words[0].removeprefix("experiment=")
    cfg = composed([*given, "name=given"])
    found = experiment(name)
    item = next(item for item in ITEMS if command in item.commands)
    job = next(
        job
        for job in item.jobs()
        if job.experiment == name and {o for o in given[1:] if "total_epochs" not in o} <= set(job.overrides)
    )
    assert found.is_study == (cfg.experiment_function is not None)
    if "seed" not in found.swept and "seed=" not in command:
        assert found.seed == cfg.seed
    if not found.is_study:
        schedule = cfg.schedule
        epochs = sum(schedule.epochs) if schedule.epochs else schedule.total_epochs
        if "total_epochs" not in command:
            assert job.epochs == epochs
        assert found.data.removesuffix("_incremental") == cfg.data.name or "data" in found.swept or "data=" in command
    assert dict(found.swept) == {
        key: _split(str(value)) for key, value in (cfg.hydra.sweeper.params or {}).items()
    } or ("hydra.sweeper.params=null" in command)


def test_a_sweeps_jobs_are_every_combination() -> None:
    item = REGISTRY.items["table2"]
    expected = Counter(
        f"table2/method={method},model={model},seed={seed}"
        for model, method, seed in product(
            ("resnet20", "vgg11", "mobilenetv1"),
            ("fixed_size", "equal_flops", "net2net", "ours", "splitting", "firefly_split", "firefly"),
            range(3),
        )
    )
    assert Counter(job.folder for job in item.jobs()) == expected
    assert {job.overrides[-1] for job in item.jobs(seeds=[7])} == {"seed=7"} and len(item.jobs([7])) == 21


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_chosen_seeds_give_the_same_jobs(item) -> None:
    """A command without a seed runs with seed 0; other seeds get folders of their own."""
    of_seed: dict[int, set[str]] = {}
    for job in item.jobs():
        named = next((o.removeprefix("seed=") for o in job.overrides if o.startswith("seed=")), "0")
        of_seed.setdefault(int(named), set()).add(job.folder)
    for seed, folders in of_seed.items():
        assert folders <= {job.folder for job in item.jobs([seed])}
    folders = {job.folder for job in item.jobs()}
    assert folders.isdisjoint(job.folder for job in item.jobs([99]))
    assert all("seed=99" in job.overrides for job in item.jobs([99]))


def test_lists_in_brackets_are_one_value() -> None:
    assert _split("[1,2],[3]") == ["[1,2]", "[3]"] and _split("a,b") == ["a", "b"] and _split("3") == ["3"]


def test_entries_of_all_files_have_different_names() -> None:
    folder = ROOT / "growlab" / "recipes" / "papers" / "entries"
    files = [yaml.safe_load(path.read_text()) for path in folder.iterdir()]
    known = {"paper", "title", "note", "gpu", "gpu_runs", "cpu_bfloat16", "items"}
    assert all(set(file) <= known for file in files)
    assert sum(len(file["items"]) for file in files) == len(REGISTRY.items)
    assert all({"title", "gpu"} <= set(paper) for paper in REGISTRY.papers.values())
