"""The target's frozen head inside the loss: logits of hidden states, and the hidden states' gradient from theirs.

`Head` computes in the hidden states' dtype. `Fp8Head` multiplies in 8 bits: hidden states and head as e4m3 with one
scale a row; the derivative of the loss, which lies within [-1, 1] and spans many orders of magnitude, as e5m2, whose
exponents reach far enough that a vocabulary's tail is not flushed to zero.

Legend: n rows, H width, V vocabulary.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from draftcache.train.kernels.float8 import Float8Weight, scaled_product

_DERIVATIVE_FACTOR = 2.0**15  # 1 lands at 32,768 of e5m2's 57,344, and 2^-31 is still above its smallest value


class FrozenHead(Protocol):
    """Products with the target's head."""

    factor: float
    """What the derivative handed to `hidden_gradient` is multiplied by."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V] in hidden's dtype."""
        ...

    def leading_logits(self, hidden: Tensor, count: Tensor) -> Tensor:
        """[n, H] -> [at least count, V]: logits of the first `count` ([1] int32) rows; do not read others."""
        ...

    def derivative_like(self, logits: Tensor) -> Tensor:
        """[n, V] memory for the derivative; may be the logits' own, which are then lost."""
        ...

    def hidden_gradient(self, derivative: Tensor, weights: Tensor) -> Tensor:
        """d loss / d hidden [n, H], of the derivative [n, V] (times `factor`) and the rows' weights [n] float32."""
        ...


class Head:
    """The head in the dtype of the step."""

    factor = 1.0

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [V, H]."""
        self._weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        """See FrozenHead."""
        return functional.linear(hidden, self._weight)

    def leading_logits(self, hidden: Tensor, count: Tensor) -> Tensor:
        """See FrozenHead."""
        if not hidden.is_cuda:
            return self.logits(hidden[: int(count)])
        if _multiplies_a_counted_group(hidden, self._weight):
            return functional.grouped_mm(hidden, self._weight.t()[None], offs=count)
        return self.logits(hidden)

    def derivative_like(self, logits: Tensor) -> Tensor:
        """See FrozenHead."""
        return logits

    def hidden_gradient(self, derivative: Tensor, weights: Tensor) -> Tensor:
        """See FrozenHead."""
        return (derivative @ self._weight).mul_(weights[:, None])


class Fp8Head:
    """The head in 8 bits."""

    factor = _DERIVATIVE_FACTOR

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [V, H], V and H multiples of 16, on a device that multiplies float8."""
        self._weight = Float8Weight(weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """See FrozenHead."""
        return self._weight.product(hidden)

    def leading_logits(self, hidden: Tensor, count: Tensor) -> Tensor:  # noqa: ARG002 - no counted product in 8 bits
        """See FrozenHead."""
        return self.logits(hidden)

    def derivative_like(self, logits: Tensor) -> Tensor:
        """See FrozenHead."""
        return torch.empty(logits.shape, dtype=torch.float8_e5m2, device=logits.device)

    def hidden_gradient(self, derivative: Tensor, weights: Tensor) -> Tensor:
        """See FrozenHead."""
        scales = (weights / self.factor)[:, None]
        return scaled_product(derivative, scales, self._weight.columns, self._weight.column_scales, torch.bfloat16)


def _multiplies_a_counted_group(hidden: Tensor, weight: Tensor) -> bool:
    """Whether torch has a kernel here that takes the number of rows from the device, a graph's capture included."""
    aligned = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
    return hidden.dtype == torch.bfloat16 and aligned and _capability(hidden.device) == (9, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
