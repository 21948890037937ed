"""Untrusted modules in the working directory, names and checkpoints run no code and break no output."""

import csv
import io
import pickle
import re
from pathlib import Path

import pytest
import torch

from growlab.base.errors import UserError
from growlab.inspect.hub import read_saved
from growlab.lab.analysis.grid import Grid, inert
from growlab.lab.analysis.report import page
from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.tables import markdown, summarise, write_table
from growlab.lab.training.checkpoints import read_header
from tests.command_line import ROOT, new_process
from tests.lab.analysis.fake_runs import write_run
from tests.lab.analysis.test_report import runs_of

WIDEN = ("widen", "no_such_folder", "--width", "2", "-o", "out")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("-m", "growlab", "widths", "mine:made"), marks=pytest.mark.slow),
        pytest.param(("-m", "growlab.widen", *WIDEN[1:]), marks=pytest.mark.slow),
        ("bin/growlab", *WIDEN),
    ],
    ids=lambda command: command[1] if command[0] == "-m" else command[0],
)
def test_modules_in_the_working_directory_do_not_replace_packages(command: tuple[str, ...], tmp_path: Path) -> None:
    # Without modules that Python itself imports first.
    for name in ("torch", "json", "csv", "pathlib", "hydra", "numpy", "argparse"):
        (tmp_path / f"{name}.py").write_text(f"open('ran_{name}', 'w')\nraise SystemExit(7)\n")
    (tmp_path / "mine.py").write_text("import torch\ndef made(): return torch.nn.Linear(4, 4), torch.ones(2, 4)\n")
    script = tmp_path / "elsewhere" / "bin" / "growlab"
    script.parent.mkdir(parents=True)
    script.write_text("import sys\nfrom growlab.lab.cli.app import main\nsys.exit(main())\n")
    arguments = [str(script) if one == "bin/growlab" else one for one in command]
    ended = new_process(*arguments, cwd=tmp_path)
    assert list(tmp_path.glob("ran_*")) == []
    if "mine:made" in command:
        assert ended.code == 0 and "mine:made" in ended.out, ended.err
    else:
        assert (ended.code, "no config.json" in ended.err) == (2, True), ended.err


NAMES = ("<!--<script>", "</script><b>", "x]]>", "=HYPERLINK(1)", "\x1b[31mred\x9b2J", "a|b")
NAMES = (*NAMES, r"50% & $x_1^2$ \input{y} {}~#<>")


def runs_named(tmp_path: Path, name: str) -> list:
    write_run(tmp_path / "one", growth=name, lr_adapt="none", model=name)
    return load_runs(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_reports_and_tables_escape_names(name: str, tmp_path: Path) -> None:
    runs = runs_named(tmp_path, name)
    text = page(runs)
    assert not any("<" in line for line in text.splitlines() if line.startswith("const RUNS = "))
    assert runs_of(text)[0]["title"].startswith(name)
    rows = summarise(runs)
    for text in (markdown(rows), write_table(rows, "latex"), write_table(rows, "csv")):
        assert text.replace("\n", "").isprintable()
    assert not re.search(r"(?<!\\)<[A-Za-z/!?]", markdown(rows))
    (record,) = csv.DictReader(io.StringIO(write_table(rows, "csv")))
    assert not record["model"].startswith(("=", "+", "-", "@"))


def test_latex_escapes_special_characters() -> None:
    table = Grid([r"a\b"], [[r"50% & $x_1^2$ {}~#<> ± **c** −1"]], caption=r"\end{table}").latex()
    assert r"a\textbackslash{}b" in table and r"\caption{\textbackslash{}end\{table\}}" in table
    row = r"50\% \& \$x\_1\textasciicircum{}2\$ \{\}\textasciitilde{}\#\textless{}\textgreater{} $\pm$ \textbf{c} $-$1"
    assert row in table
    rows = Grid(["[a]"], [["[0.1] x"], ["*"], ["**best**"], ["a [b]"]]).latex().splitlines()[4:-3]
    assert rows == [r"{}[a] \\", r"\midrule", r"{}[0.1] x \\", r"{}* \\", r"\textbf{best} \\", r"a [b] \\"]


def test_formulas_in_csv_are_escaped() -> None:
    plain = ["-1", "+0.5", "-1e-05", "-.5", "-inf", "-0.25 ± 0.10 (3)", "-3.1 %", "-1.70x", "12", "", "a=b", "x-1"]
    assert [inert(cell) for cell in plain] == plain
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "-2+3+cmd|x", "@SUM(A1)", " =1", "-A1", "--help"]
    assert [inert(cell) for cell in formulas] == [f"'{cell}" for cell in formulas]


def test_messages_about_checkpoints_do_not_suggest_running_their_code(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "mine": Path}, path)
    for read in (lambda: read_header(path), lambda: read_saved(str(path), str(path))):
        with pytest.raises(UserError) as raised:
            read()
        assert "weights_only" not in str(raised.value) and "\n" not in str(raised.value)
    path.write_bytes(pickle.dumps(Path()))
    with pytest.raises(UserError):
        read_saved(str(path), str(path))


def test_documentation_does_not_suggest_loading_code() -> None:
    files = [
        path
        for folder in ("growlab", "conf", "notebooks")
        for suffix in ("py", "md", "yaml", "ipynb", "html")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    advising = [
        path
        for path in [*files, ROOT / "README.md"]
        for words in ("weights_only=False", "trust_remote_code=True", "allow_pickle=True")
        if words in path.read_text(encoding="utf-8")
    ]
    assert advising == []
