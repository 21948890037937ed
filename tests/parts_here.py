"""Which parts are here: each can be taken away, and the rest is tested without it (`parts/test_removal.py`)."""

import importlib.util
from collections.abc import Sequence

import pytest

from growlab import parts

# By part: what of its settings and prepared experiments other tests name.
_NAMED = {
    "averages": ("ema.",),
    "classes": (),
    "depth": ("depth.", "=grown_", "llama_text", "plan.use=[fewer_blocks]"),
    "hypernets": ("=hyperfan",),
    "isotropic": ("=isotropic",),
    "osgd": ("osgd.", "=table14"),
    "resolution": ("resolution.",),
}


def is_here(home: str) -> bool:
    """Whether a part's file or folder in `growlab/parts` is."""
    return importlib.util.find_spec(f"growlab.parts.{home}") is not None


def needs(*homes: str) -> pytest.MarkDecorator:
    """Skip what several parts have to do with where one of them is gone; all of them by default."""
    gone = [home for home in homes or _NAMED if not is_here(home)]
    return pytest.mark.skipif(bool(gone), reason=f"growlab.parts is without {' and '.join(gone)}")


def averages() -> list[parts.Part]:
    """Averaged weights that go along in tests of other things, where they are here."""
    return [parts.Averages(decay=0.7)] if is_here("averages") else []


def skip_without(arguments: Sequence[object]) -> None:
    """Skip a test whose command line names something of a part that is gone."""
    for home, names in _NAMED.items():
        if not is_here(home) and any(name in str(argument) for argument in arguments for name in names):
            pytest.skip(f"growlab.parts is without {home}")


def skip_unless_whole() -> None:
    """Skip a test of something made of all parts, such as the docs."""
    gone = [home for home in _NAMED if not is_here(home)]
    if gone:
        pytest.skip(f"growlab.parts is without {' and '.join(gone)}")
