"""Notebooks run on run folders alone, and are kept with the outputs of those that are kept."""

import base64
import importlib.util
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tests.analysis.fake_runs import write_run

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_nothing_is_trained(path):
    content = path.read_text(encoding="utf-8")
    # In the history for ever, once for each time that figures change.
    assert len(content) < 400_000
    cells = [cell for cell in json.loads(content)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in out.get("data", {}) for cell in cells for out in cell["outputs"])
    for cell in cells:
        source = "".join(cell["source"])
        for word in ("torch", "lightning", "Trainer", "backward", "optimizer."):
            assert word not in source


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """The script that runs notebooks and makes pages of them."""
    spec = importlib.util.spec_from_file_location("notebook_pages", ROOT / "notebooks/docs/notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One for all notebooks of the project, which import the same."""
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    from jupyter_client import KernelManager

    manager = KernelManager(kernel_name="python3")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
    manager.start_kernel(cwd=str(ROOT / "notebooks"), env=environment)
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture
def execute(docs, kernel, tmp_path, monkeypatch) -> Callable[[Path], list]:
    """All outputs of a notebook that runs in its own folder, which is left as it is."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(path: Path) -> list:
        before, target = path.read_bytes(), tmp_path / "executed" / path.name
        docs.execute(path, target, kernel if path.parent == ROOT / "notebooks" else None)
        assert path.read_bytes() == before
        cells = json.loads(target.read_text(encoding="utf-8"))["cells"]
        return [out for cell in cells for out in cell.get("outputs", [])]

    return run


def _assert_kept(path: Path, outputs: list) -> None:
    """A notebook shows these outputs: `make notebooks ARGS=--keep` puts them there."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    kept = [out for cell in cells for out in cell.get("outputs", [])]
    assert [_told(out) for out in kept] == [_told(out) for out in outputs]
    for shown, drawn in zip(kept, outputs, strict=True):
        if "image/png" in drawn.get("data", {}):
            one, other = (_pixels(out) for out in (shown, drawn))
            # Fonts and antialiasing differ from machine to machine, sizes and contents do not.
            assert abs(np.subtract(one.shape, other.shape)).max() <= 0.03 * max(one.shape)
            low, wide = np.minimum(one.shape, other.shape)[:2]
            assert abs(one[:low, :wide] - other[:low, :wide]).mean() < 12, "make notebooks ARGS=--keep"


def _told(output: dict) -> str:
    """What an output says in words; of pictures nothing."""
    data = output.get("data", {})
    said = output.get("text") if not data else data.get("text/markdown", "")
    return "".join(said)


def _pixels(output: dict) -> np.ndarray:
    content = base64.b64decode("".join(output["data"]["image/png"]))
    return np.asarray(PIL.Image.open(io.BytesIO(content)).convert("RGB"), dtype=float)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize(
    ("name", "num_images", "num_tables"),
    [
        ("01_first_growth", 4, 2),
        ("02_compare_methods", 2, 4),
        ("03_rate_adaptation", 3, 1),
        ("04_schedules_and_cost", 5, 2),
        ("05_isotropic_neurons", 6, 2),
        ("06_hyperfan", 5, 1),
    ],
)
def test_they_run_on_the_results_that_are_kept_and_show_what_came_of_it(
    name, num_images, num_tables, execute
):
    outputs = execute(ROOT / "notebooks" / f"{name}.ipynb")
    _assert_kept(ROOT / "notebooks" / f"{name}.ipynb", outputs)
    data = [out.get("data", {}) for out in outputs]
    assert sum("image/png" in d for d in data) == num_images
    tables = ["".join(d["text/markdown"]) for d in data if "text/markdown" in d]
    assert len(tables) == num_tables and all(table.count("\n|") > 1 for table in tables)
    assert not [out for out in outputs if out["output_type"] == "stream" and out["name"] == "stderr"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
def test_first_growth_runs_on_run_folders_next_to_it(tmp_path, execute):
    """Without rates, whose figure is left out."""
    for seed in range(2):
        folder = tmp_path / "results" / "digits" / f"ours{seed}"
        write_run(folder, seed=seed, lr_adapt="none", stage_epochs=(1, 1, 2))
    write_run(tmp_path / "results" / "digits" / "fixed", growth="none", lr_adapt="none", stage_epochs=(4,))
    shutil.copy(ROOT / "notebooks" / "01_first_growth.ipynb", tmp_path)
    outputs = execute(tmp_path / "01_first_growth.ipynb")
    data = [out.get("data", {}) for out in outputs]
    assert sum("image/png" in d for d in data) == 3
    tables = ["".join(d["text/markdown"]) for d in data if "text/markdown" in d]
    assert "fixed-size" in tables[0] and "82.00 ± 0.00 (2)" in tables[0]
    assert "| 1 | 1 | " in tables[1] and "2.1e-07 | 3.4e-07" in tables[1]
    assert not [out for out in outputs if out["output_type"] == "stream" and out["name"] == "stderr"]


PNG = base64.b64encode(b"a figure").decode()
SHOWN = {
    "cells": [
        {"cell_type": "markdown", "source": ["# A title\n", "and text"]},
        {
            "cell_type": "code",
            "source": ["draw()"],
            "outputs": [
                {"data": {"image/png": PNG, "text/plain": ["<Figure>"]}},
                {"data": {"text/markdown": ["| a |\n", "|-|"], "text/plain": ["object"]}},
                {"output_type": "stream", "name": "stdout", "text": ["told\n"]},
            ],
        },
    ]
}


def test_outputs_are_kept_in_the_same_form_each_time(docs, tmp_path):
    picture = io.BytesIO()
    PIL.Image.linear_gradient("L").convert("RGBA").save(picture, "png")
    png = base64.b64encode(picture.getvalue()).decode()
    ran = json.loads(json.dumps(SHOWN))
    ran["cells"][1]["outputs"][0] |= {"output_type": "execute_result", "execution_count": 7}
    ran["cells"][1]["outputs"][0]["data"]["image/png"] = png
    executed, source = tmp_path / "executed.ipynb", tmp_path / "source.ipynb"
    executed.write_text(json.dumps(ran))
    plain = [{**cell, "outputs": [], "execution_count": None} for cell in SHOWN["cells"]]
    source.write_text(json.dumps({"cells": plain}))
    docs.keep(executed, source)
    once = source.read_bytes()
    docs.keep(executed, source)
    assert source.read_bytes() == once
    cell = json.loads(once)["cells"][1]
    assert cell["execution_count"] == cell["outputs"][0]["execution_count"] == 1
    assert cell["outputs"][1:] == ran["cells"][1]["outputs"][1:]
    assert abs(_pixels(cell["outputs"][0]) - _pixels(ran["cells"][1]["outputs"][0])).max() <= 2


def test_a_page_shows_code_tables_text_and_figures(docs):
    text, images = docs.page(SHOWN, "shown")
    assert text.split("\n\n") == [
        "# A title\nand text",
        "```python\ndraw()\n```",
        "![shown, figure 1](shown_0.png)",
        "| a |\n|-|",
        "```text\ntold\n```\n",
    ]
    assert images == {"shown_0.png": b"a figure"}


def test_outputs_of_other_cells_are_not_shown(docs, tmp_path):
    source, executed = tmp_path / "source.ipynb", tmp_path / "executed.ipynb"
    cells = [{**cell, "outputs": []} for cell in SHOWN["cells"]]
    source.write_text(json.dumps({"cells": cells}))
    assert docs.outputs_of(source, executed)["cells"] == cells
    executed.write_text(json.dumps(SHOWN))
    assert docs.outputs_of(source, executed) == SHOWN
    cells[1]["source"] = ["draw(2)"]
    source.write_text(json.dumps({"cells": cells}))
    assert docs.outputs_of(source, executed)["cells"] == cells


def test_make_notebooks_writes_into_the_build_folder_alone(docs, tmp_path, monkeypatch):
    """The checkout stays as it is, unless it is told to keep what came of it."""
    recipe = (ROOT / "Makefile").read_text().split("\nnotebooks: ")[1].split("\n\n")[0]
    assert "$(PY) notebooks/docs/notebooks.py" in recipe and "inplace" not in recipe
    assert docs.EXECUTED == ROOT / "build" / "notebooks" and docs.SOURCES == ROOT / "notebooks"
    calls = []
    monkeypatch.setattr(docs, "execute", lambda source, target: calls.append((source, target)))
    monkeypatch.setattr(docs, "keep", lambda executed, target: calls.append((executed, target)))
    docs.main()
    copies = [ROOT / "build" / "notebooks" / path.name for path in NOTEBOOKS]
    assert calls == list(zip(NOTEBOOKS, copies, strict=True))
    calls.clear()
    docs.main(["--keep"])
    pairs = zip(NOTEBOOKS, copies, strict=True)
    assert calls == [call for source, copy in pairs for call in ((source, copy), (copy, source))]
    with pytest.raises(SystemExit, match="usage"):
        docs.main(["--inplace"])
