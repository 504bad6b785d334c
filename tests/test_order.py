"""The order of micro-batches: complete, disjoint, reproducible, and never silently another one."""

from collections.abc import Iterator
from itertools import islice, pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftcache.common.errors import UsageError
from draftcache.common.layout import DEFAULT_CEILINGS, DEFAULT_TOKEN_BUDGET
from draftcache.train.order import (
    Batching,
    BucketIndex,
    Cursor,
    MicroBatch,
    Step,
    check_fits,
    context_shapes,
    epoch_batches,
    hash32,
    held_out_batches,
    split,
    steps_per_epoch,
    training_steps,
)

CEILINGS = (40, 100, 130, 300)
Buckets = dict[int, BucketIndex]


def index(samples: list[int], lengths: list[int]) -> BucketIndex:
    """A bucket's index from plain lists."""
    numbers = np.array(samples, dtype=np.int64)
    return BucketIndex(np.arange(len(samples)), numbers, np.array(lengths, dtype=np.int64), len(samples))


def fixed_buckets() -> Buckets:
    """Ten samples in three buckets."""
    return {
        40: index([3, 0, 8, 5, 9], [40, 12, 33, 7, 20]),
        130: index([1, 7, 2], [130, 41, 100]),
        200: index([4, 6], [131, 200]),
    }


@st.composite
def bucket_sets(draw: st.DrawFn) -> Buckets:
    """One to four buckets with up to nine samples each and distinct sample numbers."""
    lengths: dict[int, list[int]] = {}
    for low, ceiling in pairwise((0, *CEILINGS)):
        lengths[ceiling] = draw(st.lists(st.integers(low + 1, ceiling), max_size=9))
    if not any(lengths.values()):
        lengths[CEILINGS[0]] = [1]
    total = sum(map(len, lengths.values()))
    numbers = iter(draw(st.permutations(range(5, 5 + total))))
    return {c: index([next(numbers) for _ in held], held) for c, held in lengths.items() if held}


batchings = st.one_of(
    st.builds(Batching, kind=st.just("bucket"), token_budget=st.integers(1, 1000), rows=st.none()),
    st.builds(Batching, kind=st.just("bucket"), token_budget=st.just(1), rows=st.integers(1, 6)),
    st.builds(Batching, kind=st.just("packed"), token_budget=st.integers(300, 1500)),
)
keys = st.tuples(st.integers(0, 1 << 33), st.integers(0, 50))


def samples_of(batches: list[MicroBatch]) -> list[list[int]]:
    """Sample numbers, micro-batch by micro-batch."""
    return [[row.sample for row in batch.rows] for batch in batches]


def until_epoch(steps: Iterator[Step], epoch: int) -> list[Step]:
    """The steps before the first one of `epoch`."""
    return list(takewhile(lambda step: step.batches[0].epoch < epoch, steps))


@given(bucket_sets(), batchings, keys)
@settings(max_examples=150, deadline=None)
def test_every_sample_is_in_exactly_one_micro_batch(buckets: Buckets, batching: Batching, key: tuple[int, int]) -> None:
    batches = epoch_batches(buckets, batching, *key)
    found = [(row.ceiling, row.row, row.sample, row.length) for batch in batches for row in batch.rows]
    wanted = [
        (ceiling, row, sample, length)
        for ceiling, held in buckets.items()
        for row, (sample, length) in enumerate(zip(held.samples.tolist(), held.lengths.tolist(), strict=True))
    ]
    assert sorted(found) == sorted(wanted)
    assert all(batch.rows for batch in batches)
    assert sum(batch.real_tokens for batch in batches) == sum(length for *_, length in wanted)


@given(bucket_sets(), batchings, keys)
@settings(max_examples=150, deadline=None)
def test_rows_do_not_overlap_and_fit_the_context(buckets: Buckets, batching: Batching, key: tuple[int, int]) -> None:
    shapes = context_shapes(buckets, batching)
    for batch in epoch_batches(buckets, batching, *key):
        assert batch.epoch == key[1]
        assert batch.tokens in shapes
        assert batch.tokens % 128 == 0
        used = 0
        for row in batch.rows:
            assert row.first % 64 == 0
            assert row.first >= used
            used = row.first + -(-row.length // 64) * 64
        assert used <= batch.tokens


@given(bucket_sets(), batchings)
@settings(max_examples=50, deadline=None)
def test_bucket_batches_hold_one_ceiling_within_the_budget(buckets: Buckets, batching: Batching) -> None:
    for batch in epoch_batches(buckets, batching, 1, 1):
        if batching.kind == "packed":
            assert batch.tokens == -(-batching.token_budget // 128) * 128
            continue
        (ceiling,) = {row.ceiling for row in batch.rows}
        stride = -(-ceiling // 64) * 64
        asked = batching.rows or max(1, batching.token_budget // stride)
        rows = min(asked, len(buckets[ceiling].samples))
        assert len(batch.rows) <= rows
        assert [row.first for row in batch.rows] == [i * stride for i in range(len(batch.rows))]
        assert batch.tokens - rows * stride in (0, 64)


@given(bucket_sets(), batchings, keys)
@settings(max_examples=30, deadline=None)
def test_the_same_seed_and_epoch_give_the_same_list(buckets: Buckets, batching: Batching, key: tuple[int, int]) -> None:
    reordered = dict(reversed(buckets.items()))
    assert epoch_batches(reordered, batching, *key) == epoch_batches(buckets, batching, *key)


@pytest.mark.parametrize("kind", ["bucket", "packed"])
def test_another_epoch_or_seed_gives_another_order(kind: str) -> None:
    buckets, batching = fixed_buckets(), Batching(kind=kind, token_budget=256)
    orders = [samples_of(epoch_batches(buckets, batching, *key)) for key in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len({str(order) for order in orders}) == 4
    assert len({str(sorted(map(sorted, order))) for order in orders}) == 4  # not the batches' order alone


@given(bucket_sets(), batchings, st.integers(1, 7), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_the_list_does_not_depend_on_how_many_a_step_consumes(
    buckets: Buckets, batching: Batching, per_step: int, seed: int
) -> None:
    steps = until_epoch(training_steps(buckets, batching, seed, per_step, Cursor()), 2)
    consumed = [batch for step in steps for batch in step.batches if batch.rows]
    assert consumed == [b for epoch in (0, 1) for b in epoch_batches(buckets, batching, seed, epoch)]


@given(bucket_sets(), batchings, st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_an_epochs_last_step_is_filled_with_empty_micro_batches(
    buckets: Buckets, batching: Batching, per_step: int
) -> None:
    shapes = context_shapes(buckets, batching)
    for epoch in range(2):
        both = until_epoch(training_steps(buckets, batching, 0, per_step, Cursor()), 2)
        steps = [s.batches for s in both if s.batches[0].epoch == epoch]
        assert all(len(step) == per_step for step in steps)
        flat = [batch for step in steps for batch in step]
        full = len(epoch_batches(buckets, batching, 0, epoch))
        assert len(steps) == -(-full // per_step)
        assert [bool(batch.rows) for batch in flat] == [True] * full + [False] * (len(flat) - full)
        assert all(batch.tokens in shapes and batch.epoch == epoch for batch in flat)
        if epoch == 0:
            assert len(steps) == steps_per_epoch(buckets, batching, per_step)


@pytest.mark.parametrize(
    ("arguments", "hashes"),
    [
        ((0, 0, [0, 1, 2, 3], 0), [0, 1461123477, 2272955061, 1930306816]),
        ((0, 0, [0, 1, 2, 3], 1), [1364076727, 3144699569, 2786475019, 4282923123]),
        ((1, 0, [0, 1, 2], 0), [1558626407, 2020229611, 2760928705]),
        ((0, 1, [0, 1, 2], 0), [215606638, 1738073308, 2676931931]),
        ((42, 7, [123456, 1 << 33, (1 << 40) + 5], 0), [779384320, 1142689450, 1605226291]),
        ((-1, 0, [0], 0), [2092695559]),
    ],
)
def test_hash32_never_changes(arguments: tuple[int, int, list[int], int], hashes: list[int]) -> None:
    seed, epoch, numbers, salt = arguments
    assert hash32(seed, epoch, np.array(numbers, dtype=np.int64), salt).tolist() == hashes


@pytest.mark.parametrize(
    ("kind", "seed", "epoch", "samples"),
    [
        ("bucket", 0, 0, [[4], [6], [0, 9, 3, 8], [1], [5], [7], [2]]),
        ("bucket", 0, 1, [[2], [0, 3, 9, 5], [4], [6], [1], [8], [7]]),
        ("bucket", 1, 0, [[6], [8, 0, 9, 5], [7], [2], [1], [3], [4]]),
        ("packed", 0, 0, [[0, 9], [2, 8, 7], [1, 3], [6], [5, 4]]),
        ("packed", 0, 1, [[6], [0, 3], [8], [4, 7], [1, 9], [2, 5]]),
        ("packed", 1, 0, [[8, 7, 0], [6], [2, 5, 3], [1, 9], [4]]),
    ],
)
def test_the_order_never_changes(kind: str, seed: int, epoch: int, samples: list[list[int]]) -> None:
    batching = Batching(kind=kind, token_budget=256)
    assert samples_of(epoch_batches(fixed_buckets(), batching, seed, epoch)) == samples


def test_full_scale_shapes() -> None:
    batching = Batching(kind="bucket", token_budget=DEFAULT_TOKEN_BUDGET)
    buckets = {c: index(list(range(200)), [c] * 200) for c in DEFAULT_CEILINGS}
    rows = {c: batching.bucket_rows(c, 200) for c in DEFAULT_CEILINGS}
    assert rows == {770: 59, 1216: 40, 1728: 28, 2432: 20, 3296: 14, 8192: 6}
    assert context_shapes(buckets, batching) == {49_152, 48_640, 48_384, 46_592}
    assert context_shapes(buckets, Batching(kind="packed", token_budget=DEFAULT_TOKEN_BUDGET)) == {49_152}


def test_packing_refuses_a_sample_longer_than_the_budget() -> None:
    with pytest.raises(UsageError, match="sample 6 has 200 tokens"):
        check_fits({200: index([2, 6], [20, 200])}, Batching(kind="packed", token_budget=128))
    check_fits({200: index([2, 6], [20, 200])}, Batching(kind="packed", token_budget=129))
    check_fits({200: index([2, 6], [20, 200])}, Batching(kind="bucket", token_budget=128))


@pytest.mark.parametrize(
    ("kind", "token_budget", "rows"), [("rows", 256, None), ("bucket", 0, None), ("bucket", 256, 0), ("packed", 256, 2)]
)
def test_impossible_batching_is_refused(kind: str, token_budget: int, rows: int | None) -> None:
    with pytest.raises(UsageError):
        Batching(kind=kind, token_budget=token_budget, rows=rows)


def test_epochs_go_on_without_end() -> None:
    steps = training_steps(fixed_buckets(), Batching(kind="packed", token_budget=256), 0, 4, Cursor())
    assert [step.batches[0].epoch for step in islice(steps, 9)] == [0, 0, 1, 1, 2, 2, 3, 3, 4]


@given(bucket_sets(), batchings, st.integers(1, 7), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_a_cursor_goes_on_anywhere(buckets: Buckets, batching: Batching, per_step: int, behind: int) -> None:
    steps = list(islice(training_steps(buckets, batching, 3, per_step, Cursor()), behind + 6))
    begin = steps[behind - 1].after if behind else Cursor()
    assert list(islice(training_steps(buckets, batching, 3, per_step, begin), 6)) == steps[behind:]


def test_a_cursor_at_an_epochs_end_stands_at_the_next_ones_beginning() -> None:
    steps = training_steps(fixed_buckets(), Batching(kind="bucket", token_budget=256), 0, 4, Cursor())
    assert [step.after for step in islice(steps, 3)] == [Cursor(0, 4), Cursor(1, 0), Cursor(1, 4)]


@given(bucket_sets(), batchings, st.integers(1, 9), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_processes_share_a_step_evenly_and_completely(
    buckets: Buckets, batching: Batching, per_step: int, world_size: int
) -> None:
    for step in until_epoch(training_steps(buckets, batching, 0, per_step, Cursor()), 1):
        shares = [step.share(rank, world_size) for rank in range(world_size)]
        assert {len(share) for share in shares} == {-(-per_step // world_size)}
        assert {batch.tokens for share in shares for batch in share} <= context_shapes(buckets, batching)
        shared = [batch for share in shares for batch in share if batch.rows]
        assert sorted(samples_of(shared)) == sorted(samples_of([b for b in step.batches if b.rows]))
        assert step.real_tokens == sum(batch.real_tokens for batch in shared)


@given(bucket_sets(), batchings, st.floats(0, 0.9), st.integers(0, 1 << 40))
@settings(max_examples=60, deadline=None)
def test_a_split_is_complete_and_brings_no_new_shapes(
    buckets: Buckets, batching: Batching, share: float, first: int
) -> None:
    digests = {c: first + 7 * held.samples for c, held in buckets.items()}
    trained, held_out = split(buckets, digests, share)
    assert set(trained) == set(buckets)
    assert all(len(held.samples) for held in (*trained.values(), *held_out.values()))
    both = samples_of([*epoch_batches(trained, batching, 1, 0), *held_out_batches(held_out, batching)])
    every = [n for held in buckets.values() for n in held.samples.tolist()]
    assert sorted(n for batch in both for n in batch) == sorted(every)
    assert context_shapes(trained, batching) == context_shapes(buckets, batching)
    assert {b.tokens for b in held_out_batches(held_out, batching)} <= context_shapes(trained, batching)
    for batch in held_out_batches(held_out, batching):
        assert all(buckets[row.ceiling].samples[row.row] == row.sample for row in batch.rows)


def test_a_split_follows_the_share_and_keeps_equal_samples_together() -> None:
    many = {64: index(list(range(5000)), [30] * 5000)}
    _, held_out = split(many, {64: np.arange(5000) // 2}, 0.1)
    chosen = held_out[64].samples
    assert 400 < len(chosen) < 600
    assert set(chosen.tolist()) == {int(n) ^ 1 for n in chosen}
    assert split(many, {64: np.arange(5000)}, 0.0)[1] == {}


def test_all_samples_of_a_line_are_on_one_side() -> None:
    """A line whose history is rewritten gives several samples that begin alike, often in several buckets."""
    lines = list(range(1000))
    buckets = {64: index(lines, [30] * 1000), 128: index(lines + lines[:300], [100] * 1300)}
    digests = {64: np.arange(1000) * 17, 128: np.arange(1300) * 31 + 5}
    trained, held_out = split(buckets, digests, 0.2)
    sides = [{int(n) for held in part.values() for n in held.samples} for part in (trained, held_out)]
    assert not sides[0] & sides[1]
    assert 120 < len(sides[1]) < 280
    lonely = {64: index([3], [30]), 128: index([3, 4, 5], [100] * 3)}
    trained, held_out = split(lonely, {64: np.zeros(1, np.int64), 128: np.zeros(3, np.int64)}, 0.9)
    assert sorted(trained[128].samples.tolist()) == sorted({3, 4, 5} - set(held_out[128].samples.tolist()))
    assert trained[64].samples.tolist() == [3]
