"""The drafter's attention by torch's flex_attention, the baseline of bench_attention: the rule as tiles of a BlockMask.

Q and T must be multiples of TILE and B must divide it. Legend as in train/model/attention.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftcache.common.fused import MAX_COMPILATIONS
from draftcache.train.model.anchors import Blocks
from draftcache.train.model.attention import Visibility, context_bounds

TILE = 128
"""Rows and columns of a mask tile."""


class FlexAttention:
    """Attention through flex_attention, with block masks computed arithmetically on the device."""

    def __init__(self, blocks: Blocks, tokens: int, rules: set[Visibility]) -> None:
        self._masks = {rule: flex_mask(blocks, tokens, rule) for rule in rules}

    def __call__(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, key: Tensor, value: Tensor, rule: Visibility
    ) -> Tensor:
        """See Attention in train/model/attention.py."""
        k, v = (
            torch.cat([before.transpose(0, 1), own.transpose(0, 1)], dim=1)[None]
            for before, own in ((context_key, key), (context_value, value))
        )
        q = query.transpose(0, 1)[None]
        mixed: Tensor = _compiled_flex()(q, k, v, block_mask=self._masks[rule], enable_gqa=True)
        return mixed[0].transpose(0, 1)


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
