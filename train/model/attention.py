"""The drafter's attention: which keys a slot sees, as a mask anywhere, in groups on the CPU, as ranges on CUDA.

Keys are those of the T context tokens and of the Q block slots. Slot j of the block whose anchor stands at flat
position a, in a document that begins at f, sees

    context t    iff  f <= t < a, and on sliding layers t >= a + j - (W - 1)
    block slot   iff  it is in the same block, and on causal layers not behind j

Documents are contiguous, so f <= t < a is the whole document rule. Dropped blocks see only their own slots, which keeps
every softmax row non-empty.

Legend: T context tokens, A anchors, B block size, Q = A * B queries, N / M query / key heads, d head width, W window.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftcache.train.kernels.prefix_attention import prefix_attention, ranges
from draftcache.train.model.anchors import Blocks

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
        context_key: Tensor,  # [T, M, d]
        context_value: Tensor,  # [T, M, d]
        key: Tensor,  # [Q, M, d]
        value: Tensor,  # [Q, M, d]
        rule: Visibility,
    ) -> Tensor:  # [Q, N, d]
        """Scaled by d ** -0.5; each key head serves N / M query heads."""
        ...


class DenseAttention:
    """The plain reference: one boolean mask per rule, any device, any shape."""

    def __init__(self, blocks: Blocks, tokens: int, rules: set[Visibility]) -> None:
        self._masks = {rule: dense_mask(blocks, tokens, rule) for rule in rules}

    def __call__(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, key: Tensor, value: Tensor, rule: Visibility
    ) -> Tensor:
        """See Attention."""
        keys, values = torch.cat([context_key, key]), torch.cat([context_value, value])
        q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=self._masks[rule], enable_gqa=True)
        return mixed[0].transpose(0, 1)


class GroupedAttention:
    """The same on the CPU, some blocks at a time over only the context that they can see. Reads bounds on the host."""

    def __init__(self, blocks: Blocks, tokens: int, rules: set[Visibility]) -> None:
        self._size = blocks.positions.shape[1]
        self._parts = {rule: list(self._cut(blocks, tokens, rule)) for rule in rules}

    def __call__(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, key: Tensor, value: Tensor, rule: Visibility
    ) -> Tensor:
        """See Attention."""
        mixed = []
        for slots, context, mask in self._parts[rule]:
            k, v = (
                torch.cat([before[context], own[slots]]).transpose(0, 1)[None]
                for before, own in ((context_key, key), (context_value, value))
            )
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


class PrefixAttention:
    """The same by kernels of our own on CUDA, which walk the range of context that a block sees."""

    def __init__(self, blocks: Blocks, tokens: int, rules: set[Visibility]) -> None:
        size = blocks.positions.shape[1]
        self._ranges = {
            rule: ranges(blocks.anchors, blocks.keep, blocks.first, tokens, size, rule.window or 0, rule.causal)
            for rule in rules
        }

    def __call__(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, key: Tensor, value: Tensor, rule: Visibility
    ) -> Tensor:
        """See Attention."""
        return prefix_attention(query, context_key, context_value, key, value, self._ranges[rule])


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
