"""Host memory that the device copies from and to by itself: pinned where it lies, without rounding its size up."""

import torch
from torch import Tensor


def pin(block: Tensor) -> None:
    """Pin a page-aligned host tensor's memory."""
    _check(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel() * block.element_size(), 0))


def unpin(block: Tensor) -> None:
    """Release it; no copy may be under way."""
    _check(torch.cuda.cudart().cudaHostUnregister(block.data_ptr()))


def _check(error: object) -> None:
    code = int(getattr(error, "value", error))  # type: ignore[call-overload]
    assert code == 0, f"CUDA could not pin or release host memory: error {code}"
