"""Figures about a store, computed from its own data with every byte checked."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from draftcache.common.codec import field_tensor, read_taps
from draftcache.common.layout import CHUNK_TOKENS, round_up
from draftcache.common.manifest import DataReport
from draftcache.common.memory import aligned_bytes
from draftcache.common.record import RecordSpec
from draftcache.common.shard import Bytes, RowReader, shard_damage
from draftcache.common.store import Bucket, Store
from draftcache.common.target import load_parts

AGREEMENT_SAMPLES = 8
LOW_AGREEMENT = 0.6
"""Below this share the data was hardly written by the target: a drafter learns to follow somebody else."""
_LARGEST_CODE = {"mxfp8": 0x7E, "mxfp4": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStats:
    """One bucket. `fill` is real over padded tokens, `stored_per_real` what shards take over what their tokens need.

    Void samples are left out, but their bytes are on disk all the same.
    """

    ceiling: int
    samples: int
    shards: int
    tokens: int
    supervised: int
    fill: float
    real_bytes: int  # real tokens x bytes per token
    disk_bytes: int
    stored_per_real: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneStats:
    """One stored state, a tap or the last hidden state, over all real tokens read."""

    name: str
    tokens: int
    mean_norm: float  # mean over tokens of the L2 norm
    max_abs: float
    top_channel: float  # share of the energy in the channel that has most: an outlier if far from 1 / H
    non_finite: int  # values
    zero_tokens: int  # tokens whose state is all zero
    zero_groups: float  # share of the codec's groups that are all zero; 0 for bf16
    at_limit: float  # share of values at the codec's largest magnitude; 0 for bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What `draftcache stats` shows."""

    bytes_per_token: int
    report: DataReport
    void: int  # samples whose states are not finite or all zero: everything below leaves them out
    label_agreement: float | None  # share of supervised tokens that the target would have chosen; None: no teacher
    buckets: tuple[BucketStats, ...]
    planes: tuple[PlaneStats, ...]


def store_stats(store: Store, max_samples: int | None = None) -> StoreStats:
    """Read the store (at most `max_samples` samples per bucket, evenly spread) and sum up what it holds.

    Raises DamageError at the first byte that is not what was written.
    """
    spec = store.manifest.record
    sums = [_PlaneSums(name, store.manifest.target.hidden_size) for name in plane_names(store)]
    for bucket in store.buckets.values():
        rows = _spread(bucket, max_samples)
        for row in tqdm(rows, desc=f"stats {bucket.ceiling}", unit=" samples", disable=None):
            records = torch.from_numpy(read_row_records(bucket, row))
            for plane, values in zip(sums, _planes(records, spec), strict=True):
                plane.add(values)
            for plane, (groups, values) in zip(sums, _coded(records, spec), strict=False):
                plane.add_coded(groups, values, _LARGEST_CODE[spec.codec])
    return StoreStats(
        bytes_per_token=spec.record_bytes,
        report=store.manifest.report,
        void=store.void_samples,
        label_agreement=_label_agreement(store),
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
    def __init__(self, name: str, width: int) -> None:
        self._name = name
        self._energy = torch.zeros(width, dtype=torch.float64)
        self._tokens = self._non_finite = self._zero = 0
        self._norms = self._max = 0.0
        self._groups = self._zero_groups = self._values = self._at_limit = 0

    def add(self, values: Tensor) -> None:
        """One sample's states, [tokens, H] float32."""
        finite = values.isfinite()
        clean = values.double().where(finite, 0.0)
        squares = clean.square()
        self._tokens += len(values)
        self._non_finite += int((~finite).sum())
        self._energy += squares.sum(0)
        self._norms += float(squares.sum(-1).sqrt().sum())
        self._max = max(self._max, float(clean.abs().amax()))
        self._zero += int((~clean.any(-1) & finite.all(-1)).sum())

    def add_coded(self, groups: Tensor, values: Tensor, largest: int) -> None:
        """The same states as the codec stored them: scale codes, and magnitudes of the values' codes."""
        self._groups += groups.numel()
        self._zero_groups += int((groups == 0).sum())
        self._values += values.numel()
        self._at_limit += int((values == largest).sum())

    def result(self) -> PlaneStats:
        """The sums as figures."""
        energy = float(self._energy.sum())
        return PlaneStats(
            name=self._name,
            tokens=self._tokens,
            mean_norm=self._norms / max(self._tokens, 1),
            max_abs=self._max,
            top_channel=float(self._energy.amax()) / energy if energy else 0.0,
            non_finite=self._non_finite,
            zero_tokens=self._zero,
            zero_groups=self._zero_groups / self._groups if self._groups else 0.0,
            at_limit=self._at_limit / self._values if self._values else 0.0,
        )


def _planes(records: Tensor, spec: RecordSpec) -> list[Tensor]:
    """One sample's states as float32, each [tokens, H]."""
    taps = read_taps(records, spec, torch.float32).unflatten(-1, (spec.field("taps").shape[0], -1))
    last = [field_tensor(records, spec.field("last")).float()] if spec.has("last") else []
    return [*taps.unbind(1), *last]


def _coded(records: Tensor, spec: RecordSpec) -> list[tuple[Tensor, Tensor]]:
    """Scale codes and value magnitudes of each tap as the codec stored them; nothing for bf16."""
    if spec.codec == "bf16":
        return []
    scales, values = (field_tensor(records, spec.field(name)) for name in ("tap_scales", "taps"))
    magnitudes = values & 0x7F if spec.codec == "mxfp8" else torch.cat([values & 7, (values >> 4) & 7], dim=-1)
    return list(zip(scales.unbind(1), magnitudes.unbind(1), strict=True))


def _label_agreement(store: Store) -> float | None:
    """Share of supervised tokens equal to the teacher's most probable one, over some samples of each bucket."""
    spec = store.manifest.record
    if spec.has("top_ids"):
        choose = _first_of_top(spec)
    elif spec.has("last"):
        choose = _argmax_of_head(spec, load_parts(store.path, store.manifest, torch.device("cpu")).head)
    else:
        return None
    equal = total = 0
    for bucket in store.buckets.values():
        for row in _spread(bucket, AGREEMENT_SAMPLES):
            tokens = bucket.samples.tokens(row)
            labels = torch.from_numpy(bucket.samples.input_ids[tokens])[1:]
            supervised = torch.from_numpy(bucket.samples.loss_mask[tokens]).bool()[1:]
            chosen = choose(torch.from_numpy(read_row_records(bucket, row))[:-1][supervised])
            equal += int((chosen == labels[supervised]).sum())
            total += int(supervised.sum())
    return equal / total if total else None


def _first_of_top(spec: RecordSpec) -> Callable[[Tensor], Tensor]:
    return lambda records: field_tensor(records, spec.field("top_ids"))[:, 0]


def _argmax_of_head(spec: RecordSpec, head: Tensor) -> Callable[[Tensor], Tensor]:
    wide = head.float()
    return lambda records: functional.linear(field_tensor(records, spec.field("last")).float(), wide).argmax(-1)


def _bucket_stats(bucket: Bucket, spec: RecordSpec) -> BucketStats:
    rows = _live_rows(bucket)
    cuts = [bucket.samples.tokens(row) for row in rows]
    tokens = sum(cut.stop - cut.start for cut in cuts)
    disk = sum(_size(bucket, shard) for shard in range(bucket.shard_count))
    return BucketStats(
        ceiling=bucket.ceiling,
        samples=len(rows),
        shards=bucket.shard_count,
        tokens=tokens,
        supervised=sum(int(bucket.samples.loss_mask[cut].sum()) for cut in cuts),
        fill=tokens / max(len(rows) * bucket.ceiling, 1),
        real_bytes=tokens * spec.record_bytes,
        disk_bytes=disk,
        stored_per_real=disk / max(tokens * spec.record_bytes, 1),
    )


def _size(bucket: Bucket, shard: int) -> int:
    found = bucket.shard(shard)
    if not found.path.is_file():
        raise shard_damage(found.path, found.samples, "is missing")
    return found.path.stat().st_size


def _live_rows(bucket: Bucket) -> list[int]:
    return [row for row in range(len(bucket.samples.samples)) if row not in bucket.void_rows]


def _spread(bucket: Bucket, most: int | None) -> list[int]:
    """At most so many of the bucket's rows, evenly spread; void ones left out."""
    rows = _live_rows(bucket)
    return [rows[int(i)] for i in np.unique(np.linspace(0, len(rows) - 1, min(len(rows), most or len(rows))).round())]
