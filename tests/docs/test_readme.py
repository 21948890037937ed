"""Commands and examples of the README and the guide run as written, with small settings."""

import ast
import builtins
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

import growlab.inspect.__main__
import growlab.lab.analysis.__main__
import growlab.lab.analysis.dashboard
import growlab.recipes.papers.paper_table
from growlab.lab.cli.commands import COMMANDS
from tests.command_line import ROOT, CommandLine, new_process
from tests.runs.test_experiment import fake_images  # noqa: F401  (a fixture)

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "notebooks" / "docs" / "pages"
GUIDE = DOCS / "guide"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = [page.read_text(encoding="utf-8") for page in sorted(GUIDE.glob("*.md"))]
PYTHON = ".venv/bin/python -m "
BLOCKS = [block for text in (README, *PAGES) for block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)]
# Modules of commands.
_COMMANDS = {
    "table": "growlab.lab.analysis",
    "widths": "growlab.widths",
    "dashboard": "growlab.lab.analysis.dashboard",
    "paper": "growlab.recipes.papers.paper_table",
} | {name: f"growlab.lab.analysis {name}" for name in ("paired", "time", "figure")}


def _called(line: str) -> str:
    """Rewrite `growlab COMMAND` as a call of the module, unless it uses several devices or a launcher."""
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
# Without repeated lines.
LINES = list(dict.fromkeys(_WRITTEN))
# Programs that are not started here: only their configuration is tested.
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
# Lets imports of these packages fail.
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
    """Working directory with a user's package."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "module.py").write_text(FACTORY)
    return folder


def test_every_command_is_tested() -> None:
    assert len(LINES) > 15
    for line in LINES:
        words = line.split()
        tool = words[2] if line.startswith(PYTHON) else words[0]
        assert tool in {"make", *LAUNCHERS, *TOOLS}, f"the README has a line that no test runs: {line}"


def test_a_command_has_one_spelling() -> None:
    # Generated pages of papers quote recorded commands.
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name != "papers"]
    for page in [ROOT / "README.md", *pages]:
        modules = re.findall(r"python -m growlab\.(\w+)", page.read_text(encoding="utf-8"))
        assert not {*modules} & {*COMMANDS, "analysis"}, f"{page.name}: write growlab COMMAND"


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make")])
def test_targets_of_make_exist(line: str) -> None:
    outcome = subprocess.run([*line.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0 and ".venv/bin/python" in outcome.stdout


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith(LAUNCHERS)])
def test_configurations_for_several_devices_compose(line: str, cli: CommandLine, tmp_path: Path) -> None:
    *_, after = line.partition("growlab ")
    # Without ranges for a sweeper.
    arguments = [word for word in shlex.split(after) if word != "-m" and not word.startswith("hydra/")]
    arguments = [word for word in arguments if "(" not in word]
    outcome = cli(*arguments, "--cfg", "job", cwd=tmp_path)
    assert outcome.code == 0 and "trainer:" in outcome.out, outcome.err


@pytest.fixture(scope="module")
def trained(cli: CommandLine, folder: Path) -> Path:
    """Working directory after three runs, for commands that resume or compare runs."""
    for more in (["method=fixed_size"], [], ["growth=net2net"]):
        assert cli(*SMALL, *more, cwd=folder).code == 0
    return folder


def shortened(arguments: list[str]) -> list[str]:
    """Shorten a sweep to two values of the first swept setting and one of the others."""
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
        # Without lists of widths, which these methods choose.
        small = ["schedule.total_epochs=2", "trainer.accelerator=cpu"]
    if any("cifar10" in argument for argument in arguments):
        # Twenty images: two steps per epoch.
        small = ["data.batch_size=10" if one == "data.batch_size=32" else one for one in small]
        small += [f"data.root={fake_images}", "data.download=false", "data.limit_train=null", "data.limit_test=null"]
    if "model=custom" in arguments:
        # Not in the folder of runs that the README compares.
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


# Examples of the README and their output: a block of Python, then one of text.
EXAMPLES = re.findall(r"^```python\n(.*?)^```$.*?^```text\n(.*?)^```$", README, re.M | re.S)


def without_rounding(text: str) -> str:
    """Replace rounding errors and accuracies, which differ between machines."""
    return re.sub(r"\d+e-\d+|\d+%", "#", text)


@pytest.mark.parametrize("program, printed", EXAMPLES, ids=["lightning", "own_loop"])
def test_an_example_prints_the_stated_output(program: str, printed: str, tmp_path: Path) -> None:
    if "lightning" not in program:
        program = BLOCKED + program.replace("256", "64")
    done = new_process("-c", program, cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [line for line in (done.err + done.out).splitlines() if line.startswith(("growth", "test acc"))]
    assert without_rounding("\n".join(lines)) == without_rounding(printed.strip())
    found, said = ([int(one) for one in re.findall(r"accuracy (\d+)%", text)] for text in (done.out, printed))
    # Accuracies differ by the machine's arithmetic.
    assert all(abs(one - other) <= 2 for one, other in zip(found, said, strict=True))
    assert all(float(error) < 1e-5 for error in re.findall(r"error (\S+)", done.err))


def _unbound(page: Path) -> set[str]:
    """Names that a page's blocks of Python use without defining them."""
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
def test_blocks_define_or_import_their_names(page: Path) -> None:
    """Except for the reader's network and data."""
    assert _unbound(page) <= {"MyNetwork", "my_loader", "my_validation_loader", "loader", "network", "x"}


def test_make_help_lists_all_targets_within_eighty_columns() -> None:
    # Without the variables of a surrounding `make test`.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "help"], cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    listed = done.stdout
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    described = dict(re.findall(r"^([a-z-]+):.*?## (.*)$", makefile, re.M))
    assert max(map(len, listed.splitlines())) <= 80
    assert listed.split() == [word for name, does in described.items() for word in ("make", name, *does.split())]


def test_targets_of_make_are_phony() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    assert set(re.findall(r"^([a-z-]+):.*## ", makefile, re.M)) == set(phony.split())


def test_the_readme_and_the_makefile_state_the_same_disk_space() -> None:
    """6.4 GiB after `make run`, half of it libraries of CUDA: 7 GB."""
    stated = re.findall(r"about (\d+) GB", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert stated == re.findall(r"(\d+) GB of disk", README) == ["7"]


def test_the_resumed_command_is_one_of_those_above() -> None:
    block = next(text for _, text in BLOCKS if "ckpt_path=last" in text)
    lines = [line.partition("#")[0].split() for line in block.splitlines()]
    at = next(number for number, line in enumerate(lines) if "ckpt_path=last" in line)
    resumed = [word for word in lines[at] if word != "ckpt_path=last"]
    assert len(resumed) > 1 and resumed in lines[:at]


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), f"the README links to {target}, which does not exist"


def test_options_in_the_table_of_groups_exist() -> None:
    page = (GUIDE / "experiments.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(model|data|growth|lr_adapt|schedule|optimizer)` \| (.*) \|$", page, re.M)
    assert len(rows) == 6
    for group, text in rows:
        named = set(re.findall(r"`(\w+)`", text))
        files = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        assert named <= files, f"experiments.md names {group} {named - files}"


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_run_as_written(page: Path, cli: CommandLine, tmp_path: Path) -> None:
    program = "".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S))
    cli.done(cwd=tmp_path, program=program)
