"""The stores that bench_stream feeds its step from are sound, and a peer's micro-batch is the same bits as ours."""

from pathlib import Path

import pytest
import torch

from draftcache.benchmarks.bench_stream import SMALL, context_tokens, load_peer_batch, micro_batches
from draftcache.benchmarks.stream_stores import write_store
from draftcache.common.codec import field_tensor
from draftcache.common.shard import RowReader
from draftcache.train.batch import batch_bytes, view_batch
from draftcache.train.ring import Ring, fill_batch


@pytest.mark.parametrize(("codec", "teacher"), [("bf16", "last"), ("mxfp4", "top")])
def test_a_store_streams_whole_micro_batches(tmp_path: Path, codec: str, teacher: str) -> None:
    store = write_store(tmp_path / "store", SMALL, codec, teacher, 1e6)
    (bucket,) = store.buckets.values()
    assert bucket.shard_count >= 2
    batches = micro_batches(store, SMALL)
    with Ring(store, micro_batches(store, SMALL), context_tokens(SMALL), pinned=False) as ring:
        for _ in range(5):
            filled = ring.take()
            assert filled.micro_batch == next(batches)
            assert filled.batch.tokens == context_tokens(SMALL)
            assert len(filled.micro_batch.rows) == SMALL.tokens // SMALL.stride
            assert (filled.batch.documents >= 0).sum() == filled.micro_batch.real_tokens
            ring.give_back(filled)


def test_a_peers_micro_batch_is_the_same_bits(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", SMALL, "bf16", "last", 1e6)
    spec, tokens = store.manifest.record, context_tokens(SMALL)
    ours, theirs = (
        view_batch(torch.zeros(batch_bytes(tokens, spec.record_bytes), dtype=torch.uint8), tokens, spec.record_bytes)
        for _ in range(2)
    )
    fill_batch(store, RowReader(), next(micro_batches(store, SMALL)), ours)
    collated = {
        "hidden_states": field_tensor(ours.records, spec.field("taps")).flatten(1)[None],
        "verifier_last_hidden_states": field_tensor(ours.records, spec.field("last"))[None],
        "input_ids": ours.input_ids[None],
        "loss_mask": ours.loss_mask.long()[None],
        "position_ids": ours.positions.long()[None],
        "document_ids": ours.documents.long()[None],
    }
    load_peer_batch(collated, theirs, spec)
    for name in ("records", "input_ids", "loss_mask", "positions", "documents"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
