"""`growlab dashboard ENTITY/PROJECT`: create a workspace and a report in Weights & Biases for `logger=wandb`.

`--dry-run` prints their panels without an account or additional packages.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from growlab.base.command_parser import CommandParser, command
from growlab.base.errors import UserError, how_to_install

_STEP = "trainer/global_step"


class Panel(NamedTuple):
    """Panel of a workspace or report.

    Attributes:
        kind: curves over steps, a scatter plot of final values, images, or a table of all runs.
        keys: names of the logged curves, x and y values, images, or table.
        pattern: regular expression that selects curves by name, instead of `keys`.
    """

    kind: Literal["curves", "scatter", "images", "table"]
    title: str
    keys: tuple[str, ...] = ()
    pattern: str | None = None
    log_y: bool = False


_PARITY = ("growth/parity_error_eval", "growth/parity_error_train")
_FIGURES = ("figures/learning_curves", "figures/widths", "figures/rate_factors")
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
        Panel("curves", "parity error", _PARITY, log_y=True),
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
    "Figures": (Panel("images", "figures of the runs", _FIGURES),),
}


@command
def main(argv: Sequence[str]) -> None:
    """Create a workspace and a report, or print their panels with `--dry-run`."""
    parser = CommandParser(
        prog="growlab dashboard",
        description="Create a workspace and a report in Weights & Biases for runs logged with logger=wandb.",
        epilog="Example: growlab dashboard my-team/growlab --dry-run",
        allow_abbrev=False,
    )
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="where the runs are")
    parser.add_argument("--dry-run", action="store_true", help="print the panels without creating them")
    arguments = parser.parse_args(argv)
    entity, slash, project = arguments.project.partition("/")
    if not (entity and slash and project) or "/" in project:
        raise UserError(f"{arguments.project} is not ENTITY/PROJECT, such as my-team/growlab.")
    if arguments.dry_run:
        print(f"workspace and report 'growlab' in {entity}/{project}, runs grouped by sweep:")
        for name, panels in SECTIONS.items():
            print(f"  {name}")
            for kind, title, keys, pattern, _ in panels:
                shown = pattern or (" against " if kind == "scatter" else ", ").join(reversed(keys))
                print(f"    {kind}: {title} ({shown})")
        return
    workspace, report = build(entity, project)
    workspace.save()
    report.save()
    print(workspace.url, report.url, sep="\n")


def build(entity: str, project: str) -> tuple[Any, Any]:
    """Return the workspace and the report, not saved yet, as objects of `wandb-workspaces`."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError(f"a dashboard needs a package that is not installed: {how_to_install('dashboard')}.") from error
    place: dict[str, Any] = {"entity": entity, "project": project}
    sections = {name: [_panel(reports, panel) for panel in panels] for name, panels in SECTIONS.items()}
    workspace = workspaces.Workspace(
        **place,
        name="growlab",
        sections=[workspaces.Section(name=name, panels=panels, is_open=True) for name, panels in sections.items()],
        settings=workspaces.WorkspaceSettings(x_axis=_STEP),
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Metric("Group")]),
    )
    blocks: list[Any] = [reports.P("Growing networks: cost, accuracy and what happened at every growth event.")]
    for name, panels in sections.items():
        grid = reports.PanelGrid(runsets=[reports.Runset(**place, name=name)], panels=panels)
        blocks += [reports.H2(name), grid]
    description = "Made by growlab.lab.analysis.dashboard"
    return workspace, reports.Report(**place, title="growlab", description=description, blocks=blocks)


def _panel(reports: Any, panel: Panel) -> Any:
    kind, title, keys, pattern, log_y = panel
    if kind == "images":
        return reports.MediaBrowser(title=title, media_keys=list(keys))
    if kind == "table":
        return reports.WeavePanelSummaryTable(table_name=keys[0])
    if kind == "scatter":
        x, y = (reports.SummaryMetric(key) for key in keys)
        return reports.ScatterPlot(title=title, x=x, y=y)
    return reports.LinePlot(title=title, x=_STEP, y=list(keys), metric_regex=pattern, log_y=log_y or None)
