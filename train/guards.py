"""What makes a run stop, or speak up: signals, updates that change nothing, results too good to be true, no memory."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch

from draftcache.common.errors import TrainingError

MAX_SKIPPED_IN_A_ROW = 3
EARLY_STEPS = 200
_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""What torch says on the CPU in place of an error of its own for too little memory."""
TOO_GOOD_SHARE = 0.9
"""Of a block's most tokens: no honest drafter accepts so much within EARLY_STEPS steps."""


class StopRequest:
    """Turns the first SIGTERM or Ctrl-C into a flag; the second acts as ever. Use as a context manager."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def is_stuck(skipped_in_a_row: int) -> bool:
    """Whether too many updates in a row changed nothing."""
    return skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW


def stuck_error(skipped_in_a_row: int, step: int) -> TrainingError:
    """What to say then."""
    return TrainingError(
        f"{skipped_in_a_row} updates in a row, for step {step}, changed nothing: gradients were not finite, or no "
        "slot was trained",
        needed="finite gradients",
        do="lower --lr, and look at the store with `draftcache stats`; the last checkpoint is sound",
    )


def too_good(step: int, accepted_length: float | None, block_size: int) -> str | None:
    """A warning if a run knows too early what it cannot know."""
    if step > EARLY_STEPS or accepted_length is None or accepted_length < TOO_GOOD_SHARE * block_size:
        return None
    return (
        f"warning: accepted length {accepted_length:.2f} of at most {block_size} at step {step} is too good to be "
        "true: either this data repeats itself, or the drafter sees what it should predict; look at the held-out "
        "figures and decode with `draftcache evaluate` before training on"
    )


@contextmanager
def naming_memory(part: str, lower: str) -> Iterator[None]:
    """Turn out-of-memory into an error that names the part and what to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and _CPU_ALLOCATOR not in str(error):
            raise
        raise TrainingError(
            f"out of memory for {part}{_usage(error)}", needed="memory for it", do=f"lower {lower}"
        ) from None


def _usage(error: BaseException) -> str:
    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    return f" on the device: {free / 1e9:.1f} of {total / 1e9:.1f} GB were free"
