"""Figures about a store, computed from its own data with every byte checked."""

from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from draftcache.common.codec import field_tensor, read_taps
from draftcache.common.layout import CHUNK_TOKENS, round_up
from draftcache.common.manifest import DataReport
from draftcache.common.memory import aligned_bytes
from draftcache.common.record import RecordSpec
from draftcache.common.shard import Bytes, RowReader
from draftcache.common.store import Bucket, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStats:
    """One bucket. `fill` is real over padded tokens; `disk_bytes` is what its shards take."""

    ceiling: int
    samples: int
    shards: int
    tokens: int
    supervised: int
    fill: float
    record_bytes: int  # real tokens x bytes per token
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneStats:
    """One stored state, a tap or the last hidden state, over all real tokens read."""

    name: str
    tokens: int
    mean_norm: float  # mean over tokens of the L2 norm
    max_abs: float
    non_finite: int  # values
    zero_tokens: int  # tokens whose state is all zero


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What `draftcache stats` shows."""

    bytes_per_token: int
    report: DataReport
    buckets: tuple[BucketStats, ...]
    planes: tuple[PlaneStats, ...]


def store_stats(store: Store, max_samples: int | None = None) -> StoreStats:
    """Read the store (at most `max_samples` samples per bucket, evenly spread) and sum up what it holds.

    Raises DamageError at the first byte that is not what was written.
    """
    spec = store.manifest.record
    sums = [_PlaneSums(name) for name in plane_names(store)]
    for bucket in store.buckets.values():
        rows = _spread(len(bucket.samples.samples), max_samples)
        for row in tqdm(rows, desc=f"stats {bucket.ceiling}", unit=" samples", disable=None):
            for plane, values in zip(sums, _read_planes(bucket, spec, row), strict=True):
                plane.add(values)
    return StoreStats(
        bytes_per_token=spec.record_bytes,
        report=store.manifest.report,
        buckets=tuple(_bucket_stats(bucket, spec) for bucket in store.buckets.values()),
        planes=tuple(plane.result() for plane in sums),
    )


def plane_names(store: Store) -> list[str]:
    """Names of the stored states in order: `layer 1`, ..., and `last` where it is kept."""
    names = [f"layer {layer}" for layer in store.manifest.settings.layer_ids]
    return names + (["last"] if store.manifest.record.has("last") else [])


def read_row_records(bucket: Bucket, row: int) -> Bytes:
    """[length, R] uint8: the records of one sample's real tokens."""
    length = int(bucket.samples.lengths[row])
    record_bytes = bucket.geometry.record_bytes
    out = aligned_bytes(round_up(length, CHUNK_TOKENS) * record_bytes)
    bucket.read_row(RowReader(), row, out)
    return out.reshape(-1, record_bytes)[:length]


class _PlaneSums:
    def __init__(self, name: str) -> None:
        self._name = name
        self._tokens = self._non_finite = self._zero = 0
        self._norms = self._max = 0.0

    def add(self, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        finite = np.isfinite(values)
        self._non_finite += int((~finite).sum())
        clean = np.where(finite, values, 0)
        self._tokens += len(clean)
        self._norms += float(np.sqrt(np.square(clean, dtype=np.float64).sum(-1)).sum())
        self._max = max(self._max, float(np.abs(clean).max(initial=0)))
        self._zero += int((~clean.any(-1) & finite.all(-1)).sum())

    def result(self) -> PlaneStats:
        return PlaneStats(
            name=self._name,
            tokens=self._tokens,
            mean_norm=self._norms / max(self._tokens, 1),
            max_abs=self._max,
            non_finite=self._non_finite,
            zero_tokens=self._zero,
        )


def _read_planes(bucket: Bucket, spec: RecordSpec, row: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """One sample's states as float32, each [tokens, H]."""
    records = read_row_records(bucket, row)
    tensor = torch.from_numpy(records)
    taps = read_taps(tensor, spec, torch.float32).unflatten(-1, (spec.field("taps").shape[0], -1)).numpy()
    planes = [taps[:, k] for k in range(taps.shape[1])]
    if spec.has("last"):
        planes.append(field_tensor(tensor, spec.field("last")).float().numpy())
    return planes


def _bucket_stats(bucket: Bucket, spec: RecordSpec) -> BucketStats:
    samples = bucket.samples
    tokens = len(samples.input_ids)
    return BucketStats(
        ceiling=bucket.ceiling,
        samples=len(samples.samples),
        shards=bucket.shard_count,
        tokens=tokens,
        supervised=int(samples.loss_mask.sum()),
        fill=tokens / (len(samples.samples) * bucket.ceiling),
        record_bytes=tokens * spec.record_bytes,
        disk_bytes=sum(bucket.shard_path(shard).stat().st_size for shard in range(bucket.shard_count)),
    )


def _spread(count: int, most: int | None) -> list[int]:
    return [int(i) for i in np.unique(np.linspace(0, count - 1, min(count, most or count)).round())]
