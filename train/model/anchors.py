"""Draws anchors and lays out their blocks on the device, with static shapes and without a host read.

The draw is stateless: every valid position gets the key (hash32(seed, epoch, sample, position) << 20) | flat position,
and the A smallest keys win. Keys are unique integers, so the draw is the same on every device, and there is no
generator whose state could be lost.

Legend: T context tokens, A anchors, B block size, Q = A * B queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from draftcache.common.errors import UsageError
from draftcache.train.batch import FlatBatch

MAX_SEED = 0xFFFFFFFF
POSITION_BITS = 20
MAX_CONTEXT_TOKENS = 1 << POSITION_BITS
_MASK32 = 0xFFFFFFFF
_INVALID_KEY = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A blocks of B slots over one context. Dropped blocks (`keep` False) train nothing and see only themselves."""

    anchors: Tensor  # [A] int64, flat position, ascending; dropped ones last
    keep: Tensor  # [A] bool
    first: Tensor  # [A] int64, flat position of the first token of the anchor's document
    input_ids: Tensor  # [A, B] int64: the anchor's own token, then mask tokens
    positions: Tensor  # [A, B] int64: position in the document
    labels: Tensor  # [A, B] int64: the data's token at each slot
    teacher_rows: Tensor  # [A, B] int64: flat position whose last hidden state predicts the label
    valid: Tensor  # [A, B] bool: slots that are trained; never slot 0


def check_seed(seed: int) -> None:
    """Raise UsageError for a seed of more than the 32 bits that `hash32` tells apart."""
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed {seed}", needed=f"within [0, {MAX_SEED}]", do="correct --seed")


def hash32(seed: int, epoch: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """A 32-bit hash of its arguments as int64, element by element; equal on every device. Mixer: MurmurHash3's."""
    state = _mix((epoch.long() & _MASK32) ^ _mix_int(seed))
    state = _mix(state ^ (samples.long() & _MASK32))
    state = _mix(state ^ (samples.long() >> 32))
    return _mix(state ^ positions.long())


def draw_anchors(
    batch: FlatBatch,
    seed: int,
    count: int,
) -> tuple[Tensor, Tensor]:  # anchors [A] int64 ascending, keep [A] bool
    """Draw `count` anchors without replacement; where there are fewer valid positions the rest is dropped.

    A position t >= 1 of a document is valid if it and t + 1 are supervised and lie in that document.
    """
    tokens = batch.tokens
    mask, documents = batch.loss_mask.bool(), batch.documents
    valid = (
        mask[:-1] & mask[1:] & (documents[:-1] == documents[1:]) & (documents[:-1] >= 0) & (batch.positions[:-1] > 0)
    )
    flat = torch.arange(tokens - 1, device=mask.device)
    keys = (hash32(seed, batch.epoch, batch.samples[:-1], batch.positions[:-1]) << POSITION_BITS) | flat
    keys = functional.pad(keys.where(valid, _INVALID_KEY), (0, max(0, count - len(keys))), value=_INVALID_KEY)
    winners = torch.topk(keys, count, largest=False, sorted=False).values
    order = torch.where(winners < _INVALID_KEY, winners & (MAX_CONTEXT_TOKENS - 1), MAX_CONTEXT_TOKENS).sort().values
    return order.clamp_max(tokens - 1), order < MAX_CONTEXT_TOKENS


def lay_out_blocks(
    batch: FlatBatch,
    anchors: Tensor,  # [A] int64
    keep: Tensor,  # [A] bool
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Ids, positions, labels and teacher rows of every slot. Slot k of an anchor at t predicts token t + k."""
    slots = torch.arange(block_size, device=anchors.device)
    anchor_positions = batch.positions[anchors].long()
    reach = anchors[:, None] + slots
    flat = reach.clamp_max(batch.tokens - 1)
    labels = batch.input_ids[flat]
    same_document = (batch.documents[flat] == batch.documents[anchors][:, None]) & (reach < batch.tokens)
    return Blocks(
        anchors=anchors,
        keep=keep,
        first=anchors - anchor_positions,
        input_ids=labels.where(slots == 0, mask_token_id),
        positions=anchor_positions[:, None] + slots,
        labels=labels,
        teacher_rows=(flat - 1).clamp_min(0),
        valid=keep[:, None] & (slots > 0) & same_document & batch.loss_mask[flat].bool(),
    )


def _mix(state: Tensor) -> Tensor:
    state = state ^ (state >> 16)
    state = (state * 0x85EBCA6B) & _MASK32
    state = state ^ (state >> 13)
    state = (state * 0xC2B2AE35) & _MASK32
    return state ^ (state >> 16)


def _mix_int(value: int) -> int:
    return int(_mix(torch.tensor(value & _MASK32, dtype=torch.int64)))
