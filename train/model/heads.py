"""Splits a joint projection into heads: query and key normalised and rotated, value as it is.

The gradient of the joint projection is written part by part into one buffer, so that nothing is concatenated.

Legend: S rows, N / M query / key heads, d head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftcache.train.kernels.pointwise import norm_rotate, norm_rotate_backward
from draftcache.train.model.drafter import DrafterConfig
from draftcache.train.model.linear import Norm


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation tables of one set of positions, [S, d / 2] float32 each."""

    cos: Tensor
    sin: Tensor


def rotary_tables(positions: Tensor, config: DrafterConfig) -> Rotary:
    """The rotation of [S] positions."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    angles = positions.float()[:, None] * config.rope_theta**-exponent
    return Rotary(angles.cos(), angles.sin())


def query_key_value(
    joint: Tensor,  # [S, (N + 2 M) * d]
    query_norm: Norm,
    key_norm: Norm,
    rotary: Rotary,
    config: DrafterConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # [S, N, d], [S, M, d], [S, M, d]
    """Heads of a block's slots; keeps joint."""
    parts = (_Part(config.num_heads, query_norm), _Part(config.num_kv_heads, key_norm), _Part(config.num_kv_heads))
    query, key, value = _Heads.apply(joint, query_norm.scale.parameter, parts, rotary)  # type: ignore[no-untyped-call]
    return query, key, value


def key_value(
    joint: Tensor,  # [S, 2 M * d]
    key_norm: Norm,
    rotary: Rotary,
    config: DrafterConfig,
) -> tuple[Tensor, Tensor]:  # [S, M, d] each
    """Heads of the context; keeps joint."""
    parts = (_Part(config.num_kv_heads, key_norm), _Part(config.num_kv_heads))
    key, value = _Heads.apply(joint, key_norm.scale.parameter, parts, rotary)  # type: ignore[no-untyped-call]
    return key, value


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive heads of a joint projection; without a norm they are neither normalised nor rotated."""

    heads: int
    norm: Norm | None = None


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, _asks: Tensor, parts: tuple[_Part, ...], rotary: Rotary) -> tuple[Tensor, ...]:
        ctx.save_for_backward(joint, rotary.cos, rotary.sin)
        ctx.parts = parts
        return tuple(
            x.clone()
            if part.norm is None
            else norm_rotate(x, part.norm.scale.value, part.norm.eps, rotary.cos, rotary.sin)
            for part, x in zip(parts, _split(joint, parts), strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        joint, cos, sin = ctx.saved_tensors
        d_joint = torch.empty_like(joint)
        split = zip(ctx.parts, gradients, _split(joint, ctx.parts), _split(d_joint, ctx.parts), strict=True)
        for part, gradient, x, dx in split:
            if part.norm is None:
                dx.copy_(gradient)
            else:
                norm = part.norm
                norm.scale.gradient.add_(norm_rotate_backward(gradient, x, norm.scale.value, norm.eps, cos, sin, dx))
        return d_joint, None, None, None


def _split(joint: Tensor, parts: tuple[_Part, ...]) -> list[Tensor]:
    """Views of a joint projection's parts, [S, heads, d] each."""
    width = joint.shape[1] // sum(part.heads for part in parts)
    pieces = joint.split([part.heads * width for part in parts], dim=1)
    return [piece.unflatten(1, (part.heads, width)) for part, piece in zip(parts, pieces, strict=True)]
