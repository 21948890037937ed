"""Networks of public libraries grow as much and as exactly as the committed table says; no row may get worse."""

import pytest

from tests.foreign.grown import ENOUGH, EXACT, LIBRARIES, Row, grown, read
from tests.foreign.networks import NETWORKS

TABLE = read()


def test_the_table_has_a_row_for_each_network() -> None:
    assert list(TABLE) == list(NETWORKS)


def test_most_networks_trace_and_grow() -> None:
    rows = list(TABLE.values())
    traced = [row for row in rows if row.traced]
    assert len(rows) >= 40 and len(traced) >= 0.95 * len(rows)
    assert sum(row.share >= ENOUGH for row in traced) >= 0.9 * len(traced)


def test_a_network_that_fails_while_it_trains_is_not_exact() -> None:
    assert Row("", eval=0.0, train=0.0, loaded=0.0).exact and not Row("", eval=0.0, train=0.0).exact


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_no_row_gets_worse(name: str) -> None:
    pytest.importorskip(next(library for library in LIBRARIES if name.startswith(library)))
    known, row = TABLE[name], grown(name)
    assert row.share >= known.share - 1e-3, row
    assert row.exact or not known.exact, f"{row} is off by more than {EXACT}"
