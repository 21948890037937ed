"""Here networks are traced anew each time: it is what these tests are of."""

import pytest

from tests.once import tracing

_TRACED = tracing._traced


@pytest.fixture(autouse=True)
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_traced", _TRACED)
