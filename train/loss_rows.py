"""Two passes over rows of logits: one for statistics, one that writes the loss's derivative.

On CUDA they are Triton kernels (`loss_kernels.py`) that read every logit once each; the functions here are the plain
twins and run everywhere else.

Legend: n rows, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """What one pass over n rows of logits tells."""

    log_normaliser: Tensor  # [n] float32, log sum exp z
    best: Tensor  # [n] int64, argmax of z
    teacher_log_normaliser: Tensor | None = None  # [n] float32
    divergence: Tensor | None = None  # [n] float32, KL(teacher || drafter)


def row_statistics(
    logits: Tensor,  # [n, V]
    teacher_logits: Tensor | None,  # [n, V]
) -> RowStatistics:
    """Normalisers, arg max, and the divergence from a teacher if there is one."""
    run = _kernels().row_statistics if logits.is_cuda else plain_row_statistics
    return run(logits, teacher_logits)


def write_difference(
    logits: Tensor,  # [n, V]
    statistics: RowStatistics,
    coefficients: Tensor,  # [n] float32
    teacher_logits: Tensor | None,  # [n, V]
    factor: float,
    out: Tensor,  # [n, V], written; may be `logits` itself
) -> None:
    """out = factor * (coefficient * softmax(z) - softmax(teacher's z)); without a teacher, only the first term."""
    run = _kernels().write_difference if logits.is_cuda else plain_write_difference
    run(logits, statistics, coefficients, teacher_logits, factor, out)


def plain_row_statistics(logits: Tensor, teacher_logits: Tensor | None) -> RowStatistics:
    """The plain twin of `row_statistics`."""
    z = logits.float()
    log_normaliser = z.logsumexp(-1)
    if teacher_logits is None:
        return RowStatistics(log_normaliser, z.argmax(-1))
    teacher = teacher_logits.float()
    teacher_log_normaliser = teacher.logsumexp(-1)
    p = (teacher - teacher_log_normaliser[:, None]).exp_()
    divergence = (p * (teacher - z)).sum(-1) - teacher_log_normaliser + log_normaliser
    return RowStatistics(log_normaliser, z.argmax(-1), teacher_log_normaliser, divergence)


def plain_write_difference(
    logits: Tensor,
    statistics: RowStatistics,
    coefficients: Tensor,
    teacher_logits: Tensor | None,
    factor: float,
    out: Tensor,
) -> None:
    """The plain twin of `write_difference`."""
    difference = (logits.float() - statistics.log_normaliser[:, None]).exp_() * coefficients[:, None]
    if teacher_logits is not None:
        assert statistics.teacher_log_normaliser is not None, "statistics made without the teacher's logits"
        difference -= torch.exp(teacher_logits.float() - statistics.teacher_log_normaliser[:, None])
    out.copy_(difference.mul_(factor))


def _kernels() -> Any:
    """Triton exists only beside CUDA."""
    from draftcache.train import loss_kernels

    return loss_kernels
