"""What lies between the products of the drafter, forward and backward, in float32 inside and rounded once at the end.

On CUDA each is one Triton kernel (`pointwise_kernels.py`); the functions named plain_ are the twins and run everywhere
else. Backward passes recompute what they need from the forward's inputs, so that nothing but those is kept. Formulas
are the derivatives of the definitions in `drafter.py`, and tests hold them to autograd.

Legend: S rows, N heads, d head width, I inner width of the MLP.
"""

from typing import Any

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., n], contiguous
    scale: Tensor,  # [n]
    eps: float,
) -> Tensor:  # [..., n]
    """x / rms(x) * scale over the last axis."""
    run = _kernels().rms_norm if x.is_cuda else plain_rms_norm
    return run(x, scale, eps)


def rms_norm_backward(
    gradient: Tensor,  # [..., n]
    x: Tensor,  # [..., n], contiguous
    scale: Tensor,  # [n]
    eps: float,
    residual: Tensor | None = None,  # [..., n]
) -> tuple[Tensor, Tensor]:  # d x [..., n], d scale [n] float32
    """Gradients of `rms_norm`; `residual`, another gradient of x, is added to the first."""
    run = _kernels().rms_norm_backward if x.is_cuda else plain_rms_norm_backward
    return run(gradient, x, scale, eps, residual)


def norm_rotate(
    x: Tensor,  # [S, N, d], heads contiguous
    scale: Tensor,  # [d]
    eps: float,
    cos: Tensor,  # [S, d / 2] float32
    sin: Tensor,  # [S, d / 2] float32
) -> Tensor:  # [S, N, d]; on CUDA head after head in memory, as attention reads it
    """`rms_norm` of every head, then the rotary embedding's half-split rotation."""
    run = _kernels().norm_rotate if x.is_cuda else plain_norm_rotate
    return run(x, scale, eps, cos, sin)


def norm_rotate_backward(
    gradient: Tensor,  # [S, N, d]
    x: Tensor,  # [S, N, d], heads contiguous
    scale: Tensor,  # [d]
    eps: float,
    cos: Tensor,  # [S, d / 2] float32
    sin: Tensor,  # [S, d / 2] float32
    dx: Tensor,  # [S, N, d], heads contiguous, written
) -> Tensor:  # d scale [d] float32
    """Gradients of `norm_rotate`: the rotation backwards, then the norm's."""
    run = _kernels().norm_rotate_backward if x.is_cuda else plain_norm_rotate_backward
    return run(gradient, x, scale, eps, cos, sin, dx)


def swiglu(
    gate_up: Tensor,  # [S, 2 I], contiguous
) -> Tensor:  # [S, I]
    """silu(gate) * up."""
    run = _kernels().swiglu if gate_up.is_cuda else plain_swiglu
    return run(gate_up)


def swiglu_backward(
    gradient: Tensor,  # [S, I], contiguous
    gate_up: Tensor,  # [S, 2 I], contiguous
) -> None:
    """Gradient of `swiglu` in place: gate_up becomes its own gradient, and gradient becomes swiglu(gate_up)."""
    run = _kernels().swiglu_backward if gate_up.is_cuda else plain_swiglu_backward
    run(gradient, gate_up)


def plain_rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """The plain twin of `rms_norm`."""
    return (_normalised(x.float(), eps)[0] * scale.float()).to(x.dtype)


def plain_rms_norm_backward(
    gradient: Tensor, x: Tensor, scale: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The plain twin of `rms_norm_backward`."""
    dx, d_scale = _norm_gradients(gradient.float(), x.float(), scale.float(), eps)
    return (dx if residual is None else dx + residual.float()).to(x.dtype), d_scale


def plain_norm_rotate(x: Tensor, scale: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """The plain twin of `norm_rotate`."""
    a, b = (_normalised(x.float(), eps)[0] * scale.float()).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def plain_norm_rotate_backward(
    gradient: Tensor, x: Tensor, scale: Tensor, eps: float, cos: Tensor, sin: Tensor, dx: Tensor
) -> Tensor:
    """The plain twin of `norm_rotate_backward`."""
    a, b = gradient.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated_back = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
    exact, d_scale = _norm_gradients(rotated_back, x.float(), scale.float(), eps)
    dx.copy_(exact)
    return d_scale


def plain_swiglu(gate_up: Tensor) -> Tensor:
    """The plain twin of `swiglu`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


def plain_swiglu_backward(gradient: Tensor, gate_up: Tensor) -> None:
    """The plain twin of `swiglu_backward`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid, d = gate.sigmoid(), gradient.float()
    silu = gate * sigmoid
    d_gate, d_up, y = d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * silu, silu * up
    gate_up.copy_(torch.cat([d_gate, d_up], dim=-1))
    gradient.copy_(y)


def _kernels() -> Any:
    """Triton exists only beside CUDA."""
    from draftcache.train.kernels import pointwise_kernels

    return pointwise_kernels


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * inverse, inverse


def _norm_gradients(gradient: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normal, inverse = _normalised(x, eps)
    scaled = gradient * scale
    dx = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx, (gradient * normal).flatten(0, -2).sum(0)
