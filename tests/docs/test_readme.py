"""Every command and example of the README and the guide runs as it is written there, on small settings."""

import ast
import builtins
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import growlab.inspect.__main__
import growlab.lab.analysis.__main__
import growlab.lab.analysis.dashboard
import growlab.recipes.papers.paper_table
from growlab.lab.cli.commands import COMMANDS
from tests.command_line import ROOT, CommandLine
from tests.runs.test_experiment import fake_images  # noqa: F401  (a fixture)

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "notebooks" / "docs" / "pages"
GUIDE = DOCS / "guide"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = [page.read_text(encoding="utf-8") for page in sorted(GUIDE.glob("*.md"))]
PYTHON = ".venv/bin/python -m "
BLOCKS = [block for text in (README, *PAGES) for block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)]
# The guide calls commands by the installed name.
_COMMANDS = {
    "table": "growlab.lab.analysis",
    "widths": "growlab.widths",
    "dashboard": "growlab.lab.analysis.dashboard",
    "paper": "growlab.recipes.papers.paper_table",
} | {name: f"growlab.lab.analysis {name}" for name in ("paired", "time", "figure")}


def _called(line: str) -> str:
    """The line as a call of a module where no other program starts it, and it asks for no devices."""
    program, _, rest = line.partition(" ")
    if program != "growlab" or "trainer=" in rest or "hydra/" in rest:
        return line
    command, _, arguments = rest.partition(" ")
    module, arguments = (_COMMANDS[command], arguments) if command in _COMMANDS else ("growlab", rest)
    return f"{PYTHON}{module} {arguments}".rstrip()


_WRITTEN = [
    _called(line.partition(" #")[0].rstrip())
    for language, block in BLOCKS
    if language == ""
    for line in block.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]
# Lines of several pages run once.
LINES = list(dict.fromkeys(_WRITTEN))
# Started by other programs, or by the name of the installed script.
LAUNCHERS = ("torchrun", "srun", "growlab", ".venv/bin/growlab")
TRAINING = [line for line in LINES if line.startswith(f"{PYTHON}growlab ")] + [
    line for line in LINES if line == f"{PYTHON}growlab"
]
TOOLS = {
    "growlab.lab.analysis": growlab.lab.analysis.__main__.main,
    "growlab.widths": growlab.inspect.__main__.main,
    "growlab.lab.analysis.dashboard": growlab.lab.analysis.dashboard.main,
    "growlab.recipes.papers.paper_table": growlab.recipes.papers.paper_table.main,
}
SMALL = (
    *("data.limit_train=64", "data.limit_test=20", "data.batch_size=32", "trainer.accelerator=cpu"),
    *("schedule.epochs=[1,1]", "schedule.widths=[0.25,1]"),
)
# Importing any of these fails, as on a machine without them.
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(('lightning', 'pytorch_lightning', 'hydra', 'omegaconf')))\n"
FACTORY = """
from torch import nn
def factory(image_shape=(3, 32, 32), num_classes=10):
    return nn.Sequential(
        nn.Conv2d(image_shape[0], 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the commands are called from, with a package of the user's."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "module.py").write_text(FACTORY)
    return folder


def test_every_line_of_a_plain_block_is_a_command_that_is_tested() -> None:
    assert len(LINES) > 15
    for line in LINES:
        words = line.split()
        tool = words[2] if line.startswith(PYTHON) else words[0]
        assert tool in {"make", *LAUNCHERS, *TOOLS}, f"the README has a line that no test runs: {line}"


def test_a_command_has_one_spelling() -> None:
    # Those of the papers are made from the registry, which says what started a run.
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name != "papers"]
    for page in [ROOT / "README.md", *pages]:
        modules = re.findall(r"python -m growlab\.(\w+)", page.read_text(encoding="utf-8"))
        assert not {*modules} & {*COMMANDS, "analysis"}, f"{page.name}: write growlab COMMAND"


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make")])
def test_targets_of_make_are_there(line: str) -> None:
    outcome = subprocess.run([*line.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0 and ".venv/bin/python" in outcome.stdout


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith(LAUNCHERS)])
def test_what_several_devices_run_is_a_configuration(line: str, cli: CommandLine, tmp_path: Path) -> None:
    *_, after = line.partition("growlab ")
    # What spans a range is for a sweeper.
    arguments = [word for word in shlex.split(after) if word != "-m" and not word.startswith("hydra/")]
    arguments = [word for word in arguments if "(" not in word]
    outcome = cli(*arguments, "--cfg", "job", cwd=tmp_path)
    assert outcome.code == 0 and "trainer:" in outcome.out, outcome.err


@pytest.fixture(scope="module")
def trained(cli: CommandLine, folder: Path) -> Path:
    """The folder after three runs, which other commands resume or compare."""
    for more in (["method=fixed_size"], [], ["growth=net2net"]):
        assert cli(*SMALL, *more, cwd=folder).code == 0
    return folder


def shortened(arguments: list[str]) -> list[str]:
    """A sweep's arguments with the first value of every setting, and two of the first one with several."""
    found, swept = [], False
    for word in arguments:
        name, _, values = word.partition("=")
        if "-m" in arguments and "," in values and "[" not in values:
            number = 1 if swept else 2
            word, swept = f"{name}={','.join(values.split(',')[:number])}", True
        found.append(word)
    return found


@pytest.mark.parametrize("line", TRAINING)
def test_trainings_run_as_written(
    line: str,
    cli: CommandLine,
    trained: Path,
    fake_images: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    arguments = shortened(shlex.split(line.removeprefix(f"{PYTHON}growlab")))
    if "--help" in arguments:
        outcome = cli(*arguments, cwd=trained)
        assert outcome.code == 0 and "Start here: " in outcome.out
        return
    small = list(SMALL)
    if any("isotropic" in argument for argument in arguments):
        # Their widths follow demand, not a list; as many epochs as are needed to see it.
        small = ["schedule.total_epochs=2", "trainer.accelerator=cpu"]
    if any("cifar10" in argument for argument in arguments):
        # Twenty images: two steps an epoch, as on the digits.
        small = ["data.batch_size=10" if one == "data.batch_size=32" else one for one in small]
        small += [f"data.root={fake_images}", "data.download=false", "data.limit_train=null", "data.limit_test=null"]
    if "model=custom" in arguments:
        # Not among the runs on digits, which the README compares.
        small.append("hydra.run.dir=runs/own/run")
    if "ckpt_path=last" in arguments:
        trained = tmp_path
        begun = [word for word in arguments if word != "ckpt_path=last"]
        assert cli(*begun, *small, cwd=trained, fault=("at_step", 3, int(signal.SIGKILL))).code < 0
    cli.done(*arguments, *small, cwd=trained)


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith(tuple(PYTHON + t + " " for t in TOOLS))])
def test_tools_run_as_written(
    line: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = shlex.split(line.removeprefix(PYTHON))
    monkeypatch.chdir(trained)
    monkeypatch.syspath_prepend(trained)
    assert TOOLS[name](arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


# README's examples, and what each prints: a block of Python, then one of text.
EXAMPLES = re.findall(r"^```python\n(.*?)^```$.*?^```text\n(.*?)^```$", README, re.M | re.S)


def without_rounding(text: str) -> str:
    """Text without what differs from machine to machine: rounding errors, accuracies."""
    return re.sub(r"\d+e-\d+|\d+%", "#", text)


@pytest.mark.parametrize("program, printed", EXAMPLES, ids=["lightning", "own_loop"])
def test_an_example_prints_what_the_readme_says(program: str, printed: str, tmp_path: Path) -> None:
    if "lightning" not in program:
        program = BLOCKED + program.replace("256", "64")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith(("growth", "test acc"))]
    assert without_rounding("\n".join(lines)) == without_rounding(printed.strip())
    found, said = ([int(one) for one in re.findall(r"accuracy (\d+)%", text)] for text in (done.stdout, printed))
    # Seeded: what differs is the machine's arithmetic.
    assert all(abs(one - other) <= 2 for one, other in zip(found, said, strict=True))
    assert all(float(error) < 1e-5 for error in re.findall(r"error (\S+)", done.stderr))


def _unbound(page: Path) -> set[str]:
    """Names that the page's blocks of Python use and do not make."""
    bound, unbound = set(dir(builtins)), set()
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
        unbound |= {node.id for node in names if isinstance(node.ctx, ast.Load)} - bound
    return unbound


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_a_block_imports_what_it_uses(page: Path) -> None:
    """What is the reader's own (a network, a loader) is all that a block may leave open."""
    assert _unbound(page) <= {"MyNetwork", "my_loader", "my_validation_loader", "loader", "network", "x"}


def test_the_targets_of_make_are_listed_within_eighty_columns() -> None:
    # As from a terminal, where `make test` runs the tests too.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "help"], cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    listed = done.stdout
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    told = dict(re.findall(r"^([a-z-]+):.*?## (.*)$", makefile, re.M))
    assert max(map(len, listed.splitlines())) <= 80
    assert listed.split() == [word for name, does in told.items() for word in ("make", name, *does.split())]


def test_no_folder_hides_a_target_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    assert set(re.findall(r"^([a-z-]+):.*## ", makefile, re.M)) == set(phony.split())


def test_it_asks_for_as_much_disk_as_make_says_that_it_takes() -> None:
    """6.4 GiB after `make run`, half of it libraries of CUDA: 7 GB."""
    told = re.findall(r"about (\d+) GB", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert told == re.findall(r"(\d+) GB of disk", README) == ["7"]


def test_what_is_to_go_on_after_an_interruption_is_a_run_started_above() -> None:
    block = next(text for _, text in BLOCKS if "ckpt_path=last" in text)
    lines = [line.partition("#")[0].split() for line in block.splitlines()]
    at = next(number for number, line in enumerate(lines) if "ckpt_path=last" in line)
    resumed = [word for word in lines[at] if word != "ckpt_path=last"]
    assert len(resumed) > 1 and resumed in lines[:at]


def test_pictures_and_files_that_it_names_are_there() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), f"the README links to {target}, which is not there"


def test_settings_that_it_names_are_there() -> None:
    """Choices of the table of groups: each is a file of that group."""
    page = (GUIDE / "experiments.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(model|data|growth|lr_adapt|schedule|optimizer)` \| (.*) \|$", page, re.M)
    assert len(rows) == 6
    for group, text in rows:
        named = set(re.findall(r"`(\w+)`", text))
        files = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        assert named <= files, f"experiments.md names {group} {named - files}"


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_written_from_top_to_bottom(page: Path, cli: CommandLine, tmp_path: Path) -> None:
    program = "".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S))
    cli.done(cwd=tmp_path, program=program)
