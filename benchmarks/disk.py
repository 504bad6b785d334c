"""Files on the disk that is measured: out of the page cache, into it, and how fast raw O_DIRECT reads bring them."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from draftcache.common import pagecache
from draftcache.common.memory import aligned_bytes

REQUEST_BYTES = 8 << 20


def evict(folder: Path) -> None:
    """Drop every file from the page cache and check that none of its pages is left."""
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        left = pagecache.evict(fd)
        os.close(fd)
        assert left == 0, f"{path}: {left} pages are still in the page cache"


def check_cold(folder: Path) -> None:
    """Check that nothing has come into the page cache meanwhile."""
    for path in _files(folder):
        assert cached_share(path) < 0.01, f"{path} has come into the page cache"


def warm(folder: Path, threads: int) -> None:
    """Bring every file into the page cache and check that it stays there."""

    def read(thread: int) -> None:
        piece = bytearray(REQUEST_BYTES)
        for path in _files(folder)[thread::threads]:
            with path.open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass

    in_threads(read, threads)
    for path in _files(folder):
        share = cached_share(path)
        assert share > 0.99 or not path.stat().st_size, f"{share:.1%} of {path} stay in the page cache"


def cached_share(path: Path) -> float:
    """Share of a file's pages that lie in memory; 0 for an empty one."""
    fd, size = os.open(path, os.O_RDONLY), path.stat().st_size
    pages = pagecache.cached_pages(fd, 0, size)
    os.close(fd)
    return pages / -(-size // os.sysconf("SC_PAGESIZE")) if size else 0.0


def read_raw(paths: Sequence[Path], threads: int) -> float:
    """Read the files whole by O_DIRECT requests of 8 MiB in threads, nothing checked; returns bytes per second.

    O_DIRECT where the file system has it.
    """
    work = [(path, begin) for path in paths for begin in range(0, path.stat().st_size, REQUEST_BYTES)]
    memory = aligned_bytes(threads * REQUEST_BYTES)
    memory.fill(1)

    def read(thread: int) -> None:
        place = memory[thread * REQUEST_BYTES : (thread + 1) * REQUEST_BYTES]
        for path, begin in work[thread::threads]:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(fd, [place.data], begin)
            os.close(fd)

    started = time.perf_counter()
    in_threads(read, threads)
    return sum(path.stat().st_size for path in paths) / (time.perf_counter() - started)


def in_threads(work: Callable[[int], object], threads: int) -> None:
    """Run `work(0)`, `work(1)`, ... beside one another; raises what any of them raises."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, range(threads)):
            pass


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
