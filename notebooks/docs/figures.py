"""Draws the figures of notebooks/results anew, from the rows beside them: `make figures`.

`notebooks/results/figures.yaml` says which figure each is and of which folders.
"""

import glob
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from matplotlib import pyplot
from matplotlib.figure import Figure

from growlab.analysis.figures import FIGURES, save
from growlab.analysis.results import load_runs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "notebooks" / "results"


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


def _quiet(sentence: str) -> None:
    """Some runs are there twice, in figures of two folders."""


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for one in kept():
        if not wanted or any(part in one.file for part in wanted):
            save(one.draw(), RESULTS / one.file)
            pyplot.close("all")
            print(one.file)
