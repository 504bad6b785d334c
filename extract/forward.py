"""Runs the frozen target over a batch and fills that batch's records in a device buffer allocated once.

Taps are copied out by forward hooks on the decoder layers, so no layer's output is kept longer than needed, and only
the decoder runs: no logits exist but the chunks that teacher `top` needs. Samples are padded on the right: under causal
attention, sliding windows, causal convolutions and recurrences a real token never sees what follows it, so no attention
mask is needed and any fill id gives the same states.

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
        self.device = device
        self._records: Tensor | None = None  # [n, C, R] uint8, view of the buffer during a forward
        self._wrong = torch.zeros(0)  # [n, C] bool: tokens with a state that is not finite, or all zero
        self._being_read: torch.cuda.Event | None = None
        self.void = torch.zeros(0, dtype=torch.bool)
        """[n] bool on the device: rows of the last batch with such a token."""
        self._hooks = tap_layers(target, layer_ids, self._tap)

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,  # [n, C] int64
        lengths: Tensor,  # [n] int64
    ) -> Tensor:  # [n, S, R] uint8, zero beyond each length; overwritten by the next call
        """Run one batch. Nothing here waits for the device; transformers does once, for the batch before it."""
        rows, ceiling = input_ids.shape
        stride, nbytes = row_stride(ceiling), self._record.record_bytes
        records = self._buffer[: rows * stride * nbytes].view(rows, stride, nbytes)
        self._records = records[:, :ceiling]
        self._wrong = torch.zeros(rows, ceiling, dtype=torch.bool, device=self.device)
        last = self._target.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        self._wait_for_reader()
        self._mark_wrong(last)
        put_teacher(self._records, self._record, last, self._target.head, self._target.ends)
        self._records = None
        padding = torch.arange(stride, device=self.device) >= lengths[:, None]
        self.void = (self._wrong & ~padding[:, :ceiling]).any(-1)
        return records.masked_fill_(padding[..., None], 0)

    def being_read_until(self, event: torch.cuda.Event | None) -> None:
        """The next forward's first write to the records waits for `event`; the layers before that tap do not."""
        self._being_read = event

    def __enter__(self) -> "Forward":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def _tap(self, position: int, hidden: Tensor) -> None:
        if self._records is not None:
            self._wait_for_reader()
            self._mark_wrong(hidden)
            put_tap(self._records, self._record, position, hidden)

    def _wait_for_reader(self) -> None:
        if self._being_read is not None:
            torch.cuda.current_stream(self.device).wait_event(self._being_read)
            self._being_read = None

    def _mark_wrong(self, hidden: Tensor) -> None:
        peak = torch.linalg.vector_norm(hidden.to(torch.bfloat16), float("inf"), dim=-1).to(self.device)
        self._wrong |= ~peak.isfinite() | (peak == 0)


def batch_inputs(bucket: BucketSamples, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """The ids [n, C] int64, right-padded, and lengths [n] int64 of one batch, on the device."""
    ids = np.full((batch.count, bucket.ceiling), FILL_ID, dtype=np.int64)
    rows = range(batch.first, batch.first + batch.count)
    for position, row in enumerate(rows):
        tokens = bucket.input_ids[bucket.tokens(row)]
        ids[position, : len(tokens)] = tokens
    lengths = np.ascontiguousarray(bucket.lengths[rows.start : rows.stop])
    return _to_device(torch.from_numpy(ids), device), _to_device(torch.from_numpy(lengths), device)


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy from pinned memory does not wait for the forward before it; one from ordinary memory does."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
