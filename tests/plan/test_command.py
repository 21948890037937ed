"""`python -m growlab plan`: what it prints and leaves, that its files can be run, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from growlab.lab.training.run_folder import held_alone
from tests.command_line import PLAN, CommandLine, Outcome
from tests.parts_here import needs

# A multi-layer perceptron on digits, in some hundred steps.
TINY = (
    *("model=mlp5", "model.width=16", "data.batch_size=16", "data.limit_train=400", "data.limit_test=60"),
    *("schedule.budget=16", "optimizer.lr=0.05", "trainer=cpu", "lr_adapt=none"),
)


def ask(cli: CommandLine, folder: Path, *arguments: str) -> Outcome:
    return cli(*arguments, "hydra.run.dir=run", cwd=folder, environment={PLAN: "1"})


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
    found = json.loads((folder / "run" / "plan.json").read_text())
    assert found["command"].startswith("python -m growlab --config-dir ")
    assert found["spent"]["spent"] <= 0.15 and found["verdict"]["kind"] in ("grow", "smaller", "full")
    assert set(found["measured"]) == {"full", "half_width"} and "fewer_blocks" in found["left_out"]
    table = (folder / "run" / "plan.md").read_text()
    assert table.startswith("| candidate |") and "fewer_blocks was left out" in table
    assert (folder / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")


@needs("depth")
@pytest.mark.parametrize("arm", ["planned", "full", "smaller", "grown"])
def test_its_experiments_run_at_equal_cost(asked: tuple[Path, Outcome], cli: CommandLine, arm: str) -> None:
    folder, _ = asked
    options = ("--config-dir", str(folder / "run"), f"experiment={arm}", f"hydra.run.dir={arm}")
    outcome = cli(*options, cwd=folder)
    assert outcome.code == 0, outcome.err
    found = json.loads((folder / arm / "results.json").read_text())
    assert 93 < found["train_cost_percent"] <= 100.001 and found["reference_epochs"] == 16
    widths = [
        stage["widths"][0] if isinstance(stage["widths"], list) else stage["widths"]
        for stage in found["stages"]
    ]
    assert found["growth"] == {"full": "none", "smaller": "none", "grown": "pairs"}.get(arm, found["growth"])
    if arm == "grown":
        assert len(widths) == 2
        planned = json.loads((folder / "run" / "plan.json").read_text())
        first, second = (stage["epochs"] for stage in found["stages"])
        relative = planned["relative_flops"]["half_width"]
        share = first * relative / (first * relative + second)
        # To an epoch at the full width.
        assert share == pytest.approx(planned["verdict"]["growing"][0]["guess"], abs=0.07)


def test_the_full_network_may_be_wanted_in_any_case(cli: CommandLine, tmp_path: Path) -> None:
    outcome = ask(cli, tmp_path, *TINY, "plan.size=full", "plan.charge=true", "plan.use=[half_width]")
    assert outcome.code == 0, outcome.err
    found = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert found["verdict"]["kind"] in ("grow", "full")
    assert found["budget_of_the_run"] == pytest.approx(1 - found["spent"]["spent"])
    written = (tmp_path / "run" / "experiment" / "full.yaml").read_text()
    left = 16 * found["budget_of_the_run"]
    assert f"budget: {left:.4g}" in written


@needs("depth")
def test_its_experiments_can_go_on_from_the_probes(cli: CommandLine, tmp_path: Path) -> None:
    """The weights that an arm begins with are those of its probe, and both together cost the budget."""
    outcome = ask(cli, tmp_path, *TINY, "plan.start=true", "growth=pairs")
    assert outcome.code == 0, outcome.err
    run = tmp_path / "run"
    found = json.loads((run / "plan.json").read_text())
    for arm, name in {"full": "full", "smaller": "half_width", "grown": "half_width"}.items():
        written = yaml.safe_load((run / "experiment" / f"{arm}.yaml").read_text())
        assert written["start_from"] == str(run / "start" / f"{name}.pt")
        probed = found["measured"][name]["cost"][-1]
        assert written["schedule"]["budget"] == pytest.approx(16 * (1 - probed), rel=1e-3)
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
        learned = [
            key for key in started if not key.endswith(("running_mean", "running_var", "num_batches_tracked"))
        ]
        if arm == "grown":
            assert all(len(started[key]) < len(ended[key]) for key in learned[:2])
        else:
            assert all(torch.equal(started[key], ended[key]) for key in learned)


def test_a_method_on_the_command_line_says_how_it_grows(cli: CommandLine, tmp_path: Path) -> None:
    outcome = ask(cli, tmp_path, *TINY, "method=net2net")
    assert outcome.code == 0, outcome.err
    assert "override /growth: net2net" in (tmp_path / "run" / "experiment" / "grown.yaml").read_text()


def test_weights_of_another_network_are_no_start(cli: CommandLine, tmp_path: Path) -> None:
    torch.save({"out.weight": torch.zeros(10, 3)}, tmp_path / "other.pt")
    for file, sentence in (
        (
            "other.pt",
            "start_from=other.pt is of another network than the first stage's: classifier.bias is absent",
        ),
        ("none.pt", "cannot read start_from=none.pt"),
    ):
        outcome = cli(*TINY, f"start_from={file}", "hydra.run.dir=run", cwd=tmp_path)
        assert outcome.code == 2 and sentence in outcome.err and "Traceback" not in outcome.err, outcome.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["schedule.budget=null"], "error: a plan needs a budget: schedule.budget=N"),
        (["schedule.budget=0.5"], "error: the budget is too small to probe: 15% of it are 2 steps"),
        (["schedule.budget=-1"], "error: schedule.budget=-1.0 must be a number above 0."),
        (["schedule.budget=inf"], "error: schedule.budget=inf must be a number above 0."),
        (["seed=-1"], "error: seed=-1 must lie between 0 and 4294967295."),
        (["probe_size=1"], "error: probe_size=1 must be at least 2"),
        (["trainer.accelerator=cuda"], "error: trainer.accelerator=cuda, but torch"),
        (["plan.charge=-2"], "error: plan.charge=-2 must be true or false."),
        (["optimizer.lr=nan"], "error: optimizer.lr must be a finite number, not nan."),
        (["optimizer.lr=-1"], "error: optimizer cannot be made with lr=-1, momentum="),
        (["growth=isotropic"], "decides widths while it trains, so no probe tells what it will cost"),
        (
            ["plan.use=[thirds]"],
            "error: plan.use: there is no candidate 'thirds'; there are half_width, fewer_blocks",
        ),
        (
            ["plan.candidates.half_width.width=2"],
            "width of candidate half_width must be above 0 and at most 1",
        ),
        (["+plan.candidates.half_width.height=2"], "plan.candidates.half_width has no 'height'"),
        (
            ["plan.use=[fewer_blocks]"],
            "error: no candidate can be probed (fewer_blocks: blocks='auto' finds no",
        ),
        (["plan.use=both"], "error: plan.use=both must be a list of candidates, such as [half_width, "),
        (["plan.candidates=null"], "error: plan.candidates leaves none to probe beside the full network."),
        (["plan.candidates.both=3"], "error: plan.candidates.both=3 is no candidate: that has width, depth"),
        (
            ["plan.candidates.both.width=wide"],
            "plan.candidates.both.width must be a finite number, not 'wide'",
        ),
        (["plan.candidates.both.settings=3"], "plan.candidates.both.settings=3 must be settings of the run"),
        (["ckpt_path=last"], "error: ckpt_path is of runs: a plan probes networks from their beginning."),
        (["start_from=a.pt"], "error: start_from=a.pt is of runs: a plan probes networks from their"),
        (["plan.size=huge"], "error: plan.size=huge must be any or full."),
        (["plan.sise=full"], "did you mean 'size'?"),
        (["plan=none"], "error: there is no plan 'none'"),
        (["study={_target_: builtins.dict}"], "error: a study is no training of one network"),
        (["trainer.precision=16-mixed"], "trainer.precision=16-mixed cannot be probed"),
        (["trainer.limit_train_batches=2"], "trainer.limit_train_batches changes what an epoch costs"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input_gets_a_sentence(
    cli: CommandLine, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    own = {argument.split("=")[0] for argument in arguments}
    rest = [argument for argument in TINY if argument.split("=")[0] not in own]
    outcome = ask(cli, tmp_path, *rest, *arguments)
    assert outcome.code == 2, outcome.err
    assert sentence in outcome.err and "Traceback" not in outcome.err


def test_a_folder_of_a_run_or_of_another_process_is_left_alone(cli: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with held_alone(folder):
        outcome = ask(cli, tmp_path, *TINY)
    assert outcome.code == 2 and "another process is at work in" in outcome.err, outcome.err
    for name in ("config.yaml", "metrics.csv"):
        (folder / name).write_text("a run's")
    outcome = ask(cli, tmp_path, *TINY)
    assert outcome.code == 2 and "run holds a run: name another folder for the plan" in outcome.err
    assert (folder / "config.yaml").read_text() == "a run's"


def test_a_plan_that_cannot_be_written_is_told_before_it_is_made_or_said_all_the_same(
    cli: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "run" / "plan.json").mkdir(parents=True)
    outcome = ask(cli, tmp_path, *TINY)
    assert outcome.code == 2 and "cannot write" in outcome.err and "Traceback" not in outcome.err
    assert "Probing spent" in outcome.out
    (tmp_path / "run" / "config.yaml").unlink()
    (tmp_path / "run" / "config.yaml").mkdir()
    outcome = ask(cli, tmp_path, *TINY)
    assert outcome.code == 2 and "(spent" not in outcome.err


def test_a_run_is_asked_no_plan(cli: CommandLine, tmp_path: Path) -> None:
    for asked, sentence in (
        ("plan.size=full", "plan.size: Key 'size' is not in struct."),
        (
            "plan=default",
            "a run has no plan: leave plan=... out, or ask `growlab plan` with the other settings.",
        ),
    ):
        outcome = cli(asked, cwd=tmp_path)
        assert (outcome.code, outcome.err) == (2, f"error: {sentence}\n")
