"""Notebooks run, and are committed with their outputs."""

import base64
import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tests.command_line import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_committed_and_short(path: Path) -> None:
    content = path.read_text(encoding="utf-8")
    # Each change of a figure adds to the size of the repository.
    assert len(content) < 100_000 and str(ROOT) not in content
    cells = json.loads(content)["cells"]
    assert len(cells) <= 14
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [out for cell in cells for out in cell["outputs"]]
    assert any("image/png" in out.get("data", {}) for out in outputs)
    assert not [out for out in outputs if out["output_type"] == "error"]
    warned = "".join(out["text"] for out in map(flat, outputs) if out.get("name") == "stderr")
    for line in warned.splitlines():
        assert line.startswith(("growth ", "training has ended in stage")), line


def flat(output: dict[str, Any]) -> dict[str, Any]:
    """Copy of an output with its text joined."""
    return {**output, "text": "".join(output.get("text", ""))}


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """The script that runs notebooks and converts them to pages."""
    spec = importlib.util.spec_from_file_location("notebook_pages", ROOT / "notebooks/docs/notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(path: Path) -> tuple[list[dict[str, str]], list[tuple[int, ...]]]:
    """Text of each cell's outputs, with numbers replaced, and the sizes of all pictures."""
    words, sizes = [], []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        said: dict[str, str] = {}
        for output in map(flat, cell.get("outputs", [])):
            data = output.get("data", {})
            if "image/png" in data:
                sizes.append(_pixels(output).shape)
            else:
                text = output["text"] or "".join(data.get("text/plain", ""))
                said[output.get("name", "value")] = said.get(output.get("name", "value"), "") + text
        words.append({name: " ".join(re.sub(NUMBERS, "#", text).split()) for name, text in said.items()})
    return words, sizes


# Accuracies and seconds differ between machines, and with them the width of columns.
NUMBERS = r"\**[+−-]?\d[\d.,]*(e[+-]?\d+)?\**|-{3,}"


def _pixels(output: dict) -> np.ndarray:
    content = base64.b64decode("".join(output["data"]["image/png"]))
    return np.asarray(PIL.Image.open(io.BytesIO(content)).convert("RGB"), dtype=float)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_with_the_committed_outputs(
    path: Path, docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Update outputs with `make notebooks ARGS=--keep`."""
    for package in ("nbformat", "nbclient", "ipykernel", "transformers", "accelerate"):
        pytest.importorskip(package)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = path.read_bytes()
    docs.execute(path, tmp_path / path.name)
    assert path.read_bytes() == before
    (words, sizes), (kept_words, kept_sizes) = shown(tmp_path / path.name), shown(path)
    assert words == kept_words
    assert np.shape(sizes) == np.shape(kept_sizes)
    # Fonts differ between machines.
    assert np.allclose(sizes, kept_sizes, rtol=0.03)


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
                {"output_type": "stream", "name": "stdout", "text": ["printed\n"]},
            ],
        },
    ]
}


def test_keeping_outputs_twice_gives_the_same_file(docs, tmp_path):
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
        "```text\nprinted\n```\n",
    ]
    assert images == {"shown_0.png": b"a figure"}
    # Links are to pages of the site.
    source = "[a](02_lightning.ipynb), [b](docs/pages/guide/data.md), [c](https://x.org/y.ipynb)"
    text, _ = docs.page({"cells": [{"cell_type": "markdown", "source": [source]}]}, "shown")
    assert text == "[a](02_lightning.md), [b](../guide/data.md), [c](https://x.org/y.ipynb)\n"


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


def test_make_notebooks_writes_to_the_build_folder_unless_asked_to_keep(docs, tmp_path, monkeypatch):
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
