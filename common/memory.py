"""Page-aligned host memory: what O_DIRECT reads into and what CUDA can pin without rounding sizes up."""

import mmap

import numpy as np
import numpy.typing as npt


def aligned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` bytes of zeroed, page-aligned, writable memory; freed with the last view of it."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)[:nbytes]
