"""Brings ready ring buffers to the device: one slot allocated once, a copy stream, events instead of syncs.

The step copies the slot into its own input before anything else and then releases it, so the next micro-batch travels
while the step's graph runs. On the CPU a ring buffer is the slot.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.meter import Traffic
from draftcache.train.ring import Filled, Ring


class Slots(Protocol):
    """Hands out micro-batches on the step's device, in order, one at a time."""

    def take(self) -> FlatBatch:
        """The next micro-batch; the one before must have been released."""
        ...

    def release(self) -> None:
        """What has been launched so far is all that reads the micro-batch taken last."""
        ...

    def traffic(self) -> Traffic:
        """What was moved and waited for since the last call. The device must be done with all that was launched."""
        ...


class HostSlots:
    """The ring's own buffers, for a step that runs on the CPU."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._held: Filled | None = None
        self._traffic = Traffic()

    def take(self) -> FlatBatch:
        """See Slots."""
        assert self._held is None, "taken before the last micro-batch was released"
        began = time.perf_counter()
        self._held = self._ring.take()
        waited = time.perf_counter() - began
        self._traffic += Traffic(read_bytes=self._held.read_bytes, wait_seconds=waited)
        return self._held.batch

    def release(self) -> None:
        """See Slots."""
        assert self._held is not None, "released before a micro-batch was taken"
        self._ring.give_back(self._held)
        self._held = None

    def traffic(self) -> Traffic:
        """See Slots."""
        found, self._traffic = self._traffic, Traffic()
        return found


@dataclass(frozen=True, slots=True)
class _Coming:
    """A micro-batch on its way to the slot, or there: what was read for it, and the copy's begin and end."""

    filled: Filled
    begun: torch.cuda.Event
    arrived: torch.cuda.Event


class DeviceSlots:
    """One slot on a CUDA device."""

    def __init__(self, ring: Ring, max_tokens: int, record_bytes: int, device: torch.device) -> None:
        self._ring = ring
        self._record_bytes = record_bytes
        self._block = torch.zeros(batch_bytes(max_tokens, record_bytes), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream())
        self._free = torch.cuda.Event()
        self._coming: _Coming | None = None  # copied or being copied, not yet taken
        self._held: _Coming | None = None  # taken, its ring buffer not yet given back
        self._taken: list[tuple[_Coming, torch.cuda.Event, torch.cuda.Event]] = []  # with begin and end of the wait

    def take(self) -> FlatBatch:
        """See Slots."""
        assert self._held is None, "taken before the last micro-batch was released"
        compute = torch.cuda.current_stream()
        idle = _event_on(compute)  # when the device has done all that was launched before
        if self._coming is None:
            self._bring(self._ring.take())
        coming, self._coming = self._coming, None
        assert coming is not None, "brought nothing"
        compute.wait_event(coming.arrived)
        self._taken.append((coming, idle, _event_on(compute)))
        self._held = coming
        return view_batch(self._block, coming.filled.batch.tokens, self._record_bytes)

    def release(self) -> None:
        """See Slots. The next micro-batch sets out at once if it is ready.

        Waits for the arrival of this one, which the device is done with unless the step waits for it.
        """
        assert self._held is not None, "released before a micro-batch was taken"
        self._free.record(torch.cuda.current_stream())
        self._held.arrived.synchronize()
        self._ring.give_back(self._held.filled)
        self._held = None
        filled = self._ring.take_ready()
        if filled is not None:
            self._bring(filled)

    def traffic(self) -> Traffic:
        """See Slots."""
        found = Traffic()
        for coming, idle, going_on in self._taken:
            found += Traffic(
                read_bytes=coming.filled.read_bytes,
                copied_bytes=coming.filled.batch.block.numel(),
                copy_seconds=coming.begun.elapsed_time(coming.arrived) / 1000,
                wait_seconds=idle.elapsed_time(going_on) / 1000,
            )
        self._taken.clear()
        return found

    def _bring(self, filled: Filled) -> None:
        slot = view_batch(self._block, filled.batch.tokens, self._record_bytes)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free)
            begun = _event_on(self._stream)
            slot.block.copy_(filled.batch.block, non_blocking=True)
            self._coming = _Coming(filled, begun, _event_on(self._stream))


def _event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(stream)
    return event
