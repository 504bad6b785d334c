"""Weights, optimizer and position of a run, as atomic directories of safetensors and JSON.

    RUN/run.json                   what the run is: drafter, target, store, versions
    RUN/settings.json              every setting, resolved, so that `--resume` needs no other flag
    RUN/metrics.jsonl              one line per step
    RUN/validation.jsonl           one line per validation
    RUN/checkpoint-00000200/       drafter.safetensors, optimizer.safetensors, state.json

A checkpoint is written aside and moved into place by one rename: a directory with its final name is complete, and the
one of the most steps counts. Its state.json keeps a crc32c of itself, of the files beside it, and of run.json.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from crc32c import crc32c
from safetensors.torch import load_file
from torch import Tensor

from draftcache.common import config as configs
from draftcache.common.errors import CheckpointError, UsageError, first_line
from draftcache.common.files import PARTIAL_SUFFIX, sync_directory, sync_file, write_json
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
_DIGESTS = "crc32c"
_PIECE = 1 << 24
_REMOVE = "remove this checkpoint, so that the one before it counts"

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


def check_new(folder: Path) -> None:
    """Raise CheckpointError if a folder already holds a run, or anything else that pruning could take for a run's."""
    if holds_run(folder):
        raise CheckpointError(
            f"{folder} holds a run", needed="a new folder", do="choose another --out, or go on with --resume"
        )
    ours = {SETTINGS_NAME, SETTINGS_NAME + PARTIAL_SUFFIX, RUN_NAME + PARTIAL_SUFFIX}  # what a crash left
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in ours)
    if foreign:
        raise CheckpointError(
            f"{folder} holds {foreign[0]} and {len(foreign) - 1} more", needed="a new folder", do="choose another --out"
        )


def write_run(folder: Path, run: Run, settings: TrainConfig) -> None:
    """Begin a run in its folder."""
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
    try:
        _write_files(partial, progress, files)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
        raise
    if final.exists():
        _remove(final)
    partial.rename(final)
    sync_directory(folder)
    return final


def _write_files(partial: Path, progress: Progress, files: Mapping[str, dict[str, Tensor]]) -> None:
    folder = partial.parent
    digests = {RUN_NAME: _crc32c_of(folder / RUN_NAME)} if holds_run(folder) else {}
    for name, tensors in files.items():
        save_tensors(partial / name, tensors)
        sync_file(partial / name)
        digests[name] = _crc32c_of(partial / name)
    plain = configs.to_dict(progress)
    write_json(partial / _STATE, plain | {_DIGESTS: digests | {_STATE: _crc32c_of_state(plain, digests)}})


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
    """Where the run stood at a checkpoint. Raises CheckpointError unless its file is as it was written."""
    return _read_state(checkpoint)[0]


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
    """The tensors of one file of a checkpoint; CheckpointError if it is not as it was written."""
    check_file(checkpoint, name)
    try:
        return load_file(checkpoint / name, device=str(device))
    except Exception as error:  # safetensors raises its own types
        raise CheckpointError(
            f"{checkpoint / name}: {first_line(error)}",
            needed="the file that was written",
            do=_REMOVE,
        ) from None


def check_file(checkpoint: Path, name: str) -> None:
    """Raise CheckpointError unless a file of a checkpoint, or its run's run.json, is as it was when it was written."""
    path = checkpoint.parent / name if name == RUN_NAME else checkpoint / name
    digests = _read_state(checkpoint)[1]
    try:
        same = _crc32c_of(path) == digests.get(name)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", needed="the file that was written", do=_REMOVE) from None
    if not same:
        do = "restore it from a copy" if name == RUN_NAME else _REMOVE
        raise CheckpointError(f"{path} has changed since it was written", needed="its bytes unchanged", do=do)


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
    check_file(checkpoint, RUN_NAME)
    drafter = Drafter(run.drafter).to(device)
    load_weights(drafter, load_tensors(checkpoint, WEIGHTS, device), checkpoint)
    return run, drafter


def _read(cls: type[T], path: Path) -> T:
    try:
        return configs.from_dict(cls, _read_json(path), str(path))
    except UsageError as error:
        raise _not_ours(path, error) from None


def _read_state(checkpoint: Path) -> tuple[Progress, dict[str, int]]:
    """Where the run stood, and the crc32c of the checkpoint's files by name."""
    path = checkpoint / _STATE
    plain = _read_json(path)
    try:
        digests = plain.pop(_DIGESTS)
        same = digests.pop(_STATE) == _crc32c_of_state(plain, digests)
    except (LookupError, AttributeError, TypeError):
        raise _not_ours(path, ValueError("no checksums")) from None
    if not same:
        raise CheckpointError(f"{path} has changed since it was written", needed="its values unchanged", do=_REMOVE)
    return configs.from_dict(Progress, plain, str(path)), digests


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _not_ours(path, error) from None


def _not_ours(path: Path, error: Exception) -> CheckpointError:
    found = f"{path}: {first_line(error)}"
    return CheckpointError(found, needed="a folder written by `draftcache train`", do="check the folder")


def _crc32c_of(path: Path) -> int:
    """The crc32c of a file's bytes. Other threads run meanwhile."""
    digest = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest = crc32c(piece, digest, gil_release_mode=1)
    return digest


def _crc32c_of_state(plain: dict[str, Any], digests: dict[str, int]) -> int:
    return int(crc32c(json.dumps([plain, digests], sort_keys=True).encode()))


def _remove(checkpoint: Path) -> None:
    """Take a checkpoint's final name away first: a half-removed one must never look complete."""
    doomed = checkpoint.with_name(checkpoint.name + ".old" + PARTIAL_SUFFIX)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)
