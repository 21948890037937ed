"""Unifying axes: what is split, what is bound, what is frozen."""

import pytest

from growlab.widths.atoms import Atoms, Run, fixed


def test_meeting_a_finer_axis_splits_an_atom():
    atoms = Atoms()
    wide, left, right = atoms.new(10), atoms.new(4), atoms.new(6)
    atoms.unify(wide, left + right, "")
    assert atoms.resolve(wide) == atoms.resolve(left) + atoms.resolve(right)
    assert [atoms.sizes[run.atom] for run in atoms.resolve(wide)] == [4, 6]


def test_a_split_atom_stays_above_the_stream_that_it_completes():
    """16 channels above 8 split into 6 and 10: these stand above 8 and above 14."""
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
