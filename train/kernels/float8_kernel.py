"""The Triton kernel of `float8.py`. Import it only where there is a CUDA device."""

import triton
import triton.language as tl
from torch import Tensor

from draftcache.train.kernels.float8 import E4M3_MAX, SMALLEST_SCALE

_BLOCK = 4096
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


def quantise_rows(x: Tensor, coded: Tensor, scales: Tensor) -> None:
    """See float8.quantise_rows."""
    rows, width = x.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    _quantise_kernel[(rows,)](x, coded, scales, width, BLOCK=block, num_warps=max(1, block // 512))


@triton.jit
def _quantise_kernel(x_ptr, coded_ptr, scales_ptr, width, BLOCK: tl.constexpr):
    start_of_row = tl.program_id(0).to(tl.int64) * width
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + start_of_row + columns, mask=columns < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.maximum(tl.max(largest, axis=0) / _E4M3_MAX, _SMALLEST)
    tl.store(scales_ptr + tl.program_id(0), scale)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + start_of_row + columns, mask=columns < width, other=0.0).to(tl.float32)
        y = tl.minimum(tl.maximum(x / scale, -_E4M3_MAX), _E4M3_MAX)
        tl.store(coded_ptr + start_of_row + columns, y.to(coded_ptr.dtype.element_ty), mask=columns < width)
