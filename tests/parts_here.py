"""Which parts are here: each can be taken away, and the rest is tested without it (`parts/test_removal.py`)."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from growlab.parts import Part

# By part: what of its settings and prepared experiments other tests name.
_NAMED = {
    "averages": ("ema.",),
    "classes": (),
    "depth": ("depth.", "=grown_", "llama_text"),
    "features": ("features.",),
    "hypernets": ("=hyperfan",),
    "isotropic": ("=isotropic", "isotropic.", "gain_weights."),
    "osgd": ("osgd.", "=table14"),
    "patch_size": ("patch_size.",),
    "resolution": ("resolution.",),
    "setting": ("setting.",),
}


def is_here(home: str) -> bool:
    """Whether a part's file or folder in `growlab/parts` is."""
    return importlib.util.find_spec(f"growlab.parts.{home}") is not None


def _gone(homes: Sequence[str]) -> str:
    """Why a test is skipped that has to do with several parts, by default with all; empty where they are here."""
    gone = [home for home in homes or _NAMED if not is_here(home)]
    return f"growlab.parts is without {' and '.join(gone)}" if gone else ""


def needs(*homes: str) -> pytest.MarkDecorator:
    """Skip a test of these parts, by default of all, where one of them is gone."""
    return pytest.mark.skipif(bool(_gone(homes)), reason=_gone(homes))


def averages() -> "list[Part]":
    """Averaged weights that go along in tests of other things, where they are here."""
    # The process that distributes the tests imports this file and needs nothing of torch.
    from growlab import parts

    return [parts.Averages(decay=0.7)] if is_here("averages") else []


def skip_without(arguments: Sequence[object]) -> None:
    """Skip a test whose command line names something of a part that is gone."""
    named = [home for home, names in _NAMED.items() if any(n in str(a) for a in arguments for n in names)]
    if named and _gone(named):
        pytest.skip(_gone(named))


def skip_unless_whole() -> None:
    """Skip a test of something made of all parts, such as the docs."""
    if _gone(()):
        pytest.skip(_gone(()))
