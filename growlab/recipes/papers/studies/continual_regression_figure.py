"""The figure of continual learning with hypernetworks: `losses.png` (Chang et al. 2020, Figure 4)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from growlab.lab.analysis import style
from growlab.recipes.papers.studies.measuring import read_table


def draw(run_dir: Path) -> Path:
    """Draw a run's `losses.png` from its files: loss on the task being learnt, mean and standard error (Figure 4).

    A panel a task. Four initialisations stand out: hyperfan's two, the paper's baseline that trains (Kaiming's
    fan-out), and of the others the one with the smallest loss when learnt; the rest are grey, without bands, and named
    above the legend, as are those that diverged and so have no line. The loss before the first step, which would hide
    everything else, stands in the legend.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    curves: dict[str, list[tuple[float, float, float]]] = {
        row["initialisation"]: [] for row in summary["rows"]
    }
    for line in read_table(run_dir / "losses.csv"):
        curves[line["initialisation"]].append((line["step"], line["loss"], line["standard_error"]))
    shown = _chosen(summary["rows"])
    length = summary["settings"]["steps"]
    num_tasks = len(summary["rows"][0]["loss_when_learnt"])
    with style.styled():
        drawn = style.new_figure(7.0, 3.0)
        panels = drawn.subplots(1, num_tasks, sharey=True)
        for task, axes in enumerate(panels):
            for row in sorted(
                summary["rows"], key=lambda row: (*shown, row["initialisation"]).index(row["initialisation"])
            ):
                if None in row["loss_when_learnt"]:
                    continue
                steps, mean, error = torch.tensor(curves[row["initialisation"]]).T
                own = (steps > task * length) & (steps < (task + 1) * length + (task == num_tasks - 1))
                x, mean, error = steps[own] - task * length, mean[own], error[own]
                if row["initialisation"] not in shown:
                    axes.plot(x, mean, color="0.8", linewidth=0.8, zorder=1)
                    continue
                rank = shown.index(row["initialisation"])
                look = {"color": style.PALETTE[rank], "linestyle": style.DASHES[rank]}
                axes.plot(x, mean, **look, linewidth=1.3, label=label(row))
                # One standard error may reach below 0, where a logarithm ends.
                low = (mean - error).clamp(min=float(mean.min()) / 3)
                axes.fill_between(x, low, mean + error, color=look["color"], alpha=0.15, linewidth=0)
            axes.set_title(f"task {task + 1}")
            axes.set_xlim(0, length)
            axes.set_xlabel("step of the task")
        style.log_axis(panels[0])
        panels[0].set_ylabel("training loss of the task")
        handles, names = panels[0].get_legend_handles_labels()
        n = summary["settings"]["num_seeds"]
        note = f"lines: means over n = {n} seeds, each at its best rate; bands: one standard error"
        others, diverged = rest(summary["rows"], shown)
        if others:
            handles += panels[0].plot([], [], color="0.8", linewidth=0.8)
            names.append(f"{len(others)} others")
            note += f"; others: {', '.join(others)}"
        if diverged:
            note += f"; diverged at every rate: {', '.join(diverged)}"
        if summary["settings"].get("lookahead"):
            note += "; the regulariser looks ahead"
        style.legend_below(drawn, handles, names, 2, note=note)
    return style.save(drawn, run_dir / "losses.png")


def _chosen(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Initialisations that stand out in the figure: at most four of those that trained."""
    trained = {row["initialisation"]: row for row in rows if None not in row["loss_when_learnt"]}
    named = [name for name in ("hyperfan_in", "hyperfan_out", "kaiming_out") if name in trained]
    others = [name for name in trained if name not in named]
    return named + sorted(others, key=lambda name: sum(trained[name]["loss_when_learnt"]))[: 4 - len(named)]


def rest(rows: Sequence[dict[str, Any]], shown: Sequence[str]) -> tuple[list[str], list[str]]:
    """Initialisations that are drawn in grey, and those that have no line since they diverged at every rate."""
    diverged = [row["initialisation"] for row in rows if None in row["loss_when_learnt"]]
    others = [row["initialisation"] for row in rows if row["initialisation"] not in (*shown, *diverged)]
    return others, diverged


def label(row: dict[str, Any]) -> str:
    """Name of a row of the summary, in the legend and on the terminal."""
    if None in row["loss_when_learnt"]:
        return f"{row['initialisation']}: diverged at every rate"
    return f"{row['initialisation']}, lr {row['learning_rate']:g}, median first loss {row['median_first_loss']:.2g}"
