"""Docstrings, comments, messages and pages are plain English, without listed words."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import ROOT

DOCS = ROOT / "notebooks" / "docs" / "pages"
RIDDLE = re.compile(r"(What|Whether|How|Of|Where|Which)\b")
WORDS = re.compile(
    r"\b(told|tells|looks|held(?![- ]out)|holds|go(es|ing)? (by|on)|(?-i:is none)|anew|beside|in vain|lies|alike"
    r"|of (one's|your) own)\b",
    re.IGNORECASE,
)
# Pages with verdicts ("holds") and quotations of papers.
GENERATED = {*(DOCS / "papers").glob("*.md"), DOCS / "changelog.md"}


def prose_of_code(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, True for a docstring) of docstrings, comments and sentences of a module."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value, id(node) in docstrings
    for line, text in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)#:? (.*)", text):
            yield line, comment[1], False


def markdown_of(page: Path) -> str:
    """Text of a Markdown file, or of a notebook's Markdown cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def prose_of_page(path: Path) -> str:
    """Words of a page or notebook, without code, addresses and HTML."""
    text = re.sub(r"^( *)```.*?^\1```|<!--.*?-->", "", markdown_of(path), flags=re.M | re.S)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|\$[^$]*\$|<[^>]*>", " ", text)


def hits(text: str, docstring: bool = False) -> list[str]:
    """Listed words in a text, and the question word that a docstring begins with; code in backticks is ignored."""
    text = " ".join(re.sub(r"`[^`]*`", "", text).split())
    riddle = RIDDLE.match(text) if docstring else None
    return [match.group() for match in (riddle, *WORDS.finditer(text)) if match]


def hits_in_code(source: str) -> list[str]:
    """`LINE: WORD` for each hit in a module."""
    return [f"{line}: {word}" for line, text, doc in prose_of_code(source) for word in hits(text, doc)]


def flesch(text: str) -> float:
    """Reading ease of Flesch 1948: 60 to 70 is plain English, below 50 hard."""
    sentences = [s for s in re.split(r"[.!?:;](?:\s|$)|\n\s*\n|\n\s*[-*|#\d]", text) if len(s.split()) > 2]
    words = re.findall(r"[a-z']+", " ".join(sentences).lower())
    syllables = sum(
        max(1, len(re.findall(r"[aeiouy]+", re.sub(r"(?<![aeiouyl])e(s|d)?$", "", word)))) for word in words
    )
    return 206.835 - 1.015 * len(words) / len(sentences) - 84.6 * syllables / len(words)


CODE = sorted((ROOT / "growlab").rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in DOCS.rglob("*.md") if path not in GENERATED),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
SETTINGS = sorted((ROOT / "conf").rglob("*.yaml"))


def found(hits_by_path: dict[Path, list[str]]) -> dict[str, list[str]]:
    """Hits by the name of their file."""
    named = {path.relative_to(ROOT).as_posix(): words for path, words in hits_by_path.items()}
    return {name: words for name, words in named.items() if words}


def test_code_is_plain_english() -> None:
    assert found({path: hits_in_code(path.read_text(encoding="utf-8")) for path in CODE}) == {}


def test_pages_are_plain_english() -> None:
    assert found({path: hits(prose_of_page(path)) for path in PAGES}) == {}


def test_comments_of_settings_are_plain_english() -> None:
    comments = {path: re.findall(r"#.*", path.read_text(encoding="utf-8")) for path in SETTINGS}
    assert found({path: [word for line in lines for word in hits(line)] for path, lines in comments.items()}) == {}


NEWCOMERS = [ROOT / "README.md", *DOCS.glob("tutorials/*.md"), *sorted((ROOT / "notebooks").glob("*.ipynb"))]


@pytest.mark.parametrize("page", NEWCOMERS, ids=lambda page: page.name)
def test_pages_for_newcomers_read_easily(page: Path) -> None:
    assert flesch(prose_of_page(page)) > 50


def test_riddles_and_listed_words_are_found() -> None:
    assert len(CODE) > 100 and len(PAGES) > 20 and len(SETTINGS) > 50
    source = '"""What it does."""\n\n# It holds them.\nraise ValueError("classes told apart")\nkey = "held-out set"\n'
    assert hits_in_code(source) == ["1: What", "4: told", "3: holds"]
    assert hits("Return `what.holds` of your own loop") == ["of your own"]
    easy, hard = (
        "The cat sat on the mat. It was a good day.",
        "Institutional considerations necessitate reconsideration.",
    )
    assert flesch(easy) > 90 and flesch(hard) < 0
