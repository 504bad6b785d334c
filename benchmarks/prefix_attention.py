"""Attention of blocks over a prefix and themselves as Triton kernels: a candidate for flex_attention's place.

One program holds all query heads of one key head for one block, so that its rows share one range of context keys: no
tile of keys is visited for a neighbour's sake, and keys are read once for all those heads. Context and block keys are
read where they lie, without being joined. Sums are float32, and there are no atomics.

Legend: T context tokens, A anchors, B block size, Q = A * B slots, N / M query / key heads, G = N / M, d head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_LAUNCH = {"KEYS": 64, "num_warps": 8, "num_stages": 3}
QUERY_LAUNCH = {"KEYS": 64, "num_warps": 8, "num_stages": 2}
CONTEXT_LAUNCH = {"KEYS": 64, "num_warps": 8, "num_stages": 2}
KEYS = CONTEXT_LAUNCH["KEYS"]
"""Context keys of one tile; T is a multiple of it."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Which context a block sees, and which blocks see a tile of context."""

    first: Tensor  # [A] int32: first token of the anchor's document
    high: Tensor  # [A] int32: the anchor, ascending; 0 for dropped blocks, which come last
    seen: Tensor  # [2, T / KEYS] int32: first block that sees a key of the tile, and one past the last
    whole: Tensor  # [2, T / KEYS] int32: likewise of the blocks that see all of it
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
    tiles = torch.arange(0, tokens, KEYS, device=anchors.device)[:, None]

    def count(blocks: Tensor) -> Tensor:
        return (keep & blocks).sum(1, dtype=torch.int32)

    begin, end = count(anchors <= tiles), count(lowest < tiles + KEYS)
    whole_begin, whole_end = count(anchors < tiles + KEYS), count(highest <= tiles)
    return Ranges(
        first=first.int(),
        high=anchors.where(keep, 0).int(),
        seen=torch.stack([begin, end]),
        whole=torch.stack([whole_begin, torch.maximum(whole_begin, whole_end)]),
        block_size=block_size,
        window=window,
        causal=causal,
    )


def prefix_attention(
    query: Tensor,  # [Q, N, d]
    context_key: Tensor,  # [T, M, d]
    context_value: Tensor,  # [T, M, d]
    key: Tensor,  # [Q, M, d]
    value: Tensor,  # [Q, M, d]
    seen: Ranges,
) -> Tensor:  # [Q, N, d]
    """softmax(q k' / sqrt(d)) v over the visible keys."""
    inputs = query, context_key, context_value, key, value, seen
    mixed: Tensor = _PrefixAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    return mixed


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, seen: Ranges) -> Tensor:
        q, ck, cv, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, ck, cv, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        _forward_kernel[(len(seen.high), k.shape[1])](
            q, *_strides(q), ck, *_strides(ck), cv, *_strides(cv), k, *_strides(k), v, *_strides(v),
            out, *_strides(out), lse, seen.first, seen.high, q.shape[0], q.shape[2] ** -0.5,
            **_constants(q, k, seen), **_own_constants(seen), **FORWARD_LAUNCH,
        )  # fmt: skip
        ctx.save_for_backward(q, ck, cv, k, v, out, lse)
        ctx.seen = seen
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, ck, cv, k, v, out, lse = ctx.saved_tensors
        seen: Ranges = ctx.seen
        d_out = gradients[0] if gradients[0].stride(2) == 1 else gradients[0].contiguous()
        dq, d_ck, d_cv, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, ck, cv, k, v))
        delta = torch.empty_like(lse)
        constants = _constants(q, k, seen)
        _query_kernel[(len(seen.high), k.shape[1])](
            q, *_strides(q), ck, *_strides(ck), cv, *_strides(cv), k, *_strides(k), v, *_strides(v),
            out, *_strides(out), d_out, *_strides(d_out), lse, delta, dq, *_strides(dq), dk, *_strides(dk),
            dv, *_strides(dv), seen.first, seen.high, q.shape[0], q.shape[2] ** -0.5,
            **constants, **_own_constants(seen), **QUERY_LAUNCH,
        )  # fmt: skip
        _context_kernel[(seen.seen.shape[1], k.shape[1])](
            q, *_strides(q), ck, *_strides(ck), cv, *_strides(cv), d_out, *_strides(d_out), lse, delta,
            d_ck, *_strides(d_ck), d_cv, *_strides(d_cv), seen.first, seen.high, seen.seen, seen.whole,
            q.shape[0], q.shape[2] ** -0.5, **constants, **CONTEXT_LAUNCH,
        )  # fmt: skip
        return dq, d_ck, d_cv, dk, dv, None


def _constants(q: Tensor, k: Tensor, seen: Ranges) -> dict[str, Any]:
    group = q.shape[1] // k.shape[1]
    return {
        "B": seen.block_size,
        "G": group,
        "WINDOW": seen.window,
        "ROWS": max(16, triton.next_power_of_2(group * seen.block_size)),
        "D": q.shape[2],
        "LOG2_E": _LOG2_E,
    }


def _own_constants(seen: Ranges) -> dict[str, Any]:
    return {"CAUSAL": seen.causal, "OWN": max(16, triton.next_power_of_2(seen.block_size))}


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


@triton.jit
def _rows_at(
    row_stride,
    head_stride,
    block,
    key_head,
    B: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    """Where a block's rows of all query heads of a key head lie, [ROWS, D], and which of them exist, [ROWS, 1]."""
    row = tl.arange(0, ROWS)
    slot, head = block * B + row % B, key_head * G + row // B
    at = slot.to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride + tl.arange(0, D)[None, :]
    return at, (row < G * B)[:, None]


@triton.jit
def _load_rows(
    ptr,
    row_stride,
    head_stride,
    block,
    key_head,
    B: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    at, there = _rows_at(row_stride, head_stride, block, key_head, B, G, ROWS, D)
    return tl.load(ptr + at, mask=there, other=0.0)


@triton.jit
def _statistics_at(block, key_head, slots, B: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr):
    """Where a number for each row lies, [ROWS], head after head."""
    row = tl.arange(0, ROWS)
    return (key_head * G + row // B).to(tl.int64) * slots + block * B + row % B


@triton.jit
def _keys_at(key, row_stride, head_stride, key_head, D: tl.constexpr):
    """Where keys (or values) lie, [keys, D]."""
    return key.to(tl.int64)[:, None] * row_stride + key_head * head_stride + tl.arange(0, D)[None, :]


@triton.jit
def _lowest_seen(first_ptr, high, block, B: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """The first context key that each row sees, [ROWS]."""
    slot = tl.arange(0, ROWS) % B
    low = tl.load(first_ptr + block) + 0 * slot
    if WINDOW > 0:
        low = tl.maximum(low, high + slot - (WINDOW - 1))
    return low


@triton.jit
def _context_tiles(low, high, KEYS: tl.constexpr):
    """First tile, first and one past the last tile that every row sees whole, as keys."""
    whole_end = high // KEYS * KEYS
    begin = tl.minimum(tl.min(low, axis=0) // KEYS * KEYS, whole_end)
    whole_begin = tl.minimum(tl.cdiv(tl.max(low, axis=0), KEYS) * KEYS, whole_end)
    return begin, tl.maximum(whole_begin, begin), whole_end


@triton.jit
def _edge_tile(number, begin, whole_begin, whole_end, KEYS: tl.constexpr):
    """First key of the tiles before and behind the whole ones, in one count."""
    start = begin + number * KEYS
    return tl.where(start < whole_begin, start, whole_end + start - whole_begin)


@triton.jit
def _own_seen(B: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr):
    """Which keys of the block each row sees, [ROWS, OWN]."""
    own, slot = tl.arange(0, OWN), tl.arange(0, ROWS) % B
    sees = (own < B)[None, :]
    if CAUSAL:
        sees = sees & (own[None, :] <= slot[:, None])
    return sees


@triton.jit
def _attend(s, v, mixed, total, largest):
    """The running softmax after one more tile of scores [ROWS, KEYS], in powers of two."""
    new = tl.maximum(largest, tl.max(s, axis=1))
    rescale = tl.exp2(largest - new)
    p = tl.exp2(s - new[:, None])
    mixed = tl.dot(p.to(v.dtype), v, mixed * rescale[:, None])
    return mixed, total * rescale + tl.sum(p, axis=1), new


@triton.jit
def _forward_kernel(
    q_ptr, q_row, q_head, ck_ptr, ck_row, ck_head, cv_ptr, cv_row, cv_head, k_ptr, k_row, k_head, v_ptr, v_row, v_head,
    out_ptr, out_row, out_head, lse_ptr, first_ptr, high_ptr, slots, scale,
    B: tl.constexpr, G: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    LOG2_E: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    block, key_head = tl.program_id(0), tl.program_id(1)
    factor = scale * LOG2_E
    q = _load_rows(q_ptr, q_row, q_head, block, key_head, B, G, ROWS, D)
    # the block itself comes first: every row sees a key of it, so the running maximum is finite from here on
    own = tl.arange(0, OWN)
    inside = (own < B)[:, None]
    own_k = tl.load(k_ptr + _keys_at(block * B + own, k_row, k_head, key_head, D), mask=inside, other=0.0)
    own_v = tl.load(v_ptr + _keys_at(block * B + own, v_row, v_head, key_head, D), mask=inside, other=0.0)
    own_s = tl.where(_own_seen(B, CAUSAL, ROWS, OWN), tl.dot(q, tl.trans(own_k)) * factor, float("-inf"))
    largest = tl.max(own_s, axis=1)
    own_p = tl.exp2(own_s - largest[:, None])
    total = tl.sum(own_p, axis=1)
    mixed = tl.dot(own_p.to(own_v.dtype), own_v)
    high = tl.load(high_ptr + block)
    low = _lowest_seen(first_ptr, high, block, B, WINDOW, ROWS)
    begin, whole_begin, whole_end = _context_tiles(low, high, KEYS)
    for start in range(whole_begin, whole_end, KEYS):
        key = start + tl.arange(0, KEYS)
        k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
        v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
        s = tl.dot(q, tl.trans(k)) * factor
        mixed, total, largest = _attend(s, v, mixed, total, largest)
    for number in range(0, tl.cdiv(whole_begin - begin + high - whole_end, KEYS)):
        key = _edge_tile(number, begin, whole_begin, whole_end, KEYS) + tl.arange(0, KEYS)
        k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
        v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
        sees = (key[None, :] >= low[:, None]) & (key < high)[None, :]
        s = tl.where(sees, tl.dot(q, tl.trans(k)) * factor, float("-inf"))
        mixed, total, largest = _attend(s, v, mixed, total, largest)
    at, there = _rows_at(out_row, out_head, block, key_head, B, G, ROWS, D)
    tl.store(out_ptr + at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)
    at = _statistics_at(block, key_head, slots, B, G, ROWS)
    tl.store(lse_ptr + at, largest + tl.log2(total), mask=tl.arange(0, ROWS) < G * B)


@triton.jit
def _query_kernel(
    q_ptr, q_row, q_head, ck_ptr, ck_row, ck_head, cv_ptr, cv_row, cv_head, k_ptr, k_row, k_head, v_ptr, v_row, v_head,
    out_ptr, out_row, out_head, do_ptr, do_row, do_head, lse_ptr, delta_ptr, dq_ptr, dq_row, dq_head,
    dk_ptr, dk_row, dk_head, dv_ptr, dv_row, dv_head, first_ptr, high_ptr, slots, scale,
    B: tl.constexpr, G: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    LOG2_E: tl.constexpr, CAUSAL: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    block, key_head = tl.program_id(0), tl.program_id(1)
    factor = scale * LOG2_E
    q = _load_rows(q_ptr, q_row, q_head, block, key_head, B, G, ROWS, D)
    d_out = _load_rows(do_ptr, do_row, do_head, block, key_head, B, G, ROWS, D)
    out = _load_rows(out_ptr, out_row, out_head, block, key_head, B, G, ROWS, D)
    delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), axis=1)
    there = tl.arange(0, ROWS) < G * B
    at = _statistics_at(block, key_head, slots, B, G, ROWS)
    lse = tl.load(lse_ptr + at, mask=there, other=float("inf"))
    tl.store(delta_ptr + at, delta, mask=there)
    own = tl.arange(0, OWN)
    inside = (own < B)[:, None]
    own_k = tl.load(k_ptr + _keys_at(block * B + own, k_row, k_head, key_head, D), mask=inside, other=0.0)
    own_v = tl.load(v_ptr + _keys_at(block * B + own, v_row, v_head, key_head, D), mask=inside, other=0.0)
    own_sees = _own_seen(B, CAUSAL, ROWS, OWN) & there[:, None]
    own_p = tl.where(own_sees, tl.exp2(tl.dot(q, tl.trans(own_k)) * factor - lse[:, None]), 0.0)
    own_ds = (own_p * (tl.dot(d_out, tl.trans(own_v)) - delta[:, None])).to(own_k.dtype)
    dq = tl.dot(own_ds, own_k)
    dk = (tl.dot(tl.trans(own_ds), q) * scale).to(dk_ptr.dtype.element_ty)
    dv = tl.dot(tl.trans(own_p.to(d_out.dtype)), d_out).to(dv_ptr.dtype.element_ty)
    tl.store(dk_ptr + _keys_at(block * B + own, dk_row, dk_head, key_head, D), dk, mask=inside)
    tl.store(dv_ptr + _keys_at(block * B + own, dv_row, dv_head, key_head, D), dv, mask=inside)
    high = tl.load(high_ptr + block)
    low = _lowest_seen(first_ptr, high, block, B, WINDOW, ROWS)
    begin, whole_begin, whole_end = _context_tiles(low, high, KEYS)
    for start in range(whole_begin, whole_end, KEYS):
        key = start + tl.arange(0, KEYS)
        k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
        v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
        p = tl.exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None])
        ds = (p * (tl.dot(d_out, tl.trans(v)) - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq)
    for number in range(0, tl.cdiv(whole_begin - begin + high - whole_end, KEYS)):
        key = _edge_tile(number, begin, whole_begin, whole_end, KEYS) + tl.arange(0, KEYS)
        k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
        v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
        sees = (key[None, :] >= low[:, None]) & (key < high)[None, :]
        p = tl.where(sees, tl.exp2(tl.dot(q, tl.trans(k)) * factor - lse[:, None]), 0.0)
        ds = (p * (tl.dot(d_out, tl.trans(v)) - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq)
    at, there = _rows_at(dq_row, dq_head, block, key_head, B, G, ROWS, D)
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=there)


@triton.jit
def _context_kernel(
    q_ptr, q_row, q_head, ck_ptr, ck_row, ck_head, cv_ptr, cv_row, cv_head, do_ptr, do_row, do_head, lse_ptr, delta_ptr,
    dk_ptr, dk_row, dk_head, dv_ptr, dv_row, dv_head, first_ptr, high_ptr, seen_ptr, whole_ptr, slots, scale,
    B: tl.constexpr, G: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    LOG2_E: tl.constexpr,
):  # fmt: skip
    tile, key_head = tl.program_id(0), tl.program_id(1)
    factor = scale * LOG2_E
    key = tile * KEYS + tl.arange(0, KEYS)
    k = tl.load(ck_ptr + _keys_at(key, ck_row, ck_head, key_head, D))
    v = tl.load(cv_ptr + _keys_at(key, cv_row, cv_head, key_head, D))
    dk = tl.zeros((KEYS, D), dtype=tl.float32)
    dv = tl.zeros((KEYS, D), dtype=tl.float32)
    there = tl.arange(0, ROWS) < G * B
    begin, end = tl.load(seen_ptr + tile), tl.load(seen_ptr + tl.num_programs(0) + tile)
    whole_begin, whole_end = tl.load(whole_ptr + tile), tl.load(whole_ptr + tl.num_programs(0) + tile)
    for block in range(whole_begin, whole_end):
        q = _load_rows(q_ptr, q_row, q_head, block, key_head, B, G, ROWS, D)
        d_out = _load_rows(do_ptr, do_row, do_head, block, key_head, B, G, ROWS, D)
        at = _statistics_at(block, key_head, slots, B, G, ROWS)
        lse = tl.load(lse_ptr + at, mask=there, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=there, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * factor - lse[None, :])
        dv = tl.dot(p.to(d_out.dtype), d_out, dv)
        ds = (p * (tl.dot(v, tl.trans(d_out)) - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
    for number in range(0, whole_begin - begin + end - whole_end):
        block = tl.where(begin + number < whole_begin, begin + number, whole_end - whole_begin + begin + number)
        q = _load_rows(q_ptr, q_row, q_head, block, key_head, B, G, ROWS, D)
        d_out = _load_rows(do_ptr, do_row, do_head, block, key_head, B, G, ROWS, D)
        at = _statistics_at(block, key_head, slots, B, G, ROWS)
        lse = tl.load(lse_ptr + at, mask=there, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=there, other=0.0)
        high = tl.load(high_ptr + block)
        low = _lowest_seen(first_ptr, high, block, B, WINDOW, ROWS)
        sees = (key[:, None] >= low[None, :]) & (key < high)[:, None]
        p = tl.where(sees, tl.exp2(tl.dot(k, tl.trans(q)) * factor - lse[None, :]), 0.0)
        dv = tl.dot(p.to(d_out.dtype), d_out, dv)
        ds = (p * (tl.dot(v, tl.trans(d_out)) - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
    tl.store(dk_ptr + _keys_at(key, dk_row, dk_head, key_head, D), (dk * scale).to(dk_ptr.dtype.element_ty))
    tl.store(dv_ptr + _keys_at(key, dv_row, dv_head, key_head, D), dv.to(dv_ptr.dtype.element_ty))
