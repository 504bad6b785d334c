"""Takes finished batches to the host and commits them behind the next forward.

Two host buffers and one thread: while the thread writes one batch, the next forward fills the device buffer and the
other host buffer. The order is fixed: records on disk and flushed, then the journal. An error in the thread is raised
by the next `submit` or by `close`.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from draftcache.common.journal import Journal, JournalEntry
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import Bytes, write_shard
from draftcache.common.store import Bucket
from draftcache.extract.buckets import Batch

_BUFFERS = 2


class Writer:
    """Commits batches in the order in which they are submitted. Use as a context manager."""

    def __init__(self, journal: Journal, max_bytes: int) -> None:
        self._journal = journal
        self._free = [aligned_bytes(max_bytes) for _ in range(_BUFFERS)]
        self._pending: deque[tuple[Future[None], Bytes]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")

    def submit(
        self,
        batch: Batch,
        bucket: Bucket,
        records: Tensor,  # [n, S, R] uint8 on any device; may be overwritten once this returns
        lengths: Sequence[int],
    ) -> None:
        """Copy the records to the host and queue them; waits while both host buffers are in use."""
        if not self._free:
            self._finish_oldest()
        buffer = self._free.pop()
        host = buffer[: records.numel()].reshape(records.shape)
        torch.from_numpy(host).copy_(records)
        self._pending.append((self._thread.submit(self._commit, batch, bucket, host, list(lengths)), buffer))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            while self._pending and error is None:
                self._finish_oldest()
        finally:
            self._thread.shutdown(wait=True)

    def _commit(self, batch: Batch, bucket: Bucket, host: Bytes, lengths: list[int]) -> None:
        digests = write_shard(bucket.shard_path(batch.shard), bucket.geometry, host, lengths)
        size = bucket.geometry.file_bytes(lengths)
        self._journal.append(JournalEntry(bucket=batch.ceiling, shard=batch.shard, size=size, digests=digests))

    def _finish_oldest(self) -> None:
        future, buffer = self._pending.popleft()
        self._free.append(buffer)
        future.result()
