"""Notebooks run on run folders alone, and are kept without outputs."""

import json
import shutil
from pathlib import Path

import pytest

from .fake_runs import write_run

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped_and_nothing_is_trained(path):
    cells = [
        cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
    ]
    assert cells
    for cell in cells:
        assert cell["outputs"] == [] and cell["execution_count"] is None
        source = "".join(cell["source"])
        for word in ("torch", "lightning", "Trainer", "backward", "optimizer."):
            assert word not in source


def execute(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """All outputs of a notebook that runs in a folder."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    notebook = nbformat.read(path, as_version=4)
    # "python3" is the kernel of the Python that runs this, whatever else is registered.
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [out for cell in notebook.cells for out in cell.get("outputs", [])]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize(
    ("name", "num_images", "num_tables"),
    [
        ("02_compare_methods", 2, 4),
        ("03_rate_adaptation", 3, 1),
        ("04_schedules_and_cost", 5, 2),
        ("05_isotropic_neurons", 6, 2),
        ("06_hyperfan", 5, 1),
    ],
)
def test_the_others_run_on_the_results_that_are_kept(name, num_images, num_tables, monkeypatch):
    outputs = execute(ROOT / "notebooks" / f"{name}.ipynb", ROOT / "notebooks", monkeypatch)
    data = [out.get("data", {}) for out in outputs]
    assert sum("image/png" in d for d in data) == num_images
    tables = [d["text/markdown"] for d in data if "text/markdown" in d]
    assert len(tables) == num_tables and all(table.count("\n|") > 1 for table in tables)
    assert not [out for out in outputs if out.output_type == "stream" and out.name == "stderr"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize("lr_adapt", ["stagewise_norm", "none"])
def test_first_growth_runs_on_run_folders_beside_it(tmp_path, monkeypatch, lr_adapt):
    for seed in range(2):
        write_run(
            tmp_path / "results" / "digits" / f"ours{seed}",
            seed=seed,
            lr_adapt=lr_adapt,
            stage_epochs=(1, 1, 2),
        )
    write_run(tmp_path / "results" / "digits" / "fixed", growth="none", lr_adapt="none", stage_epochs=(4,))
    shutil.copy(ROOT / "notebooks" / "01_first_growth.ipynb", tmp_path)
    outputs = execute(tmp_path / "01_first_growth.ipynb", tmp_path, monkeypatch)
    data = [out.get("data", {}) for out in outputs]
    assert sum("image/png" in d for d in data) == (4 if lr_adapt != "none" else 3)
    tables = [d["text/markdown"] for d in data if "text/markdown" in d]
    assert "fixed-size" in tables[0] and "82.00 ± 0.00 (2)" in tables[0]
    assert "| 1 | 1 | " in tables[1] and "2.1e-07 | 3.4e-07" in tables[1]
    assert not [out for out in outputs if out.output_type == "stream" and out.name == "stderr"]
