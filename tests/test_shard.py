"""The aligned shard: what is written comes back, any reader opens it, and a failing write leaves nothing."""

import errno
import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import Crc32cCodec

from draftcache.common.layout import CHUNK_TOKENS, PAGE, ShardGeometry
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import Bytes, RowReader, ShardFile, crc32c, row_digest, write_shard
from draftcache.tests.shards import (
    GEOMETRY,
    LENGTHS,
    LIVE,
    assert_reads_back,
    make_records,
    refuse_direct,
    written,
)

GOLDEN_SHA256 = "cfba88d0d1c39700a32a3898d94a4b26a6b0c825cc3ab8d82ea050ef1df1de94"


@pytest.fixture
def records() -> Bytes:
    """The records of the usual shard."""
    return make_records(GEOMETRY, LENGTHS)


@pytest.fixture
def shard(tmp_path: Path, records: Bytes) -> ShardFile:
    """The usual shard, written."""
    return written(tmp_path / "records" / "c" / "0" / "0" / "0", records)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ceiling=st.integers(2, 300),
    units=st.integers(1, 4),
    rows=st.integers(1, 5),
    data=st.data(),
)
def test_random_rows_come_back_bit_for_bit(
    tmp_path: Path, ceiling: int, units: int, rows: int, data: st.DataObject
) -> None:
    geometry = ShardGeometry(rows=rows, ceiling=ceiling, record_bytes=64 * units)
    lengths = data.draw(st.lists(st.integers(1, ceiling), min_size=1, max_size=rows))
    records = make_records(geometry, lengths, seed=ceiling)
    shard = written(tmp_path / "shard", records, geometry, lengths, range(len(lengths)))
    reader, out, total = RowReader(), aligned_bytes(geometry.row_bytes), 0
    for row in data.draw(st.permutations(range(len(lengths)))):
        out[:] = 0xAB
        total += reader.read_row(shard, row, out)
        assert np.array_equal(out.reshape(records[row].shape), records[row])
    assert total == shard.size == shard.path.stat().st_size


def test_only_the_chunks_of_a_row_need_room(shard: ShardFile, records: Bytes) -> None:
    out = aligned_bytes(LIVE[1] * GEOMETRY.chunk_bytes)
    RowReader().read_row(shard, 1, out)
    assert np.array_equal(out, records[1].reshape(-1)[: out.size])


def test_a_row_of_more_chunks_than_one_system_call_takes(tmp_path: Path) -> None:
    geometry = ShardGeometry(rows=1, ceiling=600 * CHUNK_TOKENS, record_bytes=64)
    lengths = [geometry.ceiling - 70]
    records = make_records(geometry, lengths)
    assert_reads_back(written(tmp_path / "shard", records, geometry, lengths, [7]), records)


def test_crc32c_is_the_castagnoli_checksum() -> None:
    assert crc32c(np.frombuffer(b"123456789", dtype=np.uint8)) == 0xE3069283


def expected_file(records: Bytes) -> bytes:
    """The usual shard's bytes from the format's description alone: chunks and checksums on pages, then the index."""
    body, index = b"", b""
    for row in range(GEOMETRY.rows):
        for chunk in range(3):
            if chunk < LIVE[row]:
                payload = records[row, chunk * 64 : (chunk + 1) * 64].tobytes()
                index += struct.pack("<QQ", len(body), len(payload) + 4)
                body += payload + struct.pack("<I", google_crc32c.value(payload)) + bytes(4092)
            else:
                index += b"\xff" * 16
    index += struct.pack("<I", google_crc32c.value(index))
    return body + bytes(-len(index) % 4096) + index


def test_shard_bytes_follow_the_format(shard: ShardFile, records: Bytes) -> None:
    assert shard.path.read_bytes() == expected_file(records)


def test_a_rows_digest_is_the_checksum_of_its_chunks_checksums(shard: ShardFile, records: Bytes) -> None:
    for row, live in enumerate(LIVE):
        chunks = [records[row, 64 * i : 64 * i + 64].tobytes() for i in range(live)]
        checksums = b"".join(struct.pack("<I", google_crc32c.value(chunk)) for chunk in chunks)
        assert shard.digests[row] == google_crc32c.value(checksums)
    assert row_digest([1, 2]) != row_digest([2, 1])


def test_shard_bytes_never_change(tmp_path: Path) -> None:
    records = aligned_bytes(3 * GEOMETRY.row_bytes).reshape(3, GEOMETRY.stride, -1)
    for row, length in enumerate(LENGTHS):
        tokens = np.arange(length * GEOMETRY.record_bytes) * 7 + row
        records[row, :length] = (tokens % 251).astype(np.uint8).reshape(length, -1)
    write_shard(tmp_path / "shard", GEOMETRY, records, LENGTHS)
    assert hashlib.sha256((tmp_path / "shard").read_bytes()).hexdigest() == GOLDEN_SHA256


def test_a_row_that_is_absent_from_a_last_shard_is_empty_in_the_index(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", GEOMETRY, make_records(GEOMETRY, [70]), [70])
    index = np.frombuffer((tmp_path / "shard").read_bytes()[-GEOMETRY.index_bytes : -4], "<u8").reshape(3, 3, 2)
    assert (index[1:] == 2**64 - 1).all()
    assert index[0].tolist() == [[0, 4100], [8192, 4100], [2**64 - 1, 2**64 - 1]]


def test_zarr_opens_the_very_file(tmp_path: Path) -> None:
    counts, lengths = 5, [130, 1, 65, 128, 64]
    array = zarr.create_array(
        str(tmp_path / "records"),
        shape=(counts, GEOMETRY.ceiling, GEOMETRY.record_bytes),
        dtype="uint8",
        chunks=(1, CHUNK_TOKENS, GEOMETRY.record_bytes),
        shards=(GEOMETRY.rows, GEOMETRY.stride, GEOMETRY.record_bytes),
        compressors=[Crc32cCodec()],
        fill_value=0,
    )
    records = make_records(GEOMETRY, lengths)
    for number, rows in enumerate((slice(0, 3), slice(3, 5))):
        path = tmp_path / "records" / "c" / str(number) / "0" / "0"
        write_shard(path, GEOMETRY, records[rows], lengths[rows])
    wanted = records[:, : GEOMETRY.ceiling]
    array = zarr.open_array(str(tmp_path / "records"), mode="r")
    assert np.array_equal(np.asarray(array[...]), wanted)
    assert np.array_equal(np.asarray(array[4]), wanted[4])
    assert np.array_equal(np.asarray(array[1:5, 60:129, 3:9]), wanted[1:5, 60:129, 3:9])
    assert np.array_equal(np.asarray(array[0, 128:]), wanted[0, 128:])
    assert np.array_equal(np.asarray(array.oindex[np.array([4, 0, 2]), :, 5]), wanted[[4, 0, 2], :, 5])


@pytest.mark.parametrize("call", [1, 2, 3, 4])  # three rows, then the index
def test_a_failing_write_leaves_nothing(
    tmp_path: Path, records: Bytes, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    real, calls = os.pwritev, list[int]()

    def full_disk(fd: int, buffers: Sequence[Any], offset: int) -> int:
        calls.append(offset)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full_disk)
    with pytest.raises(OSError) as caught:
        write_shard(tmp_path / "c" / "shard", GEOMETRY, records, LENGTHS)
    assert caught.value.errno == errno.ENOSPC
    assert len(calls) == call
    assert list((tmp_path / "c").iterdir()) == []


def test_a_failing_flush_leaves_nothing(tmp_path: Path, records: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError):
        write_shard(tmp_path / "c" / "shard", GEOMETRY, records, LENGTHS)
    assert list((tmp_path / "c").iterdir()) == []


def test_a_failing_write_leaves_an_older_shard_alone(
    shard: ShardFile, records: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_fd: int, _buffers: Sequence[Any], _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full_disk)
    with pytest.raises(OSError):
        write_shard(shard.path, GEOMETRY, make_records(GEOMETRY, LENGTHS, seed=1), LENGTHS)
    assert_reads_back(shard, records)
    assert list(shard.path.parent.iterdir()) == [shard.path]


def test_the_file_and_its_name_are_flushed(tmp_path: Path, records: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flushed = os.fsync, list[str]()

    def watched(fd: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", watched)
    write_shard(tmp_path / "shard", GEOMETRY, records, LENGTHS)
    assert flushed == [str(tmp_path / "shard.partial"), str(tmp_path)]


def test_without_o_direct_all_still_works(tmp_path: Path, records: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = refuse_direct(monkeypatch)
    shard = written(tmp_path / "shard", records)
    assert len(refused) == 1
    assert shard.path.read_bytes() == expected_file(records)
    assert_reads_back(shard, records)
    assert len(refused) == 1 + len(LENGTHS)


@pytest.mark.parametrize("shift", [1, 64, 512])
def test_memory_that_is_not_aligned_works_without_o_direct(tmp_path: Path, records: Bytes, shift: int) -> None:
    memory = aligned_bytes(records.size + PAGE)
    moved = memory[shift : shift + records.size].reshape(records.shape)
    moved[...] = records
    shard = written(tmp_path / "shard", moved)
    assert shard.path.read_bytes() == expected_file(records)
    for row in range(len(LENGTHS)):
        out = memory[shift : shift + GEOMETRY.row_bytes]
        out[:] = 0xAB
        RowReader().read_row(shard, row, out)
        assert np.array_equal(out.reshape(records[row].shape), records[row])


def test_other_errors_of_opening_are_not_hidden(
    tmp_path: Path, records: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def forbidden(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(PermissionError):
        write_shard(tmp_path / "shard", GEOMETRY, records, LENGTHS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("most", "direct"), [(PAGE, True), (3 * PAGE, True), (1000, False), (4097, False)])
def test_short_writes_and_reads_are_continued(
    tmp_path: Path, records: Bytes, monkeypatch: pytest.MonkeyPatch, most: int, direct: bool
) -> None:
    if not direct:  # O_DIRECT transfers whole blocks only
        refuse_direct(monkeypatch)

    def shortened(call: Callable[..., int]) -> Callable[[int, Sequence[Any], int], int]:
        def transfer(fd: int, buffers: Sequence[Any], offset: int) -> int:
            left, given = most, list[memoryview]()
            for buffer in buffers:
                given.append(memoryview(buffer)[:left])
                left -= len(given[-1])
                if not left:
                    break
            return call(fd, given, offset)

        return transfer

    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
    monkeypatch.setattr(os, "preadv", shortened(os.preadv))
    shard = written(tmp_path / "shard", records)
    assert shard.path.read_bytes() == expected_file(records)
    assert_reads_back(shard, records)
