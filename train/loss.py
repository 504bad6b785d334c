"""Head, loss and gradient in chunks of whole blocks, without ever holding the logits of all slots.

The head is frozen, so the only gradient is that of the hidden states. Each chunk's is computed by hand in the forward
pass, while its logits exist; backward only scales it. What is summed is not normalised: the step divides gradients by
the weight of the whole accumulation window.

    teacher "tokens"   l = -log q(label)                     dl/dz = q - onehot(label)
    teacher "last"     l = sum p log(p / q), p = softmax(head(last))    dl/dz = q - p
    teacher "top"      S the K stored tokens, p their probabilities, r = 1 - sum_S p, q_R = 1 - sum_S q
                       l = sum_S p log(p / q) + r log(r / q_R)          dl/dz = q - p in S, q (1 - r / q_R) elsewhere

    weighting "decay"  w_k = exp(-(k - 1) / gamma)                       denominator: sum of w
    weighting "dpace"  s_k = (1 - alpha) q(label)_k + alpha, C_k = prod_{i<=k} s_i, w_k = sum_{m>=k} C_m
                       (arXiv 2605.18810; only valid slots count)        denominator: valid slots

Slot 0 is never trained and never reaches the head.

Legend: A anchors, B block size, H width, V vocabulary, n slots of a chunk.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from draftcache.common.errors import UsageError

TEACHERS = ("tokens", "last", "top")
WEIGHTINGS = ("decay", "dpace")
MIN_REST = 1e-6
_PAPER_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """What slots are compared with and how they are weighted.

    `teacher` None: the best that the store holds. `gamma` None: the paper's value for the block size.
    """

    teacher: str | None = None
    weighting: str = "decay"
    gamma: float | None = None
    alpha: float = 0.5
    chunk_slots: int = 4096  # rows of logits held at a time

    def __post_init__(self) -> None:
        if self.teacher not in (None, *TEACHERS) or self.weighting not in WEIGHTINGS:
            raise UsageError(
                f"teacher {self.teacher!r}, weighting {self.weighting!r}",
                needed=f"a teacher of {list(TEACHERS)} and a weighting of {list(WEIGHTINGS)}",
                do="choose one of each",
            )
        if self.gamma is not None and not (self.gamma > 0 and math.isfinite(self.gamma)):
            raise UsageError(f"gamma {self.gamma}", needed="a positive number", do="correct --gamma")
        if not 0 < self.alpha <= 1:
            raise UsageError(f"alpha {self.alpha}", needed="within (0, 1]", do="correct --alpha")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss compares with, for the trained slots 1..B-1."""

    labels: Tensor  # [A, B - 1] int64
    valid: Tensor  # [A, B - 1] bool
    teacher_hidden: Tensor | None = None  # [A, B - 1, H], needed by teacher "last"
    teacher_ids: Tensor | None = None  # [A, B - 1, K] int32, needed by teacher "top"
    teacher_log_probs: Tensor | None = None  # [A, B - 1, K], needed by teacher "top"

    def blocks(self, cut: slice) -> "LossInputs":
        """Some of the blocks."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: part[cut] for name, part in parts.items() if part is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over the trained slots of one micro-batch; every one stays on the device."""

    loss: Tensor  # [] float32, the differentiable one
    weight: Tensor  # [] float32, the loss's denominator
    accepted: Tensor  # [] float32, 1 + leading run of right tokens, over blocks with a valid slot
    blocks: Tensor  # [] float32, blocks with a valid slot
    right: Tensor  # [B - 1] float32, right tokens per slot
    counted: Tensor  # [B - 1] float32, valid slots per slot


def default_gamma(block_size: int) -> float:
    """The paper's decay for its block sizes (arXiv 2602.06036), half the block size for others."""
    return _PAPER_GAMMA.get(block_size, block_size / 2)


def decay_weights(block_size: int, gamma: float | None, device: torch.device) -> Tensor:
    """[B - 1] float32, exp(-(k - 1) / gamma) for slots k = 1..B-1."""
    slots = torch.arange(block_size - 1, device=device, dtype=torch.float32)
    return torch.exp(-slots / (gamma or default_gamma(block_size)))


def dpace_weights(
    confidence: Tensor,  # [n, B - 1] drafter's probability of the label
    valid: Tensor,  # [n, B - 1] bool
    alpha: float,
) -> Tensor:  # [n, B - 1]
    """D-PACE's weights: how much of the expected accepted length hangs on each slot."""
    smoothed = torch.where(valid, (1 - alpha) * confidence + alpha, 1.0)
    reach = smoothed.cumprod(-1) * valid
    return reach.flip(-1).cumsum(-1).flip(-1) * valid


def accepted_length(
    right: Tensor,  # [n, B - 1] bool
    valid: Tensor,  # [n, B - 1] bool
) -> tuple[Tensor, Tensor]:  # sum and count, [] float32
    """1 + leading run of right tokens, summed over blocks with a valid slot, and the number of those blocks.

    A block ends where its tokens stop being valid. Sum over count is what a server logs as mean accepted length.
    """
    run = (right & valid).to(torch.float32).cumprod(-1).sum(-1)
    counted = valid.any(-1).to(torch.float32)
    return ((1 + run) * counted).sum(), counted.sum()


def chunked_loss(
    hidden: Tensor,  # [A, B - 1, H], the drafter's output at slots 1..B-1
    head: Tensor,  # [V, H], frozen
    inputs: LossInputs,
    config: LossConfig,
) -> LossSums:
    """The optimised path: at most `config.chunk_slots` rows of logits exist at a time."""
    loss, weight, right = _ChunkedLoss.apply(hidden, head, inputs, config)  # type: ignore[no-untyped-call]
    return _sums(loss, weight, right, inputs.valid)


def plain_loss(hidden: Tensor, head: Tensor, inputs: LossInputs, config: LossConfig) -> LossSums:
    """The plain twin: all logits at once, gradient by autograd."""
    logits = functional.linear(hidden, head.to(hidden.dtype)).float()
    log_q = logits.log_softmax(-1)
    label_log_q = log_q.gather(-1, inputs.labels[..., None]).squeeze(-1)
    weights = _weights(label_log_q.detach(), inputs.valid, config)
    if config.teacher == "tokens":
        losses = -label_log_q
    elif config.teacher == "top":
        losses = _top_losses(_top_teacher(inputs), log_q)
    else:
        log_p = _teacher_logits(inputs, head, hidden.dtype).log_softmax(-1)
        losses = (log_p.exp() * (log_p - log_q)).sum(-1)
    weight = weights.sum() if config.weighting == "decay" else inputs.valid.sum().float()
    return _sums((weights * losses).sum(), weight, logits.argmax(-1) == inputs.labels, inputs.valid)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, inputs: LossInputs, config: LossConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = head.to(hidden.dtype)
        anchors, slots = inputs.labels.shape
        blocks = max(1, config.chunk_slots // slots)
        gradient = torch.empty_like(hidden)
        right = torch.empty_like(inputs.valid)
        loss = hidden.new_zeros((), dtype=torch.float32)
        weight = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, anchors, blocks):
            cut = slice(begin, begin + blocks)
            chunk_loss, chunk_weight, right[cut] = _chunk(hidden[cut], head, inputs.blocks(cut), config, gradient[cut])
            loss += chunk_loss
            weight += chunk_weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight, right)
        return loss, weight, right

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None, None, None


def _chunk(
    hidden: Tensor,  # [n, B - 1, H]
    head: Tensor,  # [V, H]
    inputs: LossInputs,
    config: LossConfig,
    gradient: Tensor,  # [n, B - 1, H], written
) -> tuple[Tensor, Tensor, Tensor]:  # loss [], denominator [], right [n, B - 1] bool
    logits = _logits(hidden, head).float()
    log_normaliser = logits.logsumexp(-1, keepdim=True)
    labels = inputs.labels[..., None]
    label_log_q = (logits.gather(-1, labels) - log_normaliser).squeeze(-1)
    weights = _weights(label_log_q, inputs.valid, config)
    right = logits.argmax(-1) == inputs.labels
    if config.teacher == "tokens":
        losses = -label_log_q
        difference = (logits - log_normaliser).exp_()
        difference.scatter_add_(-1, labels, torch.full_like(labels, -1, dtype=difference.dtype))
    elif config.teacher == "top":
        top = _top_teacher(inputs)
        log_q = logits - log_normaliser
        losses = _top_losses(top, log_q)
        q = log_q.exp_()
        q_top = q.gather(-1, top.ids)
        difference = q.mul_(1 - top.rest / _rest(q_top)).scatter_(-1, top.ids, q_top - top.probs)
    else:
        log_p = _teacher_logits(inputs, head, hidden.dtype).log_softmax(-1)
        log_q = logits - log_normaliser
        losses = (log_p.exp() * (log_p - log_q)).sum(-1)
        difference = log_q.exp_() - log_p.exp_()
    weighted = (difference * weights[..., None]).to(hidden.dtype)
    torch.matmul(weighted.flatten(0, 1), head, out=gradient.flatten(0, 1))
    weight = weights.sum() if config.weighting == "decay" else inputs.valid.sum().float()
    return (weights * losses).sum(), weight, right


def _weights(label_log_q: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    if config.weighting == "decay":
        return decay_weights(valid.shape[-1] + 1, config.gamma, valid.device) * valid
    return dpace_weights(label_log_q.exp(), valid, config.alpha)


@dataclass(frozen=True, slots=True)
class _TopTeacher:
    """The stored tokens [n, B - 1, K] int64, their probabilities, and the rest's [n, B - 1, 1], in float32."""

    ids: Tensor
    probs: Tensor
    rest: Tensor


def _top_teacher(inputs: LossInputs) -> _TopTeacher:
    ids, log_probs = inputs.teacher_ids, inputs.teacher_log_probs
    assert ids is not None, "teacher 'top' needs the target's most probable tokens"
    assert log_probs is not None, "teacher 'top' needs their log-probabilities"
    probs = log_probs.float().exp()
    return _TopTeacher(ids.long(), probs, _rest(probs))


def _rest(probs: Tensor) -> Tensor:
    """1 - sum over the last axis, kept as an axis of one, at least MIN_REST."""
    return (1 - probs.sum(-1, keepdim=True)).clamp_min(MIN_REST)


def _top_losses(top: _TopTeacher, log_q: Tensor) -> Tensor:
    """sum_S p log(p / q) + r log(r / q_R), one number a slot. Zero probabilities count nothing."""
    log_q_top = log_q.gather(-1, top.ids)
    inside = torch.special.xlogy(top.probs, top.probs) - top.probs * log_q_top
    outside = top.rest * (top.rest / _rest(log_q_top.exp())).log()
    losses: Tensor = inside.sum(-1) + outside.squeeze(-1)
    return losses


def _teacher_logits(inputs: LossInputs, head: Tensor, dtype: torch.dtype) -> Tensor:
    assert inputs.teacher_hidden is not None, "teacher 'last' needs the target's last hidden states"
    return _logits(inputs.teacher_hidden.to(dtype), head.to(dtype)).float()


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """[n, B - 1, H] to [n, B - 1, V] as one matrix product; of a strided input, linear would make a batched one."""
    logits: Tensor = functional.linear(hidden.flatten(0, 1), head).unflatten(0, hidden.shape[:2])
    return logits


def _sums(loss: Tensor, weight: Tensor, right: Tensor, valid: Tensor) -> LossSums:
    accepted, blocks = accepted_length(right, valid)
    return LossSums(
        loss=loss,
        weight=weight,
        accepted=accepted,
        blocks=blocks,
        right=(right & valid).sum(0, dtype=torch.float32),
        counted=valid.sum(0, dtype=torch.float32),
    )
