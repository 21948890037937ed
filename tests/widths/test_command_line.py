"""`python -m growlab.widths`: reports and refusals."""

import json

import pytest
import torch
from torch import nn

from growlab.widths.__main__ import Report, main, matrix_table


def test_report_of_a_network(capsys):
    assert main(["growlab/resnet20", "--input-shape", "3,8,8", "--json"]) == 0
    report = Report(**json.loads(capsys.readouterr().out))
    assert report.full_params == 269722
    assert report.seed_params == 17326
    assert report.growing_share > 0.99
    assert report.groups["layers.1.0.conv2"] == 16
    assert set(report.parity) == {"ours", "pairs", "net2net"}
    assert all(errors["eval"] <= 1e-10 for errors in report.parity.values())


def test_text_names_what_grows_and_what_stays(capsys):
    assert main(["tests.widths.test_command_line:small", "--input-shape", "4"]) == 0
    text = capsys.readouterr().out
    assert "grows   0: 8" in text
    assert "stays   2: the network's output" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["resnet20"], "is no network's name"),
        (["growlab/resnet21"], "growlab has no network 'resnet21'"),
        (["torchvision/resnet180"], "torchvision has no network 'resnet180'"),
        (["tests.widths.test_command_line:small"], "add --input-shape"),
        (["tests.widths.test_command_line:nothing"], "cannot make"),
    ],
)
def test_bad_names_are_one_sentence(arguments, sentence, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_matrix_table_names_refusals():
    table = matrix_table([Report("a", error="no channel rule for x|y")])
    assert "| a | | | | | | | no channel rule for x/y |" in table


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_factories_may_return_their_inputs(capsys):
    assert main(["tests.widths.test_command_line:with_inputs"]) == 0
    assert "1 width groups" in capsys.readouterr().out


def with_inputs() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return small(), (torch.randn(2, 4),)
