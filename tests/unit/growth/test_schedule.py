"""Epochs, widths and batch sizes of stages: the published lists, and properties of any setting."""

import inspect
import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from growlab.growth import make_schedule
from growlab.growth.schedule import stage_batch_sizes, stage_epochs, stream_width, width_fractions
from growlab.lab.networks import resnet20
from growlab.widths import Group, WidthGraph, trace
from tests.command_line import ROOT


def graph_with(*groups: Group) -> WidthGraph:
    return WidthGraph({group.name: group for group in groups}, {}, (), (), frozenset(), 0)


@pytest.mark.parametrize(
    ("total", "initial", "expected"),
    [
        (160, 8, [8, 9, 11, 13, 16, 19, 23, 28, 33]),
        (200, 10, [10, 12, 14, 17, 20, 24, 29, 35, 39]),
        (90, 4, [4, 4, 5, 6, 8, 9, 11, 14, 29]),
    ],
)
def test_published_epochs(total, initial, expected):
    assert stage_epochs(total, 9, initial, 0.2) == expected
    assert make_schedule(total, 128, initial_epochs=initial).epochs == tuple(expected)


def test_default_initial_epochs_are_the_published_ones_on_cifar():
    assert make_schedule(160, 128).epochs == (8, 9, 11, 13, 16, 19, 23, 28, 33)
    assert make_schedule(200, 128).epochs[0] == 10
    assert make_schedule(16, 128).epochs == (1, 1, 1, 1, 1, 1, 2, 2, 6)
    # 0.29 * 100 is 28.999999999999996 in floating point.
    assert make_schedule(100, 128, num_stages=2, initial_fraction=0.29).epochs == (29, 71)


@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_published_widths_of_resnet20(shortcut):
    graph = trace(resnet20((3, 32, 32), 10, shortcut=shortcut), torch.randn(2, 3, 32, 32))
    stages = make_schedule(160, 128).widths(graph)
    expected = {
        16: [4, 4, 6, 6, 8, 10, 12, 14, 16],
        32: [8, 10, 12, 14, 16, 20, 24, 28, 32],
        64: [16, 20, 24, 28, 34, 40, 48, 58, 64],
    }
    for layer, full_width in enumerate((16, 32, 64)):
        for axis in (graph.axes[f"layers.{layer}.1.conv1.weight"][0], graph.axes[f"layers.{layer}.1.conv2.weight"][0]):
            assert [axis.length(widths) for widths in stages] == expected[full_width]


def test_the_first_batch_is_divisible_by_the_processes_too():
    # 10 + 0.4 * 10 = 14, rounded up to a multiple of 8.
    assert stage_batch_sizes(2, 10, 0.4, multiple=8) == [16, 10]


@given(st.integers(1, 15), st.integers(1, 400), st.floats(0.5, 20), st.floats(0, 1))
def test_epochs_add_up(num_stages, total, initial, rate):
    try:
        epochs = stage_epochs(total, num_stages, initial, rate)
    except ValueError as error:
        assert "num_stages" in str(error) or "initial_epochs" in str(error)
        return
    assert sum(epochs) == total
    assert len(epochs) == num_stages
    assert min(epochs) >= 1
    assert all(before <= after for before, after in pairwise(epochs[:-1]))


@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 70)), min_size=1, max_size=4),
    st.integers(1, 12),
    st.floats(0.01, 1),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_widths_never_decrease_and_end_full(sizes, num_stages, initial_width, rate):
    graph = graph_with(*(Group(str(i), full, below) for i, (full, below) in enumerate(sizes)))
    schedule = make_schedule(
        1000, 32, num_stages=num_stages, initial_epochs=1, initial_width=initial_width, width_growth_rate=rate
    )
    stages = schedule.widths(graph)
    assert stages[-1] == graph.full_widths
    for before, after in pairwise(stages):
        assert all(1 <= before[name] <= after[name] <= graph.full_widths[name] for name in before)


def test_the_defaults_are_those_of_the_configuration():
    conf = yaml.safe_load((ROOT / "conf" / "schedule" / "exponential.yaml").read_text())
    parameters = inspect.signature(make_schedule).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    assert {name: conf[name] for name in defaults if name != "num_processes"} == {
        name: value for name, value in defaults.items() if name != "num_processes"
    }


@given(st.integers(4, 70), st.integers(4, 70), st.integers(1, 12), st.floats(0.1, 1))
def test_streams_follow_the_rule_and_not_their_groups(below, more, num_stages, initial_width):
    """A group that completes a stream gets the difference of two streams' widths, if that never decreases."""
    graph = graph_with(Group("narrow", below), Group("more", more, below))
    schedule = make_schedule(1000, 32, num_stages=num_stages, initial_epochs=1, initial_width=initial_width)
    wide, narrow = (
        [stream_width(full, fraction) for fraction in schedule.width_fractions] for full in (below + more, below)
    )
    difference = [all_channels - first for all_channels, first in zip(wide, narrow, strict=True)]
    assume(difference == sorted(difference) and difference[0] >= 1)
    stages = schedule.widths(graph)
    assert [stage["narrow"] for stage in stages] == narrow
    assert [stage["more"] for stage in stages] == difference


@given(st.integers(1, 5000), st.fractions(Fraction(1, 100), 1))
def test_a_width_is_the_nearest_even_number(full_width, fraction):
    width = stream_width(full_width, fraction)
    assert 1 <= width <= full_width
    if fraction == 1 or full_width <= 2:
        assert width == full_width
        return
    assume(2 <= full_width * fraction <= full_width - 1)
    assert width % 2 == 0
    assert abs(width - full_width * fraction) <= 1


@given(st.integers(1, 12), st.integers(1, 512), st.floats(0, 1), st.one_of(st.none(), st.integers(512, 2000)))
def test_early_stages_have_the_larger_batches(num_stages, batch_size, rate, limit):
    sizes = stage_batch_sizes(num_stages, batch_size, rate, limit)
    assert sizes[-1] == batch_size
    for before, after in pairwise(sizes):
        grown = after + int(Fraction(str(rate)) * after + Fraction(1, 2))
        assert before == (grown if limit is None else min(grown, limit))


@given(st.integers(2, 12), st.integers(1, 512), st.floats(0, 1), st.sampled_from([1, 2, 8]))
def test_forwards_is_the_inverse_of_backwards(num_stages, batch_size, rate, num_processes):
    """Eq. 8 restores the sizes exactly, or up to rounding if they are divided among processes."""
    backwards = stage_batch_sizes(num_stages, batch_size, rate)
    assert stage_batch_sizes(num_stages, backwards[0], rate, given="first") == backwards
    divided = stage_batch_sizes(num_stages, 8 * backwards[0], rate, multiple=num_processes, given="first")
    undivided = stage_batch_sizes(num_stages, 8 * backwards[0], rate, given="first")
    for size, exact in zip(divided, undivided, strict=True):
        assert size % num_processes == 0 and abs(size - exact) <= num_processes


def test_batches_stay_within_the_limit_of_a_device():
    settings = {"batch_growth_rate": 0.5, "num_stages": 4, "num_processes": 2, "max_batch_size": 300}
    assert make_schedule(9, 64, **settings).batch_sizes == (216, 144, 96, 64)
    assert make_schedule(9, 64, max_batch_size_per_device=50, **settings).batch_sizes == (100, 100, 96, 64)


def test_equal_steps_and_fixed_rates():
    assert width_fractions(3, 0.25, 1) == [Fraction(1, 4), Fraction(1, 2), 1]
    halfway = width_fractions(3, 0.25, None)
    assert [round(float(f), 6) for f in halfway] == [0.25, 0.5, 1.0]
    # p_t = 0 is the linear schedule.
    assert stage_epochs(20, 4, 5, 0) == [5, 5, 5, 5]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_stages_are_looked_up_by_epoch(epochs):
    schedule = make_schedule(0, 32, epochs=epochs)
    assert schedule.total_epochs == sum(epochs)
    at = [schedule.stage_at(epoch) for epoch in range(schedule.total_epochs)]
    assert at == [stage for stage, count in enumerate(epochs) for _ in range(count)]
    assert schedule.stage_at(schedule.total_epochs) == len(epochs) - 1
    assert [at.index(stage) for stage in range(len(epochs))] == list(schedule.starts)


def test_explicit_lists():
    schedule = make_schedule(7, 32, epochs=[1, 2, 3], widths=[0.5, 0.75, 1], batch_sizes=[8, 4, 2])
    assert schedule.epochs == (1, 2, 3)
    assert [schedule.batch_size_at(epoch) for epoch in range(6)] == [8, 4, 4, 2, 2, 2]
    assert schedule.widths(graph_with(Group("a", 16))) == [{"a": 8}, {"a": 12}, {"a": 16}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"total_epochs": 5}, "5 epochs are fewer than num_stages=9"),
        ({"total_epochs": 20, "initial_epochs": 8}, "leave none for the last"),
        ({"initial_epochs": -1}, "set initial_epochs or initial_fraction from 0"),
        ({"initial_fraction": -0.1}, "set initial_epochs or initial_fraction from 0"),
        ({"epoch_growth_rate": -1}, "and epoch_growth_rate above -1"),
        ({"initial_width": 0}, "^initial_width must be a fraction"),
        ({"initial_width": 1.5}, "^initial_width must be a fraction"),
        ({"batch_growth_rate": -0.1}, "^batch_growth_rate must be at least 0"),
        ({"max_batch_size": 16}, "^max_batch_size=16 is below"),
        ({"max_batch_size_per_device": 16}, "max_batch_size_per_device=16 leaves no room"),
        ({"total_epochs": 0}, "^total_epochs must be at least 1, not 0"),
        ({"epochs": [1, 2], "widths": [1]}, "epochs has 2, widths has 1"),
        ({"widths": [0.5, 0.75]}, "end with 1"),
        ({"widths": [0.75, 0.5, 1]}, "must not decrease"),
        ({"widths": [0, 1]}, "above 0"),
        ({"epochs": [0, 1]}, "epochs must be at least 1, not 0"),
        ({"initial_width": math.nan}, "^initial_width must be a finite number, not nan"),
        ({"epochs": 5}, "^epochs must be a list with a number for each stage, not 5"),
        ({"widths": "1"}, "^widths must be a list with a number for each stage, not '1'"),
        ({"batch_size_stage": "next"}, "^batch_size_stage must be last or first, not 'next'"),
    ],
)
def test_invalid_schedules_raise_errors_that_say_what_to_change(settings, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(**{"total_epochs": 160, "batch_size": 32, **settings})
