"""Two passes over rows of logits: one for statistics, one that writes the loss's derivative.

On CUDA they are Triton kernels (`loss_kernels.py`) that read every logit once each; the functions here are the plain
twins and run everywhere else.

Legend: n rows, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """What one pass over n rows of logits tells."""

    log_normaliser: Tensor  # [n] float32, log sum exp z
    best: Tensor  # [n] int64, argmax of z, the first one of several


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """A teacher's logits [m, V], their normalisers [m] float32, and which of them each of n rows has, [n] int64."""

    logits: Tensor
    log_normaliser: Tensor
    place: Tensor


def row_statistics(
    logits: Tensor,  # [n, V]
    count: Tensor | None = None,  # [1] int32: rows that are meant; those behind them get no statistics
) -> RowStatistics:
    """Normalisers and arg max."""
    if not logits.is_cuda:
        return plain_row_statistics(logits)
    statistics: RowStatistics = _kernels().row_statistics(logits, count)
    return statistics


def write_difference(
    logits: Tensor,  # [n, V]
    log_normaliser: Tensor,  # [n] float32
    coefficients: Tensor,  # [n] float32
    teacher: TeacherRows | None,
    factor: float,
    out: Tensor,  # [n, V], written; may be `logits` itself
) -> Tensor | None:  # [n] float32
    """out = factor * (coefficient * softmax(z) - softmax(teacher's z)); without a teacher, only the first term.

    With a teacher it returns KL(teacher || drafter) of each row.
    """
    run = _kernels().write_difference if logits.is_cuda else plain_write_difference
    divergence: Tensor | None = run(logits, log_normaliser, coefficients, teacher, factor, out)
    return divergence


def plain_row_statistics(logits: Tensor) -> RowStatistics:
    """The plain twin of `row_statistics`."""
    return RowStatistics(logits.float().logsumexp(-1), logits.argmax(-1))


def plain_write_difference(
    logits: Tensor,
    log_normaliser: Tensor,
    coefficients: Tensor,
    teacher: TeacherRows | None,
    factor: float,
    out: Tensor,
) -> Tensor | None:
    """The plain twin of `write_difference`."""
    log_q = logits.float() - log_normaliser[:, None]
    difference = log_q.exp() * coefficients[:, None]
    divergence = None
    if teacher is not None:
        log_p = (teacher.logits.float() - teacher.log_normaliser[:, None])[teacher.place]
        p = log_p.exp()
        difference -= p
        divergence = (p * (log_p - log_q)).sum(-1)
    out.copy_(difference.mul_(factor))
    return divergence


def _kernels() -> Any:
    """Triton exists only beside CUDA."""
    from draftcache.train.kernels import loss_kernels

    return loss_kernels
