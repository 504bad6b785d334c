"""AdamW over flat buffers in one pass: moments, masters, their copies in the compute dtype, and cleared gradients.

    g = gradient / divisor                    m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

Decoupled weight decay as in arXiv 1711.05101; tests compare with `torch.optim.AdamW`. Every scalar that changes is a
device tensor, so that one captured pass serves every step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """One element per weight, all in the same order."""

    masters: Tensor  # [n] float32
    gradients: Tensor  # [n] float32, cleared by the pass
    first: Tensor  # [n] float32, m
    second: Tensor  # [n] float32, v


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """What one pass needs besides the buffers; tensors are [] float32."""

    lr: Tensor
    divisor: Tensor
    skip: Tensor  # 1: leave masters and moments alone
    first_correction: Tensor  # 1 - beta1^t
    second_correction: Tensor  # 1 - beta2^t
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def adamw(
    state: FlatState,
    scalars: Scalars,
    copies: Tensor | None,  # [n], compute dtype, follows the masters
) -> None:
    """One step in place."""
    if state.masters.is_cuda:
        from draftcache.train.kernels import adamw_kernel  # Triton exists only beside CUDA

        adamw_kernel.adamw(state, scalars, copies)
    else:
        plain_adamw(state, scalars, copies)


def plain_adamw(state: FlatState, scalars: Scalars, copies: Tensor | None) -> None:
    """The plain twin."""
    skip = scalars.skip.bool()
    gradient = state.gradients / scalars.divisor
    first = torch.lerp(state.first, gradient, 1 - scalars.beta1)
    second = scalars.beta2 * state.second + (1 - scalars.beta2) * gradient.square()
    denominator = (second / scalars.second_correction).sqrt() + scalars.eps
    decayed = state.masters * (1 - scalars.lr * scalars.weight_decay)
    masters = decayed - scalars.lr / scalars.first_correction * first / denominator
    for old, new in ((state.first, first), (state.second, second), (state.masters, masters)):
        old.copy_(torch.where(skip, old, new))
    if copies is not None:
        copies.copy_(state.masters)
    state.gradients.zero_()
