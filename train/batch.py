"""The flat context of one micro-batch as one typed record, the same on the host, in a device slot and in the step.

All arrays lie in one block of bytes, so that a whole micro-batch crosses to the device in one copy. Rows lie one after
another, each from a multiple of 64 tokens; tokens between and behind them have document -1 and loss mask 0.

Legend: T context tokens, R record bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftcache.common.layout import PAGE, round_up

_FIELDS = (
    ("input_ids", torch.int64),
    ("samples", torch.int64),
    ("positions", torch.int32),
    ("documents", torch.int32),
    ("loss_mask", torch.uint8),
)
EPOCH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """Views into one block of bytes."""

    block: Tensor  # [nbytes] uint8, everything below
    records: Tensor  # [T, R] uint8
    input_ids: Tensor  # [T] int64
    samples: Tensor  # [T] int64, sample number, part of the anchor draw's key
    positions: Tensor  # [T] int32, restart at 0 in each document
    documents: Tensor  # [T] int32, -1 on padding
    loss_mask: Tensor  # [T] uint8
    epoch: Tensor  # [1] int64, part of the anchor draw's key

    @property
    def tokens(self) -> int:
        """T."""
        return self.records.shape[0]


def batch_bytes(tokens: int, record_bytes: int) -> int:
    """Bytes of a FlatBatch of T tokens; a whole number of pages."""
    per_token = record_bytes + sum(dtype.itemsize for _, dtype in _FIELDS)
    return round_up(tokens * per_token + EPOCH_BYTES, PAGE)


def view_batch(block: Tensor, tokens: int, record_bytes: int) -> FlatBatch:
    """The FlatBatch that lies at the start of `block` (uint8, at least batch_bytes long, 8-byte aligned)."""
    block = block[: batch_bytes(tokens, record_bytes)]
    offset = tokens * record_bytes
    epoch = block[offset : offset + EPOCH_BYTES].view(torch.int64)
    offset += EPOCH_BYTES
    views: dict[str, Tensor] = {}
    for name, dtype in _FIELDS:
        nbytes = tokens * dtype.itemsize
        views[name] = block[offset : offset + nbytes].view(dtype)
        offset += nbytes
    records = block[: tokens * record_bytes].view(tokens, record_bytes)
    return FlatBatch(block=block, records=records, epoch=epoch, **views)
