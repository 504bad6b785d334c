"""Stores of a geometry's width written by this project's own writer, with random states, and what a peer reads instead.

Every shard holds the same records, which no reader can know: values do not matter where nothing is compressed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from draftcache.benchmarks.step_cases import SUPERVISED_FROM, Geometry
from draftcache.common.journal import Journal, JournalEntry
from draftcache.common.layout import LAYOUT_VERSION, ShardGeometry
from draftcache.common.manifest import (
    BucketSummary,
    DataReport,
    ExtractSettings,
    Manifest,
    TargetIdentity,
    write_manifest,
)
from draftcache.common.memory import aligned_bytes
from draftcache.common.record import RecordSpec, field_view, record_spec
from draftcache.common.shard import Bytes, RowReader, write_shard
from draftcache.common.store import BucketSamples, Store, create_store, open_store
from draftcache.common.version import VERSION

if TYPE_CHECKING:
    from draftcache.benchmarks.speculators_peer import PeerSample

TILE_TOKENS = 1024


def write_store(path: Path, geometry: Geometry, codec: str, teacher: str, nbytes: float) -> Store:
    """A store of one bucket whose ceiling is the geometry's stride, of about `nbytes` but at least two shards.

    Lengths vary around the geometry's document length, up to the ceiling.
    """
    spec = record_spec(geometry.taps, geometry.hidden, codec, teacher)
    ceiling, rows = geometry.stride, geometry.tokens // geometry.stride
    shape = ShardGeometry(rows=rows, ceiling=ceiling, record_bytes=spec.record_bytes)
    rng = np.random.default_rng(0)
    lengths = rng.integers(2 * geometry.document - geometry.stride, ceiling + 1, rows)
    shards = max(2, round(nbytes / shape.file_bytes(lengths.tolist())))
    samples = _samples(geometry, np.tile(lengths, shards), rng)
    create_store(path, spec, {ceiling: rows}, [samples])
    write_manifest(path, _manifest(geometry, codec, teacher, samples, rows))
    records = aligned_bytes(rows * shape.row_bytes).reshape(rows, shape.stride, spec.record_bytes)
    tile = _random_records(spec, geometry.vocabulary, rng)
    for row, length in enumerate(lengths.tolist()):
        for begin in range(0, length, TILE_TOKENS):
            records[row, begin : min(begin + TILE_TOKENS, length)] = tile[: length - begin]
    bucket = Store(path, _manifest(geometry, codec, teacher, samples, rows)).buckets[ceiling]
    with Journal(path) as journal:
        for shard in range(shards):
            digests = write_shard(bucket.shard_path(shard), shape, records, lengths.tolist())
            size = shape.file_bytes(lengths.tolist())
            journal.append(JournalEntry(bucket=ceiling, shard=shard, size=size, digests=digests))
    return open_store(path)


def peer_samples(store: Store) -> "Iterator[PeerSample]":
    """The samples of a bf16 store with last hidden states, as speculators_peer.py stores them."""
    from draftcache.benchmarks.speculators_peer import PeerSample

    spec, reader = store.manifest.record, RowReader()
    width = store.manifest.target.hidden_size
    for bucket in store.buckets.values():
        out = aligned_bytes(bucket.geometry.row_bytes)
        for row, length in enumerate(bucket.samples.lengths.tolist()):
            bucket.read_row(reader, row, out)
            states = torch.from_numpy(out).view(-1, spec.record_bytes)[:length].view(torch.bfloat16)
            tokens = bucket.samples.tokens(row)
            yield PeerSample(
                input_ids=torch.from_numpy(bucket.samples.input_ids[tokens]).long(),
                loss_mask=torch.from_numpy(bucket.samples.loss_mask[tokens]).long(),
                hidden_states=states[:, : (len(store.manifest.settings.layer_ids) + 1) * width].view(length, -1, width),
            )


def _samples(geometry: Geometry, lengths: np.ndarray, rng: np.random.Generator) -> BucketSamples:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    supervised = position >= SUPERVISED_FROM * np.repeat(lengths, lengths)
    return BucketSamples(
        ceiling=geometry.stride,
        samples=np.arange(len(lengths)),
        offsets=offsets,
        input_ids=rng.integers(0, geometry.vocabulary - 1, offsets[-1], dtype=np.int32),
        loss_mask=supervised.astype(np.uint8),
    )


def _random_records(spec: RecordSpec, vocabulary: int, rng: np.random.Generator) -> Bytes:
    """[TILE_TOKENS, R]: values that decode to roughly normal numbers."""
    records = np.zeros((TILE_TOKENS, spec.record_bytes), dtype=np.uint8)
    for field in spec.fields:
        view = field_view(records, field)
        if field.name == "tap_scales":
            view[...] = 127
        elif field.name == "top_ids":
            view[...] = np.arange(view.shape[-1]) % vocabulary
        elif field.name == "top_log_probs":
            view[...] = np.array([-4.5], dtype=np.float32).view(np.uint32) >> 16
        elif field.dtype == "uint8":
            view[...] = rng.integers(0, 120, view.shape, dtype=np.uint8)
        else:
            view[...] = rng.standard_normal(view.shape, dtype=np.float32).view(np.uint32) >> 16
    return records


def _manifest(geometry: Geometry, codec: str, teacher: str, samples: BucketSamples, rows: int) -> Manifest:
    drafter, count = geometry.drafter, len(samples.samples)
    return Manifest(
        layout_version=LAYOUT_VERSION,
        draftcache_version=VERSION,
        target=TargetIdentity(
            name="random",
            architecture="none",
            model_type="none",
            dtype="bfloat16",
            hidden_size=drafter.hidden_size,
            vocab_size=drafter.vocab_size,
            num_layers=64,
            num_heads=drafter.num_heads,
            num_kv_heads=drafter.num_kv_heads,
            head_dim=drafter.head_dim,
            intermediate_size=drafter.intermediate_size,
            rms_norm_eps=drafter.rms_norm_eps,
            rope_theta=drafter.rope_theta,
            max_position_embeddings=geometry.stride,
            attention_bias=False,
            tied_head=False,
            tokenizer_size=drafter.mask_token_id,
            special_token_ids=(),
            config_digest="",
            weights_digest="",
            tokenizer_digest="",
            template_digest="",
        ),
        settings=ExtractSettings(
            layer_ids=drafter.layer_ids,
            ceilings=(geometry.stride,),
            token_budget=geometry.tokens,
            max_length=geometry.stride,
            min_supervised=2,
            limit=None,
            codec=codec,
            teacher=teacher,
        ),
        final_norm_applied=True,
        data=(),
        report=DataReport(
            read=count,
            kept=count,
            dropped={},
            truncated=0,
            supervised_tokens=int(samples.loss_mask.sum()),
            supervised_tokens_cut=0,
            notes={},
        ),
        buckets=(BucketSummary(ceiling=geometry.stride, samples=count, rows=rows, digest=samples.digest()),),
    )
