"""Trace networks in every test instead of caching graphs: tracing is what these tests cover."""

import pytest

from tests.once import tracing

_TRACED = tracing._traced


@pytest.fixture(autouse=True)
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_traced", _TRACED)
