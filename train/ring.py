"""A fixed ring of host buffers filled by reader threads: free, filling, ready, in transit, nothing else.

Threads take micro-batches in order, each into a free buffer, and read its rows from the store with every byte checked.
The loop takes ready buffers in the same order and gives them back when the device has them. A reader's error is raised
in the loop, at the micro-batch that it concerns.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from draftcache.common.layout import CHUNK_TOKENS, round_up
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import RowReader
from draftcache.common.store import Store
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.order import MicroBatch

THREADS = 2
BUFFERS = 4


@dataclass(frozen=True, slots=True)
class Filled:
    """A buffer in transit: the micro-batch and the host memory that holds it."""

    micro_batch: MicroBatch
    batch: FlatBatch
    buffer: int


class Ring:
    """Reads micro-batches ahead of the loop. Use as a context manager."""

    def __init__(self, store: Store, micro_batches: Iterator[MicroBatch], max_tokens: int, *, pinned: bool) -> None:
        self._store = store
        self._record_bytes = store.manifest.record.record_bytes
        self._micro_batches = micro_batches
        nbytes = batch_bytes(max_tokens, self._record_bytes)
        self._blocks = [torch.from_numpy(aligned_bytes(nbytes)) for _ in range(BUFFERS)]
        self._pinned = pinned
        if pinned:
            for block in self._blocks:
                _check_cuda(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0))
        self._changed = threading.Condition()
        self._free = list(range(BUFFERS))
        self._ready: dict[int, Filled | BaseException | None] = {}  # by sequence number; None: the end
        self._claimed = 0
        self._taken = 0
        self._stopping = False
        self._threads = [threading.Thread(target=self._read, name=f"reader-{i}", daemon=True) for i in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def take(self) -> Filled:
        """The next micro-batch in order; waits for it. Raises the error that its reader met."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken in self._ready)
            result = self._ready.pop(self._taken)
            self._taken += 1
        assert result is not None, "more micro-batches taken than the iterator holds"
        if isinstance(result, BaseException):
            raise result
        return result

    def give_back(self, filled: Filled) -> None:
        """The buffer may be filled again."""
        with self._changed:
            self._free.append(filled.buffer)
            self._changed.notify_all()

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._pinned:
            torch.cuda.synchronize()
            for block in self._blocks:
                _check_cuda(torch.cuda.cudart().cudaHostUnregister(block.data_ptr()))

    def _read(self) -> None:
        reader = RowReader()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._free or self._stopping)
                if self._stopping:
                    return
                buffer, sequence = self._free.pop(), self._claimed
                self._claimed += 1
                claimed = self._next_micro_batch()
            result = self._fill(reader, claimed, buffer) if isinstance(claimed, MicroBatch) else claimed
            with self._changed:
                self._ready[sequence] = result
                self._changed.notify_all()
            if not isinstance(result, Filled):
                return

    def _next_micro_batch(self) -> MicroBatch | BaseException | None:
        try:
            return next(self._micro_batches, None)
        except BaseException as error:  # raised again in the loop
            return error

    def _fill(self, reader: RowReader, micro_batch: MicroBatch, buffer: int) -> Filled | BaseException:
        batch = view_batch(self._blocks[buffer], micro_batch.tokens, self._record_bytes)
        try:
            fill_batch(self._store, reader, micro_batch, batch)
        except BaseException as error:  # raised again in the loop
            return error
        return Filled(micro_batch, batch, buffer)


def fill_batch(store: Store, reader: RowReader, micro_batch: MicroBatch, batch: FlatBatch) -> int:
    """Fill a host FlatBatch with a micro-batch's rows; returns bytes read. Raises DamageError for a damaged row."""
    records = batch.records.numpy().reshape(-1)
    ids, samples, positions = batch.input_ids.numpy(), batch.samples.numpy(), batch.positions.numpy()
    documents, loss_mask = batch.documents.numpy(), batch.loss_mask.numpy()
    record_bytes = batch.records.shape[1]
    for array, value in ((ids, 0), (samples, 0), (positions, 0), (documents, -1), (loss_mask, 0)):
        array.fill(value)
    batch.epoch.fill_(micro_batch.epoch)
    read = used = 0
    for document, row in enumerate(micro_batch.rows):
        bucket = store.buckets[row.ceiling]
        end = row.first + round_up(row.length, CHUNK_TOKENS)
        records[used * record_bytes : row.first * record_bytes] = 0
        read += bucket.read_row(reader, row.row, records[row.first * record_bytes : end * record_bytes])
        used = end
        here, tokens = slice(row.first, row.first + row.length), bucket.samples.tokens(row.row)
        ids[here] = bucket.samples.input_ids[tokens]
        loss_mask[here] = bucket.samples.loss_mask[tokens]
        samples[here] = row.sample
        positions[here] = np.arange(row.length)
        documents[here] = document
    records[used * record_bytes :] = 0
    return read


def _check_cuda(error: object) -> None:
    code = int(getattr(error, "value", error))  # type: ignore[call-overload]
    assert code == 0, f"CUDA could not pin or release host memory: error {code}"
