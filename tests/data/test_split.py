import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growlab.lab.data.libraries import load_digits
from growlab.lab.data.split import first_balanced, stratified_split

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(np.array)


@given(LABELS, st.floats(0.01, 0.99), st.integers())
def test_split_is_disjoint_complete_and_stratified(labels, fraction, seed):
    first, second = stratified_split(labels, fraction, seed)
    assert np.array_equal(np.sort(np.concatenate([first, second])), np.arange(len(labels)))
    assert np.array_equal(first, np.sort(first)) and np.array_equal(second, np.sort(second))
    assert len(second) == round(fraction * len(labels))
    for label in np.unique(labels):
        assert abs((labels[second] == label).sum() - fraction * (labels == label).sum()) < 1 + 1e-9


def test_split_is_a_function_of_its_seed():
    labels = np.arange(200) % 10
    parts = [stratified_split(labels, 0.2, seed)[1].tolist() for seed in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]


@given(LABELS, st.integers(1, 150))
def test_first_balanced_takes_the_first_images_of_each_class(labels, count):
    chosen = first_balanced(labels, count)
    assert np.array_equal(chosen, np.unique(chosen)) and len(chosen) == min(count, len(labels))
    taken = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
    counts = {label: np.isin(where, chosen).sum() for label, where in taken.items()}
    most = max(counts.values())
    for label, where in taken.items():
        assert np.isin(where[: counts[label]], chosen).all()
        # No class has two images fewer than another, unless it is used up.
        assert counts[label] >= most - 1 or counts[label] == len(where)


def test_digits_are_split_once_for_all():
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    train, test = load_digits()
    assert (len(train), len(test)) == (1438, 359)
    original = sklearn_datasets.load_digits()
    rounded = np.rint(original.images * 255 / 16).astype(np.uint8)
    ours = np.concatenate([train.images_NHWC.numpy(), test.images_NHWC.numpy()]).reshape(1797, 64)
    assert sorted(map(bytes, ours)) == sorted(map(bytes, rounded.reshape(1797, 64)))
    assert rounded.max() == 255 and rounded.min() == 0
    for part in (train, test):
        np.testing.assert_allclose(
            np.bincount(part.labels) / len(part), np.bincount(original.target) / 1797, atol=0.003
        )
