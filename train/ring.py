"""A fixed ring of host buffers filled by reader threads: free, filling, ready, in transit, nothing else.

Every buffer goes through these four states in this order, and holds one micro-batch from the second to the last. The
work of a reader is one row: it takes the next row of the oldest buffer that has one left, so all readers together fill
the micro-batch that the loop waits for, and go over into the next one as its rows run out. The loop takes ready buffers
in the order of their micro-batches and gives them back when the device has them. What goes wrong in a reader is raised
in the loop, at the micro-batch that it concerns.
"""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from draftcache.common.errors import DraftcacheError, StoreError, TrainingError, first_line
from draftcache.common.layout import CHUNK_TOKENS, round_up
from draftcache.common.manifest import MANIFEST_NAME
from draftcache.common.memory import aligned_bytes
from draftcache.common.pinned import pin, unpin
from draftcache.common.shard import RowReader
from draftcache.common.store import Store
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.order import MicroBatch

THREADS = 8
"""Requests in flight: disks were measured at 1.1 GB/s with one and 1.5 GB/s with eight of them, and copying out of the
page cache beside checksums takes several cores to pass 5 GB/s. Both wait or compute without the interpreter's lock."""
BUFFERS = 4
"""One in transit, one ready, and two being filled: a micro-batch of long samples has fewer rows than there are readers,
who then go on in the next one. More would only put off the moment when a slow disk is felt."""
_LOOK_S = 1.0
"""How often a waiting loop looks whether its readers still live."""
_GO_ON = "put that right, then go on from the last checkpoint with `draftcache train --resume`"


class State(Enum):
    """What a buffer is."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    IN_TRANSIT = "in transit"


@dataclass(frozen=True, slots=True)
class Filled:
    """A buffer in transit: the micro-batch, the host memory that holds it, and what was read for it."""

    micro_batch: MicroBatch
    batch: FlatBatch
    buffer: int
    read_bytes: int


@dataclass(slots=True, eq=False)
class _Buffer:
    """One buffer; whoever changes it holds the ring's lock."""

    block: Tensor
    state: State = State.FREE
    micro_batch: MicroBatch | None = None
    batch: FlatBatch | None = None
    unclaimed: int = 0  # rows that no reader has begun
    unread: int = 0  # rows that are not there yet
    read_bytes: int = 0
    error: BaseException | None = None  # that a reader met; the buffer is then never ready

    def move(self, old: State, new: State) -> None:
        assert self.state is old, f"a ring buffer that is {self.state.value} cannot go on as {new.value}"
        self.state = new


class Ring:
    """Reads micro-batches ahead of the loop. Use as a context manager."""

    def __init__(self, store: Store, micro_batches: Iterator[MicroBatch], max_tokens: int, *, pinned: bool) -> None:
        """`max_tokens`: of the longest micro-batch."""
        self._store = store
        self._record_bytes = store.manifest.record.record_bytes
        self._micro_batches = micro_batches
        nbytes = batch_bytes(max_tokens, self._record_bytes)
        self._buffers = [_Buffer(torch.from_numpy(aligned_bytes(nbytes))) for _ in range(BUFFERS)]
        self._pinned = pinned
        if pinned:
            for buffer in self._buffers:
                pin(buffer.block)
        self._changed = threading.Condition()
        self._line: deque[_Buffer] = deque()  # the filling and ready ones, oldest micro-batch first
        self._beginning = False  # a reader is asking for the next micro-batch
        self._ended = False  # no micro-batch comes any more
        self._end_error: BaseException | None = None  # why, if it is not the end of all
        self._stopping = False
        self._left = 0  # readers that had nothing left to do
        self._threads = [threading.Thread(target=self._run, name=f"reader-{i}", daemon=True) for i in range(THREADS)]
        for thread in self._threads:
            thread.start()

    @property
    def states(self) -> list[State]:
        """What each buffer is at this moment."""
        with self._changed:
            return [buffer.state for buffer in self._buffers]

    def take(self) -> Filled:
        """The next micro-batch in order; waits for it. Raises what its readers met, or that a reader died."""
        with self._changed:
            while (filled := self._take_ready()) is None:
                self._raise_what_went_wrong()
                self._changed.wait(_LOOK_S)
            return filled

    def take_ready(self) -> Filled | None:
        """The next micro-batch if it is there and all is well; otherwise `take` waits for it or says what is wrong."""
        with self._changed:
            return self._take_ready()

    def give_back(self, filled: Filled) -> None:
        """The buffer may be filled again."""
        with self._changed:
            self._buffers[filled.buffer].move(State.IN_TRANSIT, State.FREE)
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
            for buffer in self._buffers:
                unpin(buffer.block)

    def _take_ready(self) -> Filled | None:
        if self._reader_died() or not self._line or self._line[0].state is not State.READY:
            return None
        buffer = self._line.popleft()
        buffer.move(State.READY, State.IN_TRANSIT)
        assert buffer.micro_batch is not None and buffer.batch is not None, "a ready buffer that holds nothing"  # noqa: PT018
        return Filled(buffer.micro_batch, buffer.batch, self._buffers.index(buffer), buffer.read_bytes)

    def _raise_what_went_wrong(self) -> None:
        if self._line and self._line[0].error is not None:
            raise _as_ours(self._line[0].error, self._line[0].micro_batch)
        if self._ended and not self._line:
            assert self._end_error is not None, "more micro-batches taken than the iterator holds"
            raise _as_ours(self._end_error, None)
        if self._reader_died():
            raise _dead_reader("its thread is gone", None)

    def _reader_died(self) -> bool:
        return sum(not thread.is_alive() for thread in self._threads) > self._left

    def _run(self) -> None:
        """A reader's life."""
        reader = RowReader()
        while (claim := self._claim()) is not None:
            self._fill(reader, *claim)
        with self._changed:
            self._left += 1

    def _claim(self) -> tuple[_Buffer, int] | None:
        """The next row to read, of the oldest buffer that has one; None if nothing is left to do."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._stopping:
                    return None
                for buffer in self._line:
                    if buffer.unclaimed:
                        assert buffer.micro_batch is not None, "rows of no micro-batch"
                        buffer.unclaimed -= 1
                        return buffer, len(buffer.micro_batch.rows) - buffer.unclaimed - 1
                if self._ended:
                    return None
                self._beginning = True
            self._begin()

    def _has_work(self) -> bool:
        if self._stopping or self._ended or any(buffer.unclaimed for buffer in self._line):
            return True
        return not self._beginning and self._free() is not None

    def _free(self) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.state is State.FREE), None)

    def _begin(self) -> None:
        """Ask for the next micro-batch, which may take a while at an epoch's end, and offer its rows to all readers."""
        micro_batch = error = None
        try:
            micro_batch = next(self._micro_batches, None)
        except BaseException as raised:  # raised again in the loop
            error = raised
        with self._changed:
            buffer = self._free()
            if micro_batch is None:
                self._ended, self._end_error, self._beginning = True, error, False
                self._changed.notify_all()
                return
            assert buffer is not None, "a micro-batch was begun without a free buffer"
            buffer.move(State.FREE, State.FILLING)
            batch = view_batch(buffer.block, micro_batch.tokens, self._record_bytes)
            buffer.micro_batch, buffer.batch, buffer.read_bytes = micro_batch, batch, 0
            self._line.append(buffer)
        clear_batch(micro_batch, batch)
        with self._changed:
            buffer.unclaimed = buffer.unread = len(micro_batch.rows)
            self._beginning = False
            self._ready_if_read(buffer)
            self._changed.notify_all()

    def _fill(self, reader: RowReader, buffer: _Buffer, number: int) -> None:
        """Read one row into its place."""
        assert buffer.micro_batch is not None and buffer.batch is not None, "a row of no micro-batch"  # noqa: PT018
        try:
            read = fill_row(self._store, reader, buffer.micro_batch, number, buffer.batch)
        except BaseException as error:  # raised again in the loop
            with self._changed:
                buffer.error = buffer.error or error
                self._ended = True
                self._changed.notify_all()
            return
        with self._changed:
            buffer.unread -= 1
            buffer.read_bytes += read
            self._ready_if_read(buffer)

    def _ready_if_read(self, buffer: _Buffer) -> None:
        if not buffer.unread:
            buffer.move(State.FILLING, State.READY)
            self._changed.notify_all()


def fill_batch(store: Store, reader: RowReader, micro_batch: MicroBatch, batch: FlatBatch) -> int:
    """Fill a host FlatBatch with a micro-batch's rows; returns bytes read. Raises DamageError for a damaged row."""
    clear_batch(micro_batch, batch)
    return sum(fill_row(store, reader, micro_batch, number, batch) for number in range(len(micro_batch.rows)))


def clear_batch(micro_batch: MicroBatch, batch: FlatBatch) -> None:
    """Make a host FlatBatch one of padding only; records keep what rows will overwrite."""
    for tensor, value in (
        (batch.input_ids, 0),
        (batch.samples, 0),
        (batch.positions, 0),
        (batch.documents, -1),
        (batch.loss_mask, 0),
    ):
        tensor.numpy().fill(value)
    batch.epoch.fill_(micro_batch.epoch)
    before = micro_batch.rows[0].first if micro_batch.rows else micro_batch.tokens
    batch.records.numpy()[:before] = 0


def fill_row(store: Store, reader: RowReader, micro_batch: MicroBatch, number: int, batch: FlatBatch) -> int:
    """Fill a row's place, up to the next row or the end; returns bytes read. Raises DamageError for a damaged row."""
    row = micro_batch.rows[number]
    end = micro_batch.rows[number + 1].first if number + 1 < len(micro_batch.rows) else micro_batch.tokens
    assert end - row.first >= round_up(row.length, CHUNK_TOKENS), "rows that overlap"
    bucket = store.buckets[row.ceiling]
    try:
        read = bucket.read_row(reader, row.row, batch.records.numpy()[row.first : end].reshape(-1))
    except DraftcacheError:
        if (store.path / MANIFEST_NAME).exists():
            raise
        raise StoreError(
            f"{store.path} is no longer there", needed="the store for as long as a run lasts", do=_GO_ON
        ) from None
    here, tokens = slice(row.first, row.first + row.length), bucket.samples.tokens(row.row)
    batch.input_ids.numpy()[here] = bucket.samples.input_ids[tokens]
    batch.loss_mask.numpy()[here] = bucket.samples.loss_mask[tokens]
    batch.samples.numpy()[here] = row.sample
    batch.positions.numpy()[here] = np.arange(row.length)
    batch.documents.numpy()[here] = number
    return read


def _as_ours(error: BaseException, micro_batch: MicroBatch | None) -> DraftcacheError:
    """What the loop raises for an error that a reader met."""
    if isinstance(error, DraftcacheError):
        return error
    died = _dead_reader(f"{type(error).__name__}: {first_line(error)}", micro_batch)
    died.__cause__ = error
    return died


def _dead_reader(why: str, micro_batch: MicroBatch | None) -> TrainingError:
    samples = [row.sample for row in micro_batch.rows] if micro_batch else []
    shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
    where = f" at a micro-batch of samples {shown}" if samples else ""
    return TrainingError(f"a reader of the store died{where}: {why}", needed="all readers", do=_GO_ON)
