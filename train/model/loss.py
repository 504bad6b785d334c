"""What slots are compared with, how they weigh, and what is counted; `plain_loss` is the definition, by autograd.

What is summed is not normalised: the step divides gradients by the weight of the whole accumulation window.

    teacher "tokens"   l = -log q(label)                     dl/dz = q - onehot(label)
    teacher "last"     l = sum p log(p / q), p = softmax(head(last))    dl/dz = q - p
    teacher "top"      S the K stored tokens, p their probabilities, r = 1 - sum_S p, q_R = 1 - sum_S q
                       l = sum_S p log(p / q) + r log(r / q_R)          dl/dz = q - p in S, q (1 - r / q_R) elsewhere
                       r and q_R count as at least MIN_REST; where q_R is less, autograd of `plain_loss` loses that
                       term, while `chunked_loss` keeps the derivative above, exact in S and bounded elsewhere

    weighting "decay"  w_k = exp(-(k - 1) / gamma)                       denominator: sum of w
    weighting "dpace"  s_k = (1 - alpha) q(label)_k + alpha, C_k = prod_{i<=k} s_i, w_k = sum_{m>=k} C_m
                       (arXiv 2605.18810; only valid slots count)        denominator: valid slots

Slot 0 is never trained and never reaches the head.

Legend: T context tokens, A anchors, B block size, H width, V vocabulary, n blocks, S slots of them, K stored tokens.
"""

import dataclasses
import math
from dataclasses import dataclass

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
    chunk_slots: int = 4096  # slots whose logits exist at a time, slot 0 counted though it has none

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
    teacher_hidden: Tensor | None = None  # [T, H] of all tokens, needed by teacher "last"
    teacher_rows: Tensor | None = None  # [A, B - 1] int64: whose of them predicts each label, needed by teacher "last"
    teacher_ids: Tensor | None = None  # [A, B - 1, K] int32, needed by teacher "top"
    teacher_log_probs: Tensor | None = None  # [A, B - 1, K], needed by teacher "top"

    def blocks(self, cut: slice) -> "LossInputs":
        """Some of the blocks, over the same tokens."""
        of_slots = [field.name for field in dataclasses.fields(self) if field.name != "teacher_hidden"]
        parts = {name: getattr(self, name) for name in of_slots}
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
    slots = torch.arange(block_size - 1, device=device, dtype=torch.float64)
    return torch.exp(-slots / (gamma or default_gamma(block_size))).float()


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


def plain_loss(hidden: Tensor, head: Tensor, inputs: LossInputs, config: LossConfig) -> LossSums:
    """The plain twin: all logits at once, gradient by autograd."""
    logits = functional.linear(hidden, head.to(hidden.dtype)).float()
    log_q = logits.log_softmax(-1)
    label_log_q = log_q.gather(-1, inputs.labels[..., None]).squeeze(-1)
    weights = slot_weights(label_log_q.detach(), inputs.valid, config)
    if config.teacher == "tokens":
        losses = -label_log_q
    elif config.teacher == "top":
        top = top_teacher(inputs)
        losses = top_losses(top, log_q.flatten(0, 1).gather(1, top.ids)).view(weights.shape)
    else:
        stored, rows = last_teacher(inputs)
        teacher_logits = functional.linear(stored[rows].to(hidden.dtype), head.to(hidden.dtype)).float()
        log_p = teacher_logits.log_softmax(-1)
        losses = (log_p.exp() * (log_p - log_q)).sum(-1)
    right = logits.argmax(-1) == inputs.labels
    return loss_sums((weights * losses).sum(), denominator(weights, inputs.valid, config), right, inputs.valid)


def slot_weights(
    label_log_q: Tensor,  # [n, B - 1], the drafter's log-probability of the label
    valid: Tensor,  # [n, B - 1] bool
    config: LossConfig,
) -> Tensor:  # [n, B - 1]
    """Every slot's weight; zero where it is not valid."""
    if config.weighting == "decay":
        return decay_weights(valid.shape[-1] + 1, config.gamma, valid.device) * valid
    return dpace_weights(label_log_q.exp(), valid, config.alpha)


def denominator(
    weights: Tensor,  # [n, B - 1]
    valid: Tensor,  # [n, B - 1] bool
    config: LossConfig,
) -> Tensor:  # []
    """What the summed loss is divided by."""
    return weights.sum() if config.weighting == "decay" else valid.sum().float()


def last_teacher(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """The target's last hidden states [T, H] and the row of each slot [n, B - 1]."""
    assert inputs.teacher_hidden is not None, "teacher 'last' needs the target's last hidden states"
    assert inputs.teacher_rows is not None, "teacher 'last' needs to know whose states predict the labels"
    return inputs.teacher_hidden, inputs.teacher_rows


@dataclass(frozen=True, slots=True)
class TopTeacher:
    """The stored tokens [S, K] int64, their probabilities, and the rest's [S, 1], in float32."""

    ids: Tensor
    probs: Tensor
    rest: Tensor


def top_teacher(inputs: LossInputs) -> TopTeacher:
    """The stored teacher of all slots."""
    ids, log_probs = inputs.teacher_ids, inputs.teacher_log_probs
    assert ids is not None, "teacher 'top' needs the target's most probable tokens"
    assert log_probs is not None, "teacher 'top' needs their log-probabilities"
    probs = log_probs.flatten(0, 1).float().exp()
    return TopTeacher(ids.flatten(0, 1).long(), probs, rest_of(probs))


def rest_of(probs: Tensor) -> Tensor:
    """1 - sum over the last axis, kept as an axis of one, at least MIN_REST."""
    return (1 - probs.sum(-1, keepdim=True)).clamp_min(MIN_REST)


def top_losses(
    top: TopTeacher,
    log_q_top: Tensor,  # [S, K], the drafter's log-probabilities of the stored tokens
) -> Tensor:  # [S]
    """sum p log(p / q) + r log(r / q_R) over the stored tokens. Zero probabilities count nothing."""
    inside = torch.special.xlogy(top.probs, top.probs) - top.probs * log_q_top
    outside = top.rest * (top.rest / rest_of(log_q_top.exp())).log()
    losses: Tensor = inside.sum(-1) + outside.squeeze(-1)
    return losses


def loss_sums(loss: Tensor, weight: Tensor, right: Tensor, valid: Tensor) -> LossSums:
    """Loss and weight with the counts of right tokens [n, B - 1] at valid slots."""
    accepted, blocks = accepted_length(right, valid)
    return LossSums(
        loss=loss,
        weight=weight,
        accepted=accepted,
        blocks=blocks,
        right=(right & valid).sum(0, dtype=torch.float32),
        counted=valid.sum(0, dtype=torch.float32),
    )
