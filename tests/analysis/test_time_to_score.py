"""Time to accuracy: curves over budgets read at a score, against what they were made from."""

import json
import math
from pathlib import Path

import pytest

from growlab.base.errors import UserError
from growlab.lab.analysis.__main__ import main
from growlab.lab.analysis.results import load_runs
from growlab.lab.analysis.schedules import TimeToScore, time_to_score_table, times_to_scores
from growlab.lab.analysis.tables import Row, summarise
from tests.analysis.fake_runs import write_run

BUDGETS = (2, 4, 8, 16)


def _accuracy(cost: float, lead: float) -> float:
    """Linear in the logarithm of cost, so that interpolation is exact."""
    return 0.4 + 0.1 * math.log2(cost * lead)


def _write(
    folder: Path, lead: float = 2.0, speed: float = 0.5, budgets: tuple[int, ...] = BUDGETS, **more: object
) -> None:
    """A full network, and one that grows: it needs `1 / lead` of the cost, at `speed` times the seconds for a cost."""
    for budget in budgets:
        shared = {"reference_epochs": budget, "stage_epochs": (budget,), "cost_percent": 100.0, **more}
        schedule = {"budget": budget}
        write_run(
            folder / f"full_{budget}",
            growth="none",
            lr_adapt="none",
            test_accuracy=_accuracy(budget, 1),
            seconds=100 * budget,
            schedule=schedule,
            overrides=[f"schedule.budget={budget}"],
            **shared,
        )
        write_run(
            folder / f"grown_{budget}",
            growth="pairs",
            lr_adapt="none",
            test_accuracy=_accuracy(budget, lead),
            seconds=100 * speed * budget,
            schedule=schedule,
            overrides=[f"schedule.budget={budget}"],
            **shared,
        )


def _rows(folder: Path) -> list[Row]:
    return summarise(load_runs(folder))


def _of(times: list[TimeToScore], name: str, level: float) -> TimeToScore:
    (found,) = [one for one in times if one.series.name == name and math.isclose(one.level, level)]
    return found


@pytest.mark.parametrize("lead", [1.3, 2.0, 3.7])
def test_the_ratio_is_that_which_the_curves_were_made_with(tmp_path: Path, lead: float) -> None:
    _write(tmp_path, lead=lead, speed=0.6)
    times = times_to_scores(_rows(tmp_path))
    for budget in BUDGETS:
        one = _of(times, "pairs", _accuracy(budget, 1))
        if budget / lead < BUDGETS[0]:
            assert (one.cost.sign, one.cost.value) == ("<", BUDGETS[0])
            assert (one.cost_ratio.sign, one.cost_ratio.value) == ("<", BUDGETS[0] / budget)
        else:
            assert one.cost_ratio.sign == one.seconds_ratio.sign == ""
            assert one.cost.value == pytest.approx(budget / lead)
            assert one.cost_ratio.value == pytest.approx(1 / lead)
            assert one.seconds.value == pytest.approx(60 * budget / lead)
            assert one.seconds_ratio.value == pytest.approx(0.6 / lead)
        own = _of(times, "fixed-size", _accuracy(budget, 1))
        assert own.cost.value == pytest.approx(budget)
        assert own.cost_ratio.value == own.seconds_ratio.value == 1


def test_a_score_between_budgets_and_beyond_them(tmp_path: Path) -> None:
    _write(tmp_path, lead=0.5)
    rows = _rows(tmp_path)
    between = _of(times_to_scores(rows, level=_accuracy(5.5, 1)), "pairs", _accuracy(5.5, 1))
    assert between.cost.value == pytest.approx(11)
    assert between.cost_ratio.value == pytest.approx(2)
    beyond = times_to_scores(rows, level=_accuracy(12, 1))
    # The grown network's largest budget has not reached it: more than that, and more than 16 / 12 of the reference's.
    assert (_of(beyond, "pairs", _accuracy(12, 1)).cost.sign) == ">"
    assert _of(beyond, "pairs", _accuracy(12, 1)).cost_ratio.text(lambda x: f"{x:.3f}") == "> 1.333"
    both = times_to_scores(rows, level=0.99)
    assert _of(both, "pairs", 0.99).cost_ratio.value is None, (
        "both ends are open: nothing is known of the ratio"
    )
    low = times_to_scores(rows, against="pairs", level=_accuracy(2.5, 0.5))
    assert _of(low, "fixed-size", _accuracy(2.5, 0.5)).cost_ratio.text(lambda x: f"{x:.1f}") == "< 0.8"


@pytest.mark.parametrize("noise", [-1e-12, 0.0, 1e-12])
def test_a_score_as_it_was_measured_is_reached_whatever_its_last_bit(tmp_path: Path, noise: float) -> None:
    _write(tmp_path)
    for budget in BUDGETS:
        level = _accuracy(budget, 1) * (1 + noise)
        one = _of(times_to_scores(_rows(tmp_path), level=level), "fixed-size", level)
        assert one.cost.sign == "" and one.cost.value == pytest.approx(budget)
    with pytest.raises(UserError, match="a score of nan is none to reach"):
        times_to_scores(_rows(tmp_path), level=math.nan)


def test_a_curve_that_falls_counts_where_it_first_crosses(tmp_path: Path) -> None:
    for budget, accuracy in zip(BUDGETS, (0.5, 0.7, 0.6, 0.8), strict=True):
        write_run(
            tmp_path / str(budget),
            growth="none",
            lr_adapt="none",
            stage_epochs=(budget,),
            reference_epochs=16,
            cost_percent=100 * budget / 16,
            test_accuracy=accuracy,
            overrides=[f"schedule.budget={budget}"],
        )
    (one,) = times_to_scores(_rows(tmp_path), level=0.65)
    assert one.cost.value == pytest.approx(2 * 2**0.75)


def test_lower_is_better_for_a_loss(tmp_path: Path) -> None:
    for growth, lead in (("none", 1.0), ("pairs", 2.0)):
        for budget in BUDGETS:
            write_run(
                tmp_path / f"{growth}_{budget}",
                growth=growth,
                lr_adapt="none",
                stage_epochs=(budget,),
                reference_epochs=16,
                cost_percent=100 * budget / 16,
                overrides=[f"schedule.budget={budget}"],
                metric={"name": "error", "higher_is_better": False},
                test_error=-_accuracy(budget, lead),
            )
    times = times_to_scores(_rows(tmp_path))
    assert _of(times, "pairs", -_accuracy(8, 1)).cost_ratio.value == pytest.approx(0.5)


def test_seconds_of_several_machines_are_left_out(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "grown_4" / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "machine": {"processor": "another"}}))
    times = times_to_scores(_rows(tmp_path))
    assert all(one.seconds.value is None and one.seconds_ratio.value is None for one in times)
    assert "several machines" in time_to_score_table(times).caption


def test_a_narrow_network_is_not_the_reference(tmp_path: Path) -> None:
    _write(tmp_path)
    for budget in BUDGETS:
        write_run(
            tmp_path / f"smaller_{budget}",
            growth="none",
            lr_adapt="none",
            stage_epochs=(2 * budget,),
            reference_epochs=16,
            cost_percent=100 * budget / 16,
            test_accuracy=_accuracy(budget, 4),
            overrides=["method=smaller", f"schedule.budget={budget}"],
        )
    times = times_to_scores(_rows(tmp_path))
    assert {one.reference.name for one in times} == {"fixed-size"}
    assert _of(times, "fixed-size, fewer blocks", _accuracy(16, 1)).cost_ratio.value == pytest.approx(1 / 4)


def test_the_command_prints_the_table_and_names_the_methods_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path)
    assert main(["time", str(tmp_path), "--score", "60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        "60.00",
        "pairs",
        "2.00",
        "0.50",
        "100",
        "0.25",
    ]
    assert main(["time", str(tmp_path), "--against", "net2net"]) == 2
    assert "no method net2net; name a method to compare with by --against, one of: fixed-size; pairs." in (
        capsys.readouterr().err
    )


def test_runs_without_a_full_network_need_a_reference(tmp_path: Path) -> None:
    _write(tmp_path)
    rows = [row for row in _rows(tmp_path) if not row.group.is_fixed_size]
    with pytest.raises(UserError, match="no fixed-size network at full width; name a method"):
        times_to_scores(rows)
    assert all(one.cost_ratio.value == 1 for one in times_to_scores(rows, against="pairs"))
