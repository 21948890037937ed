"""`python -m growlab widths`: reports and refusals."""

import json
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

from growlab.inspect import METHODS, USUAL, Report, examine, matrix_table
from growlab.inspect.__main__ import describe, main
from tests.cases import Around, graph_of
from tests.command_line import CommandLine

HERE = "tests.unit.widths.test_command_line"
UNKNOWN = (
    *("model=custom", "model._target_=tests.unit.widths.unknown.network", "growth=net2net", "lr_adapt=none"),
    *("data.limit_train=64", "data.limit_test=20", "data.batch_size=32", "schedule.epochs=[1,1]"),
)


def test_report_of_a_network(capsys):
    assert main(["growlab/resnet20", "--input-shape", "3,8,8", "--methods", "ours,random", "--json"]) == 0
    report = Report(**json.loads(capsys.readouterr().out))
    assert report.full_params == 269722
    assert report.seed_params == 17326
    assert report.growing_share > 0.99
    assert report.groups["layers.1.0.conv2"] == 16
    assert set(report.parity) == {"ours", "random"}
    assert report.grows
    exact = [errors for method, errors in report.parity.items() if METHODS[method].preserves]
    assert all(errors["eval"] <= 1e-10 and errors["loaded"] <= 1e-10 for errors in exact)
    assert report.parity["random"]["eval"] > 1e-3


def test_text_names_what_grows_and_what_stays(capsys):
    assert main([f"{HERE}:small", "--input-shape", "4"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"grows .*\n    0: 8\n", text)
    assert re.search(r"stays .*\n    2: the network's output\n", text)
    for method in USUAL:
        assert re.search(rf"{method}: \S+ in eval mode, \S+ in train mode", text)


def test_similar_layers_share_a_line():
    report = Report("a", groups={f"layers.{i}.conv": 8 for i in range(9)} | {"stem": 8}, full_params=1)
    assert "layers.*.conv (9 times): 8\n    stem: 8" in describe(report)


def broken() -> None:
    raise ValueError("no such size")


def leaving() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["resnet20"], "is no network's name"),
        (["growlab/resnet21"], "growlab has no network 'resnet21'"),
        (["torchvision/resnet180"], "Unknown model resnet180; did you mean resnet18"),
        ([f"{HERE}:small"], "add --input-shape"),
        ([f"{HERE}:nothing"], "cannot make"),
        ([f"{HERE}:broken"], "no such size (" + __file__),
        (["json:dumps"], "missing 1 required positional argument"),
        (["math:pi"], "is not a callable object"),
        (["os:getcwd"], "returned no network but str"),
        (["growlab/resnet20", "--methods", "theirs"], "no growth method theirs"),
        ([f"{HERE}:leaving"], f"cannot make {HERE}:leaving: SystemExit"),
        *(
            (["growlab/resnet20", "--input-shape", shape], "is not of the form 3,32,32")
            for shape in ("3,-8,8", "0", "3,,8", "1.5", "9" * 30, "\u00b2")
        ),
        (["growlab/resnet20", "--input-shape", "99999,99999"], "larger than 268,435,456 numbers"),
        (["growlab/resnet20", "--matrix", "m", "--jobs", "0"], "argument --jobs: '0' is no number above 0"),
        (["growlab/resnet20", "--matrix", "m", "--time-limit", "nan"], "'nan' is no number above 0"),
        (["growlab/resnet20", "--matrix", "m", "--memory-limit", "-1"], "'-1' is no number above 0"),
        (
            ["growlab/resnet20", "--matrix", "m", "--json"],
            "does not support --json, as it writes both files, or --keep-full",
        ),
        (
            ["growlab/resnet20", "--matrix", "m", "--keep-full", "x"],
            "does not support --json, as it writes both files, or --keep-full",
        ),
    ],
)
def test_unknown_names_are_reported_in_one_sentence(arguments, sentence, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_matrix_table_names_refusals():
    refused, grown = Report("a", error="no channel rule for x|y"), Report("a/b", growing_share=0.8)
    grown.parity = {"ours": {"eval": 1e-15, "train": 1e-5, "loaded": 0.0}}
    wrong = Report("a/c", growing_share=0.8, parity={"ours": {"eval": 1e-3, "train": 1e-5, "loaded": 0.0}})
    table = matrix_table([refused, grown, wrong])
    assert re.search(r"\| a \| no \|.* no channel rule for x/y \|", table)
    assert "| a | 3 | 1 (33.3%) |" in table
    assert "| a/b | yes |" in table and "| a/c | no |" in table


def test_a_matrix_resumes_where_it_ended(tmp_path, capsys, monkeypatch):
    """Each network has its own process: if it takes too long or cannot be created, the table has a row for that."""
    # From sys.modules, because a function of the same name hides the module.
    monkeypatch.setattr(sys.modules["growlab.inspect.examine"], "_PRELOAD", ["growlab.inspect.examine"])
    names = [f"{HERE}:with_inputs", f"{HERE}:endless", f"{HERE}:nothing"]
    arguments = ["--matrix", str(tmp_path / "m"), "--methods", "net2net", "--time-limit"]
    assert main([names[0], *arguments, "60"]) == 0
    first = json.loads((tmp_path / "m.json").read_text())["networks"]
    first[0]["trace_sec"] = 123.0
    (tmp_path / "m.json").write_text(json.dumps({"networks": first}))
    assert main([*names, *arguments, "1"]) == 0
    rows = json.loads((tmp_path / "m.json").read_text())["networks"]
    assert [row["model"] for row in rows] == names
    assert rows[0]["trace_sec"] == 123.0
    assert rows[1]["error"] == "took longer than 1 s of CPU time"
    assert "cannot make" in rows[2]["error"]
    assert "| yes |" in (tmp_path / "m.md").read_text()


def test_a_file_that_is_no_matrix_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "m.json").write_text("[]")
    assert main(["growlab/resnet20", "--matrix", str(tmp_path / "m")]) == 2
    assert "contains no matrix" in capsys.readouterr().err
    assert (tmp_path / "m.json").read_text() == "[]"


def endless() -> nn.Module:
    while True:
        torch.ones(10).sum()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_inputs_without_a_row_per_sample_are_not_cut(capsys):
    """A graph with edges [2, E]: neither its edges nor its nodes have a row per sample."""
    for keep in ([], ["--keep-full", "index_add_"]):
        assert main([f"{HERE}:on_a_graph", "--methods", "net2net", "--json", *keep]) == 0
        report = Report(**json.loads(capsys.readouterr().out))
        assert report.samples == 1 and report.probe == [[6, 4], [2, 8]]
        assert report.groups == ({"nodes": 8} if keep else {"nodes": 8, "messages": 10})
        assert report.parity["net2net"]["eval"] <= 1e-10


def on_a_graph() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])

    def passed_on(net: Any, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sent = net.messages(net.nodes(x).relu())[edges[0]]
        return net.head(torch.zeros(len(x), sent.shape[1], dtype=x.dtype).index_add_(0, edges[1], sent).tanh())

    return Around(passed_on, nodes=[4, 8], messages=[8, 10], head=[10, 2]), (torch.randn(6, 4), edges)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("convnet", ["features.0: 6"]),
        ("lstm", ["conv: 5", "lstm: 4"]),
        ("heads", ["qkv: 36 = 4 x 9 (heads or groups of channels)"]),
    ],
)
def test_a_graph_prints_the_report_in_short(name, lines):
    graph = graph_of(name)
    for line in lines:
        assert re.search(rf"^    {re.escape(line)}$", str(graph), re.MULTILINE)
    assert re.search(r"^  stays .*\n    \S+: the network's output$", str(graph), re.MULTILINE)
    assert repr(graph).startswith(f"WidthGraph({len(graph.groups)} groups {{")
    assert len(repr(graph)) < 300 and repr(graph).count("\n") < 5


@pytest.mark.parametrize(
    ("factory", "samples"),
    [("with_inputs", 2), ("by_name", 2), ("of_a_dictionary", 2), ("a_list_for_each", 1), ("one_for_all", 1)],
)
def test_inputs_and_outputs_of_any_structure(factory, samples):
    report = examine(f"{HERE}:{factory}", methods=["net2net"], parts=False)
    assert report.parity["net2net"]["eval"] <= 1e-10 and len(report.groups) == 1
    assert report.samples == samples


def with_inputs() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return small(), (torch.randn(2, 4),)


class ByName(nn.Sequential):
    def forward(self, x, *, mask):
        return super().forward(x) * mask


def by_name() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return ByName(*small()), {"x": torch.randn(2, 4), "mask": torch.ones(2, 1)}


def of_a_dictionary() -> tuple[nn.Module, tuple]:
    made = Around(lambda net, given: {"loss": None, "y": net.inner(given["x"])}, inner=small())
    return made, ({"x": torch.randn(2, 4)},)


def a_list_for_each() -> tuple[nn.Module, torch.Tensor]:
    return Around(lambda net, x: [{"boxes": row} for row in net.inner(x).unbind()], inner=small()), torch.randn(2, 4)


def one_for_all() -> tuple[nn.Module, torch.Tensor]:
    return Around(lambda net, x: net.inner(x).mean(), inner=small()), torch.randn(2, 4)


def test_the_report_says_what_to_add_and_it_works(capsys):
    arguments = ["tests.unit.widths.unknown:network", "--input-shape", "1,3,3"]
    assert main(arguments) == 1
    message = " ".join(capsys.readouterr().out.split())
    assert re.search(r'aten\.put\.default in module 4 .*unknown\.py", line 11', message)
    hint = re.search(r"--keep-full \w+", message).group().split()
    assert main([*arguments, *hint, "--json"]) == 0
    report = Report(**json.loads(capsys.readouterr().out))
    assert report.grows
    assert report.groups == {"1": 8}
    assert report.fixed["3"] == "used by put"


def test_a_run_grows_around_the_operation(cli: CommandLine, tmp_path):
    done = cli(*UNKNOWN, "schedule.widths=[0.5,1]", "hydra.run.dir=run", "keep_full=[put]", cwd=tmp_path)
    assert done.code == 0, done.err
    growth = json.loads((tmp_path / "run" / "growth.json").read_text())
    assert growth["groups"]["1"]["full_width"] == 8
    assert growth["events"][0]["parity_error_eval"] < 1e-5
