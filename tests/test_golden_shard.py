"""The bytes of a shard are a promise: a store written today is read by every later version, and by this test's file."""

from pathlib import Path

import numpy as np

from draftcache.common.layout import ShardGeometry
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import Bytes, write_shard
from draftcache.tests.shards import assert_reads_back, written

GOLDEN = Path(__file__).parent / "golden" / "shard.bin"
GEOMETRY = ShardGeometry(rows=2, ceiling=70, record_bytes=64)
LENGTHS = [70, 5]
DIGESTS = (1498970127, 2157056362)


def counted() -> Bytes:
    """[2, 128, 64] records that count up modulo 251, zero beyond each length."""
    records = aligned_bytes(2 * GEOMETRY.row_bytes).reshape(2, GEOMETRY.stride, -1)
    for row, length in enumerate(LENGTHS):
        records[row, :length] = (np.arange(length * 64).reshape(length, 64) + row) % 251
    return records


def test_a_shard_has_the_committed_bytes(tmp_path: Path) -> None:
    assert write_shard(tmp_path / "shard", GEOMETRY, counted(), LENGTHS) == DIGESTS
    assert (tmp_path / "shard").read_bytes() == GOLDEN.read_bytes()


def test_the_committed_bytes_are_read(tmp_path: Path) -> None:
    shard = written(tmp_path / "shard", counted(), GEOMETRY, LENGTHS, samples=[0, 1])
    (tmp_path / "shard").write_bytes(GOLDEN.read_bytes())
    assert_reads_back(shard, counted())
