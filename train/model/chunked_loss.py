"""The loss and its gradient in chunks of whole blocks, without ever holding the logits of all slots.

The head is frozen, so the only gradient is that of the hidden states. Each chunk's is computed by hand in the forward
pass, while its logits exist (formulas: `loss.py`, whose `plain_loss` is the twin); backward only scales it. Blocks
overlap, so slots share tokens that predict their labels: teacher "last" computes each one's logits once a chunk.

Legend: T context tokens, A anchors, B block size, H width, n blocks of a chunk, S slots of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftcache.train.kernels.loss_rows import RowStatistics, TeacherRows, row_statistics, write_difference
from draftcache.train.model.head import FrozenHead
from draftcache.train.model.loss import (
    LossConfig,
    LossInputs,
    LossSums,
    denominator,
    last_teacher,
    loss_sums,
    rest_of,
    slot_weights,
    top_losses,
    top_teacher,
)


def chunked_loss(
    hidden: Tensor,  # [A, B - 1, H], the drafter's output at slots 1..B-1
    head: FrozenHead,
    inputs: LossInputs,
    config: LossConfig,
) -> LossSums:
    """The optimised path: at most `config.chunk_slots` rows of logits exist at a time."""
    loss, weight, right = _ChunkedLoss.apply(hidden, head, inputs, config)  # type: ignore[no-untyped-call]
    return loss_sums(loss, weight, right, inputs.valid)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: FrozenHead, inputs: LossInputs, config: LossConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        anchors, slots = inputs.labels.shape
        blocks = max(1, config.chunk_slots // (slots + 1))
        gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format) if hidden.requires_grad else None
        right = torch.empty_like(inputs.valid)
        loss = hidden.new_zeros((), dtype=torch.float32)
        weight = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, anchors, blocks):
            cut = slice(begin, begin + blocks)
            part = None if gradient is None else gradient[cut]
            chunk_loss, chunk_weight, right[cut] = _chunk(hidden[cut], head, inputs.blocks(cut), config, part)
            loss += chunk_loss
            weight += chunk_weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight, right)
        return loss, weight, right

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None, None, None


def _chunk(
    hidden: Tensor,  # [n, B - 1, H]
    head: FrozenHead,
    inputs: LossInputs,
    config: LossConfig,
    gradient: Tensor | None,  # [n, B - 1, H], written
) -> tuple[Tensor, Tensor, Tensor]:  # loss [], denominator [], right [n, B - 1] bool
    shape = inputs.labels.shape
    logits = head.logits(hidden.flatten(0, 1))
    statistics = row_statistics(logits)
    teacher = _teacher_rows(inputs, head, hidden.dtype) if config.teacher == "last" else None
    labels = inputs.labels.flatten()[:, None]
    label_log_q = _log_q(logits, statistics, labels)
    weights = slot_weights(label_log_q.view(shape), inputs.valid, config)
    coefficients, losses, at, there = torch.ones_like(statistics.log_normaliser), None, None, None
    if config.teacher == "tokens":
        losses = -label_log_q.squeeze(1)
        at, there = labels, label_log_q.exp() - 1
    if config.teacher == "top":
        top = top_teacher(inputs)
        at = top.ids
        log_q_top = _log_q(logits, statistics, at)
        losses = top_losses(top, log_q_top)
        q_top = log_q_top.exp()
        coefficients = (1 - top.rest / rest_of(q_top)).squeeze(1)
        there = q_top - top.probs
    derivative = head.derivative_like(logits)
    divergence = write_difference(logits, statistics.log_normaliser, coefficients, teacher, head.factor, derivative)
    losses = divergence if losses is None else losses
    assert losses is not None, f"no loss is defined for teacher {config.teacher!r}"
    if at is not None and there is not None:
        _overwrite(derivative, at, there * head.factor)
    if gradient is not None:
        gradient.flatten(0, 1).copy_(head.hidden_gradient(derivative, weights.flatten()))
    loss = (weights.flatten() * losses).sum()
    return loss, denominator(weights, inputs.valid, config), statistics.best.view(shape) == inputs.labels


def _log_q(logits: Tensor, statistics: RowStatistics, at: Tensor) -> Tensor:
    """The drafter's log-probabilities of tokens `at` [n, k], float32."""
    return logits.gather(1, at).float() - statistics.log_normaliser[:, None]


def _overwrite(derivative: Tensor, at: Tensor, values: Tensor) -> None:
    """derivative[row, at[row]] = values[row]; float8 has no scatter of its own, its bytes have."""
    values = values.to(derivative.dtype)
    if derivative.element_size() == 1:
        derivative, values = derivative.view(torch.uint8), values.view(torch.uint8)
    derivative.scatter_(1, at, values)


def _teacher_rows(inputs: LossInputs, head: FrozenHead, dtype: torch.dtype) -> TeacherRows:
    stored, rows = last_teacher(inputs)
    distinct = distinct_rows(rows.flatten(), len(stored))
    logits = head.leading_logits(stored[distinct.rows].to(dtype), distinct.count)
    return TeacherRows(logits, row_statistics(logits, distinct.count).log_normaliser, distinct.place)


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """The distinct ones of S rows, ascending, in a buffer of S; what follows them there is row 0."""

    rows: Tensor  # [S] int64
    count: Tensor  # [1] int32
    place: Tensor  # [S] int64: where each of the S rows stands among the distinct ones


def distinct_rows(
    rows: Tensor,  # [S] int64
    tokens: int,  # T
) -> DistinctRows:
    """Which of T rows occur, without a host read."""
    occurs = torch.zeros(tokens, dtype=torch.int64, device=rows.device).scatter_(0, rows, 1)
    numbered = occurs.cumsum(0)
    place = numbered[rows] - 1
    return DistinctRows(torch.zeros_like(rows).scatter_(0, place, rows), numbered[-1:].int(), place)
