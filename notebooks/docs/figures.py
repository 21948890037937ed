"""Redraws the figures of notebooks/results from the rows beside them, and the docs' drawings: `make figures`.

`notebooks/results/figures.yaml` says which figure each is and of which folders. The docs show them as SVG (`drawn`).
"""

import glob
import importlib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import drawings
import yaml
from matplotlib import pyplot, rc_context
from matplotlib.figure import Figure

from growlab.lab.analysis import style
from growlab.lab.analysis.figures import FIGURES, save
from growlab.lab.analysis.results import load_runs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "notebooks" / "results"
# Figures of studies, which their runs draw: the module that redraws each from the tables in its folder.
OF_RUNS = {
    "hyperfan_continual_regression/losses.png": "growlab.recipes.papers.studies.continual_regression",
    "hyperfan_continual_regression_lookahead/losses.png": "growlab.recipes.papers.studies.continual_regression",
    "isotropic_appendices/appendices.png": "growlab.recipes.papers.studies.isotropic_appendices",
    "isotropic_invariance/invariance.png": "growlab.recipes.papers.studies.isotropic_invariance",
}


@dataclass(frozen=True)
class Kept:
    """A figure that is kept: its file below notebooks/results, its name, its folders as written, what it shows."""

    file: str
    figure: str
    of: tuple[str, ...]
    shows: str

    @property
    def folders(self) -> list[str]:
        """Patterns of the folders with its runs, from the root of the repository."""
        above = Path("notebooks/results") / Path(self.file).parent
        return [os.path.normpath(above / each) for each in self.of]

    @property
    def command(self) -> str:
        """What draws it, for a shell in a checkout."""
        folders = " ".join(each if "*" in each else shlex.quote(each) for each in self.folders)
        return f"growlab figure {self.figure} {folders} -o notebooks/results/{self.file}"

    def draw(self) -> Figure:
        """The figure, of the rows as they are."""
        paths = [Path(path) for each in self.folders for path in sorted(glob.glob(str(ROOT / each)))]
        return FIGURES[self.figure](load_runs([path for path in paths if path.is_dir()], _quiet), None)


def kept() -> Iterator[Kept]:
    """The figures of `figures.yaml`."""
    for file, entry in yaml.safe_load((RESULTS / "figures.yaml").read_text(encoding="utf-8")).items():
        of = [entry["of"]] if isinstance(entry["of"], str) else entry["of"]
        yield Kept(file, entry["figure"], tuple(of), entry["shows"])


def drawn(one: Kept) -> Path:
    """The figure as SVG, below build/figures: redrawn where its rows or growlab's figures are newer.

    Its letters are paths: a reader may not have the font.
    """
    path = (ROOT / "build" / "figures" / one.file).with_suffix(".svg")
    folders = [Path(folder) for each in one.folders for folder in glob.glob(str(ROOT / each))]
    sources = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".json", ".csv", ".yaml")]
    sources += (ROOT / "growlab" / "lab" / "analysis").glob("*.py")
    if not path.exists() or path.stat().st_mtime < max(file.stat().st_mtime for file in sources):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure = one.draw()
        with style.styled(), rc_context({"svg.fonttype": "path"}):
            figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close("all")
    return path


def draw_of_run(file: str, folder: Path) -> Path:
    """Draw one of `OF_RUNS` from the tables in a folder, and into it."""
    drawn: Path = importlib.import_module(OF_RUNS[file]).draw(folder)
    return drawn


def _quiet(sentence: str) -> None:
    """Some runs are there twice, in figures of two folders."""


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for one in kept():
        if not wanted or any(part in one.file for part in wanted):
            save(one.draw(), RESULTS / one.file)
            pyplot.close("all")
            print(one.file)
    for file in OF_RUNS:
        if not wanted or any(part in file for part in wanted):
            draw_of_run(file, (RESULTS / file).parent)
            print(file)
    for name, draw in drawings.ALL.items():
        if not wanted or any(part in name for part in wanted):
            print(drawings.write(draw, drawings.DRAWINGS / f"{name}.svg").name)
