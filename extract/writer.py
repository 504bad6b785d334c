"""Takes finished batches to the host and commits them behind the next forward.

Two host buffers and one thread. On a GPU the buffers are pinned and a copy stream fills them while the next forward
already runs; the thread waits for the copy, never the loop. While it writes one batch, the other buffer takes the next.
The order is fixed: records on disk and flushed, then the journal. An error in the thread is raised by the next `submit`
or when the writer is left.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from draftcache.common.journal import Journal, JournalEntry
from draftcache.common.memory import aligned_bytes
from draftcache.common.pinned import pin, unpin
from draftcache.common.shard import write_shard
from draftcache.common.store import Bucket
from draftcache.extract.buckets import Batch

_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class _HostBatch:
    """One host buffer and what it holds: records [n, S, R] uint8 and void flags [n], once `copied` has happened."""

    buffer: Tensor
    records: Tensor
    void: Tensor
    copied: torch.cuda.Event | None


class Writer:
    """Commits batches in the order in which they are submitted. Use as a context manager."""

    def __init__(self, journal: Journal, max_bytes: int, device: torch.device | None = None) -> None:
        self._journal = journal
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._free = [torch.from_numpy(aligned_bytes(max_bytes)) for _ in range(_BUFFERS)]
        if self._stream is not None:
            for buffer in self._free:
                pin(buffer)
        self._pending: deque[tuple[Future[None], Tensor]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self.seconds = 0.0
        """Spent on disk so far."""
        self.void_samples = 0
        """Committed so far as rows that are never read."""

    def submit(
        self,
        batch: Batch,
        bucket: Bucket,
        records: Tensor,  # [n, S, R] uint8 on any device; on the CPU it may be overwritten once this returns
        lengths: Sequence[int],
        void: Tensor | None = None,  # [n] bool on the same device; None: no row is void
    ) -> torch.cuda.Event | None:
        """Queue the records; waits while both host buffers are in use.

        Returns the event before which records on a GPU must not be overwritten.
        """
        if not self._free:
            self._finish_oldest()
        held = self._copy(
            self._free.pop(), records, torch.zeros(len(lengths), dtype=torch.bool) if void is None else void
        )
        self._pending.append((self._thread.submit(self._commit, batch, bucket, held, list(lengths)), held.buffer))
        return held.copied

    def finish(self) -> None:
        """Wait until everything submitted is committed."""
        while self._pending:
            self._finish_oldest()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self._thread.shutdown(wait=True)
            if self._stream is not None:
                self._stream.synchronize()
                for buffer in (*self._free, *(buffer for _, buffer in self._pending)):
                    unpin(buffer)

    def _copy(self, buffer: Tensor, records: Tensor, void: Tensor) -> _HostBatch:
        host = buffer[: records.numel()].view(records.shape)
        if self._stream is None:
            host.copy_(records)
            return _HostBatch(buffer, host, void.cpu(), None)
        flags = torch.empty(len(void), dtype=torch.bool, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(records.device))
        with torch.cuda.stream(self._stream):
            host.copy_(records, non_blocking=True)
            flags.copy_(void, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        void.record_stream(self._stream)
        return _HostBatch(buffer, host, flags, copied)

    def _commit(self, batch: Batch, bucket: Bucket, held: _HostBatch, lengths: list[int]) -> None:
        if held.copied is not None:
            held.copied.synchronize()
        begin = time.perf_counter()
        void = tuple(held.void.nonzero().flatten().tolist())
        digests = write_shard(bucket.shard_path(batch.shard), bucket.geometry, held.records.numpy(), lengths)
        size = bucket.geometry.file_bytes(lengths)
        entry = JournalEntry(bucket=batch.ceiling, shard=batch.shard, size=size, digests=digests, void=void)
        self._journal.append(entry)
        self.void_samples += len(void)
        self.seconds += time.perf_counter() - begin

    def _finish_oldest(self) -> None:
        future, buffer = self._pending.popleft()
        self._free.append(buffer)
        future.result()
