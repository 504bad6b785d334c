"""Samples to buckets and buckets to batches: every sample once, in its order, largest ceiling first."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftcache.common.layout import row_stride
from draftcache.common.store import BucketSamples, Store
from draftcache.extract.buckets import fill_buckets, plan_batches
from draftcache.extract.template import Tokens
from draftcache.tests.stores import TOKEN_BUDGET

CEILINGS = (4, 9, 20)


def sample(length: int, seed: int) -> Tokens:
    """Random tokens and mask of this length."""
    rng = random.Random(seed)
    ids = [rng.randrange(300) for _ in range(length)]
    return Tokens(input_ids=ids, loss_mask=[rng.randrange(2) for _ in ids])


def numbered(lengths: list[int]) -> list[tuple[int, Tokens]]:
    """Samples of these lengths under numbers with gaps, as dropped lines leave them."""
    return [(3 * i + 1, sample(length, i)) for i, length in enumerate(lengths)]


LENGTHS = st.lists(st.integers(1, CEILINGS[-1]), min_size=1, max_size=60)


@given(LENGTHS)
def test_every_sample_is_in_exactly_one_bucket_in_its_order(lengths: list[int]) -> None:
    samples = numbered(lengths)
    buckets = fill_buckets(samples, CEILINGS)
    found = {}
    for bucket in buckets:
        numbers = bucket.samples.tolist()
        assert numbers == sorted(numbers)
        for row, number in enumerate(numbers):
            assert number not in found
            cut = bucket.tokens(row)
            found[number] = (bucket.ceiling, bucket.input_ids[cut].tolist(), bucket.loss_mask[cut].tolist())
    below = {4: 0, 9: 4, 20: 9}
    assert set(found) == {number for number, _ in samples}
    for number, tokens in samples:
        ceiling, ids, mask = found[number]
        assert below[ceiling] < len(tokens.input_ids) <= ceiling
        assert (ids, mask) == (tokens.input_ids, tokens.loss_mask)


def test_a_length_equal_to_a_ceiling_stays_in_its_bucket() -> None:
    buckets = fill_buckets(numbered([4, 5, 9, 10, 20, 1]), CEILINGS)
    assert [(b.ceiling, b.samples.tolist(), b.lengths.tolist()) for b in buckets] == [
        (4, [1, 16], [4, 1]),
        (9, [4, 7], [5, 9]),
        (20, [10, 13], [10, 20]),
    ]


def test_arrays_have_the_stored_types() -> None:
    (bucket,) = fill_buckets(numbered([3]), CEILINGS)
    assert bucket.samples.dtype == bucket.offsets.dtype == np.int64
    assert bucket.input_ids.dtype == np.int32
    assert bucket.loss_mask.dtype == np.uint8


def test_empty_buckets_are_left_out() -> None:
    assert [bucket.ceiling for bucket in fill_buckets(numbered([20, 2]), CEILINGS)] == [4, 20]
    assert fill_buckets([], CEILINGS) == []


def test_too_long_a_sample_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="sample 1 is longer than 20 tokens"):
        fill_buckets(numbered([21]), CEILINGS)


def bare_bucket(ceiling: int, count: int) -> BucketSamples:
    """A bucket of `count` samples of one token."""
    return fill_buckets([(number, sample(1, number)) for number in range(count)], (ceiling,))[0]


@given(
    st.dictionaries(st.integers(2, 400), st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 2000),
)
def test_a_plan_covers_every_row_once_largest_ceiling_first(counts: dict[int, int], token_budget: int) -> None:
    buckets = [bare_bucket(ceiling, count) for ceiling, count in counts.items()]
    batches = plan_batches(buckets, token_budget)
    assert [b.ceiling for b in batches] == sorted((b.ceiling for b in batches), reverse=True)
    for ceiling, count in counts.items():
        own = [b for b in batches if b.ceiling == ceiling]
        assert [b.shard for b in own] == list(range(len(own)))
        assert [row for b in own for row in range(b.first, b.first + b.count)] == list(range(count))
        assert all(b.count == own[0].count for b in own[:-1])
        assert all(b.count * row_stride(ceiling) <= token_budget or b.count == 1 for b in own)


def test_a_plan_follows_the_token_budget() -> None:
    batches = plan_batches([bare_bucket(70, 5), bare_bucket(300, 2)], 400)  # strides 128 and 320
    assert [(b.ceiling, b.shard, b.first, b.count) for b in batches] == [
        (300, 0, 0, 1),
        (300, 1, 1, 1),
        (70, 0, 0, 3),
        (70, 1, 3, 2),
    ]


def test_the_order_in_which_buckets_come_does_not_matter() -> None:
    buckets = [bare_bucket(70, 5), bare_bucket(300, 2), bare_bucket(20, 9)]
    assert plan_batches(buckets, 400) == plan_batches(buckets[::-1], 400)


def test_shards_of_the_plan_are_the_stores_shards(store: Store) -> None:
    batches = plan_batches([bucket.samples for bucket in store.buckets.values()], TOKEN_BUDGET)
    planned = {(b.ceiling, b.shard): range(b.first, b.first + b.count) for b in batches}
    held = {(c, n): bucket.shard_rows(n) for c, bucket in store.buckets.items() for n in range(bucket.shard_count)}
    assert planned == held
    named = {(c, n): len(e.digests) for c, bucket in store.buckets.items() for n, e in bucket.committed.items()}
    assert named == {key: len(rows) for key, rows in held.items()}
