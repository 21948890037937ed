"""MkDocs hook: puts the figures and tables of notebooks/results into the docs, and makes a gallery of the figures.

Figures that are drawn from rows are shown as SVG, drawn when the docs are built.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # a hook is loaded by its path

from figures import RESULTS, drawn, kept

_TOP = """# Gallery

Every figure below is drawn from rows that are kept in the repository, by the command beside it (run from a checkout).
[How the rows were made](results/README.md).

"""


# A file of results, linked from a page.
_LINKED = re.compile(r"\]\((?:\.\./)*(results/[\w./-]+\.json)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add figures, tables, the results that pages link, and the gallery."""
    from mkdocs.structure.files import File

    for path in sorted((*RESULTS.rglob("*.png"), *RESULTS.rglob("*.md"))):
        name = f"results/{path.relative_to(RESULTS)}"
        if path.suffix == ".md":
            title = (
                "" if path.read_text(encoding="utf-8").startswith("# ") else f"# {path.parent.name}: {path.stem}\n\n"
            )
            files.append(File.generated(config, name, content=title + path.read_text(encoding="utf-8")))
        else:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    pages = [file.content_string for file in files.documentation_pages()]
    for name in sorted({name for text in pages for name in _LINKED.findall(text)}):
        files.append(File.generated(config, name, abs_src_path=str(RESULTS.parent / name)))
    for one in kept():
        name = f"results/{Path(one.file).with_suffix('.svg')}"
        files.append(File.generated(config, name, abs_src_path=str(drawn(one))))
    files.append(File.generated(config, "gallery.md", content=gallery()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show the SVG in place of each PNG that is drawn from rows; files of the repository name the PNG.

    What stands in notebooks/results links pages by their place in the repository, where it lies beside docs/pages.
    Pages of wide tables, and those without others beside them, have no column of other pages.
    """
    page.meta.update(hidden(page.file.src_uri))
    if page.file.src_uri.startswith("results/"):
        markdown = markdown.replace("](../docs/pages/", "](../")
    for one in kept():
        stem = f"results/{Path(one.file).with_suffix('')}"
        markdown = re.sub(rf"(\]\((?:\.\./)*{re.escape(stem)})\.png\)", r"\1.svg)", markdown)
    return markdown


def hidden(source: str) -> dict[str, list[str]]:
    """What a page does without, as Material's `hide` says it."""
    if source.startswith("results/matrix/"):
        return {"hide": ["navigation", "toc"]}
    alone = source.startswith(("results/", "papers/")) or source == "gallery.md"
    return {"hide": ["navigation"]} if alone else {}


def gallery() -> str:
    """The page: a heading for each folder of results, its figures, what each shows, and the command that draws it."""
    known = {one.file: one for one in kept()}
    parts = [_TOP]
    for folder in sorted({path.parent for path in RESULTS.rglob("*.png")}):
        parts.append(f"## {folder.relative_to(RESULTS)}\n\n")
        for path in sorted(folder.glob("*.png")):
            name = str(path.relative_to(RESULTS))
            one = known.get(name)
            shows = one.shows if one else shown_by_run(folder)
            parts.append(f"![{shows.replace('`', '')}](results/{name})\n\n{shows}\n\n")
            parts.append(f"```sh\n{one.command if one else command_of_run(folder)}\n```\n\n")
    return "".join(parts)


def shown_by_run(folder: Path) -> str:
    """Caption of a study's figure."""
    return f"The study {folder.name.replace('_', ' ')}."


def command_of_run(folder: Path) -> str:
    """Command of a study, which draws its figure itself."""
    return str(json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["command"])
