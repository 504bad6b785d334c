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

_STATISTICS_BLOCK = 2048
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
        num_warps=8,
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
    t_max = float("-inf")
    z_sums = tl.zeros((BLOCK,), dtype=tl.float32)
    t_sums = tl.zeros((BLOCK,), dtype=tl.float32)
    cross = tl.zeros((BLOCK,), dtype=tl.float32)  # sums of exp(t - t_max) (t - z)
    highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    at = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        z = tl.load(z_ptr + start_of_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
        at = tl.where(z > highest, columns, at)
        highest = tl.maximum(highest, z)
        new_max = tl.maximum(z_max, tl.max(z, axis=0))
        z_sums = z_sums * tl.exp(z_max - new_max) + tl.exp(z - new_max)
        z_max = new_max
        if HAS_TEACHER:
            t = tl.load(t_ptr + start_of_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
            new_max = tl.maximum(t_max, tl.max(t, axis=0))
            rescale = tl.exp(t_max - new_max)
            e = tl.exp(t - new_max)
            t_sums = t_sums * rescale + e
            cross = cross * rescale + tl.where(inside, e * (t - z), 0.0)
            t_max = new_max
    log_normaliser = z_max + tl.log(tl.sum(z_sums, axis=0))
    best = tl.min(tl.where(highest == z_max, at, vocabulary), axis=0)
    tl.store(log_normaliser_ptr + row, log_normaliser)
    tl.store(best_ptr + row, best.to(tl.int64))
    if HAS_TEACHER:
        t_sum = tl.sum(t_sums, axis=0)
        teacher_log_normaliser = t_max + tl.log(t_sum)
        tl.store(teacher_log_normaliser_ptr + row, teacher_log_normaliser)
        tl.store(divergence_ptr + row, tl.sum(cross, axis=0) / t_sum - teacher_log_normaliser + log_normaliser)


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
