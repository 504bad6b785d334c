"""How fast a run is and what it waits for: one report between two looks at the device.

tokens_s, blocks_s, supervised_s    over all processes; supervised ones are the slots that were trained
wait_share                          of the time: the step stood still because its micro-batch was not there
read_gb_s                           bytes from the store for the micro-batches of this process, over the time
copy_gb_s                           host to device, while a copy ran; None on the CPU
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIMIT_SHARE = 0.03
"""Of the time spent waiting, from which the disk is called the limit: below it, faster reads would hardly be seen."""
SPEED_NAMES = ("seconds", "tokens_s", "blocks_s", "supervised_s", "wait_share", "read_gb_s", "copy_gb_s")
"""The columns of metrics.jsonl that depend on the clock; the same for all steps of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What came from the store to the device."""

    read_bytes: int = 0  # from the store, checksums and index included
    copied_bytes: int = 0  # from host to device
    copy_seconds: float = 0.0  # during which a copy ran
    wait_seconds: float = 0.0  # during which the step stood still for want of a micro-batch

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            read_bytes=self.read_bytes + other.read_bytes,
            copied_bytes=self.copied_bytes + other.copied_bytes,
            copy_seconds=self.copy_seconds + other.copy_seconds,
            wait_seconds=self.wait_seconds + other.wait_seconds,
        )


class Meter:
    """The clock of a run. `began`: `time.perf_counter()` when the run was asked for."""

    def __init__(self, began: float) -> None:
        self.began = began
        self._last = time.perf_counter()

    def restart(self) -> float:
        """Begin the next report; seconds since the last one began."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before

    def since_began(self) -> float:
        """Seconds since the run was asked for."""
        return time.perf_counter() - self.began


def speed_columns(rows: Sequence[dict[str, Any]], seconds: float, traffic: Traffic) -> dict[str, float | None]:
    """The report of these steps' rows, which took so many seconds together; keys are SPEED_NAMES."""
    totals = {name: sum(row[name] for row in rows) / seconds for name in ("tokens", "blocks", "supervised")}
    found = {
        "seconds": seconds / len(rows),
        **{f"{name}_s": value for name, value in totals.items()},
        "wait_share": min(1.0, traffic.wait_seconds / seconds),
        "read_gb_s": traffic.read_bytes / seconds / 1e9,
        "copy_gb_s": traffic.copied_bytes / traffic.copy_seconds / 1e9 if traffic.copy_seconds else None,
    }
    return {name: None if value is None else float(f"{value:.6g}") for name, value in found.items()}


def disk_limit(wait_share: float, read_gb_s: float) -> str | None:
    """What to say if the disk is the limit: how fast it is and how fast it would have to be."""
    if wait_share < LIMIT_SHARE:
        return None
    if wait_share >= 1:
        return f"the disk is the limit: steps only waited for data, read at {read_gb_s:.2f} GB/s"
    return (
        f"the disk is the limit: steps waited for data {wait_share:.0%} of the time; it gave {read_gb_s:.2f} GB/s, "
        f"and {read_gb_s / (1 - wait_share):.2f} GB/s would be needed"
    )
