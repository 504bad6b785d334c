"""Runs the frozen target over a batch and fills that batch's records in a device buffer allocated once.

Taps are copied out by forward hooks on the decoder layers, so no layer's output is kept longer than needed. Samples are
padded on the right: under causal attention a real token never sees what follows it, so no attention mask is needed and
any fill id gives the same states.

Shapes: n rows of the batch, C ceiling, S row stride, K taps, H target width, R record bytes.
"""

from collections.abc import Sequence
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from draftcache.common.codec import put_tap, put_teacher
from draftcache.common.layout import row_stride
from draftcache.common.record import RecordSpec
from draftcache.common.store import BucketSamples
from draftcache.common.target import Target, tap_layers
from draftcache.extract.buckets import Batch

FILL_ID = 0
"""Token id in the padding of a batch; no stored state depends on it."""


class Forward:
    """The target with its hooks and its record buffer. Close it to remove the hooks."""

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[int],
        record: RecordSpec,
        max_tokens: int,  # largest rows x stride of any batch
        device: torch.device,
    ) -> None:
        self._target = target
        self._record = record
        self._buffer = torch.zeros(max_tokens * record.record_bytes, dtype=torch.uint8, device=device)
        self._device = device
        self._records: Tensor | None = None  # [n, C, R] uint8, view of the buffer during a forward
        self._hooks = tap_layers(target, layer_ids, self._tap)

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,  # [n, C] int64
        lengths: Tensor,  # [n] int64
    ) -> Tensor:  # [n, S, R] uint8, zero beyond each length; overwritten by the next call
        """Run one batch."""
        rows, ceiling = input_ids.shape
        stride, nbytes = row_stride(ceiling), self._record.record_bytes
        records = self._buffer[: rows * stride * nbytes].view(rows, stride, nbytes)
        self._records = records[:, :ceiling]
        last = self._target.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        put_teacher(self._records, self._record, last, self._target.head)
        self._records = None
        padding = torch.arange(stride, device=self._device) >= lengths[:, None]
        return records.masked_fill_(padding[..., None], 0)

    def __enter__(self) -> "Forward":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def _tap(self, position: int, hidden: Tensor) -> None:
        if self._records is not None:
            put_tap(self._records, self._record, position, hidden)


def batch_inputs(bucket: BucketSamples, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """The ids [n, C] int64, right-padded, and lengths [n] int64 of one batch, on the device."""
    ids = np.full((batch.count, bucket.ceiling), FILL_ID, dtype=np.int64)
    rows = range(batch.first, batch.first + batch.count)
    for position, row in enumerate(rows):
        tokens = bucket.input_ids[bucket.tokens(row)]
        ids[position, : len(tokens)] = tokens
    lengths = bucket.lengths[rows.start : rows.stop]
    return torch.from_numpy(ids).to(device), torch.from_numpy(np.ascontiguousarray(lengths)).to(device)
