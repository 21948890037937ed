"""`python -m growlab dashboard ENTITY/PROJECT` makes a workspace and a report in Weights & Biases.

They show what `logger=wandb` logs. `--dry-run` prints what would be made, without an account or any package.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from growlab.base.command_parser import CommandParser
from growlab.base.errors import UserError, how_to_install

_STEP = "trainer/global_step"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        kind: curves over steps, one run's end against another number, images, or a table of all runs.
        title: above it.
        keys: names of what was logged: curves; x and y; images; the table.
        pattern: curves whose names match this regular expression, in place of `keys`.
        log_y: a logarithmic y axis.
    """

    kind: Literal["curves", "scatter", "images", "table"]
    title: str
    keys: tuple[str, ...] = ()
    pattern: str | None = None
    log_y: bool = False

    def describe(self) -> str:
        """One line of what it shows."""
        shown = self.pattern or (" against " if self.kind == "scatter" else ", ").join(reversed(self.keys))
        return f"{self.kind}: {self.title} ({shown})"


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("curves", "training loss", ("train_loss",), log_y=True),
        Panel("curves", "held-out accuracy", ("val_accuracy", "test_accuracy")),
        Panel("curves", "learning rate", ("lr",)),
    ),
    "Cost and accuracy": (
        Panel("scatter", "cost against accuracy", ("result/train_cost_percent", "result/test_accuracy")),
        Panel("scatter", "seconds against accuracy", ("result/seconds", "result/test_accuracy")),
    ),
    "Growth": (
        Panel("curves", "parameters", ("num_params",), log_y=True),
        Panel("curves", "widths", pattern="^width/.*"),
        Panel(
            "curves", "parity error", ("growth/parity_error_eval", "growth/parity_error_train"), log_y=True
        ),
        Panel("table", "growth events", ("growth_events",)),
    ),
    "Rates and spectra": (
        Panel("curves", "rate factors", pattern="^rate_factor/.*"),
        Panel("table", "singular values at each stage's end", ("spectra",)),
    ),
    "Speed": (
        Panel("curves", "samples per second", ("samples_per_sec",)),
        Panel("curves", "batch size", ("batch_size",)),
    ),
    "Figures": (
        Panel(
            "images",
            "figures of the runs",
            ("figures/learning_curves", "figures/widths", "figures/rate_factors"),
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit code (2 after one sentence on stderr)."""
    try:
        parser = CommandParser(
            prog="growlab dashboard",
            description="Make a workspace and a report in Weights & Biases for runs logged with logger=wandb.",
            epilog="Example: growlab dashboard my-team/growlab --dry-run",
            allow_abbrev=False,
        )
        parser.add_argument("project", metavar="ENTITY/PROJECT", help="where the runs are")
        parser.add_argument("--dry-run", action="store_true", help="print what would be made")
        arguments = parser.parse_args(argv)
        entity, slash, project = arguments.project.partition("/")
        if not (entity and slash and project) or "/" in project:
            raise UserError(f"{arguments.project} is not ENTITY/PROJECT, such as my-team/growlab.")
        if arguments.dry_run:
            sys.stdout.write(describe(entity, project))
        else:
            for url in create(entity, project):
                print(url)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def describe(entity: str, project: str) -> str:
    """Description of the workspace and report, a line a panel."""
    lines = [f"workspace and report 'growlab' in {entity}/{project}, runs grouped by sweep:"]
    for name, panels in SECTIONS.items():
        lines += [f"  {name}", *(f"    {panel.describe()}" for panel in panels)]
    return "\n".join(lines) + "\n"


def create(entity: str, project: str) -> list[str]:
    """Make the workspace and the report; returns their addresses.

    Raises:
        UserError: the package is missing, nobody is logged in, or W&B refuses.
    """
    workspace, report = build(entity, project)
    try:
        workspace.save()
        report.save()
    except Exception as error:
        # W&B answers with errors of several packages of its own.
        reason = " ".join(str(error).split())
        raise UserError(
            f"W&B did not make them in {entity}/{project}: {reason}; `wandb login` logs in, --dry-run only looks."
        ) from error
    return [workspace.url, report.url]


def build(entity: str, project: str) -> tuple[Any, Any]:
    """The workspace and the report as objects of `wandb-workspaces`, not saved yet.

    Raises:
        UserError: the package is missing.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError(
            f"a dashboard needs a package that is not installed: {how_to_install('dashboard')}."
        ) from error
    sections = [
        workspaces.Section(name=name, panels=[_panel(reports, panel) for panel in panels], is_open=True)
        for name, panels in SECTIONS.items()
    ]
    workspace = workspaces.Workspace(
        entity=entity,
        project=project,
        name="growlab",
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=_STEP),
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Metric("Group")]),
    )
    blocks: list[Any] = [
        reports.P("Growing networks: cost, accuracy and what happened at every growth event.")
    ]
    for name, panels in SECTIONS.items():
        runset = reports.Runset(entity=entity, project=project, name=name)
        grid = reports.PanelGrid(runsets=[runset], panels=[_panel(reports, panel) for panel in panels])
        blocks += [reports.H2(name), grid]
    report = reports.Report(
        entity=entity,
        project=project,
        title="growlab",
        description="Made by growlab.lab.analysis.dashboard",
        blocks=blocks,
    )
    return workspace, report


def _panel(reports: Any, panel: Panel) -> Any:
    if panel.kind == "images":
        return reports.MediaBrowser(title=panel.title, media_keys=list(panel.keys))
    if panel.kind == "table":
        return reports.WeavePanelSummaryTable(table_name=panel.keys[0])
    if panel.kind == "scatter":
        x, y = (reports.SummaryMetric(key) for key in panel.keys)
        return reports.ScatterPlot(title=panel.title, x=x, y=y)
    return reports.LinePlot(
        title=panel.title, x=_STEP, y=list(panel.keys), metric_regex=panel.pattern, log_y=panel.log_y or None
    )


if __name__ == "__main__":
    sys.exit(main())
