"""What all front ends' tests share."""

from collections.abc import Iterator

import pytest

from growlab.grower import preparing
from tests.once import traced_once


@pytest.fixture(autouse=True, scope="module")
def one_trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Equal networks are traced once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "trace", traced_once(preparing.trace, tmp_path_factory.mktemp("traces")))
        yield
