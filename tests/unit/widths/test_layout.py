"""Layouts against an explicit list of (part, repetition, channel, offset), and unification of axes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from growlab.widths import Axis, Part, resized
from growlab.widths.atoms import Atoms, Run, fixed

PARTS = st.lists(
    st.builds(Part, st.sampled_from([None, "a", "b"]), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4
).map(lambda parts: Axis(tuple(Part(p.group, p.outer, 1 if p.group is None else p.inner) for p in parts), "in"))
WIDTHS = st.fixed_dictionaries({"a": st.integers(1, 5), "b": st.integers(1, 5)})


def positions(axis: Axis, widths: dict[str, int]) -> list[tuple]:
    """The entry at each position, in order."""
    found = []
    for index, part in enumerate(axis.parts):
        for outer in range(part.outer):
            for channel in range(1 if part.group is None else widths[part.group]):
                for inner in range(part.inner):
                    found.append((index, outer, part.group, channel, inner))
    return found


@given(PARTS, WIDTHS)
def test_length(axis, widths):
    assert axis.length(widths) == len(positions(axis, widths))


@given(PARTS, WIDTHS, WIDTHS)
def test_kept_finds_the_same_channel_at_other_widths(axis, widths, new_widths):
    new = {position: index for index, position in enumerate(positions(axis, new_widths))}
    expected = [new.get(position, -1) for position in positions(axis, widths)]
    assert axis.kept(widths, new_widths).tolist() == expected


@given(PARTS, WIDTHS, st.randoms(use_true_random=False))
def test_lift_maps_every_position_by_its_channel(axis, widths, random):
    target = {"a": 4, "b": 6}
    maps = {g: torch.tensor([random.randrange(-1, target[g]) for _ in range(widths[g])]) for g in axis.groups}
    new = {position: index for index, position in enumerate(positions(axis, target))}
    expected = []
    for index, outer, group, channel, inner in positions(axis, widths):
        channel = channel if group is None else int(maps[group][channel])
        expected.append(new.get((index, outer, group, channel, inner), -1))
    assert axis.lift(maps, widths, target).tolist() == expected


@given(PARTS, WIDTHS)
def test_spread_gives_every_position_its_channels_value(axis, widths):
    values = {g: torch.arange(widths[g], dtype=torch.float64) + (10 if g == "b" else 0) for g in axis.groups}
    expected = [
        -1.0 if group is None else float(values[group][channel]) for _, _, group, channel, _ in positions(axis, widths)
    ]
    assert axis.spread(values, widths, fixed=-1.0).tolist() == expected


@settings(max_examples=40)
@given(PARTS, PARTS, WIDTHS, WIDTHS)
def test_widening_and_narrowing_again_gives_the_tensor_back(rows, columns, widths, more):
    wider = {g: widths[g] + more[g] for g in widths}
    tensor = torch.randn(rows.length(widths), columns.length(widths))
    wide = resized(tensor, (rows, columns), widths, wider)
    assert wide.count_nonzero() == tensor.count_nonzero()
    assert torch.equal(resized(wide, (rows, columns), wider, widths), tensor)


def test_meeting_a_finer_axis_splits_an_atom():
    atoms = Atoms()
    wide, left, right = atoms.new(10), atoms.new(4), atoms.new(6)
    atoms.unify(wide, left + right, "")
    assert atoms.resolve(wide) == atoms.resolve(left) + atoms.resolve(right)
    assert [atoms.sizes[run.atom] for run in atoms.resolve(wide)] == [4, 6]


def test_a_split_atom_stays_above_the_stream_that_it_completes():
    """16 channels above 8, split into 6 and 10: these are above 8 and above 14."""
    atoms = Atoms()
    padding = atoms.new(16, below=8)
    atoms.unify(padding, atoms.new(6) + atoms.new(10), "")
    assert [atoms.below[run.atom] for run in atoms.resolve(padding)] == [8, 14]


def test_meeting_a_fixed_axis_freezes_with_the_reason():
    atoms = Atoms()
    axis = atoms.new(5)
    atoms.unify(axis, fixed(5), "the image")
    assert atoms.resolve(axis) == (Run(None, 5),)
    assert atoms.why_fixed(axis) == "the image"


def test_lengths_must_agree():
    atoms = Atoms()
    with pytest.raises(ValueError, match="5 and 6 positions"):
        atoms.unify(atoms.new(5), atoms.new(6), "")
