"""An operation without a rule is refused by name, with a line in the message that makes the network grow."""

import json
import re

from growlab.inspect import Report
from growlab.inspect.__main__ import main
from tests.command_line import CommandLine

NETWORK = ("model=custom", "model._target_=tests.widths.unknown.network", "growth=net2net", "lr_adapt=none")
SHORT = ("data.limit_train=64", "data.limit_test=20", "data.batch_size=32", "schedule.epochs=[1,1]")


def names_everything(message: str) -> None:
    assert "aten.put.default" in message
    assert "in module 4" in message
    assert re.search(r'unknown\.py", line 11', message)


def test_the_report_says_what_to_add_and_it_works(capsys):
    arguments = ["tests.widths.unknown:network", "--input-shape", "1,3,3"]
    assert main(arguments) == 1
    message = capsys.readouterr().out
    names_everything(message)
    hint = re.search(r"--keep-full \w+", message).group().split()
    assert main([*arguments, *hint, "--json"]) == 0
    report = Report(**json.loads(capsys.readouterr().out))
    assert report.grows
    assert report.groups == {"1": 8}
    assert report.fixed["3"] == "used by put"


def test_the_run_says_what_to_add_and_it_works(cli: CommandLine, tmp_path):
    arguments = (*NETWORK, *SHORT, "schedule.widths=[0.5,1]", "hydra.run.dir=run")
    refused = cli(*arguments, cwd=tmp_path)
    assert refused.code == 2
    names_everything(refused.err)
    hint = re.search(r"opaque=\[\w+\]", refused.err).group()
    done = cli(*arguments, hint, cwd=tmp_path)
    assert done.code == 0, done.err
    growth = json.loads((tmp_path / "run" / "growth.json").read_text())
    assert growth["groups"]["1"]["full_width"] == 8
    assert growth["events"][0]["parity_error_eval"] < 1e-5


def test_a_network_that_does_not_grow_needs_no_hint(cli: CommandLine, tmp_path):
    outcome = cli(*NETWORK, "growth=none", *SHORT[:3], "schedule.total_epochs=1", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
