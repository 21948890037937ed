"""Seconds of a growth event beside GroMo's, on the same network and batches: `make bench ARGS="-k gromo"`."""

import copy
import statistics
import time
from collections.abc import Callable

import pytest

from growlab.growth import GradMax, Tiny
from tests.growth.measured import Started
from tests.growth.test_gromo import STATISTICS, conv_ours, conv_theirs, double, grown, ours, theirs

__all__ = ["double"]  # a fixture
pytest.importorskip("gromo", reason="GroMo is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
REPEATS = 5


def median(prepare: Callable[[], object], event: Callable[[object], object]) -> float:
    times = []
    for _ in range(REPEATS):
        given = prepare()
        began = time.perf_counter()
        event(given)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@pytest.mark.parametrize("name", ["tiny", "gradmax"])
@pytest.mark.parametrize("kind", ["linear, small", "linear", "convolution, small", "convolution"])
def test_events(name: str, kind: str, double: None) -> None:
    """Small: 40 inputs and 4 neurons, so that what surrounds the computation counts; else what a layer may have."""
    convolution, small = kind.startswith("convolution"), kind.endswith("small")
    make, copied = (conv_ours, conv_theirs) if convolution else (ours, theirs)
    sizes = {}
    if not small:
        sizes = (
            {"inputs": 16, "width": 64, "side": 12}
            if convolution
            else {"inputs": 784, "width": 512, "size": 512}
        )
    method = Tiny(amplitudes=[1.0]) if name == "tiny" else GradMax()
    run = make(method, **sizes)
    start, old = copied(run), run.state.widths["0"]
    count = old // 2

    def fresh() -> Started:
        network = copy.deepcopy(run.network)
        return Started(network, run.graph, copy.deepcopy(run.state), method, run.batches)

    ours_sec = median(fresh, lambda made: made.grow({"0": old + count}))
    theirs_sec = median(
        lambda: copy.deepcopy(start), lambda made: grown(made, run.batches, 1.0, count, **STATISTICS[name])
    )
    print(f"{name}, {kind}: {1e3 * ours_sec:.1f} ms an event, checks included; ", end="")
    print(f"GroMo {1e3 * theirs_sec:.1f} ms; ratio {ours_sec / theirs_sec:.2f}")
