"""Brings ready ring buffers to the device: slots allocated once, a copy stream, events instead of syncs.

While the step works on one slot, the copy stream fills the other. The host waits only when the device is so far behind
that a ring buffer is still in transit; on the CPU a ring buffer is the slot.
"""

from collections import deque
from typing import Protocol

import torch

from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.order import MicroBatch
from draftcache.train.ring import BUFFERS, Filled, Ring

SLOTS = 2
_MAX_IN_TRANSIT = BUFFERS - 2  # so that readers always have buffers to fill


class Slots(Protocol):
    """Hands out micro-batches on the step's device, in order."""

    def take(self) -> tuple[MicroBatch, FlatBatch]:
        """The next micro-batch. The one handed out before is free again: its step must have been launched."""
        ...


class HostSlots:
    """The ring's own buffers, for a step that runs on the CPU."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._held: Filled | None = None

    def take(self) -> tuple[MicroBatch, FlatBatch]:
        """See Slots."""
        if self._held is not None:
            self._ring.give_back(self._held)
        self._held = self._ring.take()
        return self._held.micro_batch, self._held.batch


class DeviceSlots:
    """Two slots on a CUDA device."""

    def __init__(self, ring: Ring, max_tokens: int, record_bytes: int, device: torch.device) -> None:
        self._ring = ring
        self._record_bytes = record_bytes
        nbytes = batch_bytes(max_tokens, record_bytes)
        self._blocks = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._stream = torch.cuda.Stream(device)
        self._consumed = [torch.cuda.Event() for _ in range(SLOTS)]
        self._in_transit: deque[tuple[Filled, torch.cuda.Event]] = deque()
        self._count = 0
        self._stream.wait_stream(torch.cuda.current_stream())

    def take(self) -> tuple[MicroBatch, FlatBatch]:
        """See Slots."""
        compute = torch.cuda.current_stream()
        if self._count:
            self._consumed[(self._count - 1) % SLOTS].record(compute)
        self._release_arrived()
        filled = self._ring.take()
        slot = self._count % SLOTS
        batch = view_batch(self._blocks[slot], filled.batch.tokens, self._record_bytes)
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._consumed[slot])
            batch.block.copy_(filled.batch.block, non_blocking=True)
            arrived.record()
        compute.wait_event(arrived)
        self._in_transit.append((filled, arrived))
        self._count += 1
        return filled.micro_batch, batch

    def _release_arrived(self) -> None:
        while self._in_transit:
            filled, arrived = self._in_transit[0]
            if len(self._in_transit) >= _MAX_IN_TRANSIT:
                arrived.synchronize()
            elif not arrived.query():
                return
            self._in_transit.popleft()
            self._ring.give_back(filled)
