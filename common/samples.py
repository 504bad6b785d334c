"""Stored samples as text again, cut where supervision begins and ends: what a person looks at before training."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from draftcache.common.manifest import check_file
from draftcache.common.store import Store
from draftcache.common.target import PARTS_PATH, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One sample: its number and bucket, and its text in parts that are supervised or not."""

    number: int
    ceiling: int
    tokens: int
    void: bool
    parts: tuple[tuple[str, bool], ...]


def read_samples(store: Store, count: int) -> Iterator[SampleText]:
    """The `count` samples with the lowest numbers, decoded with the store's own tokenizer."""
    folder = (store.path / PARTS_PATH).parent
    for file in store.manifest.files:
        if (store.path / file.name).parent == folder and file.name != PARTS_PATH:
            check_file(store.path, store.manifest, file.name)
    tokenizer = load_tokenizer(folder)
    places = sorted(
        (number, ceiling, row)
        for ceiling, bucket in store.buckets.items()
        for row, number in enumerate(bucket.samples.samples.tolist())
    )
    for number, ceiling, row in places[:count]:
        bucket = store.buckets[ceiling]
        cut = bucket.samples.tokens(row)
        ids, mask = bucket.samples.input_ids[cut].tolist(), bucket.samples.loss_mask[cut].tolist()
        runs = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
        yield SampleText(
            number=number,
            ceiling=ceiling,
            tokens=len(ids),
            void=row in bucket.void_rows,
            parts=tuple((tokenizer.decode([i for i, _ in run]), bool(supervised)) for supervised, run in runs),
        )
