"""Batches by a budget of tokens: complete, within the budget, equal on any number of ranks, resumable."""

import numpy as np
import pytest

from growlab.recipes.translation.data import PairLoader, TokenPlan
from growlab.recipes.translation.sentence_pairs import Side

LENGTHS = np.random.default_rng(0).integers(2, 30, 200)


def plan(**changed) -> TokenPlan:
    return TokenPlan(LENGTHS, **{"budget": 90, "seed": 3, **changed})


@pytest.mark.parametrize("epoch", [0, 5])
def test_an_epoch_has_every_sentence_once_within_the_budget(epoch):
    batches = plan(epoch=epoch).batches()
    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    sizes = [LENGTHS[batch].max() * len(batch) for batch in batches]
    assert max(sizes) <= 90
    # Batches of similar lengths have little padding.
    assert LENGTHS.sum() > 0.9 * sum(sizes)


def test_order_is_a_function_of_seed_and_epoch():
    def listed(**changed):
        return [batch.tolist() for batch in plan(**changed).batches()]

    assert listed() == listed()
    assert listed() != listed(epoch=1) and listed() != listed(seed=4)
    moved = plan()
    first = moved.batches()
    moved.set_epoch(1)
    assert [b.tolist() for b in moved.batches()] == listed(epoch=1) != [b.tolist() for b in first]


@pytest.mark.parametrize("training", [True, False])
def test_ranks_share_each_batch(training):
    alone = plan(budget=300, training=training)
    ranks = [plan(budget=300, training=training, rank=rank, world_size=3) for rank in range(3)]
    shares = [rank.batches() for rank in ranks]
    assert len({len(batches) for batches in shares}) == 1
    for *parts, whole in zip(*shares, ranks[0].global_batches(), strict=True):
        assert all(len(part) for part in parts)
        assert np.concatenate(parts).tolist() == whole.tolist()
    if training:
        assert [b.tolist() for b in alone.batches()] == [b.tolist() for b in ranks[0].global_batches()]
    assert sorted(np.concatenate([*map(np.concatenate, shares)]).tolist()) == list(range(200))


def test_a_batch_of_fewer_sentences_than_ranks_repeats_some():
    shares = [TokenPlan(np.array([50, 2]), 50, 0, rank=r, world_size=2).batches() for r in range(2)]
    assert [len(batch) for batches in shares for batch in batches] == [1, 1, 1, 1]


def test_a_budget_of_sentences_counts_sentences():
    sizes = [len(batch) for batch in plan(budget=16, in_tokens=False).batches()]
    assert sorted(set(sizes)) == [8, 16] and sum(sizes) == 200


def side(lengths: list[int], seed: int) -> Side:
    """Sentences of token ids from 4, with 2 as the last."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.random.default_rng(seed).integers(4, 50, starts[-1]).astype(np.int32)
    tokens[starts[1:] - 1] = 2
    return Side(tokens, starts)


def test_a_batch_is_padded_and_shifted():
    sides = (side([3, 5], 0), side([4, 2], 1))
    loader = PairLoader(TokenPlan(np.array([4, 5]), 10, 0, training=False), sides, padding=1, end=2)
    ((source, previous, target),) = list(loader)
    long, short = sides[1][0].tolist(), sides[1][1].tolist()
    assert source.tolist() == [[*sides[0][0].tolist(), 1, 1], sides[0][1].tolist()]
    assert target.tolist() == [long, [*short, 1, 1]]
    assert previous.tolist() == [[2, *long[:-1]], [2, short[0], 1, 1]]


def test_a_loader_resumes_in_the_middle_of_an_epoch():
    lengths = np.random.default_rng(1).integers(2, 9, 40).tolist()
    sides = (side(lengths, 0), side(lengths, 1))

    def loader() -> PairLoader:
        return PairLoader(TokenPlan(np.array(lengths), 20, 0, epoch=2), sides, 1, 2)

    whole = list(loader())
    stopped = loader()
    given = iter(stopped)
    for _ in range(3):
        next(given)
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    rest = list(resumed)
    assert len(rest) == len(whole) - 3 > 3
    for mine, expected in zip(rest, whole[3:], strict=True):
        assert all(a.equal(b) for a, b in zip(mine, expected, strict=True))
    assert len(list(resumed)) == len(whole)
