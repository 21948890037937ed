"""Figures in the repository equal those drawn from their rows."""

import importlib.metadata
import re
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image, pyplot

from growlab.lab.analysis.figures import save
from tests.command_line import ROOT

sys.path.insert(0, str(ROOT / "notebooks" / "docs"))
import drawings
from figures import OF_RUNS, RESULTS, Kept, draw_of_run, kept
from results_pages import command_of_run, gallery

KEPT = list(kept())
LOCKED = re.search(r"^matplotlib==(.*)$", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.M)
same_matplotlib = pytest.mark.skipif(
    LOCKED is None or LOCKED[1] != importlib.metadata.version("matplotlib"),
    reason="layouts differ between releases of matplotlib",
)


@same_matplotlib
@pytest.mark.parametrize("one", KEPT, ids=lambda one: one.file)
def test_a_figure_equals_that_of_its_rows(one: Kept, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = save(one.draw(), tmp_path / "drawn.png")
    pyplot.close("all")
    assert_same(drawn, one.file)


@same_matplotlib
@pytest.mark.parametrize("file", OF_RUNS)
def test_a_figure_of_a_study_equals_that_of_its_tables(file: str, tmp_path: Path) -> None:
    for path in (RESULTS / file).parent.iterdir():
        if path.suffix in (".csv", ".json"):
            shutil.copy(path, tmp_path)
    assert_same(draw_of_run(file, tmp_path), file)


def assert_same(drawn: Path, file: str) -> None:
    pictures = image.imread(drawn), image.imread(RESULTS / file)
    assert pictures[0].shape == pictures[1].shape and np.abs(pictures[0] - pictures[1]).mean() < 1e-4


def test_every_figure_has_a_test_a_command_and_a_caption() -> None:
    pictures = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.png")}
    assert pictures == {one.file for one in KEPT} | set(OF_RUNS)
    for file in OF_RUNS:
        assert command_of_run((RESULTS / file).parent).startswith("python -m growlab")
    captions = re.findall(r"^!\[(.*)\]\(results/.*\)\n\n(.*)\n\n```sh$", gallery(), re.M)
    assert len(captions) == len(pictures)
    for alternative, shows in captions:
        assert len(shows.split()) > 3 and shows.endswith(".") and shows.replace("`", "") == alternative


def test_a_command_of_a_figure_draws_it(tmp_path: Path) -> None:
    from growlab.lab.analysis.__main__ import main

    (one,) = [one for one in KEPT if one.file == "digits/silhouettes.png"]
    words = one.command.split()
    assert words[:2] == ["growlab", "figure"] and words[-2] == "-o"
    drawn = tmp_path / "drawn.png"
    assert main(["figure", words[2], str(ROOT / words[3]), "-o", str(drawn)]) == 0
    assert np.array_equal(image.imread(drawn), image.imread(RESULTS / one.file))


@same_matplotlib
@pytest.mark.parametrize("name", drawings.ALL)
def test_a_drawing_is_up_to_date(name: str, tmp_path: Path) -> None:
    """After changes of growth draw it again: `make figures ARGS=NAME`."""
    number = re.compile(r"-?\d+\.\d+")
    now, kept = (
        path.read_text(encoding="utf-8")
        for path in (drawings.write(drawings.ALL[name], tmp_path / "now.svg"), drawings.DRAWINGS / f"{name}.svg")
    )
    assert number.sub("#", now) == number.sub("#", kept)
    assert np.allclose(*([float(one) for one in number.findall(text)] for text in (now, kept)), rtol=0, atol=0.05)
