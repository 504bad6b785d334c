"""Loads the drafters that a command names, runs and released folders, and refuses those of another target."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftcache.common import config as configs
from draftcache.common.errors import CheckpointError, MismatchError, UsageError, first_line
from draftcache.common.manifest import TargetIdentity
from draftcache.train.checkpoint import WEIGHTS, best_checkpoint, load_drafter
from draftcache.train.model.drafter import Drafter
from draftcache.train.serving.released import ORIGIN_NAME, load_released


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A drafter in float32, its folder's name, and what is known of its training: nothing of other tools' folders."""

    name: str
    drafter: Drafter
    store_identity: str | None = None
    validation_share: float = 0.0


def chosen_checkpoint(folder: Path) -> Path:
    """The checkpoint that a folder stands for: itself, or of a run the one of the best validation, else the newest."""
    return folder if (folder / WEIGHTS).exists() else best_checkpoint(folder)


def load_drafters(
    checkpoints: Sequence[Path],  # runs, or single checkpoints of them
    folders: Sequence[Path],  # exported or released
    target: TargetIdentity,
    device: torch.device,
) -> list[Loaded]:
    """Load them all. Raises UsageError if there are none and MismatchError for one that does not fit the target."""
    if not checkpoints and not folders:
        raise UsageError("no drafter", needed="--checkpoint or --drafter", do="pass one, or several to compare")
    loaded = []
    for path in checkpoints:
        run, drafter = load_drafter(chosen_checkpoint(path), device)
        _check_target(run.target, target)
        identity, share = run.store_identity, run.validation_share
        loaded.append(Loaded(name=str(path), drafter=drafter, store_identity=identity, validation_share=share))
    for path in folders:
        drafter = load_released(path, device)
        _check_fit(path, drafter, target)
        loaded.append(Loaded(name=str(path), drafter=drafter, **_origin(path, target)))
    return loaded


def _origin(folder: Path, target: TargetIdentity) -> dict[str, Any]:
    """What an exported folder says of its training; nothing for a folder that another tool made."""
    path = folder / ORIGIN_NAME
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        trained_for = configs.from_dict(TargetIdentity, values["target"], str(path))
        known = {name: values["run"][name] for name in ("store_identity", "validation_share")}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, UsageError) as error:
        raise CheckpointError(f"{path}: {first_line(error)}", needed="what `export` wrote", do="export again") from None
    _check_target(trained_for, target)
    return known


def _check_target(trained: TargetIdentity, given: TargetIdentity) -> None:
    wanted, found = configs.to_dict(trained), configs.to_dict(given)
    for plain in (wanted, found):
        del plain["name"], plain["dtype"]  # where the folder lies says nothing, and a drafter serves any precision
    lines = configs.differences(found, wanted)
    if lines:
        raise MismatchError(
            f"this is not the target that the drafter was trained for: {'; '.join(lines[:4])}",
            needed=f"{trained.name} as it was extracted",
            do="pass that target, or a store made from it",
        )


def _check_fit(folder: Path, drafter: Drafter, target: TargetIdentity) -> None:
    c = drafter.config
    found = (c.hidden_size, c.vocab_size, max(c.layer_ids) < target.num_layers)
    if found != (target.hidden_size, target.vocab_size, True):
        raise MismatchError(
            f"{folder} is for width {c.hidden_size}, vocabulary {c.vocab_size} and layers {list(c.layer_ids)}",
            needed=f"width {target.hidden_size}, vocabulary {target.vocab_size} and layers below {target.num_layers}",
            do="pass the target that it was trained for",
        )
