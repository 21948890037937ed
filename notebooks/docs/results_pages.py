"""MkDocs hook: puts the figures and tables of notebooks/results into the docs, and makes a gallery of the figures."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "notebooks" / "results"
_COMMANDS = RESULTS / "README.md"
_TOP = """# Gallery

Every figure below is drawn from rows that are kept in the repository, by the command beside it (run from a checkout).
[How the rows were made](results/README.md).

"""


def on_files(files: Any, config: Any) -> Any:
    """Add figures, tables, and the gallery."""
    from mkdocs.structure.files import File

    for path in sorted((*RESULTS.rglob("*.png"), *RESULTS.rglob("*.md"))):
        name = f"results/{path.relative_to(RESULTS)}"
        if path.suffix == ".md":
            title = (
                ""
                if path.read_text(encoding="utf-8").startswith("# ")
                else f"# {path.parent.name}: {path.stem}\n\n"
            )
            files.append(File.generated(config, name, content=title + path.read_text(encoding="utf-8")))
        else:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "gallery.md", content=gallery()))
    return files


def gallery() -> str:
    """The page: a heading for each folder of results, its figures, and the command of each where one is told."""
    commands = dict(_commands(_COMMANDS.read_text(encoding="utf-8")))
    parts = [_TOP]
    for folder in sorted({path.parent for path in RESULTS.rglob("*.png")}):
        parts.append(f"## {folder.relative_to(RESULTS)}\n\n")
        for path in sorted(folder.glob("*.png")):
            name = str(path.relative_to(RESULTS))
            parts.append(f"![{path.stem} of {folder.name}](results/{name})\n\n")
            if name in commands:
                parts.append(f"```sh\n{commands[name]}\n```\n\n")
    return "".join(parts)


def _commands(text: str) -> list[tuple[str, str]]:
    """Commands that write a figure below notebooks/results, by the figure."""
    text = re.sub(r"\n\s+", " ", text)
    found = re.findall(r"python -m growlab\.analysis figure [^`\n]*? -o notebooks/results/\S+\.png", text)
    return [(command.rpartition("notebooks/results/")[2], command) for command in found]
