"""`growlab plan`: output, files, runs of its experiments, and errors."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose

from growlab.base.errors import UserError
from growlab.lab.planner.cases import written
from growlab.lab.planner.run import check, settings_of
from growlab.lab.training.configuration import PRIMARY
from growlab.lab.training.processes import lock_folder
from growlab.plan import advise, read_cases
from tests.command_line import PLAN, CommandLine, Outcome

# A multi-layer perceptron on digits, some hundred steps.
TINY = (
    *("model=mlp5", "model.width=16", "data.batch_size=16", "data.limit_train=400", "data.limit_test=60"),
    *("schedule.budget=16", "optimizer.lr=0.05", "trainer=cpu", "lr_adapt=none"),
)


def ask(cli: CommandLine, folder: Path, *arguments: str) -> Outcome:
    return cli(*arguments, "hydra.run.dir=run", cwd=folder, environment={PLAN: "1"})


def found_in(folder: Path) -> dict:
    return json.loads((folder / "run" / "plan.json").read_text())


@pytest.fixture(scope="module")
def asked(cli: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("plan")
    return folder, ask(cli, folder, *TINY, "plan.probe=0.03")


def test_the_advice_is_printed_and_written_with_experiments(asked: tuple[Path, Outcome]) -> None:
    folder, outcome = asked
    assert outcome.code == 0, outcome.err
    lines, found = outcome.out.splitlines(), found_in(folder)
    assert len(lines) <= 8 and max(map(len, lines)) <= 80
    advice = found["advice"]
    samples, smaller = advice["ratio"] * advice["params"], advice["smaller_params"]
    # A tenth of 400 images is held out.
    assert 350 < samples / 16 <= 360
    expected = advise(advice["params"], samples, smaller=smaller, kind="classes")
    assert lines[:-1] == str(expected).splitlines()
    assert lines[-1].endswith("growlab --config-dir run experiment=planned")
    assert found["arms"]["smaller"]["params"] == advice["smaller_params"] < advice["params"]
    texts = {path.stem: path.read_text() for path in (folder / "run" / "experiment").iterdir()}
    assert texts["planned"] == texts["smaller"].replace("experiment=smaller", "experiment=planned")


def test_rates_are_tried_within_three_percent_of_the_budget(asked: tuple[Path, Outcome]) -> None:
    folder, outcome = asked
    assert len(re.findall(r"x optimizer.lr: training loss", outcome.err)) == 3
    assert re.search(r"Best at [\d.]+ x optimizer.lr: (2\.\d|3\.0) % spent, kept; \d+ s to go", outcome.err)
    found = found_in(folder)
    assert 0.02 < found["spent"] <= 0.03 and found["rate"] in (0.5, 1.0, 2.0)
    written = yaml.safe_load((folder / "run" / "experiment" / "smaller.yaml").read_text())
    assert written["optimizer"]["lr"] == pytest.approx(0.05 * found["rate"])
    assert written["schedule"]["budget"] == pytest.approx(16 * (1 - found["spent"]), rel=1e-3)
    assert written["start_from"] == str(folder / "run" / "start" / "smaller.pt")
    assert "start_from" not in (folder / "run" / "experiment" / "full.yaml").read_text()
    start = torch.load(folder / "run" / "start" / "smaller.pt", weights_only=True)
    assert start["optimizer"]["class"] == "growlab.optim.sgd.SGD"


@pytest.mark.parametrize("arm", ["grown", *(pytest.param(arm, marks=pytest.mark.slow) for arm in ("full", "planned"))])
def test_experiments_run_at_equal_cost(asked: tuple[Path, Outcome], cli: CommandLine, arm: str) -> None:
    folder, _ = asked
    options = ("--config-dir", str(folder / "run"), f"experiment={arm}", f"hydra.run.dir={arm}")
    cli.done(*options, cwd=folder)
    found, planned = json.loads((folder / arm / "results.json").read_text()), found_in(folder)
    assert 93 < found["train_cost_percent"] <= 100.001
    assert found["growth"] == ("pairs" if arm == "grown" else "none")
    if arm == "planned":
        assert found["schedule"]["budget"] == pytest.approx(16 * (1 - planned["spent"]), rel=1e-3)
    if arm == "grown":
        first, second = (stage["epochs"] for stage in found["stages"])
        relative = planned["arms"]["grown"]["flops"] / planned["arms"]["full"]["flops"]
        share = first * relative / (first * relative + second)
        # Rounded to an epoch at the full width.
        assert share == pytest.approx(planned["settings"]["switch"], abs=0.07)


def test_plans_for_the_full_network_and_without_a_budget(cli: CommandLine, tmp_path: Path) -> None:
    own = [argument for argument in TINY if not argument.startswith("schedule.budget")]
    outcome = ask(cli, tmp_path, *own, "schedule.total_epochs=200", "plan.size=full", "method=net2net")
    assert outcome.code == 0, outcome.err
    assert {"choice", "instead"} <= (advice := found_in(tmp_path)["advice"]).keys()
    assert {advice["choice"], advice["instead"]} == {"grow", "full"}
    assert 350 < advice["ratio"] * advice["params"] / 200 <= 360
    experiment = tmp_path / "run" / "experiment"
    assert "override /growth: net2net" in (experiment / "grown.yaml").read_text()
    assert "budget: 200.0" in (experiment / "full.yaml").read_text()


def test_a_users_own_cases_are_used(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(written([replace(case, full=0.1, smaller=0.9) for case in read_cases()] * 9))
    outcome = ask(cli, tmp_path, *TINY, "plan.cases=[mine.csv]")
    assert outcome.code == 0 and outcome.out.startswith("The full network is"), outcome.err
    outcome = ask(cli, tmp_path, *TINY, "plan.cases=[none.csv]")
    assert outcome.code == 2 and "cannot read the cases of none.csv" in outcome.err


def test_start_from_refuses_weights_of_another_network(cli: CommandLine, tmp_path: Path) -> None:
    torch.save({"out.weight": torch.zeros(10, 3)}, tmp_path / "other.pt")
    outcome = cli(*TINY, "start_from=other.pt", "hydra.run.dir=run", cwd=tmp_path)
    sentence = "start_from=other.pt is of another network than the first stage's: the shape of classifier.bias=null"
    assert outcome.code == 2 and sentence in outcome.err and "Traceback" not in outcome.err, outcome.err


def test_too_few_steps_to_try_rates_are_refused(cli: CommandLine, tmp_path: Path) -> None:
    outcome = ask(cli, tmp_path, *TINY, "plan.probe=0.01")
    assert outcome.code == 2 and "steps at each of 3 rates, and 8 are needed" in outcome.err, outcome.err


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("schedule.budget=inf", "schedule.budget must be a finite number, not inf."),
        ("plan.probe=0.1", "plan.probe=0.1: Input should be less than or equal to 0.03"),
        ("growth=isotropic", "decides widths while it trains, so nobody knows what it will cost"),
        ("plan.smaller.width=2", "plan.smaller.width=2: Input should be less than or equal to 1"),
        ("+plan.smaller.height=2", "plan.smaller.height=2: Unexpected keyword argument"),
        ("plan.smaller=3", "plan.smaller=3: Input should be an object"),
        ("start_from=a.pt", "a plan is of networks from their beginning"),
        ("experiment_function={_target_: builtins.dict}", "a study is no training of one network"),
        ("trainer.precision=16-mixed", "trainer.precision=16-mixed cannot be probed"),
        ("trainer.limit_train_batches=2", "trainer.limit_train_batches changes what an epoch costs"),
    ],
)
def test_configurations_without_a_plan_are_refused(hydra_started: None, argument: str, sentence: str) -> None:
    chosen = {
        one.split("=")[0]: one
        for one in (*TINY, "name=tiny", "plan=default", "plan.probe=0.03", "growth=pairs", argument)
    }
    cfg = compose(PRIMARY, overrides=list(chosen.values()))
    with pytest.raises(UserError) as refused:
        settings_of(cfg)
        check(cfg)
    assert sentence in str(refused.value)


def test_a_folder_of_a_run_or_of_another_process_is_refused(cli: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with lock_folder(folder):
        outcome = ask(cli, tmp_path, *TINY)
    assert outcome.code == 2 and "another process is at work in" in outcome.err, outcome.err
    for name in ("config.yaml", "metrics.csv"):
        (folder / name).write_text("a run's")
    outcome = ask(cli, tmp_path, *TINY)
    assert outcome.code == 2 and "run contains a run: name another folder for the plan" in outcome.err
    assert (folder / "config.yaml").read_text() == "a run's"
