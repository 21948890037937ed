"""The W&B dashboard: panels of logged values, and errors."""

import re
import sys

import pytest

from growlab.lab.analysis.dashboard import SECTIONS, build, main
from growlab.lab.training.loggers import EVENT_COLUMNS
from growlab.lab.training.objectives import Classification
from growlab.lab.training.recorder import metric_columns

# wandb-workspaces uses a spelling that pydantic deprecated after it.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")
PANELS = [panel for panels in SECTIONS.values() for panel in panels]


def test_a_dry_run_prints_every_panel(capsys):
    assert main(["team/growlab", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "workspace and report 'growlab' in team/growlab, runs grouped by sweep:"
    assert len(lines) == 1 + len(SECTIONS) + len(PANELS)
    scatter = "scatter: cost against accuracy (result/test_accuracy against result/train_cost_percent)"
    assert f"    {scatter}" in lines


def test_panels_show_logged_values():
    """Metrics, results, growth events, tables and figures."""
    logged = {*metric_columns(Classification()), *metric_columns(Classification(), watched="test")}
    logged |= {*(f"growth/{column}" for column in EVENT_COLUMNS)}
    logged |= {"growth_events", "spectra"}
    logged |= {"result/train_cost_percent", "result/test_accuracy", "result/seconds"}
    logged |= {f"figures/{name}" for name in ("learning_curves", "widths", "rate_factors")}
    for panel in PANELS:
        assert set(panel.keys) <= logged and (panel.keys or panel.pattern)
    patterns = [panel.pattern for panel in PANELS if panel.pattern]
    for name in ("width/layers.0.0.conv1", "rate_factor/conv1.weight/stage_3"):
        assert sum(bool(re.match(pattern, name)) for pattern in patterns) == 1


def test_the_workspace_and_the_report_have_the_panels():
    pytest.importorskip("wandb_workspaces")
    workspace, report = build("team", "growlab")
    assert (workspace.entity, workspace.project, report.project) == ("team", "growlab", "growlab")
    assert [section.name for section in workspace.sections] == list(SECTIONS)
    assert [len(section.panels) for section in workspace.sections] == list(map(len, SECTIONS.values()))
    grids = [block for block in report.blocks if type(block).__name__ == "PanelGrid"]
    assert [len(grid.panels) for grid in grids] == list(map(len, SECTIONS.values()))


@pytest.mark.parametrize("project", ["growlab", "/growlab", "a/b/c"])
def test_a_project_needs_an_entity(project, capsys):
    assert main([project, "--dry-run"]) == 2
    assert "is not ENTITY/PROJECT" in capsys.readouterr().err


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    assert main(["team/growlab"]) == 2
    missing = "error: a dashboard needs a package that is not installed: pip install 'wandb-workspaces>="
    assert capsys.readouterr().err.startswith(missing)
