"""The aligned shard: a Zarr v3 `sharding_indexed` file in which every chunk starts on a page.

Inside a shard the only codecs are Zarr's own `bytes` and `crc32c`, so any reader opens it. What is ours is where the
chunks lie (`layout.ShardGeometry`): the sharding specification allows gaps between chunks, and gaps that align them let
one O_DIRECT `preadv` bring payloads straight into the caller's buffer and checksums into scratch pages.

Every byte of a file follows from the records and their lengths: the gaps are zero and the index is known beforehand. So
reading a row checks the size, the index, every checksum and every gap, and any difference is a DamageError.
"""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt

from draftcache.common.errors import DamageError
from draftcache.common.files import atomic_path
from draftcache.common.layout import CHECKSUM_BYTES, PAGE, ShardGeometry, round_up
from draftcache.common.memory import aligned_bytes

Bytes = npt.NDArray[np.uint8]

EMPTY_ENTRY = 2**64 - 1
"""Offset and size of a chunk that does not exist, as the sharding specification writes it."""
_MAX_IOVECS = 1024
_READ_DO = "run `draftcache extract --resume` with the first run's settings, or extract again"


def crc32c(data: npt.NDArray[np.generic]) -> int:
    """The crc32c of contiguous memory."""
    return int(google_crc32c.value(data))


def shard_index(geometry: ShardGeometry, lengths: Sequence[int]) -> Bytes:
    """The index of a shard whose rows have these lengths, with its checksum: [geometry.index_bytes] uint8."""
    entries = np.full((geometry.rows, geometry.chunks_per_row, 2), EMPTY_ENTRY, dtype="<u8")
    written = 0
    for row, length in enumerate(lengths):
        live = geometry.live_chunks(length)
        entries[row, :live, 0] = (written + np.arange(live)) * geometry.chunk_span
        entries[row, :live, 1] = geometry.chunk_bytes + CHECKSUM_BYTES
        written += live
    body = entries.reshape(-1).view(np.uint8)
    return np.concatenate([body, _checksum_bytes(body)])


def write_shard(
    path: Path,
    geometry: ShardGeometry,
    records: Bytes,  # [n <= rows, stride, R], C-contiguous, zero beyond each length; page-aligned for O_DIRECT
    lengths: Sequence[int],  # [n] real tokens per row
) -> int:
    """Write one shard atomically and durably; returns its size in bytes.

    When this returns the file is on disk under its final name. Raises OSError, for example when the disk is full; then
    nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pages = aligned_bytes(geometry.chunks_per_row * PAGE).reshape(-1, PAGE)
    with atomic_path(path) as partial:
        fd = _open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, direct=_aligned(records))
        try:
            offset = 0
            for row, length in enumerate(lengths):
                iovecs: list[Bytes] = []
                for chunk in range(geometry.live_chunks(length)):
                    payload = _chunk(records[row].reshape(-1), geometry, chunk)
                    pages[chunk, :CHECKSUM_BYTES] = _checksum_bytes(payload)
                    iovecs += [payload, pages[chunk]]
                offset += _transfer(os.pwritev, fd, iovecs, offset)
            tail = aligned_bytes(round_up(geometry.index_bytes, PAGE))
            tail[-geometry.index_bytes :] = shard_index(geometry, lengths)
            offset += _transfer(os.pwritev, fd, [tail], offset)
        finally:
            os.close(fd)
    return offset


class RowReader:
    """Reads rows of shards into memory the caller owns. Holds scratch pages, so each thread needs its own."""

    def __init__(self) -> None:
        self._scratch = aligned_bytes(PAGE).reshape(-1, PAGE)

    def read_row(
        self,
        path: Path,
        geometry: ShardGeometry,
        lengths: Sequence[int],  # [n] real tokens of each row in this shard
        samples: Sequence[int],  # [n] their sample numbers, for messages
        row: int,
        out: Bytes,  # [at least the row's chunks] page-aligned for O_DIRECT
    ) -> int:
        """Fill `out` with one row, zeros after its last chunk; returns the bytes read from disk.

        Raises DamageError, naming the file and the row's sample, unless every byte read is the byte that was written.
        """
        try:
            fd = _open(path, os.O_RDONLY, direct=_aligned(out))
        except FileNotFoundError:
            raise shard_damage(path, samples, "is missing") from None
        try:
            index_bytes = self._check_index(fd, path, geometry, lengths, samples)
            live = geometry.live_chunks(lengths[row])
            first = sum(geometry.live_chunks(length) for length in lengths[:row])
            pages = self._pages(live)
            iovecs = [part for chunk in range(live) for part in (_chunk(out, geometry, chunk), pages[chunk])]
            read = _transfer(os.preadv, fd, iovecs, first * geometry.chunk_span)
        finally:
            os.close(fd)
        if read != live * geometry.chunk_span:
            raise shard_damage(path, [samples[row]], f"ends after {read} bytes of row {row}")
        for chunk in range(live):
            stored = int(pages[chunk, :CHECKSUM_BYTES].view("<u4")[0])
            if crc32c(_chunk(out, geometry, chunk)) != stored:
                raise shard_damage(path, [samples[row]], f"fails the checksum of row {row}, chunk {chunk}")
        if pages[:, CHECKSUM_BYTES:].any():
            raise shard_damage(path, [samples[row]], f"has a gap that is not zero in row {row}")
        out[live * geometry.chunk_bytes :] = 0
        return read + index_bytes

    def _check_index(
        self, fd: int, path: Path, geometry: ShardGeometry, lengths: Sequence[int], samples: Sequence[int]
    ) -> int:
        expected_size, size = geometry.file_bytes(list(lengths)), os.fstat(fd).st_size
        if size != expected_size:
            raise shard_damage(path, samples, f"is {size} bytes long instead of {expected_size}")
        nbytes = round_up(geometry.index_bytes, PAGE)
        pages = self._pages(nbytes // PAGE)
        _transfer(os.preadv, fd, [pages.reshape(-1)], size - nbytes)
        found = pages.reshape(-1)
        if found[: -geometry.index_bytes].any() or not np.array_equal(
            found[-geometry.index_bytes :], shard_index(geometry, lengths)
        ):
            raise shard_damage(path, samples, "has a damaged index")
        return nbytes

    def _pages(self, count: int) -> Bytes:
        if len(self._scratch) < count:
            self._scratch = aligned_bytes(count * PAGE).reshape(-1, PAGE)
        return self._scratch[:count]


def _chunk(row: Bytes, geometry: ShardGeometry, chunk: int) -> Bytes:
    return row[chunk * geometry.chunk_bytes : (chunk + 1) * geometry.chunk_bytes]


def _checksum_bytes(data: Bytes) -> Bytes:
    return np.array([crc32c(data)], dtype="<u4").view(np.uint8)


def _aligned(memory: Bytes) -> bool:
    """Whether O_DIRECT can move whole chunks to or from this memory."""
    return memory.ctypes.data % PAGE == 0


def _open(path: Path, flags: int, *, direct: bool) -> int:
    """Open past the page cache if `direct`, and if the file system allows it (tmpfs and some network ones do not)."""
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o644)


def _transfer(call: Callable[..., int], fd: int, buffers: list[Bytes], offset: int) -> int:
    """Run `preadv` or `pwritev` until every buffer is done or the file ends; returns the bytes transferred."""
    done = 0
    while buffers:
        count = call(fd, buffers[:_MAX_IOVECS], offset + done)
        if count == 0:
            break
        done += count
        while buffers and count >= buffers[0].nbytes:
            count -= buffers[0].nbytes
            buffers = buffers[1:]
        if count:
            buffers = [buffers[0][count:], *buffers[1:]]
    return done


def shard_damage(path: Path, samples: Sequence[int], what: str) -> DamageError:
    """The error for a shard, naming its file and samples."""
    shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
    return DamageError(f"{path} {what} (samples {shown})", needed="the bytes that were written", do=_READ_DO)
