"""The store's format in executable form: names, versions, and the arithmetic of ceilings, rows and aligned shards.

    store/
      zarr.json                        the Zarr v3 group that any reader opens
      manifest.json                    what the store was made from (manifest.py)
      target/                          embedding, head, config and tokenizer files: all that training needs
      journal/rank-0.jsonl             the shards that exist (store.py)
      buckets/770/records/c/0/0/0      one shard: the records of one forward batch (shard.py)
      buckets/770/{input_ids,loss_mask,length,sample}

A ceiling is a padded length. A bucket holds the samples whose length lies in (previous ceiling, ceiling]. On disk, in
the ring and in the step a row takes `row_stride(ceiling)` tokens, the ceiling rounded up to whole chunks.
"""

import bisect
from dataclasses import dataclass
from itertools import pairwise

from draftcache.common.errors import UsageError

LAYOUT_VERSION = 2
CHUNK_TOKENS = 64
PAGE = 4096
CHECKSUM_BYTES = 4
INDEX_ENTRY_BYTES = 16
RECORD_ALIGNMENT = 64
"""Bytes. CHUNK_TOKENS records of a multiple of 64 bytes are whole pages, whatever the target's width."""

MAX_CEILING = 2**22
DEFAULT_CEILINGS = (770, 1216, 1728, 2432, 3296, 8192)
DEFAULT_TOKEN_BUDGET = 49_152


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


def row_stride(ceiling: int) -> int:
    """Tokens that one row of this ceiling takes in a shard, a ring buffer and the step."""
    return round_up(ceiling, CHUNK_TOKENS)


def rows_per_batch(token_budget: int, ceiling: int) -> int:
    """Rows of one batch: as many as the budget of tokens holds, at least one."""
    return max(1, token_budget // row_stride(ceiling))


def check_ceilings(ceilings: tuple[int, ...]) -> None:
    """Raise UsageError unless the ceilings are strictly ascending lengths that a row can have."""
    ascending = all(a < b for a, b in pairwise(ceilings))
    if not (ceilings and ascending and ceilings[0] >= 2 and ceilings[-1] <= MAX_CEILING):
        raise UsageError(
            f"bucket ceilings {list(ceilings)}",
            needed=f"strictly ascending lengths of 2 to {MAX_CEILING} tokens",
            do="pass for example --buckets 512,1024,2048",
        )


def ceiling_for(length: int, ceilings: tuple[int, ...]) -> int | None:
    """The smallest ceiling >= `length` tokens, or None if there is none."""
    position = bisect.bisect_left(ceilings, length)
    return ceilings[position] if position < len(ceilings) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGeometry:
    """The shape of one bucket's shards, and every byte offset that follows from it.

    A shard holds, row after row, the chunks that contain real tokens: CHUNK_TOKENS records, their crc32c, zeros to the
    end of that page. The file ends with the sharding index, right-aligned so that it ends on a page.
    """

    rows: int
    ceiling: int
    record_bytes: int

    @property
    def stride(self) -> int:
        """Tokens per row."""
        return row_stride(self.ceiling)

    @property
    def row_bytes(self) -> int:
        """Bytes of one padded row."""
        return self.stride * self.record_bytes

    @property
    def chunks_per_row(self) -> int:
        """Chunks of one padded row."""
        return self.stride // CHUNK_TOKENS

    @property
    def chunk_bytes(self) -> int:
        """Payload of one chunk; a whole number of pages."""
        return CHUNK_TOKENS * self.record_bytes

    @property
    def chunk_span(self) -> int:
        """Distance between two chunks in the file: the payload and its checksum's page."""
        return self.chunk_bytes + PAGE

    @property
    def index_bytes(self) -> int:
        """The sharding index with its own crc32c."""
        return self.rows * self.chunks_per_row * INDEX_ENTRY_BYTES + CHECKSUM_BYTES

    def live_chunks(self, length: int) -> int:
        """Chunks of a row of `length` tokens that hold at least one real token."""
        return -(-length // CHUNK_TOKENS)

    def file_bytes(self, lengths: list[int]) -> int:
        """Size of a shard whose rows have these lengths."""
        chunks = sum(self.live_chunks(length) for length in lengths)
        return chunks * self.chunk_span + round_up(self.index_bytes, PAGE)

    def packed_bytes(self, lengths: list[int]) -> int:
        """Size of the same shard as stock Zarr writes it, chunk behind chunk without gaps."""
        chunks = sum(self.live_chunks(length) for length in lengths)
        return chunks * (self.chunk_bytes + CHECKSUM_BYTES) + self.index_bytes
