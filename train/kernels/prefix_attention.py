"""Attention of blocks over a prefix of their context and over themselves, forward and backward, by Triton kernels.

Which context a block sees is a range, so no mask exists anywhere: a program walks the tiles of its range, and only
those at its ends are masked. Context and block keys are read where they lie, without being joined.

Legend: T context tokens, A anchors, B block size, Q = A * B slots, N / M query / key heads, d head width.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_LOG2_E = 1.4426950408889634
_GRAIN = 32
_MIN_DOT = 16  # the least that either side of a tensor core's product holds
_MAX_ROWS = 128
_CONTEXT_ROWS = 64  # of the kernel that holds two sums over its keys besides: twice as many spill
_MAX_VALUES = 128 * 128  # rows times head width of a program: what its registers hold
_FEWER_VALUES = 64 * 128  # for GPUs like sm_120's, whose 99 KiB the query kernel's operands would overflow
_SHARED_BYTES_FOR_MOST = 128 * 1024
MAX_BLOCK_SIZE = _MAX_ROWS

# Tiles by measured speed on an H200; a GPU takes the first that its shared memory holds (bench_attention.py).
_FORWARD_TILES = ((64, 4, 2), (64, 4, 1), (32, 4, 1), (16, 4, 1))
_QUERY_TILES = ((64, 8, 3), (64, 8, 2), (64, 8, 1), (32, 8, 1), (16, 8, 1))
_CONTEXT_TILES = ((128, 8, 3), (128, 8, 2), (64, 4, 2), (64, 4, 1), (32, 4, 1))
"""(context keys, warps, stages of loads in flight)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Which context a block sees, and which blocks see a tile of context."""

    first: Tensor  # [A] int32: first token of the anchor's document
    high: Tensor  # [A] int32: the anchor, ascending; 0 for dropped blocks, which come last
    counts: Tensor  # [4, T / 32 + 1] int32: blocks before the first, and the last, that see a tile with such a border
    block_size: int
    window: int  # tokens a slot sees, itself included; 0: all
    causal: bool  # within the block


def ranges(
    anchors: Tensor,  # [A] int64, ascending, dropped ones last
    keep: Tensor,  # [A] bool
    first: Tensor,  # [A] int64
    tokens: int,  # T
    block_size: int,
    window: int,
    causal: bool,
) -> Ranges:
    """Ranges of one rule."""
    lowest, highest = first, first
    if window:
        lowest = torch.maximum(first, anchors - (window - 1))
        highest = torch.maximum(first, anchors - (window - 1) + (block_size - 1))
    border = torch.arange(0, tokens + 1, _GRAIN, device=anchors.device)[:, None]
    # anchors ascend, so the blocks that see a tile [left, right) are a range, and counts are its ends
    ends = [anchors <= border, highest <= border, lowest < border, anchors < border]
    return Ranges(
        first=first.int(),
        high=anchors.where(keep, 0).int(),
        counts=torch.stack([(keep & blocks).sum(1, dtype=torch.int32) for blocks in ends]),
        block_size=block_size,
        window=window,
        causal=causal,
    )


def prefix_attention(
    query: Tensor,  # [Q, N, d]
    context_key: Tensor,  # [T, M, d], T a multiple of 128: of every tile above
    context_value: Tensor,  # [T, M, d]
    key: Tensor,  # [Q, M, d]
    value: Tensor,  # [Q, M, d]
    seen: Ranges,
) -> Tensor:  # [Q, N, d]
    """softmax(q k' / sqrt(d)) v over the visible keys."""
    width = query.shape[2]
    padding = max(_MIN_DOT, _power_of_two(width)) - width
    inputs = [
        functional.pad(x, (0, padding)) if padding else x for x in (query, context_key, context_value, key, value)
    ]
    mixed: Tensor = _PrefixAttention.apply(*inputs, width**-0.5, seen)  # type: ignore[no-untyped-call]
    return mixed[..., :width]


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, scale: float, seen: Ranges
    ) -> Tensor:
        from draftcache.train.kernels import prefix_kernels  # Triton exists only beside CUDA

        q, ck, cv, k, v = (_rows_whole(x) for x in (q, ck, cv, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        group = _Group.of(q, k, seen)
        inputs = (*_laid(q), *_laid(ck), *_laid(cv), *_laid(k), *_laid(v))
        arguments = (*inputs, *_laid(out), lse, seen.first, seen.high, len(q), scale)
        constants = group.constants(q, seen) | group.own_constants(seen)
        _launch(prefix_kernels.forward_kernel, group.grid(seen), arguments, constants, _FORWARD_TILES)
        ctx.save_for_backward(q, ck, cv, k, v, out, lse)
        ctx.scale, ctx.seen = scale, seen
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from draftcache.train.kernels import prefix_kernels

        q, ck, cv, k, v, out, lse = ctx.saved_tensors
        seen: Ranges = ctx.seen
        d_out = _rows_whole(gradients[0])
        group = _Group.of(q, k, seen)
        dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
        d_ck, d_cv = torch.empty(ck.shape, dtype=ck.dtype, device=ck.device), torch.empty_like(cv)
        dk, dv = group.gradient_like(k), group.gradient_like(v)
        inputs = (*_laid(q), *_laid(ck), *_laid(cv))
        own = (*_laid(k), *_laid(v), *_laid(out), *_laid(d_out), lse, delta, *_laid(dq), *_laid(dk), *_laid(dv))
        _launch(
            prefix_kernels.query_kernel,
            group.grid(seen),
            (*inputs, *own, seen.first, seen.high, len(q), ctx.scale),
            group.constants(q, seen) | group.own_constants(seen),
            _QUERY_TILES,
        )
        shared = (*_laid(d_out), lse, delta, *_laid(d_ck), *_laid(d_cv), seen.first, seen.high, seen.counts)
        _launch(
            prefix_kernels.context_kernel,
            partial(_context_grid, *ck.shape[:2]),
            (*inputs, *shared, len(q), ctx.scale),
            _Group.of(q, k, seen, _CONTEXT_ROWS).constants(q, seen) | {"GRAIN": _GRAIN},
            _CONTEXT_TILES,
        )
        return dq, d_ck, d_cv, group.summed(dk, k), group.summed(dv, v), None, None


@dataclass(frozen=True, slots=True)
class _Group:
    """Query heads and blocks of one program: as many as its registers and shared memory hold, heads before blocks."""

    heads: int  # of one key head
    parts: int  # groups that serve one key head
    count: int  # groups in all
    blocks: int  # of a bundle

    @classmethod
    def of(cls, q: Tensor, k: Tensor, seen: Ranges, most_rows: int = _MAX_ROWS) -> "_Group":
        served = q.shape[1] // k.shape[1]
        most = max(1, min(most_rows, _most_values(q.device) // q.shape[2]) // seen.block_size)
        heads = max(n for n in range(1, served + 1) if served % n == 0 and n <= most)
        return cls(heads, served // heads, q.shape[1] // heads, most // heads)

    def grid(self, seen: Ranges) -> tuple[int, int]:
        return -(-len(seen.high) // self.blocks), self.count

    def constants(self, q: Tensor, seen: Ranges) -> dict[str, Any]:
        rows = max(_MIN_DOT, _power_of_two(self.heads * self.blocks * seen.block_size))
        tiles = {"B": seen.block_size, "BLOCKS": self.blocks, "HEADS": self.heads, "PARTS": self.parts, "ROWS": rows}
        return tiles | {"D": q.shape[2], "WINDOW": seen.window, "LOG2_E": _LOG2_E}

    def own_constants(self, seen: Ranges) -> dict[str, Any]:
        return {"CAUSAL": seen.causal, "OWN": max(_MIN_DOT, _power_of_two(self.blocks * seen.block_size))}

    def gradient_like(self, x: Tensor) -> Tensor:
        """[Q, groups, d] for the gradient of [Q, M, d]: every group writes its own, so that nothing is added twice."""
        dtype = x.dtype if self.parts == 1 else torch.float32
        return torch.empty(x.shape[0], self.count, x.shape[2], dtype=dtype, device=x.device)

    def summed(self, gradient: Tensor, like: Tensor) -> Tensor:
        if self.parts == 1:
            return gradient
        return gradient.view(len(like), -1, self.parts, like.shape[2]).sum(2).to(like.dtype)


def _most_values(device: torch.device) -> int:
    """Rows times head width of a program on this device."""
    if device.type != "cuda":  # Triton's interpreter
        return _MAX_VALUES
    shared: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return _MAX_VALUES if shared >= _SHARED_BYTES_FOR_MOST else _FEWER_VALUES


def _launch(
    kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: dict[str, Any], tiles: tuple[tuple[int, ...], ...]
) -> None:
    """Launch with the first tiles that this device's shared memory holds; those that it does not never start."""
    from triton.runtime.errors import OutOfResources

    for keys, warps, stages in tiles:
        try:
            kernel[grid](*arguments, **constants, KEYS=keys, num_warps=warps, num_stages=stages)
        except OutOfResources:
            if (keys, warps, stages) == tiles[-1]:
                raise
        else:
            return


def _context_grid(tokens: int, key_heads: int, constants: dict[str, Any]) -> tuple[int, int]:
    return tokens // constants["KEYS"], key_heads


def _laid(x: Tensor) -> tuple[Tensor, int, int]:
    return x, x.stride(0), x.stride(1)


def _rows_whole(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
