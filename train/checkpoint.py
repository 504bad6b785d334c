"""Weights, optimizer and position of a run, as atomic directories of safetensors and JSON.

    RUN/run.json                   what the run is: drafter, target, store, versions
    RUN/settings.json              every setting, resolved, so that `--resume` needs no other flag
    RUN/metrics.jsonl              one line per step
    RUN/validation.jsonl           one line per validation
    RUN/checkpoint-00000200/       drafter.safetensors, optimizer.safetensors, state.json

A checkpoint is written aside and moved into place by one rename: a directory with its final name is complete, and the
one of the most steps counts.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftcache.common import config as configs
from draftcache.common.errors import CheckpointError, UsageError, first_line
from draftcache.common.files import PARTIAL_SUFFIX, sync_directory, write_json
from draftcache.common.manifest import TargetIdentity
from draftcache.common.tensors import save_tensors
from draftcache.train.model.drafter import Drafter, DrafterConfig
from draftcache.train.model.loss import LossConfig
from draftcache.train.optim import OptimConfig
from draftcache.train.order import Batching, Cursor
from draftcache.train.settings import TrainConfig

RUN_NAME, SETTINGS_NAME = "run.json", "settings.json"
WEIGHTS, OPTIMIZER, _STATE = "drafter.safetensors", "optimizer.safetensors", "state.json"
_PREFIX = "checkpoint-"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run is, fully resolved: enough to rebuild the drafter and to refuse a stranger."""

    drafter: DrafterConfig
    target: TargetIdentity
    store_identity: str
    loss: LossConfig
    optim: OptimConfig
    batching: Batching
    validation_share: float
    anchors: int
    micro_batches: int  # of a step, over all processes
    steps: int
    seed: int
    dtype: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best validation so far."""

    step: int
    accepted_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands between two steps. A step counts if it changed the weights; others are `skipped`."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    validated: int = 0  # steps and skipped ones behind the last validation
    best: Best | None = None
    validations_since_best: int = 0

    @property
    def taken(self) -> int:
        """Steps taken, skipped ones included."""
        return self.step + self.skipped


def write_run(folder: Path, run: Run, settings: TrainConfig) -> None:
    """Begin a run's folder. Raises CheckpointError if it already holds a run."""
    if (folder / RUN_NAME).exists():
        raise CheckpointError(
            f"{folder} holds a run", needed="a new folder", do="choose another --out, or go on with --resume"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS_NAME, configs.to_dict(settings))
    write_json(folder / RUN_NAME, configs.to_dict(run))


def read_run(folder: Path) -> Run:
    """Read what a run is; CheckpointError if `folder` holds none."""
    return _read(Run, folder / RUN_NAME)


def read_settings(folder: Path) -> TrainConfig:
    """Read a run's settings; CheckpointError if `folder` holds none."""
    return _read(TrainConfig, folder / SETTINGS_NAME)


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    return (folder / RUN_NAME).exists()


def write_checkpoint(folder: Path, progress: Progress, files: Mapping[str, dict[str, Tensor]]) -> Path:
    """Write host tensors, by file and name, as the checkpoint of `progress` into the run's folder."""
    final = checkpoint_path(folder, progress.step)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, tensors in files.items():
        save_tensors(partial / name, tensors)
        with (partial / name).open("rb") as file:
            os.fsync(file.fileno())
    write_json(partial / _STATE, configs.to_dict(progress))
    if final.exists():
        _remove(final)
    partial.rename(final)
    sync_directory(folder)
    return final


def checkpoint_path(folder: Path, step: int) -> Path:
    """The directory of the checkpoint after `step` steps."""
    return folder / f"{_PREFIX}{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    found = (p for p in folder.glob(f"{_PREFIX}*") if p.is_dir() and not p.name.endswith(PARTIAL_SUFFIX))
    return sorted(found, key=lambda path: (len(path.name), path.name))


def newest_checkpoint(folder: Path) -> Path:
    """The run's complete checkpoint of the most steps; CheckpointError if there is none."""
    found = checkpoints(folder)
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoint", needed="a run that saved one", do="train it further")
    return found[-1]


def best_checkpoint(folder: Path) -> Path:
    """The run's checkpoint of the best validation, or the newest one where there was no validation."""
    newest = newest_checkpoint(folder)
    best = read_progress(newest).best
    path = newest if best is None else checkpoint_path(folder, best.step)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is gone", needed="the run's best checkpoint", do="name another checkpoint's folder"
        )
    return path


def read_progress(checkpoint: Path) -> Progress:
    """Where the run stood at a checkpoint."""
    return _read(Progress, checkpoint / _STATE)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints and the best one, and what crashes left unfinished."""
    found = checkpoints(folder)
    best = read_progress(found[-1]).best
    spared = {*found[-keep:], *([checkpoint_path(folder, best.step)] if best else [])}
    for path in found:
        if path not in spared:
            _remove(path)
    for path in folder.glob(f"{_PREFIX}*{PARTIAL_SUFFIX}"):
        shutil.rmtree(path)


def load_tensors(checkpoint: Path, name: str, device: torch.device) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint; CheckpointError if it cannot be read."""
    try:
        return load_file(checkpoint / name, device=str(device))
    except Exception as error:  # safetensors raises its own types
        raise CheckpointError(
            f"{checkpoint / name}: {first_line(error)}",
            needed="the file that was written",
            do="remove this checkpoint, so that the one before it counts",
        ) from None


def load_weights(drafter: Drafter, weights: dict[str, Tensor], where: Path) -> None:
    """Copy weights into a drafter, in place. Raises CheckpointError unless names and shapes are the drafter's."""
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{where}: {first_line(error)}", needed="the weights of this drafter", do="look at what lies there"
        ) from None


def load_drafter(folder: Path, device: torch.device) -> tuple[Run, Drafter]:
    """A drafter in float32, and what its run is: a run's newest checkpoint, or the checkpoint whose folder is given."""
    checkpoint = folder if (folder / WEIGHTS).exists() else newest_checkpoint(folder)
    run = read_run(checkpoint.parent)
    drafter = Drafter(run.drafter).to(device)
    load_weights(drafter, load_tensors(checkpoint, WEIGHTS, device), checkpoint)
    return run, drafter


def _read(cls: type[T], path: Path) -> T:
    try:
        return configs.from_dict(cls, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, RecursionError, UsageError) as error:
        raise CheckpointError(
            f"{path}: {first_line(error)}", needed="a folder written by `draftcache train`", do="check the folder"
        ) from None


def _remove(checkpoint: Path) -> None:
    """Take a checkpoint's final name away first: a half-removed one must never look complete."""
    doomed = checkpoint.with_name(checkpoint.name + ".old" + PARTIAL_SUFFIX)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)
