"""What lies between the products of the drafter, forward and backward, in float32 inside and rounded once at the end.

Each is one pass over memory once compiled; the backward ones recompute what they need from the forward's inputs, so
that nothing but those inputs is kept. Formulas are the derivatives of the definitions in `drafter.py`, and tests hold
them to autograd.

Legend: S rows, N heads, d head width, I inner width of the MLP.
"""

import torch
from torch import Tensor

from draftcache.common.fused import fused


@fused
def rms_norm(
    x: Tensor,  # [..., n]
    scale: Tensor,  # [n]
    eps: float,
) -> Tensor:  # [..., n]
    """x / rms(x) * scale over the last axis."""
    return (_normalised(x.float(), eps)[0] * scale.float()).to(x.dtype)


@fused
def rms_norm_backward(
    gradient: Tensor,  # [..., n]
    x: Tensor,  # [..., n]
    scale: Tensor,  # [n]
    eps: float,
    residual: Tensor | None = None,  # [..., n]
) -> tuple[Tensor, Tensor]:  # d x [..., n], d scale [n] float32
    """Gradients of `rms_norm`; `residual`, another gradient of x, is added to the first."""
    dx, d_scale = _norm_gradients(gradient.float(), x.float(), scale.float(), eps)
    return (dx if residual is None else dx + residual.float()).to(x.dtype), d_scale


@fused
def norm_rotate(
    x: Tensor,  # [S, N, d]
    scale: Tensor,  # [d]
    eps: float,
    cos: Tensor,  # [S, d / 2] float32
    sin: Tensor,  # [S, d / 2] float32
) -> Tensor:  # [S, N, d]
    """`rms_norm` of every head, then the rotary embedding's half-split rotation."""
    a, b = (_normalised(x.float(), eps)[0] * scale.float()).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@fused
def norm_rotate_backward(
    gradient: Tensor,  # [S, N, d]
    x: Tensor,  # [S, N, d]
    scale: Tensor,  # [d]
    eps: float,
    cos: Tensor,  # [S, d / 2] float32
    sin: Tensor,  # [S, d / 2] float32
) -> tuple[Tensor, Tensor]:  # d x [S, N, d], d scale [d] float32
    """Gradients of `norm_rotate`: the rotation backwards, then the norm's."""
    a, b = gradient.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated_back = torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
    dx, d_scale = _norm_gradients(rotated_back, x.float(), scale.float(), eps)
    return dx.to(x.dtype), d_scale


@fused
def swiglu(
    gate_up: Tensor,  # [S, 2 I]
) -> Tensor:  # [S, I]
    """silu(gate) * up."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


@fused
def swiglu_backward(
    gradient: Tensor,  # [S, I]
    gate_up: Tensor,  # [S, 2 I]
) -> tuple[Tensor, Tensor]:  # d gate_up [S, 2 I], and swiglu(gate_up) [S, I] again
    """Gradient of `swiglu`, which is computed anew on the way."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid, d = gate.sigmoid(), gradient.float()
    silu = gate * sigmoid
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, d * silu], dim=-1).to(gate_up.dtype), (silu * up).to(gate_up.dtype)


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * inverse, inverse


def _norm_gradients(gradient: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normal, inverse = _normalised(x, eps)
    scaled = gradient * scale
    dx = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx, (gradient * normal).flatten(0, -2).sum(0)
