"""The Triton kernel of `adamw.py`. Import it only where there is a CUDA device."""

import triton
import triton.language as tl
from torch import Tensor

from draftcache.train.kernels.adamw import FlatState, Scalars

_BLOCK = 2048


def adamw(state: FlatState, scalars: Scalars, copies: Tensor | None) -> None:
    """See adamw.adamw."""
    count = state.masters.numel()
    _adamw_kernel[(triton.cdiv(count, _BLOCK),)](
        state.masters,
        state.gradients,
        state.first,
        state.second,
        state.masters if copies is None else copies,
        scalars.lr,
        scalars.divisor,
        scalars.skip,
        scalars.first_correction,
        scalars.second_correction,
        scalars.beta1,
        scalars.beta2,
        scalars.eps,
        scalars.weight_decay,
        count,
        HAS_COPIES=copies is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit
def _adamw_kernel(
    masters_ptr,
    gradients_ptr,
    first_ptr,
    second_ptr,
    copies_ptr,
    lr_ptr,
    divisor_ptr,
    skip_ptr,
    first_correction_ptr,
    second_correction_ptr,
    beta1,
    beta2,
    eps,
    weight_decay,
    count,
    HAS_COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    lr = tl.load(lr_ptr)
    skip = tl.load(skip_ptr) != 0
    gradient = tl.load(gradients_ptr + at, mask=inside, other=0.0) / tl.load(divisor_ptr)
    old_first = tl.load(first_ptr + at, mask=inside, other=0.0)
    old_second = tl.load(second_ptr + at, mask=inside, other=0.0)
    old = tl.load(masters_ptr + at, mask=inside, other=0.0)
    first = old_first + (gradient - old_first) * (1 - beta1)
    second = beta2 * old_second + (1 - beta2) * gradient * gradient
    denominator = tl.sqrt_rn(second / tl.load(second_correction_ptr)) + eps
    new = old * (1 - lr * weight_decay) - lr / tl.load(first_correction_ptr) * first / denominator
    new = tl.where(skip, old, new)
    tl.store(masters_ptr + at, new, mask=inside)
    tl.store(first_ptr + at, tl.where(skip, old_first, first), mask=inside)
    tl.store(second_ptr + at, tl.where(skip, old_second, second), mask=inside)
    tl.store(gradients_ptr + at, tl.zeros((BLOCK,), dtype=tl.float32), mask=inside)
    if HAS_COPIES:
        tl.store(copies_ptr + at, new.to(copies_ptr.dtype.element_ty), mask=inside)
