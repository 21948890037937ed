"""MkDocs hook: a search finds what was written for readers before the API's entries and the tables of results."""

from typing import Any

# Factors on the score of a page's sections, by the beginning of its path.
_BOOSTS = {
    "guide/": 4.0,
    "notebooks/": 4.0,
    "tutorials/": 4.0,
    "index.md": 2.0,
    "own_loop.md": 2.0,
    "results/": 0.25,
    "papers/": 0.5,
}


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> None:
    """Set the page's factor, unless it sets its own."""
    for start, boost in _BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", {"boost": boost})
