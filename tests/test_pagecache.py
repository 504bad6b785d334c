"""What lies in memory is read from there; what does not is read past the page cache and leaves no trace in it."""

import os
from pathlib import Path

import pytest

from draftcache.common.layout import PAGE
from draftcache.common.memory import aligned_bytes
from draftcache.common.pagecache import cached_pages, evict
from draftcache.common.shard import RowReader
from draftcache.tests.shards import GEOMETRY, LENGTHS, assert_reads_back, make_records, written


def on_a_disk(path: Path) -> bool:
    """Whether the page cache lets go of a file there, as on a tmpfs it cannot."""
    path.write_bytes(bytes(PAGE))
    fd = os.open(path, os.O_RDONLY)
    left = evict(fd)
    os.close(fd)
    return left == 0


def test_pages_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5 * PAGE + 1))
    fd = os.open(path, os.O_RDONLY)
    assert cached_pages(fd, 0, 5 * PAGE + 1) == 6
    assert cached_pages(fd, 2 * PAGE, PAGE) == 1
    assert cached_pages(fd, 0, 0) == 0
    if on_a_disk(tmp_path / "other"):
        assert evict(fd) == 0
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, 1, PAGE)
        assert cached_pages(fd, PAGE, PAGE) == 1
        assert cached_pages(fd, 3 * PAGE, 2 * PAGE) == 0
    os.close(fd)


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def test_a_cached_shard_is_read_from_memory_and_another_past_it(tmp_path: Path) -> None:
    if not on_a_disk(tmp_path / "other"):
        pytest.skip("a file system whose files always lie in memory")
    records = make_records(GEOMETRY, LENGTHS)
    shard = written(tmp_path / "shard", records)
    fd = os.open(shard.path, os.O_RDONLY)
    assert evict(fd) == 0
    assert_reads_back(shard, records)
    assert cached_pages(fd, 0, shard.size) == 0
    shard.path.read_bytes()
    assert cached_pages(fd, 0, shard.size) == shard.size // PAGE
    before = bytes_from_disk()
    assert_reads_back(shard, records)
    rows = sum(GEOMETRY.live_chunks(length) for length in LENGTHS) * GEOMETRY.chunk_span
    assert bytes_from_disk() - before < rows  # the index alone, which each reader reads once
    before, reader = bytes_from_disk(), RowReader(past_cache=True)
    for row in range(len(LENGTHS)):
        reader.read_row(shard, row, aligned_bytes(GEOMETRY.row_bytes))
    assert bytes_from_disk() - before >= rows
    os.close(fd)
