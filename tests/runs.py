"""Small training runs for tests: their configuration, what they leave behind, and how to stop one at a given step."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from draftcache.common.store import Store
from draftcache.train.checkpoint import newest_checkpoint
from draftcache.train.meter import SPEED_NAMES
from draftcache.train.settings import GeometryOptions, TrainConfig, ValidationOptions
from draftcache.train.step import CapturedStep, EagerStep


def small_run(
    store: Store,
    out: Path,
    *,
    batching: str = "bucket",
    steps: int = 9,
    accumulate: int = 2,
    save_every: int | None = 3,
    log_every: int = 2,
    keep: int = 3,
    share: float = 0.2,
    validate_every: int = 4,
    patience: int | None = None,
) -> TrainConfig:
    """A run of a few steps on the CPU over several epochs of the small store, some of whose samples are held out."""
    return TrainConfig(
        store=store.path,
        out=out,
        geometry=GeometryOptions(num_layers=1, block_size=4),
        validation=ValidationOptions(validation_share=share, validate_every=validate_every, patience=patience),
        batching=batching,
        token_budget=256,
        anchors=16,
        accumulate=accumulate,
        steps=steps,
        save_every=save_every,
        log_every=log_every,
        keep=keep,
        device="cpu",
    )


def metrics(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """A run's rows without what depends on the clock."""
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in SPEED_NAMES} for row in rows]


def outcome(run: Path) -> dict[str, Any]:
    """What must be equal in two equal runs: the newest checkpoint byte for byte, and all rows."""
    checkpoint = newest_checkpoint(run)
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    rows = {name: metrics(run, name) for name in ("metrics.jsonl", "validation.jsonl")}
    return {"name": checkpoint.name, **files, **rows}


def steps_until(
    patch: pytest.MonkeyPatch,
    count: int,
    number: int = signal.SIGTERM,
    kind: type[EagerStep] | type[CapturedStep] = EagerStep,
) -> None:
    """Let the `count`th update of this kind of step be followed by a signal to this process."""
    update, left = kind.update, count

    def signalling(step: Any) -> None:
        nonlocal left
        update(step)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)

    patch.setattr(kind, "update", signalling)
