"""No damage to a shard goes unnoticed: bits, sizes, the index, gaps, other rows, and a disk that fails."""

import dataclasses
import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftcache.common.errors import DamageError
from draftcache.common.layout import PAGE
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import Bytes, RowReader, ShardFile
from draftcache.tests.shards import (
    GEOMETRY,
    LENGTHS,
    LIVE,
    SAMPLES,
    assert_reads_back,
    make_records,
    read,
    refuse_direct,
    written,
)


@pytest.fixture
def records() -> Bytes:
    """The records of the usual shard."""
    return make_records(GEOMETRY, LENGTHS)


@pytest.fixture
def shard(tmp_path: Path, records: Bytes) -> ShardFile:
    """The usual shard, written."""
    return written(tmp_path / "records" / "c" / "0" / "0" / "0", records)


def damage(shard: ShardFile, row: int) -> DamageError:
    """The error with which a row is refused; it names the file."""
    with pytest.raises(DamageError) as caught:
        read(shard, row)
    assert str(shard.path) in caught.value.found
    return caught.value


def assert_every_row_is_damaged(shard: ShardFile) -> None:
    """Reading any row raises a DamageError naming the file and all its samples."""
    for row in range(len(LENGTHS)):
        assert "(samples 907, 15, 4321)" in damage(shard, row).found


def assert_only_this_row_is_damaged(shard: ShardFile, damaged: int) -> None:
    """Reading that row raises a DamageError naming the file and its sample; the others are read."""
    for row in range(len(LENGTHS)):
        if row != damaged:
            read(shard, row)
    assert f"(samples {SAMPLES[damaged]})" in damage(shard, damaged).found


def damage_positions() -> list[tuple[int, int | None]]:
    """Byte positions over the whole file, each with the row it belongs to; None for the index and its gap."""
    rng = random.Random(0)
    span, positions = GEOMETRY.chunk_span, list[tuple[int, int | None]]()
    for chunk, row in enumerate(row for row, live in enumerate(LIVE) for _ in range(live)):
        begin, checksum = chunk * span, chunk * span + GEOMETRY.chunk_bytes
        payload = [begin, checksum - 1, *rng.sample(range(begin + 1, checksum - 1), 40)]
        gap = [checksum + 4, begin + span - 1, *rng.sample(range(checksum + 5, begin + span - 1), 20)]
        positions += [(at, row) for at in (*payload, *range(checksum, checksum + 4), *gap)]
    begin, end = sum(LIVE) * span, sum(LIVE) * span + PAGE
    index = range(end - GEOMETRY.index_bytes, end)
    index_gap = [begin, index.start - 1, *rng.sample(range(begin + 1, index.start - 1), 60)]
    return positions + [(at, None) for at in (*index, *index_gap)]


def test_every_flipped_bit_is_found_and_named(
    shard: ShardFile, records: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = damage_positions()
    assert len(positions) >= 500
    refuse_direct(monkeypatch)  # through the page cache: a thousand O_DIRECT reads after writes are slow
    with shard.path.open("r+b", buffering=0) as file:
        for at, row in positions:
            bit = 1 << at % 8
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ bit]), at)
            if row is None:
                assert_every_row_is_damaged(shard)
            else:
                assert_only_this_row_is_damaged(shard, row)
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert_reads_back(shard, records)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda whole: whole[:0], id="empty"),
        pytest.param(lambda whole: whole[:-1], id="one byte short"),
        pytest.param(lambda whole: whole[:-PAGE], id="without its index"),
        pytest.param(lambda whole: whole[PAGE:], id="without its first page"),
        pytest.param(lambda whole: whole[: len(whole) // 2], id="half"),
        pytest.param(lambda whole: whole + b"\0", id="one byte more"),
        pytest.param(lambda whole: whole + bytes(PAGE), id="one page more"),
        pytest.param(lambda whole: bytes(PAGE) + whole, id="moved by a page"),
        pytest.param(lambda whole: bytes(len(whole)), id="zeroed"),
        pytest.param(lambda whole: b"\xff" * len(whole), id="all ones"),
        pytest.param(lambda whole: whole[:-PAGE] + bytes(PAGE), id="index zeroed"),
    ],
)
def test_damage_to_the_whole_file_is_found(shard: ShardFile, change: Callable[[bytes], bytes]) -> None:
    shard.path.write_bytes(change(shard.path.read_bytes()))
    assert_every_row_is_damaged(shard)


def test_a_missing_shard_is_damage_and_not_zeros(shard: ShardFile) -> None:
    shard.path.unlink()
    assert_every_row_is_damaged(shard)


@pytest.mark.parametrize(("chunk", "row"), [(0, 0), (2, 0), (3, 1), (5, 2)])
def test_a_zeroed_chunk_is_found(shard: ShardFile, chunk: int, row: int) -> None:
    with shard.path.open("r+b") as file:
        file.seek(chunk * GEOMETRY.chunk_span)
        file.write(bytes(GEOMETRY.chunk_span))
    assert_only_this_row_is_damaged(shard, row)


def test_a_shard_of_other_lengths_is_found(shard: ShardFile) -> None:
    other = [64, 130, 65]  # as many chunks in all
    written(shard.path, make_records(GEOMETRY, other), lengths=other)
    assert_every_row_is_damaged(shard)


def test_a_read_that_ends_early_is_found_even_where_memory_holds_the_right_bytes(
    shard: ShardFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, out = RowReader(), aligned_bytes(GEOMETRY.row_bytes)
    reader.read_row(shard, 0, out)
    real, calls = os.preadv, list[int]()

    def ends_early(fd: int, buffers: Sequence[Any], offset: int) -> int:
        calls.append(offset)  # the index is known; first one chunk with its checksum, then nothing
        return 0 if len(calls) > 1 else real(fd, buffers[:2], offset)

    monkeypatch.setattr(os, "preadv", ends_early)
    with pytest.raises(DamageError) as caught:
        reader.read_row(shard, 0, out)
    assert "(samples 907)" in caught.value.found


def test_a_long_list_of_samples_is_cut_in_the_message(tmp_path: Path) -> None:
    lengths = [1] * 20
    geometry = dataclasses.replace(GEOMETRY, rows=20)
    shard = written(tmp_path / "0", make_records(geometry, lengths), geometry, lengths, range(100, 120))
    shard.path.unlink()
    assert "(samples 100, 101, 102, 103, 104, 105, 106, 107, ...)" in damage(shard, 0).found


def test_an_index_that_ends_early_is_found_even_where_memory_holds_the_right_bytes(
    shard: ShardFile, records: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = written(shard.path.with_name("twin"), records)
    reader, out, real = RowReader(), aligned_bytes(GEOMETRY.row_bytes), os.preadv

    def only_the_index(fd: int, buffers: Sequence[Any], offset: int) -> int:
        return real(fd, buffers, offset) if offset == shard.size - PAGE else 0

    monkeypatch.setattr(os, "preadv", only_the_index)
    with pytest.raises(DamageError):  # leaves the twin's index, which is the shard's too, in the reader's scratch page
        reader.read_row(twin, 0, out)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(DamageError) as caught:
        reader.read_row(shard, 0, out)
    assert "has a damaged index" in caught.value.found


def test_another_shard_of_the_same_size_with_valid_checksums_is_found(shard: ShardFile) -> None:
    """What checksums beside their own data cannot see: the file is sound, but it is another one."""
    other = written(shard.path.with_name("other"), make_records(GEOMETRY, LENGTHS, seed=1))
    assert_reads_back(other, make_records(GEOMETRY, LENGTHS, seed=1))
    other.path.replace(shard.path)
    for row, sample in enumerate(SAMPLES):
        found = damage(shard, row).found
        assert f"holds in row {row} other data than was written there (samples {sample})" in found


def test_rows_that_changed_places_are_found(tmp_path: Path) -> None:
    lengths = [70, 65, 1]
    records = make_records(GEOMETRY, lengths)
    shard = written(tmp_path / "0", records, lengths=lengths)
    whole, span = shard.path.read_bytes(), 2 * GEOMETRY.chunk_span
    shard.path.write_bytes(whole[span : 2 * span] + whole[:span] + whole[2 * span :])
    for row in (0, 1):
        assert "other data than was written there" in damage(shard, row).found
    assert np.array_equal(read(shard, 2), records[2])


def test_chunks_that_changed_places_are_found(shard: ShardFile) -> None:
    whole, span = shard.path.read_bytes(), GEOMETRY.chunk_span
    shard.path.write_bytes(whole[span : 2 * span] + whole[:span] + whole[2 * span :])
    assert_only_this_row_is_damaged(shard, 0)


def test_an_index_is_checked_once_per_reader_and_shard(shard: ShardFile) -> None:
    reader, out = RowReader(), aligned_bytes(GEOMETRY.row_bytes)
    spans = [live * GEOMETRY.chunk_span for live in LIVE]
    assert [reader.read_row(shard, row, out) for row in (0, 0, 1)] == [spans[0] + PAGE, spans[0], spans[1]]
    twin = written(shard.path.with_name("twin"), make_records(GEOMETRY, LENGTHS))
    assert [reader.read_row(twin, row, out) for row in (2, 2)] == [spans[2] + PAGE, spans[2]]


@pytest.mark.parametrize("call", [1, 2])  # the index, the row
def test_a_disk_that_fails_is_damage_with_the_files_name(
    shard: ShardFile, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    real, calls = os.preadv, list[int]()

    def failing(fd: int, buffers: Sequence[Any], offset: int) -> int:
        calls.append(offset)
        if len(calls) == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    found = damage(shard, 0).found
    assert f"{shard.path} cannot be read: Input/output error (samples 907, 15, 4321)" == found
    assert len(calls) == call


def test_a_file_that_cannot_be_opened_is_damage_with_its_name(
    shard: ShardFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", forbidden)
    assert "cannot be read: Permission denied" in damage(shard, 0).found


def test_a_folder_in_a_shards_place_is_damage(shard: ShardFile) -> None:
    shard.path.unlink()
    shard.path.mkdir()
    assert_every_row_is_damaged(shard)
