"""The aligned shard: a Zarr v3 `sharding_indexed` file in which every chunk starts on a page.

Inside a shard the only codecs are Zarr's own `bytes` and `crc32c`, so any reader opens it. What is ours is where the
chunks lie (`layout.ShardGeometry`): the sharding specification allows gaps between chunks, and gaps that align them let
one O_DIRECT `preadv` bring payloads straight into the caller's buffer and checksums into scratch pages.

Every byte of a file follows from the records and their lengths: the gaps are zero and the index is known beforehand.
So reading a row checks the size, the index, every checksum and every gap. What a checksum beside its own data cannot
say is whether this is the row that was written here: a sound shard copied over another passes it. So the journal keeps
a digest of every row, and a row must match that too. Any difference is a DamageError.

A shard that lies in the page cache when a reader first meets it is read from there, others past it.
"""

import errno
import fcntl
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
from crc32c import crc32c as _crc32c

from draftcache.common.errors import DamageError
from draftcache.common.files import atomic_path
from draftcache.common.layout import CHECKSUM_BYTES, PAGE, ShardGeometry, round_up
from draftcache.common.memory import aligned_bytes
from draftcache.common.pagecache import cached_pages

Bytes = npt.NDArray[np.uint8]

EMPTY_ENTRY = 2**64 - 1
"""Offset and size of a chunk that does not exist, as the sharding specification writes it."""
_MAX_IOVECS = 1024
_READ_DO = "run `draftcache extract --resume` with the first run's settings, or extract again"


def crc32c(data: npt.NDArray[np.generic]) -> int:
    """The crc32c of contiguous memory. Other threads run meanwhile."""
    return int(_crc32c(data.data, gil_release_mode=1))


def row_digest(checksums: Sequence[int]) -> int:
    """What the journal keeps of a row: the crc32c over the checksums of its chunks."""
    return crc32c(np.array(checksums, dtype="<u4"))


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One shard as it must be: where it lies, what its rows hold, and the digests that the journal keeps of them."""

    path: Path
    geometry: ShardGeometry
    lengths: tuple[int, ...]  # [n] real tokens per row
    samples: tuple[int, ...]  # [n] their sample numbers, for messages
    digests: tuple[int, ...]  # [n] `row_digest` of every row

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return self.geometry.file_bytes(list(self.lengths))

    @cached_property
    def first_chunk(self) -> list[int]:
        """[n + 1]: chunks that lie before each row."""
        return list(accumulate((self.geometry.live_chunks(n) for n in self.lengths), initial=0))


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
) -> tuple[int, ...]:
    """Write one shard atomically and durably; returns every row's digest.

    When this returns the file is on disk under its final name. Raises OSError, for example when the disk is full; then
    nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pages = aligned_bytes(geometry.chunks_per_row * PAGE).reshape(-1, PAGE)
    with atomic_path(path) as partial:
        fd = _open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, direct=_aligned(records))
        try:
            offset = 0
            digests: list[int] = []
            for row, length in enumerate(lengths):
                live = geometry.live_chunks(length)
                payloads = records[row].reshape(-1)[: live * geometry.chunk_bytes].reshape(live, geometry.chunk_bytes)
                checksums = [crc32c(payload) for payload in payloads]
                pages[:live, :CHECKSUM_BYTES] = np.array(checksums, dtype="<u4")[:, None].view(np.uint8)
                digests.append(row_digest(checksums))
                iovecs = [part for pair in zip(payloads, pages, strict=False) for part in pair]
                offset += _transfer(os.pwritev, fd, iovecs, offset)
            tail = aligned_bytes(round_up(geometry.index_bytes, PAGE))
            tail[-geometry.index_bytes :] = shard_index(geometry, lengths)
            _transfer(os.pwritev, fd, [tail], offset)
        finally:
            os.close(fd)
    return tuple(digests)


class RowReader:
    """Reads rows of shards into memory the caller owns. Holds scratch pages, so each thread needs its own."""

    def __init__(self, *, past_cache: bool = False) -> None:
        """`past_cache`: bring even what lies in memory from the disk, to learn what the disk holds."""
        self._past_cache = past_cache
        self._scratch = aligned_bytes(PAGE).reshape(-1, PAGE)
        self._cached: dict[Path, bool] = {}  # the shards whose index is sound: whether they lay in memory then

    def read_row(
        self,
        shard: ShardFile,
        row: int,
        out: Bytes,  # [at least the row's chunks] page-aligned for O_DIRECT
    ) -> int:
        """Fill `out` with one row, zeros after its last chunk; returns the bytes read from disk.

        Raises DamageError, naming the file and the row's sample, unless every byte read is the byte that was written.
        Where the row lies follows from the lengths, so a shard's index, which only other readers need, is checked when
        this reader first meets the shard.
        """
        geometry, live = shard.geometry, shard.geometry.live_chunks(shard.lengths[row])
        try:
            fd = _open(shard.path, os.O_RDONLY | os.O_NONBLOCK, direct=_aligned(out))  # never wait on a pipe
            try:
                index_bytes = self._check_size_and_index(fd, shard)
                begin, nbytes = shard.first_chunk[row] * geometry.chunk_span, live * geometry.chunk_span
                if index_bytes:
                    in_memory = not self._past_cache and _lies_in_memory(shard.path, fd, begin, nbytes)
                    self._cached[shard.path] = in_memory
                if self._cached[shard.path]:
                    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDONLY)
                payloads = out[: live * geometry.chunk_bytes].reshape(live, geometry.chunk_bytes)
                pages = self._pages(live)
                iovecs = [part for pair in zip(payloads, pages, strict=True) for part in pair]
                read = _transfer(os.preadv, fd, iovecs, begin)
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise shard_damage(shard.path, shard.samples, "is missing") from None
        except OSError as error:
            raise shard_damage(shard.path, shard.samples, f"cannot be read: {error.strerror}") from None
        here = [shard.samples[row]]
        if read != nbytes:
            raise shard_damage(shard.path, here, f"ends after {read} bytes of row {row}")
        checksums = [crc32c(payload) for payload in payloads]
        stored = pages[:, :CHECKSUM_BYTES].copy().view("<u4")[:, 0].tolist()
        if checksums != stored:
            wrong = next(i for i in range(live) if checksums[i] != stored[i])
            raise shard_damage(shard.path, here, f"fails the checksum of row {row}, chunk {wrong}")
        if pages[:, CHECKSUM_BYTES:].any():
            raise shard_damage(shard.path, here, f"has a gap that is not zero in row {row}")
        check_digest(shard, row, checksums)
        out[live * geometry.chunk_bytes :] = 0
        return read + index_bytes

    def _check_size_and_index(self, fd: int, shard: ShardFile) -> int:
        size = os.fstat(fd).st_size
        if size != shard.size:
            raise shard_damage(shard.path, shard.samples, f"is {size} bytes long instead of {shard.size}")
        if shard.path in self._cached:
            return 0
        index_bytes = shard.geometry.index_bytes
        nbytes = round_up(index_bytes, PAGE)
        pages = self._pages(nbytes // PAGE)
        found = pages.reshape(-1)
        read = _transfer(os.preadv, fd, [found], size - nbytes)
        right = np.array_equal(found[-index_bytes:], shard_index(shard.geometry, shard.lengths))
        if read != nbytes or not right or found[:-index_bytes].any():
            raise shard_damage(shard.path, shard.samples, "has a damaged index")
        return nbytes

    def _pages(self, count: int) -> Bytes:
        if len(self._scratch) < count:
            self._scratch = aligned_bytes(count * PAGE).reshape(-1, PAGE)
        return self._scratch[:count]


def check_digest(shard: ShardFile, row: int, checksums: Sequence[int]) -> None:
    """Raise DamageError unless chunks with these checksums are the row that the journal knows."""
    if row_digest(checksums) != shard.digests[row]:
        raise shard_damage(shard.path, [shard.samples[row]], f"holds in row {row} other data than was written there")


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


def _lies_in_memory(path: Path, fd: int, offset: int, nbytes: int) -> bool:
    """Whether the page cache holds the first and the last page of this part of a file."""
    may_ask = nbytes and os.access(path, os.W_OK)
    return bool(may_ask and cached_pages(fd, offset, PAGE) and cached_pages(fd, offset + nbytes - PAGE, PAGE))


def _transfer(call: Callable[..., int], fd: int, buffers: list[Bytes], offset: int) -> int:
    """Run `preadv` or `pwritev` until every buffer is done or the file ends; returns the bytes transferred."""
    done = first = 0
    ends = list(accumulate(buffer.nbytes for buffer in buffers))
    while first < len(buffers):
        head = buffers[first][len(buffers[first]) - (ends[first] - done) :]
        count = call(fd, [head, *buffers[first + 1 : first + _MAX_IOVECS]], offset + done)
        if count == 0:
            break
        done += count
        first = bisect_right(ends, done)
    return done


def shard_damage(path: Path, samples: Sequence[int], what: str) -> DamageError:
    """The error for a shard, naming its file and samples."""
    shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
    return DamageError(f"{path} {what} (samples {shown})", needed="the bytes that were written", do=_READ_DO)
