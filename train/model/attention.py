"""The drafter's attention: which keys a slot sees, as a dense mask for everywhere and as flex_attention on CUDA.

Keys are the T context tokens followed by the Q block slots. Slot j of the block whose anchor stands at flat position a,
in a document that begins at f, sees

    context t    iff  f <= t < a, and on sliding layers t >= a + j - (W - 1)
    block slot   iff  it is in the same block, and on causal layers not behind j

Documents are contiguous, so f <= t < a is the whole document rule. Dropped blocks see only their own slots, which keeps
every softmax row non-empty.

Legend: T context tokens, A anchors, B block size, Q = A * B queries, N / M query / key heads, d head width, W window.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from draftcache.common.fused import MAX_COMPILATIONS
from draftcache.train.model.anchors import Blocks

TILE = 128
"""Rows and columns of a flex_attention mask tile. On CUDA, T and Q must be multiples of it and B must divide it."""
_GROUP_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Visibility:
    """The rule of one layer type: its window in tokens (None: the whole prefix) and whether slots see later slots."""

    window: int | None
    causal: bool


class Attention(Protocol):
    """Attention over context and block keys under one visibility rule."""

    def __call__(
        self,
        query: Tensor,  # [Q, N, d]
        key: Tensor,  # [T + Q, M, d]
        value: Tensor,  # [T + Q, M, d]
        rule: Visibility,
    ) -> Tensor:  # [Q, N, d]
        """Scaled by d ** -0.5; each key head serves N / M query heads."""
        ...


class DenseAttention:
    """The plain reference: one boolean mask per rule, any device, any shape."""

    def __init__(self, blocks: Blocks, tokens: int, rules: set[Visibility]) -> None:
        self._masks = {rule: dense_mask(blocks, tokens, rule) for rule in rules}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, rule: Visibility) -> Tensor:
        """See Attention."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=self._masks[rule], enable_gqa=True)
        return mixed[0].transpose(0, 1)


class GroupedAttention:
    """The same on the CPU, some blocks at a time over only the context that they can see. Reads bounds on the host."""

    def __init__(self, blocks: Blocks, tokens: int, rules: set[Visibility]) -> None:
        self._tokens, self._size = tokens, blocks.positions.shape[1]
        self._parts = {rule: list(self._cut(blocks, tokens, rule)) for rule in rules}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, rule: Visibility) -> Tensor:
        """See Attention."""
        mixed = []
        for slots, context, mask in self._parts[rule]:
            own = slice(self._tokens + slots.start, self._tokens + slots.stop)
            k, v = (torch.cat([x[context], x[own]]).transpose(0, 1)[None] for x in (key, value))
            q = query[slots].transpose(0, 1)[None]
            part = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            mixed.append(part[0].transpose(0, 1))
        return torch.cat(mixed)

    def _cut(self, blocks: Blocks, tokens: int, rule: Visibility) -> Iterator[tuple[slice, slice, Tensor]]:
        """Per group: its slots, the context they can see, and the mask over that context and the group's slots."""
        low, high = (bound.tolist() for bound in context_bounds(blocks, rule))
        for begin in range(0, len(high), _GROUP_BLOCKS):
            end = min(begin + _GROUP_BLOCKS, len(high))
            seen = [(min(low[i]), high[i]) for i in range(begin, end) if high[i] > min(low[i])]
            context = slice(min((a for a, _ in seen), default=0), max((b for _, b in seen), default=0))
            part = Blocks(
                **{f.name: getattr(blocks, f.name)[begin:end] for f in dataclasses.fields(Blocks)},
            )
            mask = dense_mask(part, tokens, rule)
            mask = torch.cat([mask[:, context], mask[:, tokens:]], dim=1)
            yield slice(begin * self._size, end * self._size), context, mask


class FlexAttention:
    """The same through flex_attention, with block masks computed arithmetically on the device."""

    def __init__(self, blocks: Blocks, tokens: int, rules: set[Visibility]) -> None:
        self._masks = {rule: flex_mask(blocks, tokens, rule) for rule in rules}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, rule: Visibility) -> Tensor:
        """See Attention."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        mixed: Tensor = _compiled_flex()(q, k, v, block_mask=self._masks[rule], enable_gqa=True)
        return mixed[0].transpose(0, 1)


def dense_mask(blocks: Blocks, tokens: int, rule: Visibility) -> Tensor:
    """[Q, T + Q] bool, True where the query slot sees the key."""
    low, high = context_bounds(blocks, rule)
    at = torch.arange(tokens, device=low.device)
    context = (at >= low.flatten()[:, None]) & (at < high.repeat_interleave(low.shape[1])[:, None])
    slot = torch.arange(low.numel(), device=low.device)
    size = low.shape[1]
    own = slot[:, None] // size == slot // size
    if rule.causal:
        own = own & (slot[:, None] >= slot)
    return torch.cat([context, own], dim=1)


def context_bounds(blocks: Blocks, rule: Visibility) -> tuple[Tensor, Tensor]:
    """The context range of every slot: lower bounds [A, B] and upper bounds [A], both 0 for dropped blocks."""
    size = blocks.positions.shape[1]
    first = blocks.first[:, None].expand(-1, size)
    if rule.window is not None:
        slots = torch.arange(size, device=first.device)
        first = torch.maximum(first, blocks.anchors[:, None] + slots - (rule.window - 1))
    return first.where(blocks.keep[:, None], 0), blocks.anchors.where(blocks.keep, 0)


def flex_mask(blocks: Blocks, tokens: int, rule: Visibility) -> BlockMask:
    """The rule as flex_attention's BlockMask: which TILE x TILE tiles to visit, and which of them need no mask."""
    low, high = context_bounds(blocks, rule)
    count, size = low.shape
    queries = count * size
    visit, whole = _tiles(low, high, tokens)
    part_count, part_indices = _ordered(visit & ~whole)
    full_count, full_indices = _ordered(whole)
    low_flat = low.flatten()

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = q // size
        in_context = (k < tokens) & (k >= low_flat[q]) & (k < high[block])
        slot = k - tokens
        own = (slot >= 0) & (slot // size == block)
        if rule.causal:
            own = own & (slot <= q)
        return in_context | own

    return BlockMask.from_kv_blocks(
        part_count,
        part_indices,
        full_count,
        full_indices,
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(queries, tokens + queries),
    )


def _tiles(low: Tensor, high: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Which tiles hold a visible key, and which hold only visible ones: two [Q / TILE, (T + Q) / TILE] bool."""
    count, size = low.shape
    blocks_per_tile, query_tiles, context_tiles = TILE // size, count * size // TILE, tokens // TILE
    begin = torch.arange(context_tiles, device=low.device) * TILE
    lowest, highest = low.amin(1), low.amax(1)  # [A]: the window moves with the slot
    some = (begin[None] < high[:, None]) & (begin[None] + TILE > lowest[:, None])
    every = (begin[None] >= highest[:, None]) & (begin[None] + TILE <= high[:, None])
    some = some.view(query_tiles, blocks_per_tile, context_tiles).any(1)
    every = every.view(query_tiles, blocks_per_tile, context_tiles).all(1)
    own = torch.eye(query_tiles, dtype=torch.bool, device=low.device)
    return torch.cat([some, own], dim=1), torch.cat([every, torch.zeros_like(own)], dim=1)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, rows] and indices [1, 1, rows, columns] int32 of the chosen tiles, chosen ones first."""
    indices = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]


_compiled: Any = None


def _compiled_flex() -> Any:
    """flex_attention, compiled at its first use; importing this module compiles nothing.

    Every shape and rule is one compilation. Past dynamo's limit it would go on with scores held in full; `fullgraph`
    makes that an error instead.
    """
    global _compiled
    if _compiled is None:
        torch._dynamo.config.recompile_limit = MAX_COMPILATIONS
        _compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return _compiled
