"""Which rows come next: (seed, epoch) fixes the list of micro-batches, for any number of processes. Pure; no torch.

Everything is ordered by a 32-bit hash of (seed, epoch, number), the same one that draws anchors, so the order depends
on no generator and no library version. A step consumes `world size x accumulation` micro-batches of the list; an
epoch's last step is filled up with empty ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftcache.common.errors import UsageError
from draftcache.common.layout import CHUNK_TOKENS, round_up, row_stride, rows_per_batch

BATCHINGS = ("bucket", "packed")
CONTEXT_MULTIPLE = 128
"""T is a multiple of this: a tile of flex_attention."""


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
    """What ordering needs to know of a bucket: sample numbers [N], lengths [N], and rows that are left out."""

    samples: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    void: frozenset[int] = frozenset()


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
    return {batching.context_tokens(ceiling, len(index.samples)) for ceiling, index in buckets.items()}


def epoch_batches(buckets: Mapping[int, BucketIndex], batching: Batching, seed: int, epoch: int) -> list[MicroBatch]:
    """Every micro-batch of an epoch in order; every sample is in exactly one."""
    build = _packed if batching.kind == "packed" else _bucketed
    batches = build(buckets, batching, seed, epoch)
    order = np.argsort(hash32(seed, epoch, np.arange(len(batches)), salt=1), kind="stable")
    return [batches[i] for i in order]


def steps_per_epoch(buckets: Mapping[int, BucketIndex], batching: Batching, per_step: int) -> int:
    """Steps of an epoch. In packed batching the count may vary a little with the shuffle; this is epoch 0's."""
    return -(-len(epoch_batches(buckets, batching, 0, 0)) // per_step)


def training_steps(
    buckets: Mapping[int, BucketIndex], batching: Batching, seed: int, per_step: int
) -> Iterator[list[MicroBatch]]:
    """Endless steps of `per_step` micro-batches each, epoch after epoch."""
    epoch = 0
    while True:
        batches = epoch_batches(buckets, batching, seed, epoch)
        for begin in range(0, len(batches), per_step):
            step = batches[begin : begin + per_step]
            yield step + [MicroBatch(step[0].tokens, epoch, ())] * (per_step - len(step))
        epoch += 1


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


def _shuffled(index: BucketIndex, seed: int, epoch: int) -> Sequence[int]:
    order: list[int] = np.argsort(hash32(seed, epoch, index.samples, salt=0), kind="stable").tolist()
    return [row for row in order if row not in index.void]


def _bucketed(buckets: Mapping[int, BucketIndex], batching: Batching, seed: int, epoch: int) -> list[MicroBatch]:
    batches: list[MicroBatch] = []
    for ceiling, index in sorted(buckets.items()):
        count = len(index.samples)
        rows, stride = batching.bucket_rows(ceiling, count), row_stride(ceiling)
        order = _shuffled(index, seed, epoch)
        for begin in range(0, len(order), rows):
            chosen = tuple(
                Row(ceiling, row, int(index.samples[row]), int(index.lengths[row]), position * stride)
                for position, row in enumerate(order[begin : begin + rows])
            )
            batches.append(MicroBatch(batching.context_tokens(ceiling, count), epoch, chosen))
    return batches


def _packed(buckets: Mapping[int, BucketIndex], batching: Batching, seed: int, epoch: int) -> list[MicroBatch]:
    """Rows back to back, each from a whole chunk; a row that does not fit begins the next micro-batch."""
    everything = [
        (c, row) for c, index in sorted(buckets.items()) for row in range(len(index.samples)) if row not in index.void
    ]
    samples = np.array([buckets[c].samples[row] for c, row in everything], dtype=np.int64)
    tokens = round_up(batching.token_budget, CONTEXT_MULTIPLE)
    batches: list[MicroBatch] = []
    current: list[Row] = []
    used = 0
    for position in np.argsort(hash32(seed, epoch, samples, salt=0), kind="stable").tolist():
        ceiling, row = everything[position]
        length = int(buckets[ceiling].lengths[row])
        span = round_up(length, CHUNK_TOKENS)
        if span > tokens:
            raise UsageError(
                f"sample {samples[position]} has {length} tokens, the token budget is {batching.token_budget}",
                needed="a budget that holds the longest sample",
                do="raise --token-budget",
            )
        if used + span > tokens:
            batches.append(MicroBatch(tokens, epoch, tuple(current)))
            current, used = [], 0
        current.append(Row(ceiling, row, int(samples[position]), length, used))
        used += span
    return [*batches, MicroBatch(tokens, epoch, tuple(current))]
