"""Accepted length of stored samples that a drafter never trained on: seconds, and no target to load."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from draftcache.common.errors import MismatchError, UsageError
from draftcache.common.store import Store, open_store
from draftcache.common.target import check_device, load_parts
from draftcache.train.serving.decode import DrafterRunner
from draftcache.train.serving.drafters import Loaded, load_drafters
from draftcache.train.serving.replay import replay_stored
from draftcache.train.setup import bucket_index, split_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """What `draftcache replay` was asked to do."""

    store: Path
    checkpoints: tuple[Path, ...] = ()
    drafters: tuple[Path, ...] = ()
    limit: int | None = None  # samples
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit {self.limit}", needed="at least 1", do="correct it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Figures of one drafter: samples and their positions, and the two means that `replay` explains."""

    drafter: str
    samples: int
    positions: int
    along_path: float
    any_anchor: float


def replay_held_out(config: ReplayConfig) -> list[ReplayReport]:
    """Replay what each drafter never trained on: the held-out part of its own store, or the whole of another one."""
    check_device(config.device)
    device = torch.device(config.device)
    store = open_store(config.store)
    loaded = load_drafters(config.checkpoints, config.drafters, store.manifest.target, device)
    parts = load_parts(store.path, store.manifest, device)
    reports = []
    for one in loaded:
        rows = _rows(store, one)[: config.limit]
        total = replay_stored(
            DrafterRunner(one.name, one.drafter, parts),
            store,
            tqdm(rows, desc="replay", unit=" samples", disable=None),
            device,
        )
        reports.append(
            ReplayReport(
                drafter=one.name,
                samples=len(rows),
                positions=total.anchors,
                along_path=total.path_tokens / total.path_blocks,
                any_anchor=total.any_anchor / total.anchors,
            )
        )
    return reports


def _rows(store: Store, one: Loaded) -> Sequence[tuple[int, int]]:
    """Ceiling and row of the samples to replay, in the order of the data."""
    if one.drafter.config.layer_ids != store.manifest.settings.layer_ids:
        raise MismatchError(
            f"{store.path} holds layers {list(store.manifest.settings.layer_ids)}",
            needed=f"layers {list(one.drafter.config.layer_ids)}, which {one.name} reads",
            do="extract them",
        )
    trained_here = one.store_identity == store.manifest.identity
    index = split_samples(store, one.validation_share)[1] if trained_here else bucket_index(store)
    rows = sorted(
        (number, ceiling, row)
        for ceiling, held in index.items()
        for number, row in zip(held.samples.tolist(), held.rows.tolist(), strict=True)
    )
    if not rows:
        raise UsageError(
            f"{one.name} was trained on all of {store.path}",
            needed="samples that it never saw",
            do="train with --validation-share, or extract another store",
        )
    return [(ceiling, row) for _, ceiling, row in rows]
