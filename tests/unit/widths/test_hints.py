"""An operation without a rule is refused by name, with a line in the message that makes the network grow."""

import json
import re

from growlab.inspect import Report
from growlab.inspect.__main__ import main
from tests.command_line import CommandLine

NETWORK = (
    *("model=custom", "model._target_=tests.unit.widths.unknown.network", "growth=net2net", "lr_adapt=none"),
    *("data.limit_train=64", "data.limit_test=20", "data.batch_size=32", "schedule.epochs=[1,1]"),
)


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
    done = cli(*NETWORK, "schedule.widths=[0.5,1]", "hydra.run.dir=run", "keep_full=[put]", cwd=tmp_path)
    assert done.code == 0, done.err
    growth = json.loads((tmp_path / "run" / "growth.json").read_text())
    assert growth["groups"]["1"]["full_width"] == 8
    assert growth["events"][0]["parity_error_eval"] < 1e-5
