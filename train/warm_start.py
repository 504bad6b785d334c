"""Begins a run with the weights of a released drafter, strictly: same tensors, same shapes, same meaning."""

from pathlib import Path
from typing import Any

import torch

from draftcache.common.config import differences, to_dict
from draftcache.common.errors import CheckpointError, MismatchError
from draftcache.train.model.drafter import SLIDING, Drafter, DrafterConfig
from draftcache.train.serving.released import read_released_config, read_released_weights


def released_options(folder: Path) -> dict[str, Any]:
    """The geometry flags that a released drafter stands for, by their names."""
    config = read_released_config(folder)
    window = {"sliding_window": config.sliding_window} if SLIDING in config.layer_types else {}
    return window | {
        "num_layers": len(config.layer_types),
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "layer_types": ",".join(config.layer_types),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
    }


def check_start(folder: Path, wanted: DrafterConfig) -> None:
    """Raise MismatchError unless the released drafter is the one to be trained; only the block size may differ."""
    found = read_released_config(folder)
    ignored = {"block_size"} if SLIDING in found.layer_types else {"block_size", "sliding_window", "sliding_causal"}
    held, needed = (
        {name: value for name, value in to_dict(config).items() if name not in ignored} for config in (found, wanted)
    )
    lines = differences(held, needed)
    if lines:
        raise MismatchError(
            f"{folder} is another drafter than the one to be trained: {'; '.join(lines[:4])}",
            needed="a drafter for this store's target and layers, of this geometry",
            do="leave the geometry's flags away: they follow --init-from; or extract with that drafter's --layers",
        )


def load_start(folder: Path, drafter: Drafter, device: torch.device) -> None:
    """Copy the released weights into a drafter, in place. Raises CheckpointError for names, shapes or numbers."""
    weights = read_released_weights(folder, drafter.config, device)
    wrong = sorted(name for name, tensor in weights.items() if not tensor.isfinite().all())
    if wrong:
        raise CheckpointError(
            f"{folder}: {wrong[0]} and {len(wrong) - 1} more tensors hold numbers that are not finite",
            needed="finite weights",
            do="take another release",
        )
    drafter.load_state_dict(weights)
