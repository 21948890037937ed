"""`python -m growlab table`: what it prints, writes and refuses."""

import json

import pytest

from growlab.lab.analysis.__main__ import main
from growlab.recipes.papers import paper_table

from .fake_runs import write_run


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "runs" / "ours", stage_epochs=(1, 1, 2))
    write_run(tmp_path / "runs" / "fixed", growth="none", lr_adapt="none", stage_epochs=(4,))
    return tmp_path / "runs"


def test_tables_are_printed_or_written_in_the_form_asked_for(runs, tmp_path, capsys):
    assert main([str(runs)]) == 0
    table = capsys.readouterr().out
    assert table.startswith("| method") and table.count("\n|") == 3
    assert main([str(runs), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main([str(runs), "--csv"]) == 0
    assert capsys.readouterr().out.count("\n") == 3
    assert main([str(runs), "-o", str(tmp_path / "new" / "table.md")]) == 0
    assert (tmp_path / "new" / "table.md").read_text(encoding="utf-8") == table
    assert main([str(runs), "-o", str(tmp_path / "table.csv")]) == 0
    assert (tmp_path / "table.csv").read_text().startswith("method,experiment")
    assert main([str(runs), "-o", str(tmp_path / "table.tex")]) == 0
    assert (tmp_path / "table.tex").read_text().startswith(r"\begin{table}")
    assert paper_table.main([str(runs)]) == 0
    assert "92.53 ± 0.11" in capsys.readouterr().out
    assert main(["paired", str(runs), "--csv"]) == 0
    assert capsys.readouterr().out.startswith("method,against,seeds")


def test_a_torn_run_is_a_warning_and_the_rest_is_shown(runs, capsys):
    (runs / "fixed" / "results.json").write_text("{")
    assert main([str(runs)]) == 0
    streams = capsys.readouterr()
    assert streams.err.startswith("warning: skipped ") and str(runs / "fixed") in streams.err
    assert streams.out.count("\n|") == 2


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure_is_written_and_is_the_same_each_time(runs, tmp_path, capsys, suffix, start):
    out = tmp_path / f"compare.{suffix}"
    assert main(["figure", "compare", str(runs), "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    first = out.read_bytes()
    assert first.startswith(start)
    main(["figure", "compare", str(runs), "-o", str(out)])
    assert out.read_bytes() == first


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["{empty}"], "no finished run under"),
        (["{runs}/nowhere"], "there is no folder"),
        ([], "the following arguments are required: DIR"),
        (["{runs}", "--csv", "--json"], "not allowed with"),
        (["{runs}", "--html"], "unrecognized arguments: --html"),
        (["paired", "{runs}", "--against", "our"], "choose one of: fixed-size, ours + stagewise_norm"),
        (["paired", "{runs}/ours"], "no two methods on one network and data set to compare"),
        (["paired", "{runs}", "-o", "x.json"], "is written as .md, .tex or .csv"),
        (["figure", "learning_curve", "{runs}", "-o", "x.png"], "did you mean learning_curves?"),
        (["figure", "width", "{runs}", "-o", "x.png"], "did you mean widths?"),
        (["figure", "zzz", "{runs}", "-o", "x.png"], "choose one of learning_curves, widths,"),
        (["figure", "widths", "{runs}", "-o", "x.png"], "widths shows one run and there are 2"),
        (["figure", "rate_factors", "{runs}/fixed", "-o", "x.png"], "without rate adaptation"),
        (["figure", "compare", "{runs}", "-o", "x.bmp"], "must end in .png, .svg, .pdf"),
        (["figure", "compare", "{runs}"], "-o/--output"),
        (["{runs}", "-o", "{runs}/ours/results.json/table.md"], "cannot write"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    runs, tmp_path, capsys, monkeypatch, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    names = {"runs": runs, "empty": tmp_path / "empty"}
    assert main([argument.format(**names) for argument in arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    assert streams.err.startswith("error: ") and sentence in streams.err
    assert not (tmp_path / "x.png").exists()
