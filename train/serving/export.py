"""Writes a run's drafter as the folder that engines load, and reads it back before the folder gets its name.

    DIR/config.json          what engines read
    DIR/model.safetensors    the weights in bfloat16
    DIR/README.md            the model card
    DIR/draftcache.json      the run as it was trained, and which checkpoint this is

The same run gives the same bytes every time: nothing in the folder depends on the moment or the place.
"""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftcache.common import config as configs
from draftcache.common.errors import CheckpointError, MismatchError, UsageError
from draftcache.common.files import PARTIAL_SUFFIX, sync_directory, sync_file, write_json, write_text
from draftcache.common.manifest import Manifest, digest_file, read_manifest
from draftcache.common.tensors import save_tensors
from draftcache.common.version import VERSION
from draftcache.train.checkpoint import Run, load_drafter, read_progress
from draftcache.train.model.drafter import SLIDING, DrafterConfig
from draftcache.train.report import METRICS_NAME, VALIDATION_NAME, read_rows
from draftcache.train.serving.card import model_card
from draftcache.train.serving.drafters import chosen_checkpoint
from draftcache.train.serving.parity import Parity, compare_on_store
from draftcache.train.serving.released import (
    CONFIG_NAME,
    FORMATS,
    ORIGIN_NAME,
    WEIGHTS_NAME,
    check_servable,
    load_released,
    read_released_config,
    read_released_weights,
    speculators_config,
    tensor_shapes,
    zlab_config,
)

CARD_NAME = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """What `draftcache export` was asked to do."""

    checkpoint: Path  # a run, of which the checkpoint of the best validation is taken, or one checkpoint's folder
    out: Path
    layout: str = "zlab"
    store: Path | None = None  # adds the data to the card, and compares logits on stored samples
    measured: Path | None = None  # what `evaluate --json` wrote, for the card

    def __post_init__(self) -> None:
        if self.layout not in FORMATS:
            raise UsageError(f"format {self.layout!r}", needed=f"one of {list(FORMATS)}", do="correct --format")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The folder, how many tensors it holds, and how its logits compare with the trainer's if a store was given."""

    folder: Path
    tensors: int
    parity: Parity | None


def export(config: ExportConfig) -> ExportResult:
    """Write the folder. Raises DraftcacheError, leaving nothing behind, for what cannot be served or read back."""
    if config.out.exists():
        raise UsageError(f"{config.out} exists", needed="a new folder", do="choose another --out")
    checkpoint = chosen_checkpoint(config.checkpoint)
    run, drafter = load_drafter(checkpoint, torch.device("cpu"))
    check_servable(run.drafter, run.target, config.layout)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    _check_weights(weights, run.drafter)
    manifest = _manifest_of(config.store, run)
    measured = _read_measured(config)
    partial = config.out.with_name(config.out.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write(partial, config, checkpoint, run, weights, manifest, measured)
        _read_back(partial, run.drafter, weights)
        parity = None
        if config.store is not None:
            parity = compare_on_store(run, drafter, load_released(partial, torch.device("cpu")), config.store)
        partial.rename(config.out)
        sync_directory(config.out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ExportResult(folder=config.out, tensors=len(weights), parity=parity)


def _write(
    folder: Path,
    config: ExportConfig,
    checkpoint: Path,
    run: Run,
    weights: dict[str, Tensor],
    manifest: Manifest | None,
    measured: list[dict[str, Any]],
) -> None:
    folder.mkdir(parents=True)
    build = zlab_config if config.layout == "zlab" else speculators_config
    write_json(folder / CONFIG_NAME, build(run.drafter, run.target))
    save_tensors(folder / WEIGHTS_NAME, weights, {"format": "pt"})
    target, whole = configs.to_dict(run.target), configs.to_dict(run)
    origin = {"draftcache": VERSION, "format": config.layout, "checkpoint": checkpoint.name}
    origin["weights_sha256"] = digest_file(folder / WEIGHTS_NAME)
    write_json(folder / ORIGIN_NAME, origin | {"target": target, "run": whole})
    trained = _training_figures(checkpoint)
    write_text(folder / CARD_NAME, model_card(run, config.layout, checkpoint.name, manifest, measured, trained))
    sync_file(folder / WEIGHTS_NAME)  # the others were written atomically
    sync_directory(folder)


def _check_weights(weights: dict[str, Tensor], config: DrafterConfig) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert shapes == tensor_shapes(config), "the drafter's tensors are not those of the released table"
    broken = sorted(name for name, tensor in weights.items() if not bool(tensor.isfinite().all()))
    if broken:
        raise CheckpointError(
            f"{len(broken)} tensors with values that are not finite in bfloat16, first {broken[0]}",
            needed="finite weights",
            do="export an earlier checkpoint, or train with a lower --lr",
        )


def _read_back(folder: Path, config: DrafterConfig, weights: dict[str, Tensor]) -> None:
    """What was written must say what was trained, key by key and bit by bit."""
    read = read_released_config(folder)
    if SLIDING not in config.layer_types:  # these two then mean nothing, and are not written
        read = dataclasses.replace(read, sliding_window=config.sliding_window, sliding_causal=config.sliding_causal)
    lines = configs.differences(configs.to_dict(read), configs.to_dict(config))
    assert not lines, f"the written configuration reads as another drafter: {lines}"
    for name, tensor in read_released_weights(folder, config, torch.device("cpu")).items():
        same = tensor.dtype == torch.bfloat16 and torch.equal(tensor.view(torch.int16), weights[name].view(torch.int16))
        assert same, f"{name} was written with other bits"


def _manifest_of(store: Path | None, run: Run) -> Manifest | None:
    if store is None:
        return None
    manifest = read_manifest(store)
    if manifest.identity != run.store_identity:
        raise MismatchError(
            f"{store} is not the store that this run was trained on",
            needed="that store",
            do="pass it with --store, or leave the flag out",
        )
    return manifest


def _training_figures(checkpoint: Path) -> dict[str, float]:
    """Accepted length as training measured it at this checkpoint: last tenth of the steps so far, and held out."""
    step, folder = read_progress(checkpoint).step, checkpoint.parent
    steps = [row for row in read_rows(folder / METRICS_NAME) if row["step"] <= step]
    found = {"training": steps[-max(1, step // 10) :], "held-out": read_rows(folder / VALIDATION_NAME)}
    found["held-out"] = [row for row in found["held-out"] if row["step"] == step][-1:]
    return {name: mean for name, rows in found.items() if (mean := _pooled(rows)) is not None}


def _pooled(rows: list[dict[str, Any]]) -> float | None:
    blocks = sum(row["blocks"] for row in rows)
    return sum(row["accepted_length"] * row["blocks"] for row in rows if row["blocks"]) / blocks if blocks else None


def _read_measured(config: ExportConfig) -> list[dict[str, Any]]:
    """The reports on this drafter out of what `evaluate --json` wrote."""
    path = config.measured
    if path is None:
        return []
    try:
        reports: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["sets"]
        drafters = {report["drafter"] for report in reports}
        ours = {name for name in drafters if Path(name).resolve() == config.checkpoint.resolve()}
        figures = ("name", "prompts", "accepted_length")
        kept = ours or (drafters if len(drafters) == 1 else set())
        found = [{name: report[name] for name in figures} for report in reports if report["drafter"] in kept]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path}: {type(error).__name__} {error}", needed="what `evaluate --json FILE` wrote", do="check --measured"
        ) from None
    if not found:
        raise UsageError(
            f"{path} speaks of {sorted(drafters)}", needed=f"figures of {config.checkpoint}", do="check --measured"
        )
    return found
