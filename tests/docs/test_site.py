"""The documentation builds with all links resolved and has an entry for each public name."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT

PAGES = ROOT / "notebooks" / "docs" / "pages"
PACKAGES = ("widths", "growth", "optim", "widen", "plan", "training", "networks", "data", "analysis")
LAB = {page: f"lab.{page}" for page in ("training", "networks", "data", "analysis")}
# Packages on the engine's page.
ENGINE = ("grower", "grower.triggers", "parts", "frontends.lightning", "frontends.transformers")
# Methods that only growlab calls.
INTERNAL = {"Grower.restore_full_width", "Grower.reattach_hooks", "Grower.resize_for_loading", "Grower.__reduce__"}

# Words that users search for, by page.
SEARCHED = {
    "guide/optimizers/": ("optimizer state",),
    "guide/devices/": ("DDP", "multiple GPUs", "out of memory"),
    "guide/experiments/": ("resume", "command line", "mixed precision"),
    "guide/networks/": ("LayerNorm", "BatchNorm", "attention heads", "which layers grow"),
    "guide/own_data/": ("my own dataset", "early stopping"),
    "guide/measured/": ("does growing pay",),
    "guide/schedules/": ("EMA",),
    "notebooks/01_your_network/": ("export the model",),
    "": ("cite", "tutorials"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "notebooks/docs/mkdocs.yml"]
    outcome = subprocess.run(
        [*command, "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0 and "WARNING" not in outcome.stderr, outcome.stderr
    return folder


@pytest.mark.parametrize(
    ("page", "package"), [*zip(PACKAGES, PACKAGES, strict=True), *(("engine", package) for package in ENGINE)]
)
def test_every_public_name_has_an_entry(site: Path, page: str, package: str) -> None:
    """By its name in the package, or of its definition if a module has the same name."""
    module = importlib.import_module(f"growlab.{LAB.get(package, package)}")
    found = set(re.findall(r'id="([\w.]+)"', (site / page / "index.html").read_text()))
    aliases = {"Inheritance", "Widths"}  # of types, without an entry
    objects = {name: getattr(module, name) for name in getattr(module, "__all__", ["Growth"])}
    missing = {
        name
        for name, one in objects.items()
        if callable(one) and name not in aliases
        if not {f"{module.__name__}.{name}", f"{one.__module__}.{one.__qualname__}"} & found
    }
    assert not missing


def test_the_engine_lists_methods_for_loops_first(site: Path) -> None:
    found = re.findall(r'id="growlab\.grower\.(Grower\.\w+)"', (site / "engine" / "index.html").read_text())
    assert found[:3] == ["Grower.follow", "Grower.provide", "Grower.step"] and not INTERNAL & set(found)


def test_growth_methods_are_in_the_order_of_the_module(site: Path) -> None:
    found = re.findall(r'id="growlab\.growth\.(\w+)"', (site / "growth" / "index.html").read_text())
    assert found[:2] == ["GrowthMethod", "VarianceTransfer"]


def test_examples_are_code_and_references_are_links(site: Path) -> None:
    for page in site.rglob("index.html"):
        text = page.read_text()
        assert "<blockquote>\n<blockquote>" not in text and "][growlab." not in text, page


def test_links_between_results_and_pages_exist(site: Path) -> None:
    assert 'href="../papers/"' in (site / "results" / "index.html").read_text()
    page = (site / "guide" / "measured" / "index.html").read_text()
    linked = re.findall(r'href="(\.\./\.\./results/[^"]*\.json)"', page)
    assert linked and all((site / "guide" / "measured" / one).resolve().exists() for one in linked)


@pytest.mark.parametrize(
    ("page", "without"), [("papers/yuan", 1), ("gallery", 1), ("results/matrix/transformers", 2), ("guide/measured", 0)]
)
def test_pages_with_wide_tables_hide_side_columns(site: Path, page: str, without: int) -> None:
    text = (site / page / "index.html").read_text()
    assert len(re.findall(r'data-md-type="(?:navigation|toc)" hidden', text)) == without


def test_the_example_is_that_of_the_readme(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "own_loop" / "index.html").read_text())
    assert "trigger={0: 0.25, 2: 0.5, 4: 1.0}" in text


def test_search_ranks_guides_above_the_api(site: Path) -> None:
    sections = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    boosts = {one["location"].partition("#")[0]: one.get("boost", 1.0) for one in sections}
    assert boosts["guide/networks/"] == boosts["notebooks/01_your_network/"] > boosts["widths/"] > boosts["papers/"]


def test_words_that_users_search_for_are_in_titles(site: Path) -> None:
    sections = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    titles = {one["location"]: one["title"].lower() for one in sections}
    for page, words in ((page, one) for page, several in SEARCHED.items() for one in several):
        found = [t for location, t in titles.items() if location.startswith(page) and words.lower() in t]
        assert found, f"no title of {page} has {words!r}"


def test_every_notebook_is_a_page(site: Path) -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        title = "".join(cells[0]["source"]).partition("\n")[0].removeprefix("# ")
        page = (site / "notebooks" / path.stem / "index.html").read_text()
        assert f"{title}</h1>" in re.sub(r"<a [^>]*>[^<]*</a>", "", page) and f"{path.stem}_0.png" in page


# mkdocstrings parses "weight, bias: names" as an entry "weight," of the type "bias".
_SEVERAL = re.compile(r"^ +\w+(, \w+)+: ", re.MULTILINE)


def test_an_entry_of_a_docstring_has_one_name() -> None:
    docstrings = {
        f"{path.relative_to(ROOT)}:{node.lineno}": ast.get_docstring(node)
        for path in sorted((ROOT / "growlab").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    found = {place: _SEVERAL.search(text) for place, text in docstrings.items() if text}
    assert len(found) > 1000
    assert {place: match[0] for place, match in found.items() if match} == {}


def test_every_page_is_a_package_or_named_in_the_contents() -> None:
    others = ("engine", "glossary", "index", "own_loop", "changelog")
    assert {path.stem for path in PAGES.glob("*.md")} == {*PACKAGES, *others}
