"""Files of others in the working directory, in names and in checkpoints: none of them runs or breaks anything."""

import csv
import io
import json
import os
import pickle
import re
import subprocess
import sys
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
from tests.lab.analysis.fake_runs import write_run

ROOT = Path(__file__).parents[2]
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
def test_modules_of_the_working_directory_are_found_but_take_no_package_s_place(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    # What Python itself imports before any module of ours can be found is its own affair.
    for name in ("torch", "json", "csv", "pathlib", "hydra", "numpy", "argparse"):
        (tmp_path / f"{name}.py").write_text(f"open('ran_{name}', 'w')\nraise SystemExit(7)\n")
    (tmp_path / "mine.py").write_text("import torch\ndef made(): return torch.nn.Linear(4, 4), torch.ones(2, 4)\n")
    script = tmp_path / "elsewhere" / "bin" / "growlab"
    script.parent.mkdir(parents=True)
    script.write_text("import sys\nfrom growlab.lab.cli.app import main\nsys.exit(main())\n")
    arguments = [str(script) if one == "bin/growlab" else one for one in command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert list(tmp_path.glob("ran_*")) == []
    if "mine:made" in command:
        assert ended.returncode == 0 and "mine:made" in ended.stdout, ended.stderr
    else:
        assert (ended.returncode, "no config.json" in ended.stderr) == (2, True), ended.stderr


NAMES = ("<!--<script>", "</script><b>", "x]]>", "=HYPERLINK(1)", "\x1b[31mred\x9b2J", "a|b")
NAMES = (*NAMES, r"50% & $x_1^2$ \input{y} {}~#<>")


def runs_named(tmp_path: Path, name: str) -> list:
    write_run(tmp_path / "one", growth=name, lr_adapt="none", model=name)
    return load_runs(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_reports_and_tables_hold_any_name(name: str, tmp_path: Path) -> None:
    runs = runs_named(tmp_path, name)
    line = next(line for line in page(runs).splitlines() if line.startswith("const RUNS = "))
    assert "<" not in line
    (run,) = json.loads(line.removeprefix("const RUNS = ").removesuffix(";"))
    assert run["title"].startswith(name)
    rows = summarise(runs)
    for text in (markdown(rows), write_table(rows, "latex"), write_table(rows, "csv")):
        assert text.replace("\n", "").isprintable()
    assert not re.search(r"(?<!\\)<[A-Za-z/!?]", markdown(rows))
    (record,) = csv.DictReader(io.StringIO(write_table(rows, "csv")))
    assert not record["model"].startswith(("=", "+", "-", "@"))


def test_latex_prints_every_sign() -> None:
    table = Grid([r"a\b"], [[r"50% & $x_1^2$ {}~#<> ± **c** −1"]], caption=r"\end{table}").latex()
    assert r"a\textbackslash{}b" in table and r"\caption{\textbackslash{}end\{table\}}" in table
    row = r"50\% \& \$x\_1\textasciicircum{}2\$ \{\}\textasciitilde{}\#\textless{}\textgreater{} $\pm$ \textbf{c} $-$1"
    assert row in table
    rows = Grid(["[a]"], [["[0.1] x"], ["*"], ["**best**"], ["a [b]"]]).latex().splitlines()[4:-3]
    assert rows == [r"{}[a] \\", r"\midrule", r"{}[0.1] x \\", r"{}* \\", r"\textbf{best} \\", r"a [b] \\"]


def test_formulas_are_text_in_csv_and_nothing_else_changes() -> None:
    plain = ["-1", "+0.5", "-1e-05", "-.5", "-inf", "-0.25 ± 0.10 (3)", "-3.1 %", "-1.70x", "12", "", "a=b", "x-1"]
    assert [inert(cell) for cell in plain] == plain
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "-2+3+cmd|x", "@SUM(A1)", " =1", "-A1", "--help"]
    assert [inert(cell) for cell in formulas] == [f"'{cell}" for cell in formulas]


def test_no_message_says_that_code_in_a_checkpoint_may_run(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "mine": Path}, path)
    for read in (lambda: read_header(path), lambda: read_saved(str(path), str(path))):
        with pytest.raises(UserError) as raised:
            read()
        assert "weights_only" not in str(raised.value) and "\n" not in str(raised.value)
    path.write_bytes(pickle.dumps(Path()))
    with pytest.raises(UserError):
        read_saved(str(path), str(path))


def test_nothing_advises_to_load_code() -> None:
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
