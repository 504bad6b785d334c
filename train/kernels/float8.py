"""Products in 8 bits: operands as e4m3 with one float32 scale a row, accumulated and returned in 16.

A weight is held twice, because the tensor cores want both operands with the summed axis contiguous: its rows for the
forward product, its columns for the gradient of the input. Both are written anew after every update of the weight.

Legend: S rows, n / m input and output width.
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0
WIDTH_MULTIPLE = 16
"""Both widths of a product in 8 bits must be multiples of it."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Float8Weight:
    """A weight [m, n] as e4m3, by rows and by columns. Its buffers keep their addresses."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._rows, self._row_scales = _buffers(value)
        self.columns, self.column_scales = _buffers(value.t())
        """[n, m] e4m3 and [n, 1] float32."""
        self.refresh()

    def refresh(self) -> None:
        """Encode the weight as it is now."""
        quantise_rows(self._value, self._rows, self._row_scales)
        quantise_rows(self._value.t().contiguous(), self.columns, self.column_scales)

    def product(self, x: Tensor) -> Tensor:
        """[S, n] -> [S, m]: x W'."""
        return scaled_product(*encoded(x), self._rows, self._row_scales, x.dtype)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """[S, m] -> [S, n]: gradient W."""
        return scaled_product(*encoded(gradient), self.columns, self.column_scales, gradient.dtype)


def scaled_product(
    a: Tensor,  # [S, n] float8
    a_scales: Tensor,  # [S, 1] float32
    b: Tensor,  # [m, n] float8
    b_scales: Tensor,  # [m, 1] float32
    dtype: torch.dtype,
) -> Tensor:  # [S, m]
    """a b', each row times its scale."""
    return torch._scaled_mm(a, b.t(), scale_a=a_scales, scale_b=b_scales.t(), out_dtype=dtype)


def encoded(
    x: Tensor,  # [S, n]
) -> tuple[Tensor, Tensor]:  # e4m3 [S, n], scales [S, 1] float32
    """x in new memory."""
    coded, scales = _buffers(x)
    quantise_rows(x.contiguous(), coded, scales)
    return coded, scales


def quantise_rows(
    x: Tensor,  # [S, n], contiguous
    coded: Tensor,  # [S, n] e4m3, written
    scales: Tensor,  # [S, 1] float32, written
) -> None:
    """Divide each row by the scale that takes its largest value to e4m3's."""
    if x.is_cuda:
        from draftcache.train.kernels import float8_kernel  # Triton exists only beside CUDA

        float8_kernel.quantise_rows(x, coded, scales)
    else:
        plain_quantise_rows(x, coded, scales)


def plain_quantise_rows(x: Tensor, coded: Tensor, scales: Tensor) -> None:
    """The plain twin of `quantise_rows`."""
    scales.copy_((x.float().abs().amax(1, keepdim=True) / E4M3_MAX).clamp_min(SMALLEST_SCALE))
    coded.copy_((x.float() / scales).clamp(-E4M3_MAX, E4M3_MAX))


def _buffers(like: Tensor) -> tuple[Tensor, Tensor]:
    coded = torch.empty(like.shape, dtype=torch.float8_e4m3fn, device=like.device)
    return coded, torch.empty(like.shape[0], 1, dtype=torch.float32, device=like.device)
