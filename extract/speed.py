"""What limits an extraction: tokens per second of the forward and of writing, each by its own clock.

On a GPU forwards are timed by events in the stream, read when they have long passed, so that nothing waits for them.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Real tokens per second of each side alone, and of both together by the wall clock."""

    forward: float
    writing: float
    overall: float

    @property
    def slower_side(self) -> str:
        """Which of the two holds the other up."""
        return "the forward" if self.forward < self.writing else "writing"

    def __str__(self) -> str:
        return (
            f"forward {self.forward:,.0f} tokens/s, writing {self.writing:,.0f} tokens/s, both {self.overall:,.0f}: "
            f"{self.slower_side} is the slower side"
        )


class ForwardClock:
    """Sums up the seconds that forwards take on their device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is launched within."""
        if self._device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin
            return
        stream = torch.cuda.current_stream(self._device)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record(stream)
        yield
        events[1].record(stream)
        self._open.append(events)
        while self._open and self._open[0][1].query():
            self._add(*self._open.popleft())

    def seconds(self) -> float:
        """All forwards so far; waits for the last one."""
        while self._open:
            self._open[0][1].synchronize()
            self._add(*self._open.popleft())
        return self._seconds

    def _add(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._seconds += begin.elapsed_time(end) / 1000
