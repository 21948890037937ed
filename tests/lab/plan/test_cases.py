"""Cases from finished runs, and the package's table of cases."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean

import pytest

from growlab.base.errors import UserError
from growlab.lab.planner.__main__ import main
from growlab.lab.planner.cases import cases_of, read, written
from growlab.plan import Case, read_cases
from tests.command_line import ROOT

RESULTS = ROOT / "notebooks" / "results"
FOLDERS = ("testbed_cifar10", "testbed_cifar10_plain", "resnet20_cifar10_10_epochs", "llama_text")


def _pairs(folder: Path) -> Iterator[Case]:
    """Yield the cases of pairs, which are stored in two tables."""
    with (folder / "pairs.csv").open(encoding="utf-8") as pairs, (folder / "arms.csv").open() as file:
        rows = list(csv.DictReader(file))
        for pair in csv.DictReader(pairs):
            text = pair["kind"] == "language"

            def error(arm: str, name: str = pair["pair"], text: bool = text) -> float:
                own = [row for row in rows if (row["pair"], row["arm"]) == (name, arm)]
                return round(mean(_value(row, text) for row in own), 5)

            yield Case(
                case=f"{folder.name}, {pair['pair']}",
                family=pair["family"],
                kind=pair["kind"],
                params=int(pair["params"]),
                smaller_params=int(pair["smaller_params"]),
                samples=int(pair["samples"]),
                full=error("full"),
                smaller=error("smaller"),
                grown=error("grown"),
            )


def _value(row: Mapping[str, str], text: bool) -> float:
    return float(row["test_loss"]) if text else 1 - float(row["test_accuracy"])


def test_the_packages_cases_are_those_of_the_stored_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cases", *(str(RESULTS / folder) for folder in FOLDERS)]) == 0
    head, *of_runs = capsys.readouterr().out.splitlines()
    pairs = [
        case
        for name in ("plan", "blind", "blind_second", "blind_third", "blind_fourth", "blind_fifth", "blind_sixth")
        for case in _pairs(RESULTS / name)
    ]
    _, *of_pairs = written(pairs).splitlines()
    assert [head, *of_pairs, *of_runs] == (ROOT / "growlab" / "plan" / "cases.csv").read_text().splitlines()
    assert main(["--cases"]) == 0
    assert capsys.readouterr().out == written(read_cases())


def test_a_case_averages_seeds_and_uses_the_best_network_of_each_kind() -> None:
    (case,) = (one for one in read_cases() if one.case == "testbed_cifar10, 3.6 epochs")
    # Three seeds each; growth in depth is better than in width or in both.
    assert case.full == pytest.approx(1 - (0.6515 + 0.6505 + 0.6497) / 3, abs=1e-5)
    assert case.smaller == pytest.approx(1 - (0.7147 + 0.7187 + 0.7240) / 3, abs=1e-5)
    assert (case.params, case.smaller_params, case.samples) == (172_506, 75_290, 179_952)
    assert case.ratio == pytest.approx(1.043, abs=1e-3)


def test_folders_are_read_and_one_without_a_case_is_refused(tmp_path) -> None:
    folder = RESULTS / "testbed_cifar10"
    assert read([str(folder)]) == [*read_cases(), *cases_of(folder)] and len(cases_of(folder)) == 4
    with pytest.raises(UserError, match="digits_schedules has no case: that takes finished runs"):
        read([str(RESULTS / "digits_schedules")])
