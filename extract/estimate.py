"""How much disk an extraction will take, before it writes anything.

Metadata, ids and masks are written to a temporary folder and measured; shards, journal and manifest follow from the
plan by arithmetic; embedding and head from the configuration. What is left to guess is some hundred bytes of headers.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftcache.common import config as configs
from draftcache.common.errors import StoreError
from draftcache.common.identity import TEMPLATE_FILE, copied_files
from draftcache.common.journal import JournalEntry, journal_line
from draftcache.common.layout import PAGE, ShardGeometry, round_up
from draftcache.common.manifest import StoredFile
from draftcache.common.store import committed_files, create_store
from draftcache.common.target import PARTS_PATH
from draftcache.extract.buckets import Batch
from draftcache.extract.plan import Plan

_SAFETENSORS_HEADER_BYTES = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEstimate:
    """One bucket: tokens, what its records hold (ceiling x bytes per token), and what its shards take."""

    ceiling: int
    samples: int
    real_tokens: int
    padded_tokens: int
    fill: float
    logical_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The whole store. `disk_bytes` sums all its files; `block_bytes` the same in whole blocks of the file system."""

    bytes_per_token: int
    buckets: tuple[BucketEstimate, ...]
    logical_bytes: int
    disk_bytes: int
    block_bytes: int
    shard_bytes: dict[tuple[int, int], int]


def estimate(plan: Plan, target: Path) -> Estimate:
    """What the store of this plan will take."""
    manifest = plan.manifest
    record = manifest.record
    shards: dict[tuple[int, int], int] = {}
    rows = {summary.ceiling: summary.rows for summary in manifest.buckets}
    for batch in plan.batches:
        geometry = ShardGeometry(rows=rows[batch.ceiling], ceiling=batch.ceiling, record_bytes=record.record_bytes)
        lengths, _ = plan.bucket(batch).rows(range(batch.first, batch.first + batch.count))
        shards[batch.ceiling, batch.shard] = geometry.file_bytes(lengths)
    buckets = tuple(
        BucketEstimate(
            ceiling=bucket.ceiling,
            samples=len(bucket.samples),
            real_tokens=len(bucket.input_ids),
            padded_tokens=len(bucket.samples) * bucket.ceiling,
            fill=len(bucket.input_ids) / (len(bucket.samples) * bucket.ceiling),
            logical_bytes=len(bucket.samples) * bucket.ceiling * record.record_bytes,
            disk_bytes=sum(size for (ceiling, _), size in shards.items() if ceiling == bucket.ceiling),
        )
        for bucket in plan.buckets
    )
    files = [*shards.values(), *_fixed_files(plan, target)]
    return Estimate(
        bytes_per_token=record.record_bytes,
        buckets=buckets,
        logical_bytes=sum(bucket.logical_bytes for bucket in buckets),
        disk_bytes=sum(files),
        block_bytes=sum(round_up(size, PAGE) for size in files),
        shard_bytes=shards,
    )


def check_space(needed: Estimate, store: Path, todo: Sequence[Batch]) -> None:
    """Raise StoreError if the disk has no room for what is still to be written."""
    done = set(needed.shard_bytes) - {(batch.ceiling, batch.shard) for batch in todo}
    missing = needed.block_bytes - sum(needed.shard_bytes[shard] for shard in done)
    free = free_bytes(store)
    if missing > free:
        raise StoreError(
            f"{store} has {free} bytes free",
            needed=f"{missing} bytes",
            do="make room, choose a smaller --codec or --teacher, or pass --force",
        )


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that will hold `path`."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free


def _fixed_files(plan: Plan, target: Path) -> list[int]:
    """Sizes of every file but the shards."""
    manifest = plan.manifest
    with tempfile.TemporaryDirectory() as folder:
        create_store(Path(folder), manifest.record, {s.ceiling: s.rows for s in manifest.buckets}, plan.buckets)
        written = committed_files(Path(folder))
    identity = manifest.target
    itemsize = getattr(torch, identity.dtype).itemsize
    parts = identity.vocab_size * identity.hidden_size * itemsize * (1 if identity.tied_head else 2)
    sources = {path.name: path for path in copied_files(target)}
    if plan.chat_template is not None:
        sources[TEMPLATE_FILE] = plan.chat_template
    copied = [
        StoredFile(name=f"target/{name}", size=path.stat().st_size, digest="0" * 64) for name, path in sources.items()
    ]
    files = (*written, *copied, StoredFile(name=PARTS_PATH, size=parts + _SAFETENSORS_HEADER_BYTES, digest="0" * 64))
    whole = configs.to_dict(dataclasses.replace(manifest, files=files)) | {"checksum": "0" * 64}
    journal = sum(
        len(journal_line(JournalEntry(bucket=b.ceiling, shard=b.shard, size=10**9, digests=(10**9,) * b.count)))
        for b in plan.batches
    )
    return [*(file.size for file in files), len(json.dumps(whole, indent=2)) + 1, journal]
