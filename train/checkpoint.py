"""Weights, optimizer and position of a run, as one atomic directory of safetensors and JSON.

    RUN/run.json                         what the run is: drafter, target, store, settings, versions
    RUN/metrics.jsonl                    one line per step
    RUN/checkpoint-00000200/             drafter.safetensors, optimizer.safetensors, state.json

A checkpoint is written aside and moved into place by one rename: a directory with its final name is complete.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcache.common import config as configs
from draftcache.common.errors import CheckpointError, UsageError, first_line
from draftcache.common.files import PARTIAL_SUFFIX, sync_directory, write_json
from draftcache.common.manifest import TargetIdentity
from draftcache.train.drafter import Drafter, DrafterConfig
from draftcache.train.loss import LossConfig
from draftcache.train.optim import OptimConfig
from draftcache.train.order import Batching

RUN_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
_WEIGHTS, _OPTIMIZER, _STATE = "drafter.safetensors", "optimizer.safetensors", "state.json"
_PREFIX = "checkpoint-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run is, fully resolved: enough to rebuild the drafter and to refuse a stranger."""

    drafter: DrafterConfig
    target: TargetIdentity
    store_identity: str
    loss: LossConfig
    optim: OptimConfig
    batching: Batching
    anchors: int
    accumulate: int
    steps: int
    seed: int
    dtype: str
    versions: dict[str, str]


def write_run(folder: Path, run: Run) -> None:
    """Begin a run's folder. Raises CheckpointError if it already holds a run."""
    if (folder / RUN_NAME).exists():
        raise CheckpointError(f"{folder} holds a run", needed="a new folder", do="choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN_NAME, configs.to_dict(run))


def read_run(folder: Path) -> Run:
    """Read what a run is; CheckpointError if `folder` holds none."""
    path = folder / RUN_NAME
    try:
        return configs.from_dict(Run, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, UsageError) as error:
        raise CheckpointError(
            f"{path}: {first_line(error)}", needed="a folder written by `draftcache train`", do="check --checkpoint"
        ) from None


def save_checkpoint(folder: Path, step: int, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> Path:
    """Write the checkpoint of `step` completed steps into the run's folder; returns its directory."""
    final = folder / f"{_PREFIX}{step:08d}"
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, tensors in ((_WEIGHTS, weights), (_OPTIMIZER, optimizer)):
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, partial / name)
    write_json(partial / _STATE, {"step": step})
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    sync_directory(folder)
    return final


def newest_checkpoint(folder: Path) -> Path:
    """The run's complete checkpoint of the most steps; CheckpointError if there is none."""
    found = sorted(p for p in folder.glob(f"{_PREFIX}*") if p.is_dir() and not p.name.endswith(PARTIAL_SUFFIX))
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint", needed="a run that saved one", do="train it further")
    return found[-1]


def load_drafter(folder: Path, device: torch.device) -> tuple[Run, Drafter]:
    """The drafter of a run's newest checkpoint, in float32, and what the run is."""
    run = read_run(folder)
    path = newest_checkpoint(folder) / _WEIGHTS
    drafter = Drafter(run.drafter).to(device)
    try:
        drafter.load_state_dict(load_file(path, device=str(device)))
    except Exception as error:  # safetensors and torch raise their own types
        raise CheckpointError(
            f"{path}: {first_line(error)}", needed="the drafter's weights", do="train again"
        ) from None
    return run, drafter


def append_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to the run's metrics file."""
    with (folder / METRICS_NAME).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
