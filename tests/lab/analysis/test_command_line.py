"""`growlab table` and related commands: output, files and errors."""

import json

import pytest
from PIL import Image

from growlab.lab.analysis.__main__ import main
from growlab.lab.analysis.results import Run
from growlab.recipes.papers import paper_table

from .fake_runs import FIXED, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "ours", stage_epochs=(1, 1, 2), groups={"a": {"full_width": 8, "widths": [2, 4, 8]}})
    write_run(folder / "fixed", **FIXED, stage_epochs=(4,))
    return folder


def test_tables_are_printed_or_written_in_the_chosen_format(runs, tmp_path, capsys):
    assert main([str(runs)]) == 0
    table = capsys.readouterr().out
    assert table.startswith("| method") and table.count("\n|") == 3
    assert main([str(runs), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main([str(runs), "--csv"]) == 0
    assert capsys.readouterr().out.count("\n") == 3
    for name, start in (("new/table.md", table), ("t.csv", "method,experiment"), ("t.tex", r"\begin{table}")):
        assert main([str(runs), "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    assert paper_table.main([str(runs)]) == 0
    assert "92.53 ± 0.11" in capsys.readouterr().out
    assert main(["paired", str(runs), "--csv"]) == 0
    assert capsys.readouterr().out.startswith("method,against,seeds")


def test_a_table_by_a_setting_a_metric_and_a_filter(runs, capsys, monkeypatch):
    assert main([str(runs), "--by", "growth", "--metric", "epochs", "--sort=-epochs", "--csv"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("growth,epochs,") and {line.split(",")[1] for line in lines} == {"4 (1)"}
    # Reading a thousand configurations takes seconds.
    with monkeypatch.context() as patched:
        patched.setattr(Run, "settings", {})
        patched.setattr(Run, "config", property(lambda run: pytest.fail(f"{run.path} is read without need")))
        assert main([str(runs), "--by", "growth", "--metric", "epochs"]) == 0
    capsys.readouterr()
    assert main([str(runs), "--filter", "growth=no*"]) == 0
    assert "over 1 runs" in capsys.readouterr().out
    # Brackets of a list are not a pattern.
    for run in runs.glob("*/results.json"):
        run.write_text(json.dumps(json.loads(run.read_text()) | {"devices_used": [0, 1]}))
    assert main([str(runs), "--filter", "devices_used=[0, 1]"]) == 0
    assert "over 2 runs" in capsys.readouterr().out
    for wrong, said in (("--by=groth", "near it: growth"), ("--sort=x", "no column"), ("--filter=growth=x", "no run")):
        assert main([str(runs), wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_damaged_run_is_skipped_with_a_warning(tmp_path, capsys):
    for name in ("good", "torn"):
        write_run(tmp_path / name, stage_epochs=(4,), **FIXED)
    (tmp_path / "torn" / "results.json").write_text("{")
    assert main([str(tmp_path)]) == 0
    streams = capsys.readouterr()
    assert streams.err.startswith("warning: skipped ") and str(tmp_path / "torn") in streams.err
    assert streams.out.count("\n|") == 2


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_writing_a_figure_is_deterministic(runs, tmp_path, capsys, suffix, start):
    out = tmp_path / f"figure.{suffix}"
    assert main(["figure", "silhouettes", str(runs / "ours"), "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    first = out.read_bytes()
    assert first.startswith(start)
    main(["figure", "silhouettes", str(runs / "ours"), "-o", str(out)])
    assert out.read_bytes() == first


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["{tmp}"], "no finished run under"),
        (["{runs}/nowhere"], "there is no folder"),
        ([], "the following arguments are required: DIR"),
        (["{runs}", "--csv", "--json"], "not allowed with"),
        (["paired", "{runs}", "--against", "our"], "choose one of: fixed-size, ours + stagewise_norm"),
        (["paired", "{runs}/ours"], "no two methods with the same network, data set and"),
        (["paired", "{runs}", "-o", "x.json"], "its name must end in .md, .tex or .csv"),
        (["figure", "learning_curve", "{runs}", "-o", "x.png"], "did you mean learning_curves?"),
        (["figure", "zzz", "{runs}", "-o", "x.png"], "choose one of learning_curves, widths,"),
        (["figure", "widths", "{runs}", "-o", "x.png"], "widths shows one run, not 2"),
        (["figure", "widths", "{runs}/ours", "--parameter", "a", "-o", "x.png"], "does not show single parameters"),
        (["figure", "rate_factors", "{runs}/fixed", "-o", "x.png"], "without rate adaptation"),
        (["figure", "compare", "{runs}", "-o", "x.bmp"], "must end in .png, .svg, .pdf"),
        (["{runs}", "-o", "{runs}/ours/results.json/table.md"], "cannot write"),
    ],
)
def test_invalid_input_is_one_line_and_exit_code_2(runs, tmp_path, capsys, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert main([argument.format(runs=runs, tmp=tmp_path) for argument in arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    assert streams.err.startswith("error: ") and sentence in streams.err
    assert not (tmp_path / "x.png").exists()


def test_a_movie_has_several_frames_and_shows_one_run(runs, tmp_path, capsys):
    out = tmp_path / "growing.gif"
    assert main(["figure", "movie", str(runs / "ours"), "-o", str(out)]) == 0
    with Image.open(out) as picture:
        assert picture.n_frames > 3 and picture.info["loop"] == 0
    assert main(["figure", "movie", str(runs / "ours"), "-o", "growing.png"]) == 2
    assert main(["figure", "movie", str(runs), "-o", str(out)]) == 2
    assert "movie shows one run" in capsys.readouterr().err
