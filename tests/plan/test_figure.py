"""The picture of a plan."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from growlab.lab.analysis import style
from growlab.lab.planner import report as figure
from growlab.lab.planner.probes import FULL
from tests.command_line import ROOT

PLANS = sorted((ROOT / "notebooks" / "results" / "plan").glob("*/plan.json"))


def content(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def markers(drawn: Figure) -> dict[str, tuple]:
    """Colour and marker of each candidate in the legend."""
    (legend,) = drawn.legends
    lines = [line for line in legend.get_lines() if line.get_marker() != "None"]
    names = [
        text.get_text().split(" ")[0] for text in legend.get_texts() if "of the FLOPs" in text.get_text()
    ]
    return {name: (line.get_color(), line.get_marker()) for name, line in zip(names, lines, strict=True)}


def test_a_candidate_has_one_colour_and_marker_in_all_plans() -> None:
    seen: dict[str, set[tuple]] = {}
    for path in PLANS:
        for name, look in markers(figure.drawn(content(path))).items():
            seen.setdefault(name, set()).add(look)
    assert len(seen) == 5
    assert all(len(looks) == 1 for looks in seen.values())
    assert len(set.union(*seen.values())) == len(seen)


def test_the_candidates_that_plans_have_by_default_are_known() -> None:
    plan = yaml.safe_load((ROOT / "conf" / "plan" / "default.yaml").read_text(encoding="utf-8"))
    assert set(plan["candidates"]) == set(figure._KNOWN)


def test_no_candidate_has_the_grown_run_s_colour() -> None:
    looks = figure._line_styles([FULL, *(f"mine_{i}" for i in range(3)), *figure._KNOWN])
    colours = [look["color"] for look in looks]
    assert len(set(colours)) == len(colours) == 8
    assert figure._GROWN not in colours


@pytest.mark.parametrize("path", PLANS[::4], ids=lambda path: path.parent.name)
def test_the_grown_curve_begins_at_its_event_or_with_the_full_network_s_law(path: Path) -> None:
    plan = content(path)
    way, full = plan["verdict"]["growing"][0], plan["measured"][FULL]
    left, _ = figure.drawn(plan).axes
    (event,) = [line for line in left.lines if line.get_gid() == style.EVENT]
    behind = [line for line in left.lines if line.get_color() == figure._GROWN][-1]
    assert isinstance(behind, Line2D)
    begins = np.asarray(behind.get_xdata())[0]
    fitted = 100 * (full["cost"][len(full["cost"]) // 2] - way["cost"]["median"] * plan["budget_of_the_run"])
    assert begins == pytest.approx(max(np.asarray(event.get_xdata())[0], fitted))
