"""Cost against accuracy over schedules and budgets (Yuan et al. 2023, Figure 6)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from growlab.analysis import style
from growlab.analysis.results import Run
from growlab.analysis.schedules import best_at_cost, series_over_budgets
from growlab.analysis.tables import one_task, summarise


def frontier(runs: Sequence[Run]) -> Figure:
    """Training cost against test accuracy: a curve for each method and shape of schedule over its budgets.

    Fixed-size training is black. Means over seeds, bars one sample standard deviation. The grey steps are the
    best accuracy measured at a cost or below it.

    Raises:
        UserError: the runs are of several networks or data sets, whose numbers do not compare.
    """
    rows = summarise(runs)
    one_task(rows, "frontier")
    series = series_over_budgets(rows)
    points = [point for one in series for point in one.points]
    looks = style.looks([one.is_fixed_size for one in series])
    reference = rows[0].reference_epochs
    names = [f"{style.symbols(one.name)} (n={_seeds([p.row.n for p in one.points])})" for one in series]
    with style.styled():
        columns = 1 if max(map(len, names)) > 45 else 2
        lines = -(-len(names) // columns)
        figure = style.new_figure(5.2, 3.4 + 0.16 * lines)
        axes = figure.subplots()
        edge = best_at_cost(points)
        axes.plot(
            [point.cost for point in edge],
            [100 * point.accuracy for point in edge],
            drawstyle="steps-post",
            color="0.85",
            linewidth=4,
            zorder=0.5,
            gid="frontier",
        )
        for one, name, look in zip(series, names, looks, strict=True):
            stds = [point.row.accuracy_std for point in one.points]
            axes.errorbar(
                [point.cost for point in one.points],
                [100 * point.accuracy for point in one.points],
                yerr=None if None in stds else [100 * std for std in stds if std is not None],
                **look,
                linewidth=1.1,
                markersize=4.5,
                capsize=2,
                elinewidth=0.8,
                label=name,
            )
        axes.set_xlabel("training cost, in epochs of the fixed-size network at full width")
        axes.set_ylabel("test accuracy (%)")
        percent = axes.secondary_xaxis(
            "top", functions=(lambda x: 100 * x / reference, lambda x: x * reference / 100)
        )
        percent.set_xlabel(f"% of {reference} epochs")
        figure.legend(loc="outside lower center", ncols=columns, handlelength=3)
    return figure


def _seeds(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"
