"""Assigns samples to ceilings and plans batches under the token budget. Pure and deterministic; no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from draftcache.common.layout import ceiling_for, rows_per_batch
from draftcache.common.store import BucketSamples
from draftcache.extract.template import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One forward of the target and one shard of the store: rows [first, first + count) of a bucket."""

    ceiling: int
    shard: int
    first: int
    count: int


def fill_buckets(samples: Iterable[tuple[int, Tokens]], ceilings: tuple[int, ...]) -> list[BucketSamples]:
    """Sort (sample number, tokens) into buckets, keeping their order; empty buckets are left out.

    No sample may be longer than the largest ceiling.
    """
    members: dict[int, list[tuple[int, Tokens]]] = {ceiling: [] for ceiling in ceilings}
    for number, tokens in samples:
        ceiling = ceiling_for(len(tokens.input_ids), ceilings)
        assert ceiling is not None, f"sample {number} is longer than {ceilings[-1]} tokens"
        members[ceiling].append((number, tokens))
    return [_bucket(ceiling, held) for ceiling, held in members.items() if held]


def plan_batches(buckets: Sequence[BucketSamples], token_budget: int) -> list[Batch]:
    """Every batch of the extraction, largest ceiling first, so that a run out of memory fails at once."""
    batches: list[Batch] = []
    for bucket in sorted(buckets, key=lambda b: -b.ceiling):
        rows = rows_per_batch(token_budget, bucket.ceiling)
        total = len(bucket.samples)
        batches += [
            Batch(ceiling=bucket.ceiling, shard=first // rows, first=first, count=min(rows, total - first))
            for first in range(0, total, rows)
        ]
    return batches


def _bucket(ceiling: int, held: list[tuple[int, Tokens]]) -> BucketSamples:
    lengths = [len(tokens.input_ids) for _, tokens in held]
    return BucketSamples(
        ceiling=ceiling,
        samples=np.array([number for number, _ in held], dtype=np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_ids=np.concatenate([np.array(t.input_ids, dtype=np.int32) for _, t in held]),
        loss_mask=np.concatenate([np.array(t.loss_mask, dtype=np.uint8) for _, t in held]),
    )
