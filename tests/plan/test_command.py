"""`python -m growlab plan`: its output and files, the runs of its experiments, and refusals."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir

from growlab.base.errors import UserError
from growlab.lab.planner import plan
from growlab.lab.planner.run import problem_of, settings_of
from growlab.lab.training.configuration import PRIMARY, config_dir, set_plugin_defaults
from growlab.lab.training.run_folder import lock_folder
from tests.command_line import PLAN, CommandLine, Outcome
from tests.parts_here import needs

# A multi-layer perceptron on digits, in some hundred steps.
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
    return folder, ask(cli, folder, *TINY)


def test_it_says_what_to_do_and_what_it_cost(asked: tuple[Path, Outcome]) -> None:
    folder, outcome = asked
    assert outcome.code == 0, outcome.err
    said = " ".join(outcome.out.split())
    assert any(word in said for word in ("GROW", "A SMALLER NETWORK IS BETTER", "TRAIN THE FULL NETWORK"))
    assert "of the budget" in said and "growlab --config-dir" in said
    # Progress, line by line, with what has been spent.
    assert "held-out loss" in outcome.err and "(spent 14." in outcome.err
    found = found_in(folder)
    assert found["command"].startswith("python -m growlab --config-dir ")
    assert found["spent"]["spent"] <= 0.15 and found["verdict"]["kind"] in ("grow", "smaller", "full")
    assert set(found["measured"]) == {"full", "half_width"} and "fewer_blocks" in found["left_out"]
    table = (folder / "run" / "plan.md").read_text()
    assert table.startswith("| candidate |") and "fewer_blocks was left out" in table
    assert (folder / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")
    texts = {path.stem: path.read_text() for path in (folder / "run" / "experiment").iterdir()}
    chosen = {"grow": "grown", "smaller": "smaller", "full": "full"}[found["verdict"]["kind"]]
    assert texts["planned"] == texts[chosen].replace(f"experiment={chosen}", "experiment=planned")


@needs("depth")
@pytest.mark.parametrize("arm", ["full", "smaller", "grown"])
def test_its_experiments_run_at_equal_cost(asked: tuple[Path, Outcome], cli: CommandLine, arm: str) -> None:
    folder, _ = asked
    options = ("--config-dir", str(folder / "run"), f"experiment={arm}", f"hydra.run.dir={arm}")
    outcome = cli(*options, cwd=folder)
    assert outcome.code == 0, outcome.err
    found = json.loads((folder / arm / "results.json").read_text())
    assert 93 < found["train_cost_percent"] <= 100.001 and found["reference_epochs"] == 16
    assert found["growth"] == ("pairs" if arm == "grown" else "none")
    if arm == "grown":
        planned = found_in(folder)
        first, second = (stage["epochs"] for stage in found["stages"])
        relative = planned["relative_flops"]["half_width"]
        share = first * relative / (first * relative + second)
        # To an epoch at the full width.
        assert share == pytest.approx(planned["verdict"]["growing"][0]["guess"], abs=0.07)


def test_the_full_network_may_be_wanted_in_any_case(cli: CommandLine, tmp_path: Path) -> None:
    outcome = ask(cli, tmp_path, *TINY, "plan.size=full", "plan.charge=true", "plan.use=[half_width]")
    assert outcome.code == 0, outcome.err
    found = found_in(tmp_path)
    assert found["verdict"]["kind"] in ("grow", "full")
    assert found["budget_of_the_run"] == pytest.approx(1 - found["spent"]["spent"])
    written = (tmp_path / "run" / "experiment" / "full.yaml").read_text()
    assert f"budget: {16 * found['budget_of_the_run']:.4g}" in written


@needs("depth")
def test_its_experiments_can_start_from_the_probes(cli: CommandLine, tmp_path: Path) -> None:
    """A run begins with the weights of its probe, and both together cost the budget."""
    outcome = ask(cli, tmp_path, *TINY, "plan.start=true", "growth=pairs")
    assert outcome.code == 0, outcome.err
    run, found = tmp_path / "run", found_in(tmp_path)
    for arm, name in {"full": "full", "smaller": "half_width", "grown": "half_width"}.items():
        written = yaml.safe_load((run / "experiment" / f"{arm}.yaml").read_text())
        assert written["start_from"] == str(run / "start" / f"{name}.pt")
        probed = found["measured"][name]["cost"][-1]
        assert written["schedule"]["budget"] == pytest.approx(16 * (1 - probed), rel=1e-3)
        if arm == "full":
            continue
        # At a rate of 0 the run ends with what it began with, if it does not grow.
        options = ("--config-dir", str(run), f"experiment={arm}", f"hydra.run.dir={arm}")
        still = cli(*options, "optimizer.lr=0", "optimizer.weight_decay=0", cwd=tmp_path)
        assert still.code == 0, still.err
        start = torch.load(run / "start" / f"{name}.pt", weights_only=True)
        started, optimizer = start["state_dict"], start["optimizer"]
        assert optimizer["class"] == "growlab.optim.sgd.SGD"
        momentum = optimizer["state"]["classifier.weight"]["momentum_buffer"]
        assert momentum.shape == started["classifier.weight"].shape
        ended = torch.load(tmp_path / arm / "model.pt", weights_only=True)
        assert started.keys() == ended.keys()
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        learned = [key for key in started if not key.endswith(statistics)]
        if arm == "grown":
            assert all(len(started[key]) < len(ended[key]) for key in learned[:2])
        else:
            assert all(torch.equal(started[key], ended[key]) for key in learned)


def test_a_plan_that_cannot_be_written_is_refused_before_it_is_made_or_printed_all_the_same(
    cli: CommandLine, tmp_path: Path
) -> None:
    """A method on the command line says how it grows."""
    (tmp_path / "run" / "plan.json").mkdir(parents=True)
    outcome = ask(cli, tmp_path, *TINY, "method=net2net")
    assert outcome.code == 2 and "cannot write" in outcome.err and "Traceback" not in outcome.err
    assert "Probing spent" in outcome.out
    assert "override /growth: net2net" in (tmp_path / "run" / "experiment" / "grown.yaml").read_text()
    (tmp_path / "run" / "config.yaml").unlink()
    (tmp_path / "run" / "config.yaml").mkdir()
    outcome = ask(cli, tmp_path, *TINY)
    assert outcome.code == 2 and "(spent" not in outcome.err


def test_weights_of_another_network_are_no_start(cli: CommandLine, tmp_path: Path) -> None:
    torch.save({"out.weight": torch.zeros(10, 3)}, tmp_path / "other.pt")
    outcome = cli(*TINY, "start_from=other.pt", "hydra.run.dir=run", cwd=tmp_path)
    sentence = (
        "start_from=other.pt is of another network than the first stage's: the shape of classifier.bias=null"
    )
    assert outcome.code == 2 and sentence in outcome.err and "Traceback" not in outcome.err, outcome.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["schedule.budget=0.5"], "error: the budget is too small to probe: 15% of it are 2 steps"),
        (["optimizer.lr=-1"], "error: optimizer cannot be made with lr=-1, momentum="),
        (["ckpt_path=last"], "error: ckpt_path is of runs: a plan probes networks from their beginning."),
        (["plan.size=huge"], "error: plan.size=huge: Input should be 'any' or 'full'."),
        (["plan.sise=full"], "did you mean 'size'?"),
        (["plan=none"], "error: there is no plan 'none'"),
    ],
    ids=str,
)
def test_wrong_input_gets_a_sentence(
    cli: CommandLine, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    own = {argument.split("=")[0] for argument in arguments}
    rest = [argument for argument in TINY if argument.split("=")[0] not in own]
    outcome = ask(cli, tmp_path, *rest, *arguments)
    assert outcome.code == 2, outcome.err
    assert sentence in outcome.err and "Traceback" not in outcome.err


@pytest.fixture(scope="module")
def hydra_started() -> Iterator[None]:
    set_plugin_defaults()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("schedule.budget=null", "a plan needs a budget: schedule.budget=N"),
        ("schedule.budget=inf", "schedule.budget=inf must be a number above 0."),
        ("plan.charge=-2", "plan.charge=-2: Input should be a valid boolean"),
        ("growth=isotropic", "decides widths while it trains, so no probe can predict its cost"),
        ("plan.use=[thirds]", "plan.use: there is no candidate 'thirds'; there are half_width, fewer_blocks"),
        ("plan.use=both", "plan.use=both must be a list of candidates, such as [half_width, "),
        ("plan.use=[fewer_blocks]", "no candidate can be probed (fewer_blocks: blocks='auto' finds no"),
        ("plan.candidates=null", "plan.candidates leaves none to probe besides the full network."),
        ("plan.candidates.half_width.width=2", "half_width.width=2: Input should be less than or equal to 1"),
        ("+plan.candidates.half_width.height=2", "is no candidate: that has width, depth, settings"),
        ("plan.candidates.both=3", "plan.candidates.both=3 is no candidate: that has width, depth"),
        ("plan.candidates.both.width=wide", "both.width=wide: Input should be a valid number"),
        (
            "plan.candidates.both.settings=3",
            "plan.candidates.both.settings=3: Input should be a valid dictionary",
        ),
        ("start_from=a.pt", "start_from=a.pt is of runs: a plan probes networks from their"),
        ("study={_target_: builtins.dict}", "a study is no training of one network"),
        ("trainer.precision=16-mixed", "trainer.precision=16-mixed cannot be probed"),
        ("trainer.limit_train_batches=2", "trainer.limit_train_batches changes what an epoch costs"),
    ],
)
def test_a_configuration_that_cannot_be_probed_is_refused(
    hydra_started: None, argument: str, sentence: str
) -> None:
    chosen = {
        one.split("=")[0]: one for one in (*TINY, "name=tiny", "plan=default", "growth=pairs", argument)
    }
    cfg = compose(PRIMARY, overrides=list(chosen.values()))
    with pytest.raises(UserError) as refused:
        settings = settings_of(cfg)
        plan(problem_of(cfg)[0], settings)
    assert sentence in str(refused.value)


def test_a_folder_of_a_run_or_of_another_process_is_left_alone(cli: CommandLine, tmp_path: Path) -> None:
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


def test_a_run_is_asked_no_plan(cli: CommandLine, tmp_path: Path) -> None:
    none = "a run has no plan: leave plan=... out, or ask `growlab plan`."
    for asked, sentence in (
        ("plan.size=full", "plan.size: Key 'size' is not in struct."),
        ("plan=default", none),
    ):
        outcome = cli(asked, cwd=tmp_path)
        assert (outcome.code, outcome.err) == (2, f"error: {sentence}\n")
