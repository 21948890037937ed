import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growlab.lab.data.order import ORDER, draws, evaluation_batches, permutation, training_batches

SIZES = st.integers(1, 200)
WORLDS = st.sampled_from([1, 2, 3, 4, 8])


def _splitmix64(state: int):
    """The published generator, with Python's integers."""
    word = (1 << 64) - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & word
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        yield z ^ (z >> 31)


def test_draws_without_a_key_are_splitmix64_from_zero():
    # java.util.SplittableRandom(0) and the reference C code begin with this number.
    assert next(_splitmix64(0)) == 0xE220A8397B1DCDAF
    reference = _splitmix64(0)
    assert draws(np.arange(1000)).tolist() == [next(reference) for _ in range(1000)]


@given(st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.integers(1, 50))
def test_a_draw_depends_only_on_key_and_index(seed, start, count):
    together = draws(np.arange(start, start + count), seed, 3)
    alone = [draws(np.array([index]), seed, 3)[0] for index in range(start, start + count)]
    assert together.tolist() == alone


@pytest.mark.parametrize("other", [(ORDER, 1, 1), (ORDER, 0, 2), (ORDER + 1, 0, 1), (ORDER, 1, 0)])
def test_other_keys_give_uncorrelated_numbers(other):
    n = 4096
    a, b = (draws(np.arange(n), *key).astype(float) for key in ((ORDER, 0, 1), other))
    # Correlations of n independent samples have standard deviation 1/sqrt(n).
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(n)


@given(SIZES, st.integers(), st.integers(0, 300))
def test_permutation_has_every_index_once(length, seed, epoch):
    assert np.array_equal(np.sort(permutation(length, ORDER, seed, epoch)), np.arange(length))


@given(SIZES, st.integers(1, 12), WORLDS)
def test_training_slices_of_the_ranks_make_the_global_batch(length, per_rank, world_size):
    batch_size = per_rank * world_size
    order = permutation(length, ORDER, 0, 0)
    whole = training_batches(order, batch_size)
    ranks = [training_batches(order, batch_size, rank, world_size) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(whole), order)
    for step, batch in enumerate(whole):
        slices = [rank[step] for rank in ranks]
        assert len({len(part) for part in slices}) == 1
        joined = np.concatenate(slices)
        # Only the last batch may be padded from the start of the order, by fewer images than ranks.
        assert np.array_equal(joined[: len(batch)], batch)
        filled = joined[len(batch) :]
        assert len(filled) < world_size and np.array_equal(filled, np.resize(order, len(filled)))
        assert step == len(whole) - 1 or not len(filled)
    assert all(len(rank) == len(whole) for rank in ranks)


@given(SIZES, st.integers(1, 64), WORLDS)
def test_evaluation_shows_every_image_once_over_all_ranks(length, batch_size, world_size):
    ranks = [evaluation_batches(length, batch_size, rank, world_size) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    assert all(len(batch) for rank in ranks for batch in rank)
    steps = [np.concatenate(parts) for parts in zip(*ranks, strict=True)]
    if length >= world_size:
        assert np.array_equal(np.concatenate(steps), np.arange(length))
    else:
        assert set(np.concatenate(steps)) == set(range(length))
    whole = evaluation_batches(length, batch_size)
    assert max(len(batch) for batch in whole) <= batch_size
    if batch_size >= 2 * world_size and length >= world_size:
        assert [batch.tolist() for batch in steps] == [batch.tolist() for batch in whole]
