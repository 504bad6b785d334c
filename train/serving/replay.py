"""What a drafter would have had accepted at every position of a text that is known, without decoding it.

Two means over these lengths answer different questions. Over all positions, as training draws its anchors: every
position counts the same. Along the path that decoding takes, from the first position to the one that its accepted
length leads to and so on: where drafting is hard blocks are short and more anchors fall there, so that this mean comes
out smaller. Only the second is what a server logs; on the target's own greedy text it is exactly that.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftcache.common.codec import read_taps
from draftcache.common.layout import CHUNK_TOKENS, round_up
from draftcache.common.shard import RowReader
from draftcache.common.store import Store
from draftcache.train.serving.decode import DrafterRunner

_ANCHORS = 64
"""Blocks that run at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Sums over a text: accepted lengths at all positions, and tokens and blocks of the path through it."""

    anchors: int = 0
    any_anchor: int = 0
    path_blocks: int = 0
    path_tokens: int = 0

    def __add__(self, other: "Replay") -> "Replay":
        return Replay(
            anchors=self.anchors + other.anchors,
            any_anchor=self.any_anchor + other.any_anchor,
            path_blocks=self.path_blocks + other.path_blocks,
            path_tokens=self.path_tokens + other.path_tokens,
        )


@torch.inference_mode()
def replay(
    runner: DrafterRunner,
    ids: Tensor,  # [n] int64, prompt and text
    taps: Tensor,  # [n, K * H]
    first: int,  # position of the text's first token
    *,
    finished: bool,  # whether the text ended by itself
) -> Replay:
    """Accepted lengths at the text's positions. A block ends where the text ends.

    Of a text that was cut off only whole blocks count: nobody knows what the others would have reached.
    """
    size = runner.config.block_size
    end = len(ids) - (1 if finished else size)
    anchors = torch.arange(first, max(first, end), device=ids.device)
    context = runner.context(taps, 0)
    found: list[int] = []
    for at in anchors.split(_ANCHORS):
        drafted = runner.draft(ids[at], at, context)
        reach = at[:, None] + torch.arange(1, size, device=ids.device)
        right = (ids[reach.clamp_max(len(ids) - 1)] == drafted) & (reach < len(ids))
        length = 1 + right.long().cumprod(-1).sum(-1)
        found += torch.minimum(length, len(ids) - 1 - at).tolist()  # the target's own token must lie in the text too
    tokens, blocks = along_path(found)
    return Replay(anchors=len(found), any_anchor=sum(found), path_blocks=blocks, path_tokens=tokens)


def replay_stored(
    runner: DrafterRunner,
    store: Store,
    rows: Iterable[tuple[int, int]],  # ceiling and row of every sample to replay
    device: torch.device,
) -> Replay:
    """Sums over the answers in stored samples, from their stored taps: needs no target."""
    total, reader, spec = Replay(), RowReader(), store.manifest.record
    for ceiling, row in rows:
        bucket = store.buckets[ceiling]
        tokens = bucket.samples.tokens(row)
        ids = torch.from_numpy(bucket.samples.input_ids[tokens].astype(np.int64)).to(device)
        records = np.zeros(round_up(len(ids), CHUNK_TOKENS) * spec.record_bytes, dtype=np.uint8)
        bucket.read_row(reader, row, records)
        held = torch.from_numpy(records).view(-1, spec.record_bytes)[: len(ids)].to(device)
        taps = read_taps(held, spec, runner.dtype)
        for first, end in _answers(bucket.samples.loss_mask[tokens]):
            total += replay(runner, ids[:end], taps[:end], first, finished=True)
    return total


def _answers(loss_mask: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """First position and end of every run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask, [0]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def along_path(lengths: Sequence[int]) -> tuple[int, int]:
    """Tokens and blocks of the path through consecutive positions with these accepted lengths."""
    position = blocks = 0
    while position < len(lengths):
        position += lengths[position]
        blocks += 1
    return position, blocks
