"""The target's frozen head inside the loss: logits of hidden states, and the hidden states' gradient from theirs.

`Head` computes in the hidden states' dtype. `Fp8Head` multiplies in 8 bits: hidden states and head as e4m3 with one
scale a row; the derivative of the loss, which lies within [-1, 1] and spans many orders of magnitude, as e5m2, whose
exponents reach far enough that a vocabulary's tail is not flushed to zero.

Legend: n rows, H width, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

E4M3_MAX = 448.0
_DERIVATIVE_FACTOR = 2.0**15  # 1 lands at 32,768 of e5m2's 57,344, and 2^-31 is still above its smallest value


class FrozenHead(Protocol):
    """Products with the target's head."""

    factor: float
    """What the derivative handed to `hidden_gradient` is multiplied by."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V] in hidden's dtype."""
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

    def derivative_like(self, logits: Tensor) -> Tensor:
        """See FrozenHead."""
        return logits

    def hidden_gradient(self, derivative: Tensor, weights: Tensor) -> Tensor:
        """See FrozenHead."""
        return (derivative @ self._weight).mul_(weights[:, None])


class Fp8Head:
    """The head as e4m3, twice: rows of V for logits, rows of H for gradients."""

    factor = _DERIVATIVE_FACTOR

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [V, H], V and H multiples of 16, on a device that multiplies float8."""
        self._dtype = weight.dtype
        self._rows, self._row_scales = quantise_rows(weight)
        self._columns, self._column_scales = quantise_rows(weight.t().contiguous())

    def logits(self, hidden: Tensor) -> Tensor:
        """See FrozenHead."""
        coded, scales = quantise_rows(hidden)
        return torch._scaled_mm(
            coded,
            self._rows.t(),
            scale_a=scales,
            scale_b=self._row_scales.t(),
            out_dtype=self._dtype,
            use_fast_accum=True,
        )

    def derivative_like(self, logits: Tensor) -> Tensor:
        """See FrozenHead."""
        return torch.empty(logits.shape, dtype=torch.float8_e5m2, device=logits.device)

    def hidden_gradient(self, derivative: Tensor, weights: Tensor) -> Tensor:
        """See FrozenHead."""
        return torch._scaled_mm(
            derivative,
            self._columns.t(),
            scale_a=(weights / self.factor)[:, None],
            scale_b=self._column_scales.t(),
            out_dtype=self._dtype,
            use_fast_accum=False,
        )


def quantise_rows(
    x: Tensor,  # [rows, columns]
) -> tuple[Tensor, Tensor]:  # e4m3 [rows, columns], scales [rows, 1] float32
    """Each row divided by its own scale, which takes its largest value to e4m3's."""
    scales = (x.abs().amax(1, keepdim=True).float() / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (x / scales).to(torch.float8_e4m3fn), scales
