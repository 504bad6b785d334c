"""The Triton kernels of `loss_rows.py`. Import it only where there is a CUDA device.

The statistics kernel takes one row a program and keeps a running maximum with rescaled sums; the other is pointwise.
Both read a logit once. Sums and exponentials are float32, and there are no atomics: equal inputs give equal bits.

Legend: n rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftcache.train.kernels.loss_rows import RowStatistics, TeacherRows

_STATISTICS_BLOCK = 2048
_DIFFERENCE_BLOCK = 4096


def row_statistics(logits: Tensor, count: Tensor | None = None) -> RowStatistics:
    """See loss_rows.row_statistics."""
    rows, vocabulary = logits.shape
    log_normaliser = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _statistics_kernel[(rows,)](
        logits,
        log_normaliser,
        best,
        best if count is None else count,
        vocabulary,
        HAS_COUNT=count is not None,
        BLOCK=_STATISTICS_BLOCK,
        num_warps=4,
    )
    return RowStatistics(log_normaliser, best)


def write_difference(
    logits: Tensor,
    log_normaliser: Tensor,
    coefficients: Tensor,
    teacher: TeacherRows | None,
    factor: float,
    out: Tensor,
) -> Tensor | None:
    """See loss_rows.write_difference."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _DIFFERENCE_BLOCK)
    partial = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    _difference_kernel[(rows, blocks)](
        logits,
        logits if teacher is None else teacher.logits,
        out,
        log_normaliser,
        log_normaliser if teacher is None else teacher.log_normaliser,
        log_normaliser if teacher is None else teacher.place,
        coefficients,
        partial,
        vocabulary,
        factor,
        HAS_TEACHER=teacher is not None,
        BLOCK=_DIFFERENCE_BLOCK,
        num_warps=8,
    )
    return None if teacher is None else partial.sum(1)


@triton.jit
def _statistics_kernel(
    z_ptr, log_normaliser_ptr, best_ptr, count_ptr, vocabulary, HAS_COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    end = vocabulary
    if HAS_COUNT:
        end = tl.where(row < tl.load(count_ptr), vocabulary, 0)
    start_of_row = row.to(tl.int64) * vocabulary
    z_max = float("-inf")
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    at = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + start_of_row + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        at = tl.where(z > highest, columns, at)
        highest = tl.maximum(highest, z)
        new_max = tl.maximum(z_max, tl.max(z, axis=0))
        sums = sums * tl.exp(z_max - new_max) + tl.exp(z - new_max)
        z_max = new_max
    best = tl.min(tl.where(highest == z_max, at, vocabulary), axis=0)
    tl.store(log_normaliser_ptr + row, z_max + tl.log(tl.sum(sums, axis=0)))
    tl.store(best_ptr + row, best.to(tl.int64))


@triton.jit
def _difference_kernel(
    z_ptr,
    t_ptr,
    out_ptr,
    log_normaliser_ptr,
    teacher_log_normaliser_ptr,
    place_ptr,
    coefficient_ptr,
    partial_ptr,
    vocabulary,
    factor,
    HAS_TEACHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    at = row.to(tl.int64) * vocabulary + columns
    z = tl.load(z_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    log_q = z - tl.load(log_normaliser_ptr + row)
    value = tl.exp(log_q) * tl.load(coefficient_ptr + row)
    if HAS_TEACHER:
        place = tl.load(place_ptr + row)
        t = tl.load(t_ptr + place * vocabulary + columns, mask=inside, other=float("-inf")).to(tl.float32)
        log_p = t - tl.load(teacher_log_normaliser_ptr + place)
        p = tl.exp(log_p)
        value -= p
        part = tl.sum(tl.where(inside, p * (log_p - log_q), 0.0), axis=0)
        tl.store(partial_ptr + row * tl.num_programs(1) + tl.program_id(1), part)
    tl.store(out_ptr + at, (value * factor).to(out_ptr.dtype.element_ty), mask=inside)
