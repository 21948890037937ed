"""Runs that are kept are told apart by the jobs that they are, and what is read for that is what is composed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from growlab.base.files import write_json
from growlab.lab.analysis.results import Run, open_run
from growlab.lab.training.configuration import PRIMARY, config_dir, register_schemas
from growlab.recipes.papers.matching import Matching, _flat, settings_of
from growlab.recipes.papers.page import Standing
from growlab.recipes.papers.registry import Item, Job, registry
from tests.command_line import ROOT
from tests.parts_here import needs

RESULTS = ROOT / "notebooks" / "results"
REGISTRY = registry()
WITH_ROWS = [item for item in REGISTRY.items.values() if item.rows]


def matched(item: Item, whole: bool) -> Iterator[tuple[Run, Job]]:
    """Kept runs of an entry with their jobs."""
    matching = Matching(item.jobs())
    for rows, runs in Standing(item, RESULTS).kept:
        for run in runs if rows.whole == whole else ():
            if job := matching.take(run):
                yield run, job


@pytest.mark.parametrize("item", WITH_ROWS, ids=lambda item: item.name)
def test_what_is_read_of_a_job_is_what_is_composed(item: Item) -> None:
    """Up to five jobs of an entry that rows are kept of; each row's own configuration says the same."""
    register_schemas()
    jobs: dict[tuple[str, ...], Job] = {}
    for _, job in (*matched(item, whole=True), *matched(item, whole=False)):
        words = [o for o in job.overrides if not o.startswith("seed=")]
        jobs.setdefault((f"experiment={job.experiment}", *words), job)
    spread = list(jobs)[:: max(1, len(jobs) // 4)]
    for words in spread[:5]:
        found = settings_of(words)
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            cfg = compose(PRIMARY, overrides=[*words, "name=given", "data.root=x"], return_hydra_config=True)
        chosen = cfg.hydra.runtime.choices
        assert found.choices == {group: chosen[group] for group in found.choices}
        composed = _flat(OmegaConf.to_container(cfg, resolve=False))
        for key, value in {**found.others, **found.fixed}.items():
            if "${" not in str(value):
                assert composed[key] == value or str(composed[key]) == str(value), key


@pytest.mark.parametrize("item", WITH_ROWS, ids=lambda item: item.name)
def test_rows_that_count_as_whole_are_of_the_jobs_length(item: Item) -> None:
    for run, job in matched(item, whole=True):
        assert run.results["epochs"] == job.epochs or (
            "method=equal_flops" in job.overrides and run.results["reference_epochs"] == job.epochs
        )


@needs()
def test_the_kept_rows_are_told_apart() -> None:
    def names(name: str) -> tuple[int, set[str], set[str]]:
        counted = Standing(REGISTRY.items[name], RESULTS).counted
        shortened, others = ({run.path.name for run in runs} for runs in (counted.shortened, counted.others))
        return len(counted.whole), shortened, others

    whole, shortened, others = names("table2")
    assert whole >= 2 and {"ours_s0", "fixedflops_s0", "firefly_s0", "vgg11_ours"} <= shortened
    assert {"random_s0", "tiny_s0", "gradmax_s0", "pairs_s0", "ours_nora_s0"} <= others
    _, shortened, others = names("table6")
    assert {"pairs_s0", "pairs_ra_s0", "ours_nora_s0", "net2net_s0", "ours_s0"} <= shortened
    assert {"fixed_s0", "fixedflops_s0", "tiny_s0", "gradmax_s0", "firefly_s0"} <= others
    assert names("table5_multi30k")[0] >= 5 and len(names("incremental_cifar10")[1]) >= 6
    assert len(names("table5")[2]) == 5 and len(names("table14")[2]) == 6
    overabundance = Standing(REGISTRY.items["isotropic_overabundance"], RESULTS)
    assert overabundance.num_whole == len(overabundance.jobs) == 32 and len(overabundance.counted.others) == 8
    scaffold = Standing(REGISTRY.items["isotropic_scaffold"], RESULTS)
    assert scaffold.num_whole == len(scaffold.jobs) == 12 and scaffold.left == []
    assert Standing(REGISTRY.items["hyperfan_continual_regression"], RESULTS).left == []
    over_rates = Standing(REGISTRY.items["figure14"], RESULTS)
    assert (over_rates.num_whole, len(over_rates.counted.diverged), over_rates.left) == (18, 12, [])
    assert over_rates.rows_text == "18 of 30; 12 diverged"


def test_only_a_loss_that_is_not_finite_is_a_run_that_diverged(tmp_path: Path) -> None:
    item = REGISTRY.items["figure14"]
    job = item.jobs()[0]
    failure = {
        "reason": "the training loss became NaN or infinite at step 3",
        "overrides": [f"experiment={job.experiment}", *job.overrides, "num_threads=1"],
    }
    path = tmp_path / "figure14" / "run" / "failure.json"
    path.parent.mkdir(parents=True)
    for changed, diverged in (
        ({}, [job]),
        ({"reason": "the disk is full"}, []),
        ({"overrides": [f"experiment={job.experiment}"]}, []),
    ):
        write_json(path, {**failure, **changed})
        standing = Standing(item, tmp_path)
        assert list(standing.counted.diverged) == diverged
        assert standing.left == [one for one in item.jobs() if one not in diverged]


@pytest.mark.parametrize(
    ("override", "settings", "is_a_job"),
    [
        ("schedule.num_stages=5", {}, True),
        ("data.limit_train=100", {}, True),
        ("trainer.precision=bf16-mixed", {}, True),
        ("schedule.equal_flops=true", {}, False),
        ("optimizer.lr=0.2", {}, False),
        ("optimizer_state=inherit", {}, False),
        ("logger=csv", {"optimizer": {"lr": 0.2}}, False),
        ("logger=csv", {"data": {"batch_size": 64}}, False),
    ],
)
@needs()
def test_a_run_with_another_setting_is_no_job(
    override: str, settings: dict[str, dict[str, object]], is_a_job: bool, tmp_path: Path
) -> None:
    """Its length, size and machine aside: what it was given, and what its configuration says."""
    source = RESULTS / "resnet20_cifar10_16_epochs" / "ours_s0"
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("config.yaml", "results.json"):
        shutil.copy(source / name, copy)
    content = yaml.safe_load((copy / "config.yaml").read_text(encoding="utf-8"))
    for section, changed in settings.items():
        content[section].update(changed)
    (copy / "config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    run = open_run(copy)
    write_json(copy / "results.json", {**run.results, "overrides": [*run.results["overrides"], override]})
    job = Matching(REGISTRY.items["table2"].jobs()).take(open_run(copy))
    assert (job is not None) == is_a_job
    assert job is None or job.folder == "table2/method=ours,model=resnet20,seed=0"
    assert Matching(REGISTRY.items["table2"].jobs([1])).take(open_run(copy)) is None
