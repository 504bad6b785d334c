"""Which pages of a file lie in memory. Reading past the page cache would fetch them from the disk all the same."""

import ctypes
import mmap
import os
from functools import cache

import numpy as np

_FAILED = ctypes.c_void_p(-1).value
"""What the system's mmap returns for no memory."""


def cached_pages(fd: int, offset: int, nbytes: int) -> int:
    """Pages of this part of an open file that the page cache holds. `offset` is a multiple of the page size.

    The system tells the truth only to who may write the file; anybody else hears that all of them are there.
    """
    if nbytes == 0:
        return 0
    libc = _libc()
    resident = np.zeros(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
    address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "the file cannot be mapped")
    failed = libc.mincore(address, nbytes, resident.ctypes.data)
    libc.munmap(address, nbytes)
    assert not failed, f"mincore failed: {os.strerror(ctypes.get_errno())}"
    return int(np.count_nonzero(resident & 1))


def evict(fd: int) -> int:
    """Drop an open file's pages from the page cache; returns how many are still there."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_pages(fd, 0, os.fstat(fd).st_size)


@cache
def _libc() -> ctypes.CDLL:
    """The C library, whose mmap, unlike Python's, needs no object for each map."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, integer = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, integer, integer, integer, ctypes.c_int64], pointer
    libc.mincore.argtypes = [pointer, size, pointer]
    libc.munmap.argtypes = [pointer, size]
    return libc
