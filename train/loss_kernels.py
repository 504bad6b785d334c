"""The Triton kernels of `loss_rows.py`. Import it only where there is a CUDA device.

The statistics kernel takes one row a program and keeps a running maximum with rescaled sums; the other is pointwise.
Both read a logit once. Sums and exponentials are float32, and there are no atomics: equal inputs give equal bits.

Legend: n rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftcache.train.loss_rows import RowStatistics

_STATISTICS_BLOCK = 8192
_DIFFERENCE_BLOCK = 4096


def row_statistics(logits: Tensor, teacher_logits: Tensor | None) -> RowStatistics:
    """See loss_rows.row_statistics."""
    rows, vocabulary = logits.shape
    log_normaliser, teacher_log_normaliser, divergence = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _statistics_kernel[(rows,)](
        logits,
        logits if teacher_logits is None else teacher_logits,
        log_normaliser,
        best,
        teacher_log_normaliser,
        divergence,
        vocabulary,
        HAS_TEACHER=teacher_logits is not None,
        BLOCK=_STATISTICS_BLOCK,
        num_warps=16,
    )
    if teacher_logits is None:
        return RowStatistics(log_normaliser, best)
    return RowStatistics(log_normaliser, best, teacher_log_normaliser, divergence)


def write_difference(
    logits: Tensor,
    statistics: RowStatistics,
    coefficients: Tensor,
    teacher_logits: Tensor | None,
    factor: float,
    out: Tensor,
) -> None:
    """See loss_rows.write_difference."""
    rows, vocabulary = logits.shape
    _difference_kernel[(rows, triton.cdiv(vocabulary, _DIFFERENCE_BLOCK))](
        logits,
        logits if teacher_logits is None else teacher_logits,
        out,
        statistics.log_normaliser,
        statistics.log_normaliser if teacher_logits is None else statistics.teacher_log_normaliser,
        coefficients,
        vocabulary,
        factor,
        HAS_TEACHER=teacher_logits is not None,
        BLOCK=_DIFFERENCE_BLOCK,
        num_warps=8,
    )


@triton.jit
def _statistics_kernel(
    z_ptr,
    t_ptr,
    log_normaliser_ptr,
    best_ptr,
    teacher_log_normaliser_ptr,
    divergence_ptr,
    vocabulary,
    HAS_TEACHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start_of_row = row.to(tl.int64) * vocabulary
    z_max = float("-inf")
    z_sum = 0.0
    best = tl.full((), 0, tl.int64)
    t_max = float("-inf")
    t_sum = 0.0
    cross = 0.0  # sum exp(t - t_max) (t - z)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        z = tl.load(z_ptr + start_of_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
        block_max, block_best = tl.max(z, axis=0, return_indices=True)
        if block_max > z_max:
            best = (start + block_best).to(tl.int64)
        new_max = tl.maximum(z_max, block_max)
        z_sum = z_sum * tl.exp(z_max - new_max) + tl.sum(tl.exp(z - new_max), axis=0)
        z_max = new_max
        if HAS_TEACHER:
            t = tl.load(t_ptr + start_of_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
            new_max = tl.maximum(t_max, tl.max(t, axis=0))
            rescale = tl.exp(t_max - new_max)
            e = tl.exp(t - new_max)
            t_sum = t_sum * rescale + tl.sum(e, axis=0)
            cross = cross * rescale + tl.sum(tl.where(inside, e * (t - z), 0.0), axis=0)
            t_max = new_max
    log_normaliser = z_max + tl.log(z_sum)
    tl.store(log_normaliser_ptr + row, log_normaliser)
    tl.store(best_ptr + row, best)
    if HAS_TEACHER:
        teacher_log_normaliser = t_max + tl.log(t_sum)
        tl.store(teacher_log_normaliser_ptr + row, teacher_log_normaliser)
        tl.store(divergence_ptr + row, cross / t_sum - teacher_log_normaliser + log_normaliser)


@triton.jit
def _difference_kernel(
    z_ptr,
    t_ptr,
    out_ptr,
    log_normaliser_ptr,
    teacher_log_normaliser_ptr,
    coefficient_ptr,
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
    value = tl.exp(z - tl.load(log_normaliser_ptr + row)) * tl.load(coefficient_ptr + row)
    if HAS_TEACHER:
        t = tl.load(t_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        value -= tl.exp(t - tl.load(teacher_log_normaliser_ptr + row))
    tl.store(out_ptr + at, (value * factor).to(out_ptr.dtype.element_ty), mask=inside)
