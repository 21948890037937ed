"""Which parts are here: each can be taken away, and the rest is tested without it (`parts/test_removal.py`)."""

import importlib.util

import pytest

from growlab import parts

_HOMES = ("averages", "classes", "depth", "hypernets", "isotropic", "osgd", "resolution")


def is_here(home: str) -> bool:
    """Whether a part's file or folder in `growlab/parts` is."""
    return importlib.util.find_spec(f"growlab.parts.{home}") is not None


def needs(*homes: str) -> pytest.MarkDecorator:
    """Skip what several parts have to do with where one of them is gone; all of them by default."""
    gone = [home for home in homes or _HOMES if not is_here(home)]
    return pytest.mark.skipif(bool(gone), reason=f"growlab.parts is without {' and '.join(gone)}")


def averages() -> list[parts.Part]:
    """Averaged weights that go along in tests of other things, where they are here."""
    return [parts.Averages(decay=0.7)] if is_here("averages") else []
