"""Which rows come next: (seed, epoch) fixes the list of micro-batches, for any number of processes. Pure; no torch.

Everything is ordered by a 32-bit hash of (seed, epoch, number), the same one that draws anchors, so the order depends
on no generator and no library version. A step consumes `world size x accumulation` micro-batches of the list; an
epoch's last step is filled up with empty ones. So a cursor of two numbers says where a run stands.

Some lines' samples are held out for validation: by the hash of their tokens, whatever seed or number of processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt

from draftcache.common.errors import UsageError
from draftcache.common.layout import CHUNK_TOKENS, round_up, row_stride, rows_per_batch

BATCHINGS = ("bucket", "packed")
CONTEXT_MULTIPLE = 128
"""T is a multiple of this: a tile of attention's context keys (`kernels/prefix_attention.py`)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample in a micro-batch: where it lies in the store and at which token of the context it begins."""

    ceiling: int
    row: int
    sample: int
    length: int
    first: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows over a context of T tokens; no rows at all if it only fills up a step."""

    tokens: int
    epoch: int
    rows: tuple[Row, ...]

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(row.length for row in self.rows)


@dataclass(frozen=True, slots=True)
class BucketIndex:
    """What ordering needs to know of a bucket, or of a part of it: rows [N], sample numbers [N] and lengths [N].

    `size` counts the whole bucket's samples, which decide how many rows a micro-batch has.
    """

    rows: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    size: int

    def part(self, chosen: npt.NDArray[np.bool_]) -> "BucketIndex":
        """Some of the samples."""
        return BucketIndex(self.rows[chosen], self.samples[chosen], self.lengths[chosen], self.size)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a run stands: micro-batches of this epoch's list that are behind it."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The micro-batches of one step over all processes, and where the next step begins."""

    batches: tuple[MicroBatch, ...]
    after: Cursor

    def share(self, rank: int, world_size: int) -> list[MicroBatch]:
        """One process's micro-batches: as many as every other's, filled up with empty ones."""
        count = -(-len(self.batches) // world_size)
        mine = list(self.batches[rank::world_size])
        return mine + [_empty_like(self.batches[0])] * (count - len(mine))

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding, over all processes."""
        return sum(batch.real_tokens for batch in self.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How samples become micro-batches. `rows` overrides the token budget in bucket batching."""

    kind: str
    token_budget: int
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in BATCHINGS:
            raise UsageError(f"batching {self.kind!r}", needed=f"one of {list(BATCHINGS)}", do="correct --batching")
        if self.token_budget < 1 or (self.rows is not None and self.rows < 1):
            raise UsageError(
                f"token budget {self.token_budget}, rows {self.rows}", needed="at least 1", do="correct the flag"
            )
        if self.kind == "packed" and self.rows is not None:
            raise UsageError("--rows with packed batching", needed="a token budget", do="use --token-budget instead")

    def bucket_rows(self, ceiling: int, count: int) -> int:
        """Rows of this ceiling in one micro-batch: never more than the bucket's `count` samples."""
        return min(count, self.rows or rows_per_batch(self.token_budget, ceiling))

    def context_tokens(self, ceiling: int, count: int) -> int:
        """T of a bucket's micro-batches."""
        return round_up(self.bucket_rows(ceiling, count) * row_stride(ceiling), CONTEXT_MULTIPLE)


def context_shapes(buckets: Mapping[int, BucketIndex], batching: Batching) -> set[int]:
    """Every T that occurs: one per bucket, or the budget alone when packed."""
    if batching.kind == "packed":
        return {round_up(batching.token_budget, CONTEXT_MULTIPLE)}
    return {batching.context_tokens(ceiling, index.size) for ceiling, index in buckets.items()}


def split(
    buckets: Mapping[int, BucketIndex],
    digests: Mapping[int, npt.NDArray[np.int64]],  # by ceiling, [N]: a hash of every sample's tokens
    share: float,
) -> tuple[dict[int, BucketIndex], dict[int, BucketIndex]]:
    """Samples to train on and samples held out, about `share` of all; buckets without any are left out.

    Samples of one number (they begin alike) and lines that are equal fall on one side. No bucket is held out whole.
    """
    numbers = np.concatenate([index.samples for index in buckets.values()])
    lines, line_of = np.unique(numbers, return_inverse=True)
    smallest = np.full(len(lines), np.iinfo(np.int64).max)
    np.minimum.at(smallest, line_of, np.concatenate([digests[ceiling] for ceiling in buckets]))
    chosen = set(lines[hash32(0, 0, smallest, salt=2) < int(share * 2**32)].tolist())
    for index in buckets.values():
        if chosen.issuperset(index.samples.tolist()):
            chosen.difference_update(index.samples.tolist())
    held = np.array(sorted(chosen), dtype=np.int64)
    parts = {ceiling: np.isin(index.samples, held) for ceiling, index in buckets.items()}
    trained = {ceiling: index.part(~parts[ceiling]) for ceiling, index in buckets.items()}
    return trained, {ceiling: buckets[ceiling].part(part) for ceiling, part in parts.items() if part.any()}


def epoch_batches(buckets: Mapping[int, BucketIndex], batching: Batching, seed: int, epoch: int) -> list[MicroBatch]:
    """Every micro-batch of an epoch in order; every sample is in exactly one."""
    build = _packed if batching.kind == "packed" else _bucketed
    batches = build(buckets, batching, seed, epoch)
    order = np.argsort(hash32(seed, epoch, np.arange(len(batches)), salt=1), kind="stable")
    return [batches[i] for i in order]


def steps_per_epoch(buckets: Mapping[int, BucketIndex], batching: Batching, per_step: int) -> int:
    """Steps of an epoch. In packed batching the count may vary a little with the shuffle; this is epoch 0's."""
    if batching.kind == "packed":
        count = len(epoch_batches(buckets, batching, 0, 0))
    else:
        count = sum(-(-len(index.samples) // batching.bucket_rows(c, index.size)) for c, index in buckets.items())
    return -(-count // per_step)


def check_fits(buckets: Mapping[int, BucketIndex], batching: Batching) -> None:
    """Raise UsageError for a sample that is longer than a packed micro-batch."""
    for index in buckets.values() if batching.kind == "packed" else ():
        longest = int(index.lengths.argmax())
        if index.lengths[longest] > round_up(batching.token_budget, CONTEXT_MULTIPLE):
            raise UsageError(
                f"sample {index.samples[longest]} has {index.lengths[longest]} tokens, "
                f"the token budget is {batching.token_budget}",
                needed="a budget that holds the longest sample",
                do="raise --token-budget",
            )


def training_steps(
    buckets: Mapping[int, BucketIndex], batching: Batching, seed: int, per_step: int, begin: Cursor
) -> Iterator[Step]:
    """Endless steps of `per_step` micro-batches each, epoch after epoch, from `begin` on."""
    epoch, first = begin.epoch, begin.batch
    while True:
        batches = epoch_batches(buckets, batching, seed, epoch)
        for start in range(first, len(batches), per_step):
            real = batches[start : start + per_step]
            end = start + per_step
            after = Cursor(epoch, end) if end < len(batches) else Cursor(epoch + 1)
            yield Step((*real, *[_empty_like(real[0])] * (per_step - len(real))), after)
        epoch, first = epoch + 1, 0


def held_out_batches(buckets: Mapping[int, BucketIndex], batching: Batching) -> list[MicroBatch]:
    """Every held-out sample once, the same micro-batches for every run and every validation."""
    return epoch_batches(buckets, batching, 0, 0) if buckets else []


def hash32(seed: int, epoch: int, numbers: npt.NDArray[np.int64], salt: int) -> npt.NDArray[np.uint64]:
    """The hash of `anchors.hash32` in numpy, with `salt` in place of the position."""
    state = _mix(np.uint64(epoch & 0xFFFFFFFF) ^ _mix(np.uint64(seed & 0xFFFFFFFF)))
    wide = numbers.astype(np.uint64)
    state = _mix(state ^ (wide & np.uint64(0xFFFFFFFF)))
    state = _mix(state ^ (wide >> np.uint64(32)))
    return np.asarray(_mix(state ^ np.uint64(salt)))


def _mix(state: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64] | np.uint64:
    mask = np.uint64(0xFFFFFFFF)
    state = state ^ (state >> np.uint64(16))
    state = (state * np.uint64(0x85EBCA6B)) & mask
    state = state ^ (state >> np.uint64(13))
    state = (state * np.uint64(0xC2B2AE35)) & mask
    return state ^ (state >> np.uint64(16))


def _empty_like(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(batch.tokens, batch.epoch, ())


def _shuffled(index: BucketIndex, seed: int, epoch: int) -> Sequence[int]:
    order: list[int] = np.argsort(hash32(seed, epoch, index.samples, salt=0), kind="stable").tolist()
    return order


def _bucketed(buckets: Mapping[int, BucketIndex], batching: Batching, seed: int, epoch: int) -> list[MicroBatch]:
    batches: list[MicroBatch] = []
    for ceiling, index in sorted(buckets.items()):
        rows, stride = batching.bucket_rows(ceiling, index.size), row_stride(ceiling)
        tokens = batching.context_tokens(ceiling, index.size)
        order = _shuffled(index, seed, epoch)
        shuffled = zip(*(column[order].tolist() for column in (index.rows, index.samples, index.lengths)), strict=True)
        firsts = cycle(range(0, rows * stride, stride))
        chosen = [
            Row(ceiling, row, sample, length, first)
            for (row, sample, length), first in zip(shuffled, firsts, strict=False)
        ]
        batches += [
            MicroBatch(tokens, epoch, tuple(chosen[begin : begin + rows])) for begin in range(0, len(chosen), rows)
        ]
    return batches


def _packed(buckets: Mapping[int, BucketIndex], batching: Batching, seed: int, epoch: int) -> list[MicroBatch]:
    """Rows back to back, each from a whole chunk; a row that does not fit begins the next micro-batch."""
    everything = [(c, i) for c, index in sorted(buckets.items()) for i in range(len(index.samples))]
    samples = np.array([buckets[c].samples[i] for c, i in everything], dtype=np.int64)
    tokens = round_up(batching.token_budget, CONTEXT_MULTIPLE)
    batches: list[MicroBatch] = []
    current: list[Row] = []
    used = 0
    for position in np.argsort(hash32(seed, epoch, samples, salt=0), kind="stable").tolist():
        ceiling, i = everything[position]
        length = int(buckets[ceiling].lengths[i])
        span = round_up(length, CHUNK_TOKENS)
        assert span <= tokens, "check_fits comes first"
        if used + span > tokens:
            batches.append(MicroBatch(tokens, epoch, tuple(current)))
            current, used = [], 0
        current.append(Row(ceiling, int(buckets[ceiling].rows[i]), int(samples[position]), length, used))
        used += span
    return [*batches, MicroBatch(tokens, epoch, tuple(current))]
