"""The command line with a replaced job: messages, exit codes, help, sweeps, lazy imports."""

import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import growlab.lab.cli.app as command_line
from growlab import __version__
from growlab.base.command_parser import whole_words
from growlab.base.errors import UserError, how_to_install
from growlab.lab.analysis.identity import leaves
from growlab.lab.cli.commands import COMMANDS, run_command
from growlab.lab.cli.explain import explain
from growlab.lab.cli.settings import difference, explanation, in_short
from growlab.lab.planner.__main__ import main as plan_main
from growlab.lab.training.configuration import composed, config_dir
from growlab.lab.training.processes import program
from tests.command_line import ROOT, CommandLine, Outcome, new_process

COMMANDS_OF_HELP = ["[run]", "widths", "plan", "table", "resume"]


# Functions that fail, for `_target_`.
def refuse() -> None:
    raise UserError("the initial width must be at least 1")


def negative() -> None:
    raise ValueError("Invalid learning rate: -1")


def broken(size: int = 0) -> None:
    raise RuntimeError("our own mistake")


def wants_wandb() -> None:
    raise ModuleNotFoundError("Requirement 'wandb>=0.12' not met")


def making(name: str) -> Callable[[Any], Any]:
    """Return a job that instantiates one of them."""
    settings = OmegaConf.create({"part": {"_target_": f"{__name__}.{name}"}})
    return lambda cfg: hydra.utils.instantiate(settings.part)


@pytest.fixture
def as_it_was() -> Iterator[None]:
    """Restore what the command line changes in its process: loggers, Hydra's configuration, environment variables."""
    loggers = [logging.getLogger(), logging.getLogger("hydra")]
    before = [(logger, logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    config, environment = HydraConfig.instance().cfg, dict(os.environ)
    yield
    HydraConfig.instance().cfg = config
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:] = handlers
        logger.propagate = propagate


@pytest.fixture
def growlab(
    as_it_was: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Return a function that calls the command line in this process with `job` as `build.train`."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, job: Callable[[Any], Any] = lambda cfg: None) -> Outcome:
        experiment = types.ModuleType("growlab.lab.training.build")
        experiment.train = job  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "growlab.lab.training.build", experiment)
        monkeypatch.setattr(sys, "argv", ["growlab", *arguments])
        try:
            code = command_line.main()
        except SystemExit as stop:
            code = stop.code or 0
        return Outcome(code, *capfd.readouterr())

    return call


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        (lambda cfg: OmegaConf.create({"needed": "???"}).needed, "Missing mandatory value: needed."),
        (
            lambda cfg: OmegaConf.create({"refers": "${nowhere}"}).refers,
            "refers: Interpolation key 'nowhere' not found.",
        ),
        (making("refuse"), "the initial width must be at least 1."),
        (making("negative"), "part: Invalid learning rate: -1."),
        (making("wants_wandb"), f"part needs a package that is not installed: {how_to_install('wandb')}."),
    ],
)
def test_an_error_that_the_user_can_fix_is_one_line(
    growlab: Callable[..., Outcome], job: Callable[[Any], Any], sentence: str
) -> None:
    outcome = growlab(job=job)
    assert (outcome.code, outcome.err) == (2, f"error: {sentence}\n")


@pytest.mark.parametrize(
    ("overrides", "job", "place"),
    [
        ((), lambda cfg: cfg.typo_in_our_code, "in <lambda>"),
        ((), making("broken"), "in broken"),
        (
            (f"+part._target_={__name__}.broken", "+part.size=1"),
            lambda cfg: hydra.utils.instantiate(cfg.part),
            "in broken",
        ),
    ],
    ids=["attribute", "constructor", "inside_a_constructor"],
)
def test_bugs_keep_their_traceback(
    growlab: Callable[..., Outcome], overrides: tuple[str, ...], job: Callable[[Any], Any], place: str
) -> None:
    outcome = growlab(*overrides, job=job)
    assert outcome.code == 1 and "\nerror: " not in outcome.err
    assert "Traceback" in outcome.err and place in outcome.err


def test_a_job_gets_the_composed_configuration(growlab: Callable[..., Outcome]) -> None:
    seen = []
    outcome = growlab("growth=pairs", "schedule.total_epochs=7", job=seen.append)
    assert outcome == Outcome(0, "", "")
    (cfg,) = seen
    assert (cfg.growth._target_, cfg.schedule.total_epochs) == ("growlab.growth.PairGrowth", 7)


def test_a_sweep_continues_after_failures_and_prints_each_reason_once(growlab: Callable[..., Outcome]) -> None:
    ran = []

    def job(cfg: Any) -> float:
        ran.append(cfg.seed)
        if cfg.seed > 0:
            raise UserError("the data is gone")
        return 0.5

    for _ in range(2):
        outcome = growlab("-m", "name=try", "seed=0,1,2", job=job)
        assert outcome.code == 2
        lines = outcome.err.splitlines()
        assert lines[:2] == ["job 1 (seed=1) failed: the data is gone.", "job 2 (seed=2) failed: as job 1 did."]
        assert lines[-1] == "error: 2 jobs of the sweep failed."
    assert ran == [0, 1, 2] * 2


@pytest.mark.parametrize("by_lightning", [False, True])
def test_ctrl_c(growlab: Callable[..., Outcome], by_lightning: bool) -> None:
    def job(cfg: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if by_lightning:
                sys.exit(1)
            raise

    assert growlab(job=lambda cfg: sys.exit(5)).code == 5
    outcome = growlab(job=job)
    assert outcome.code == 130
    assert outcome.err.startswith("interrupted") and outcome.err.count("\n") == 1


def test_modules_in_the_current_folder_can_be_imported(
    growlab: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `python -m growlab`; the script `growlab` has its own folder on the path instead."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p or ".").resolve() != tmp_path])
    (tmp_path / "users_module.py").write_text("def made(): return 1")
    made = []
    outcome = growlab(job=lambda cfg: made.append(hydra.utils.instantiate({"_target_": "users_module.made"})))
    assert (outcome.code, made) == (0, [1]), outcome.err


def test_installing_an_extra_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install growlab[wandb]` fails for an installation from a checkout."""
    declared = ["torch>=2", "wandb>=0.18; extra == 'all'", "wandb>=0.18; extra == 'wandb'", "a>1; extra == 'two'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: [*declared, 'b; extra == "two"'])
    assert how_to_install("wandb") == "pip install 'wandb>=0.18' (growlab's extra [wandb])"
    assert how_to_install("two") == "pip install 'a>1' 'b' (growlab's extra [two])"


def test_printed_commands_use_the_name_of_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    here = types.SimpleNamespace(main=lambda given: seen.append((program(), sys.argv[0].rpartition("/")[2])))
    monkeypatch.setitem(sys.modules, COMMANDS["plan"].module, here)
    for called in ("/a venv/bin/growlab", "/site-packages/growlab/lab/cli/app.py"):
        monkeypatch.setattr(sys, "argv", [called, "plan"])
        run_command(["plan"])
    assert seen == [("growlab", "growlab plan"), ("growlab", "growlab plan")]
    monkeypatch.setattr(sys, "argv", ["/site-packages/growlab/__main__.py"])
    assert program() == "python -m growlab"


# Help of `growlab plan` comes from Hydra.
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "plan"])
def test_help_of_a_command_has_an_example_and_a_wrong_option_is_one_sentence(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["growlab"])
    with pytest.raises(SystemExit) as end:
        run_command([command, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert text.startswith(f"usage: growlab {command} ") and f"Example: growlab {command} " in text
    assert run_command([command, "--nonsense"]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    assert streams.err.startswith("error: ") and streams.err.endswith(f"see growlab {command} --help.\n")
    # A terminal shows what takes the time.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run_command([command, "--nonsense"])
    assert capsys.readouterr().err.startswith("importing PyTorch ...\n") == bool(COMMANDS[command].imports)


@pytest.mark.parametrize(
    ("main", "typed"), [(command_line.main, ["growlab", "plan"]), (plan_main, ["python -m growlab plan"])]
)
def test_help_of_a_plan_has_its_settings_and_an_example(
    as_it_was: None,
    main: Callable[[], int],
    typed: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", [*typed, "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    text = capfd.readouterr().out
    assert max(map(len, text.splitlines())) <= 110
    assert text.startswith("usage: growlab plan ") and "\nExample: growlab plan " in text
    settings = yaml.safe_load((config_dir() / "plan" / "default.yaml").read_text())
    assert all(re.search(rf"^plan\.{name}[=:]", text, re.MULTILINE) for name in settings)


# Hides packages, also from code that searches for them.
HIDING = """
import sys
from importlib.machinery import PathFinder
def hide(names):
    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.partition(".")[0] in names else super().find_spec(name, path, target)
    sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
WITHOUT = {
    (): (2, r"error: this needs hydra, which is not installed: pip install .*'hydra-core.*\."),
    ("--version",): (0, rf"^growlab {re.escape(__version__)}"),
    ("--help",): (0, r"^Experiments need hydra, which is not installed: pip install [^\0]*\n    growlab widths "),
    ("table", "--help"): (0, "usage: growlab table"),
    ("widths", "growlab/mlp8", "--input-shape", "1,4,4"): (0, "growlab/mlp8: 8 width groups"),
}
# Compilers must not be imported: they take as long as the rest of torch.
ENGINE = """
import torch, growlab
from growlab import parts
print(sorted({"torch._dynamo", "triton"} & set(sys.modules)))
network = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
x = torch.randn(8, 6)
method, average = growlab.VarianceTransfer(), parts.Averages(0.9)
grower = growlab.Grower(network, x, method=method, trigger={0: 0.25, 1: 1.0}, parts=[average], verbose=False)
optimizer = growlab.optim.SGD(network.parameters(), lr=0.1)
grower.follow(optimizer)
for epoch in range(2):
    grower.step(epoch=epoch)
    network(x).sum().backward()
    optimizer.step()
grower.finish()
import growlab.inspect, growlab.parts.depth, growlab.parts.isotropic, growlab.parts.hypernets
print(network[0].out_features, "yaml" in sys.modules)
"""
# Errors of missing packages say how to install them.
LACKING = """
import growlab
for name in ("growlab.Growth", "__import__('growlab.frontends.transformers')"):
    try:
        eval(name)
    except ImportError as error:
        print(error)
"""
# Importing the module runs the command and exits, each time.
CALLED = """
import contextlib, io, json
ended = []
for arguments in {}:
    sys.argv = ["growlab", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            import growlab.lab.cli.app
        except SystemExit as stop:
            ended.append([stop.code or 0, out.getvalue()])
print(json.dumps(ended))
"""


def printed_by(program: str) -> str:
    done = new_process("-c", program, cwd=ROOT)
    assert done.code == 0, done.err
    return done.out


def test_with_only_torch_the_engine_grows_a_network_and_its_commands_run() -> None:
    """As after `pip install --no-deps growlab`."""
    absent = "hydra omegaconf lightning pytorch_lightning torchvision transformers timm pandas scipy sklearn"
    absent = [*absent.split(), "matplotlib", "rich", "PIL", "pyarrow", "pydantic", "safetensors"]
    printed = printed_by(f"{HIDING}\nhide({absent})\n{ENGINE}{LACKING}{CALLED.format(list(WITHOUT))}")
    compilers, grown, first, second, ended = printed.splitlines()
    assert (compilers, grown) == ("[]", "32 False")
    assert first.startswith("growlab.Growth needs lightning, which is not installed: pip install ")
    assert f"needs transformers, which is not installed: {how_to_install('transformers')}" in second
    for (expected, message), (code, text) in zip(WITHOUT.values(), json.loads(ended), strict=True):
        assert code == expected and "Traceback" not in text and re.search(message, text), text


def test_hydra_full_error_shows_tracebacks(growlab: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    outcome = growlab("growth=netnet")
    assert outcome.code == 2
    assert outcome.err.startswith("Traceback")
    assert outcome.err.splitlines()[-1].startswith("error: there is no growth 'netnet'")


def test_a_closed_pipe_ends_the_output_without_a_message(cli: CommandLine, tmp_path: Path) -> None:
    """As in `growlab --cfg job | head`."""
    program = """
import os, sys
from growlab.lab.cli.app import main
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 1)
sys.argv = ["growlab", "--cfg", "job"]
sys.exit(main())
"""
    outcome = cli(cwd=tmp_path, program=program)
    assert (outcome.code, outcome.err) == (141, "")


def test_help_begins_with_commands_and_experiments_and_lists_groups(growlab: Callable[..., Outcome]) -> None:
    outcome = growlab("--help")
    assert outcome.code == 0 and outcome.err == ""
    lines = outcome.out.splitlines()
    assert len(lines) <= 50 and [line.split()[1] for line in lines[2:7]] == COMMANDS_OF_HELP
    assert "growlab -m seed=0,1,2" in outcome.out and ", growth, " in outcome.out
    assert "$" not in outcome.out.replace('"$(growlab -sc install=bash)"', "")
    assert "hydra.cc" not in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def on_a_terminal(run: Callable[[], object]) -> list[str]:
    """Lines that a function prints to a terminal of 80 columns."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    text = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(reader, 4096):
                text.extend(chunk)

    # In a thread, since a terminal buffers little.
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    with os.fdopen(writer, "w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        run()
    reading.join(60)
    os.close(reader)
    return text.decode().replace("\r\n", "\n").splitlines()


DIGITS = str(ROOT / "notebooks" / "results" / "digits")


@pytest.mark.parametrize(
    "arguments",
    [
        *([name, "--help"] for name in COMMANDS if name != "plan"),
        ["figure", "nothing", DIGITS, "-o", "a.png"],
        *([name, DIGITS] for name in ("table", "paired", "time", "paper")),
        ["reproduce", "--list"],
    ],
    ids=lambda arguments: " ".join(arguments[:2] if arguments[-1] == "--help" else arguments[:1]),
)
def test_lines_on_a_terminal_fit_eighty_columns(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["growlab", *arguments])

    def run() -> None:
        with contextlib.suppress(SystemExit):
            command_line.main()

    lines = on_a_terminal(run)
    assert len(lines) > 3 and max(map(len, lines)) <= 80
    assert not any(re.search(r"\w-$", line) for line in lines)


def test_long_lines_break_between_words_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(f"word{number:03}" for number in range(40))

    def run() -> None:
        with whole_words():
            print(f"error: {words}", file=sys.stderr)
            print(f"  {'x' * 100}")
            print("\x1b[1m" + words)

    lines = on_a_terminal(run)
    assert max(map(len, lines[:-2])) <= 80 and " ".join(lines[:-2]).split() == ["error:", *words.split()]
    assert lines[-2].strip() == "x" * 100 and lines[-1] == f"\x1b[1m{words}"
    run()
    assert capsys.readouterr() == (f"  {'x' * 100}\n\x1b[1m{words}\n", f"error: {words}\n")


def test_the_default_run_is_shown_in_few_settings_and_each_is_explained() -> None:
    """Chosen parts are shown too; `difference` prints only what differs from the default run."""
    cfg = composed(["depth.blocks=auto"])
    default = composed([])
    assert len(in_short(default, default).splitlines()) <= 80 and "depth" not in in_short(default, default)
    assert "blocks: auto" in in_short(cfg, default)
    assert "mirror: false" in in_short(cfg, default, {"data.mirror"})
    off = composed(["lr_adapt=none"])
    assert "divide_output_lr_by_fan_in: false" in in_short(off, default)
    assert difference(cfg, default).splitlines()[0] == "depth.blocks=auto  # null"
    other = ["optimizer=muon", "model=isotropic_mlp"]
    for chosen in ([], ["depth.blocks=auto"], [*other, "isotropic.mode=reserve"], ["logger=wandb"]):
        cfg = composed(chosen)
        choices = HydraConfig.get().runtime.choices
        for name, _ in leaves(OmegaConf.to_container(cfg)):
            if not name.startswith(("hydra", "parts")) and not name.endswith("_"):
                said = explanation(cfg, name, choices)
                assert said.count("\n") and "see the documentation" not in said, name
                assert not name.startswith("isotropic.") or re.search(
                    r"^ +[\w |]*(int|float|bool|Literal)", said, re.M
                ), name
    assert explanation(cfg, "growth", choices).startswith("growth: bert2bert, ")
    assert explanation(cfg, "method=ours", choices).startswith("method=ours: The full method of Yuan et al. 2023")
    with pytest.raises(UserError, match="near it: progress_unit"):
        explanation(cfg, "progres_unit", choices)


def test_cfg_prints_the_job_without_importing_torch() -> None:
    code = "import sys; from growlab.lab.cli.app import main; sys.exit(main() or 'torch' in sys.modules)"
    done = new_process("-c", code, "--cfg", "job", "seed=17", cwd=ROOT)
    assert done.code == 0, done.err
    printed = OmegaConf.create(done.out)
    assert printed.seed == 17 and "hydra" not in printed


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("growlab growth=n", ["growth=net2net", "growth=none"]),
        ("growlab schedule.total_e", ["schedule.total_epochs="]),
        ("growlab tab", ["table"]),
        ("growlab see", ["seed="]),
        ("growlab plan growth=n", ["growth=net2net", "growth=none"]),
        ("growlab run schedule.total_e", ["schedule.total_epochs="]),
        ("growlab table schedule.total", []),
    ],
)
def test_completion(
    growlab: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, line: str, candidates: list[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    outcome = growlab("--shell-completion", "query=bash")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.split() == candidates


def test_messages_are_one_line_with_a_full_stop() -> None:
    assert explain(UserError("no data\n  in /nowhere")) == "no data in /nowhere."
    assert explain(UserError("is that so?")) == "is that so?"
    assert explain(OSError(28, "No space left", "/data/x")) == "cannot use /data/x: No space left."
    assert explain(MemoryError("9 TiB")) == "there is not enough memory: 9 TiB."
    caused = RuntimeError("something failed")
    caused.__cause__ = UserError("the reason")
    assert explain(caused) == "the reason."


@pytest.mark.parametrize(("logger", "package"), [("mlflow", "mlflow"), ("aim", "aim"), ("comet", "comet-ml")])
def test_a_logger_without_its_package_names_the_package(logger: str, package: str) -> None:
    if importlib.util.find_spec(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    with pytest.raises(hydra.errors.InstantiationException) as raised:
        hydra.utils.instantiate(composed([f"logger={logger}"]).logger)
    assert explain(raised.value) == f"logger.{logger} needs a package that is not installed: pip install {package}."
