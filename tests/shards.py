"""One small shard for tests: its geometry, its records, reading a row of it back, and a disk without O_DIRECT."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftcache.common.layout import ShardGeometry
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import Bytes, RowReader, ShardFile, write_shard

GEOMETRY = ShardGeometry(rows=3, ceiling=130, record_bytes=64)
LENGTHS = [130, 1, 65]
SAMPLES = [907, 15, 4321]
LIVE = [3, 1, 2]


def make_records(geometry: ShardGeometry, lengths: Sequence[int], seed: int = 0) -> Bytes:
    """[n, stride, R] random records in aligned memory, zero beyond each length."""
    records = aligned_bytes(len(lengths) * geometry.row_bytes).reshape(len(lengths), geometry.stride, -1)
    rng = np.random.default_rng(seed)
    for row, length in enumerate(lengths):
        records[row, :length] = rng.integers(0, 256, (length, geometry.record_bytes), dtype=np.uint8)
    return records


def written(
    path: Path,
    records: Bytes,  # [n, stride, R]
    geometry: ShardGeometry = GEOMETRY,
    lengths: Sequence[int] = LENGTHS,
    samples: Sequence[int] = SAMPLES,
) -> ShardFile:
    """Write a shard; returns what must be read there from now on."""
    digests = write_shard(path, geometry, records, lengths)
    return ShardFile(path=path, geometry=geometry, lengths=tuple(lengths), samples=tuple(samples), digests=digests)


def read(shard: ShardFile, row: int) -> Bytes:
    """One row, [stride, R], read by a fresh reader into memory that was full of other bytes."""
    out = aligned_bytes(shard.geometry.row_bytes)
    out[:] = 0xAB
    RowReader().read_row(shard, row, out)
    return out.reshape(shard.geometry.stride, -1)


def assert_reads_back(shard: ShardFile, records: Bytes) -> None:
    """Every row is bit for bit what was written."""
    for row in range(len(shard.lengths)):
        assert np.array_equal(read(shard, row), records[row])


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make `os.open` refuse O_DIRECT, as tmpfs used to; returns the list of refused flags."""
    real, refused = os.open, list[int]()

    def fake(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            refused.append(flags)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", fake)
    return refused
