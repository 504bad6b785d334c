"""The aligned shard: what is written comes back, any reader opens it, and no damage goes unnoticed."""

import errno
import hashlib
import os
import random
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

from draftcache.common.errors import DamageError
from draftcache.common.layout import CHUNK_TOKENS, PAGE, ShardGeometry
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import Bytes, RowReader, crc32c, write_shard

GEOMETRY = ShardGeometry(rows=3, ceiling=130, record_bytes=64)
LENGTHS = [130, 1, 65]
SAMPLES = [907, 15, 4321]
LIVE = [3, 1, 2]
GOLDEN_SHA256 = "cfba88d0d1c39700a32a3898d94a4b26a6b0c825cc3ab8d82ea050ef1df1de94"


def make_records(geometry: ShardGeometry, lengths: Sequence[int], seed: int = 0) -> Bytes:
    """[n, stride, R] random records in aligned memory, zero beyond each length."""
    records = aligned_bytes(len(lengths) * geometry.row_bytes).reshape(len(lengths), geometry.stride, -1)
    rng = np.random.default_rng(seed)
    for row, length in enumerate(lengths):
        records[row, :length] = rng.integers(0, 256, (length, geometry.record_bytes), dtype=np.uint8)
    return records


def read(path: Path, row: int, geometry: ShardGeometry = GEOMETRY, lengths: Sequence[int] = LENGTHS) -> Bytes:
    """One row read into memory that was full of other bytes."""
    out = aligned_bytes(geometry.row_bytes)
    out[:] = 0xAB
    RowReader().read_row(path, geometry, lengths, SAMPLES, row, out)
    return out.reshape(geometry.stride, -1)


def assert_reads_back(path: Path, records: Bytes) -> None:
    """Every row of the usual shard is bit for bit what was written."""
    for row in range(len(LENGTHS)):
        assert np.array_equal(read(path, row), records[row])


def assert_every_row_is_damaged(path: Path) -> None:
    """Reading any row raises a DamageError naming the file and all its samples."""
    for row in range(len(LENGTHS)):
        with pytest.raises(DamageError) as caught:
            read(path, row)
        assert str(path) in caught.value.found
        assert "(samples 907, 15, 4321)" in caught.value.found


def assert_only_this_row_is_damaged(path: Path, damaged: int) -> None:
    """Reading that row raises a DamageError naming the file and its sample; the others are read."""
    for row in range(len(LENGTHS)):
        if row != damaged:
            read(path, row)
    with pytest.raises(DamageError) as caught:
        read(path, damaged)
    assert str(path) in caught.value.found
    assert f"(samples {SAMPLES[damaged]})" in caught.value.found


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


@pytest.fixture
def records() -> Bytes:
    """The records of the usual shard."""
    return make_records(GEOMETRY, LENGTHS)


@pytest.fixture
def shard(tmp_path: Path, records: Bytes) -> Path:
    """The usual shard, written."""
    path = tmp_path / "records" / "c" / "0" / "0" / "0"
    write_shard(path, GEOMETRY, records, LENGTHS)
    return path


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
    written = make_records(geometry, lengths, seed=ceiling)
    size = write_shard(tmp_path / "shard", geometry, written, lengths)
    reader, out, total = RowReader(), aligned_bytes(geometry.row_bytes), 0
    for row in data.draw(st.permutations(range(len(lengths)))):
        out[:] = 0xAB
        total += reader.read_row(tmp_path / "shard", geometry, lengths, list(range(9)), row, out)
        assert np.array_equal(out.reshape(written[row].shape), written[row])
    index_pages = -(-geometry.index_bytes // PAGE) * PAGE
    assert total == size + (len(lengths) - 1) * index_pages  # every row reads the index again


def test_only_the_chunks_of_a_row_need_room(shard: Path, records: Bytes) -> None:
    out = aligned_bytes(LIVE[1] * GEOMETRY.chunk_bytes)
    RowReader().read_row(shard, GEOMETRY, LENGTHS, SAMPLES, 1, out)
    assert np.array_equal(out, records[1].reshape(-1)[: out.size])


def test_a_row_of_more_chunks_than_one_system_call_takes(tmp_path: Path) -> None:
    geometry = ShardGeometry(rows=1, ceiling=600 * CHUNK_TOKENS, record_bytes=64)
    lengths = [geometry.ceiling - 70]
    written = make_records(geometry, lengths)
    write_shard(tmp_path / "shard", geometry, written, lengths)
    assert np.array_equal(read(tmp_path / "shard", 0, geometry, lengths), written[0])


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


def test_shard_bytes_follow_the_format(shard: Path, records: Bytes) -> None:
    assert shard.read_bytes() == expected_file(records)


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
    written = make_records(GEOMETRY, lengths)
    for number, rows in enumerate((slice(0, 3), slice(3, 5))):
        path = tmp_path / "records" / "c" / str(number) / "0" / "0"
        write_shard(path, GEOMETRY, written[rows], lengths[rows])
    wanted = written[:, : GEOMETRY.ceiling]
    array = zarr.open_array(str(tmp_path / "records"), mode="r")
    assert np.array_equal(np.asarray(array[...]), wanted)
    assert np.array_equal(np.asarray(array[4]), wanted[4])
    assert np.array_equal(np.asarray(array[1:5, 60:129, 3:9]), wanted[1:5, 60:129, 3:9])
    assert np.array_equal(np.asarray(array[0, 128:]), wanted[0, 128:])
    assert np.array_equal(np.asarray(array.oindex[np.array([4, 0, 2]), :, 5]), wanted[[4, 0, 2], :, 5])


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


def test_every_flipped_bit_is_found_and_named(shard: Path, records: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = damage_positions()
    assert len(positions) >= 500
    refuse_direct(monkeypatch)  # through the page cache: a thousand O_DIRECT reads after writes are slow
    with shard.open("r+b", buffering=0) as file:
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
def test_damage_to_the_whole_file_is_found(shard: Path, change: Callable[[bytes], bytes]) -> None:
    shard.write_bytes(change(shard.read_bytes()))
    assert_every_row_is_damaged(shard)


def test_a_missing_shard_is_damage_and_not_zeros(shard: Path) -> None:
    shard.unlink()
    assert_every_row_is_damaged(shard)


@pytest.mark.parametrize(("chunk", "row"), [(0, 0), (2, 0), (3, 1), (5, 2)])
def test_a_zeroed_chunk_is_found(shard: Path, chunk: int, row: int) -> None:
    with shard.open("r+b") as file:
        file.seek(chunk * GEOMETRY.chunk_span)
        file.write(bytes(GEOMETRY.chunk_span))
    assert_only_this_row_is_damaged(shard, row)


def test_a_shard_of_other_lengths_is_found(shard: Path) -> None:
    write_shard(shard, GEOMETRY, make_records(GEOMETRY, [64, 130, 65]), [64, 130, 65])  # as many chunks in all
    assert_every_row_is_damaged(shard)


def test_a_read_that_ends_early_is_found_even_where_memory_holds_the_right_bytes(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, out = RowReader(), aligned_bytes(GEOMETRY.row_bytes)
    reader.read_row(shard, GEOMETRY, LENGTHS, SAMPLES, 0, out)
    real, calls = os.preadv, list[int]()

    def ends_early(fd: int, buffers: Sequence[Any], offset: int) -> int:
        calls.append(offset)  # first the index, then one chunk with its checksum, then nothing
        return 0 if len(calls) > 2 else real(fd, buffers[:2], offset)

    monkeypatch.setattr(os, "preadv", ends_early)
    with pytest.raises(DamageError) as caught:
        reader.read_row(shard, GEOMETRY, LENGTHS, SAMPLES, 0, out)
    assert "(samples 907)" in caught.value.found


def test_a_long_list_of_samples_is_cut_in_the_message(shard: Path) -> None:
    shard.unlink()
    with pytest.raises(DamageError) as caught:
        RowReader().read_row(shard, GEOMETRY, LENGTHS, list(range(100, 120)), 0, aligned_bytes(GEOMETRY.row_bytes))
    assert "(samples 100, 101, 102, 103, 104, 105, 106, 107, ...)" in caught.value.found


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
    shard: Path, records: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_fd: int, _buffers: Sequence[Any], _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full_disk)
    with pytest.raises(OSError):
        write_shard(shard, GEOMETRY, make_records(GEOMETRY, LENGTHS, seed=1), LENGTHS)
    assert_reads_back(shard, records)
    assert list(shard.parent.iterdir()) == [shard]


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
    write_shard(tmp_path / "shard", GEOMETRY, records, LENGTHS)
    assert len(refused) == 1
    assert (tmp_path / "shard").read_bytes() == expected_file(records)
    assert_reads_back(tmp_path / "shard", records)
    assert len(refused) == 1 + len(LENGTHS)


@pytest.mark.parametrize("shift", [1, 64, 512])
def test_memory_that_is_not_aligned_works_without_o_direct(tmp_path: Path, records: Bytes, shift: int) -> None:
    memory = aligned_bytes(records.size + PAGE)
    moved = memory[shift : shift + records.size].reshape(records.shape)
    moved[...] = records
    write_shard(tmp_path / "shard", GEOMETRY, moved, LENGTHS)
    assert (tmp_path / "shard").read_bytes() == expected_file(records)
    for row in range(len(LENGTHS)):
        out = memory[shift : shift + GEOMETRY.row_bytes]
        out[:] = 0xAB
        RowReader().read_row(tmp_path / "shard", GEOMETRY, LENGTHS, SAMPLES, row, out)
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
    assert write_shard(tmp_path / "shard", GEOMETRY, records, LENGTHS) == GEOMETRY.file_bytes(LENGTHS)
    assert (tmp_path / "shard").read_bytes() == expected_file(records)
    assert_reads_back(tmp_path / "shard", records)
