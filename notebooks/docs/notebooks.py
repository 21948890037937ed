"""Runs copies of the notebooks, keeps their outputs in the notebooks if asked to, and makes pages of them for the docs.

`python notebooks/docs/notebooks.py` writes executed copies into build/notebooks; with `--keep` the notebooks get the
outputs too, so that whoever opens one in the repository sees its tables and figures. MkDocs loads this file as a hook:
each notebook becomes a page, of an executed copy of the same cells where one lies there.
"""

import base64
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES, EXECUTED = ROOT / "notebooks", ROOT / "build" / "notebooks"
_TIMEOUT_SEC = 600
_UNTOUCHED = "!!! note\n    Outputs are left out here: `make docs` runs the notebooks first.\n"


def execute(source: Path, target: Path) -> None:
    """Run a notebook in its own folder and write what came of it into another file.

    Args:
        source: the notebook.
        target: the other file.
    """
    # Imported here: the docs build without them.
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(source, as_version=4)
    # "python3" is the kernel of the Python that runs this, whatever else is registered.
    resources = {"metadata": {"path": str(source.parent)}}
    settings = {"timeout": _TIMEOUT_SEC, "kernel_name": "python3", "resources": resources}
    # Programs installed beside this Python (`growlab`, `torchrun`) are found as in an active environment.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    NotebookClient(notebook, **settings).execute(env={**os.environ, "PATH": path})
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)


def keep(executed: Path, target: Path) -> None:
    """Put the outputs of an executed copy into the notebook, in a form that is the same each time and small."""
    notebook = json.loads(target.read_text(encoding="utf-8"))
    count = 0
    for cell, ran in zip(notebook["cells"], json.loads(executed.read_text(encoding="utf-8"))["cells"], strict=True):
        if cell["cell_type"] != "code":
            continue
        count += 1
        cell["execution_count"], cell["outputs"] = count, [_kept(output, count) for output in ran["outputs"]]
    target.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _kept(output: dict[str, Any], count: int) -> dict[str, Any]:
    output = {**output, **({"execution_count": count} if "execution_count" in output else {})}
    if "image/png" in output.get("data", {}):
        image = smaller(base64.b64decode("".join(output["data"]["image/png"])))
        output["data"] = {**output["data"], "image/png": base64.b64encode(image).decode() + "\n"}
    return output


def smaller(image: bytes) -> bytes:
    """A figure as a PNG of 256 colours, a third of the size; figures have few."""
    # Imported here: the docs build without it.
    from PIL import Image

    target = io.BytesIO()
    drawn = Image.open(io.BytesIO(image)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    drawn.save(target, "png", optimize=True)
    return target.getvalue()


def page(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its images by the names of their files.

    Args:
        notebook: the content of an .ipynb file.
        stem: of the names of images.
    """
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # Links by the place in the repository, to pages and to other notebooks.
            parts.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", source.replace("](docs/pages/", "](../")))
        elif cell["cell_type"] == "code":
            parts.append(_fenced(source, "python"))
            for output in cell["outputs"]:
                data = output.get("data", {})
                if "image/png" in data:
                    name = f"{stem}_{len(images)}.png"
                    images[name] = base64.b64decode("".join(data["image/png"]))
                    parts.append(f"![{stem}, figure {len(images)}]({name})")
                elif "text/markdown" in data:
                    parts.append("".join(data["text/markdown"]))
                elif "text/plain" in data or "text" in output:
                    parts.append(_fenced("".join(data.get("text/plain") or output["text"]), "text"))
    return "\n\n".join(parts) + "\n", images


def outputs_of(source: Path, executed: Path) -> dict[str, Any]:
    """The executed copy of a notebook if it has the same cells, else the notebook itself."""
    notebook = json.loads(source.read_text(encoding="utf-8"))
    if executed.exists():
        copy = json.loads(executed.read_text(encoding="utf-8"))
        if _cells(copy) == _cells(notebook):
            return copy
    return notebook


def on_files(files: Any, config: Any) -> Any:
    """MkDocs' hook: add the pages and their images."""
    from mkdocs.structure.files import File

    for source in sorted(SOURCES.glob("*.ipynb")):
        notebook = outputs_of(source, EXECUTED / source.name)
        text, images = page(notebook, source.stem)
        if not any(cell.get("outputs") for cell in notebook["cells"]):
            title, _, rest = text.partition("\n")
            text = f"{title}\n\n{_UNTOUCHED}\n{rest}"
        files.append(File.generated(config, f"notebooks/{source.stem}.md", content=text))
        for name, content in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def _cells(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def main(arguments: Sequence[str] = ()) -> None:
    """Run a copy of every notebook; with `--keep` put the outputs into the notebooks."""
    if set(arguments) - {"--keep"}:
        sys.exit(f"usage: {Path(__file__).name} [--keep]")
    for path in sorted(SOURCES.glob("*.ipynb")):
        print(f"running {path.name}", file=sys.stderr)
        execute(path, EXECUTED / path.name)
        if "--keep" in arguments:
            keep(EXECUTED / path.name, path)
    print(f"executed copies: {EXECUTED}; make docs puts them into the docs")


if __name__ == "__main__":
    main(sys.argv[1:])
