"""Stage two as a whole on the CPU: both batchings, every loss, what a run leaves behind, and damaged stores."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from draftcache.common.errors import CheckpointError, DamageError
from draftcache.common.shard import RowReader
from draftcache.common.store import Store
from draftcache.extract.run import extract
from draftcache.tests.helpers import record_field
from draftcache.tests.stores import flip_bit, tiny_config
from draftcache.train.checkpoint import load_drafter, newest_checkpoint, read_run
from draftcache.train.model.loss import LossConfig
from draftcache.train.order import Batching, context_shapes, epoch_batches
from draftcache.train.ring import BUFFERS, Ring, fill_batch
from draftcache.train.run import train
from draftcache.train.settings import GeometryOptions, TrainConfig
from draftcache.train.setup import bucket_index


def config(store: Store, out: Path, *, batching: str = "bucket", loss: LossConfig | None = None) -> TrainConfig:
    return TrainConfig(
        store=store.path,
        out=out,
        geometry=GeometryOptions(num_layers=2, block_size=4, layer_types="sliding-last-full", sliding_window=16),
        loss=loss or LossConfig(),
        batching=batching,
        token_budget=256,
        anchors=24,
        accumulate=2,
        steps=7,
        save_every=3,
        log_every=3,
        device="cpu",
    )


@pytest.mark.parametrize("batching", ["bucket", "packed"])
@pytest.mark.parametrize("teacher", ["tokens", "last"])
@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_a_run_trains_and_writes_what_it_promises(
    tmp_path: Path, store: Store, batching: str, teacher: str, weighting: str
) -> None:
    loss = LossConfig(teacher=teacher, weighting=weighting)
    result = train(config(store, tmp_path / "run", batching=batching, loss=loss))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert all(row["loss"] > 0 and row["accepted_length"] >= 1 and row["skipped"] == 0 for row in rows)
    assert rows[0]["lr"] > rows[3]["lr"] > rows[6]["lr"] > 0
    assert result.metrics == rows[-1]
    folders = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert folders == ["checkpoint-00000003", "checkpoint-00000006", "checkpoint-00000007"]
    run, drafter = load_drafter(tmp_path / "run", torch.device("cpu"))
    assert run == read_run(tmp_path / "run")
    assert len(drafter.state_dict()) == 2 * 11 + 3


@pytest.mark.parametrize("codec", ["mxfp8", "mxfp4"])
def test_a_compact_store_trains_with_the_teacher_it_holds(
    tmp_path: Path, store: Store, target_folder: Path, codec: str
) -> None:
    losses = {}
    for name in ("bf16", codec):
        wanted = tiny_config(tmp_path / name, target=target_folder, data=[store.path.parent / "data.jsonl"])
        made = extract(dataclasses.replace(wanted, codec=name, teacher="top"))
        losses[name] = train(config(made, tmp_path / f"{name}-run")).metrics["loss"]
        assert read_run(tmp_path / f"{name}-run").loss.teacher == "top"
    assert losses[codec] == pytest.approx(losses["bf16"], rel=0.05)
    assert losses[codec] != losses["bf16"]


def test_two_runs_are_bit_equal(tmp_path: Path, store: Store) -> None:
    for name in ("a", "b"):
        train(config(store, tmp_path / name))
    a, b = (newest_checkpoint(tmp_path / name) for name in ("a", "b"))
    for name in ("drafter.safetensors", "optimizer.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes()


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-00000009.partial").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("batching", ["bucket", "packed"])
def test_the_ring_delivers_the_stored_rows_in_order(store: Store, batching: str) -> None:
    kind = Batching(kind=batching, token_budget=256)
    index = bucket_index(store)
    batches = epoch_batches(index, kind, seed=3, epoch=1)
    spec, reader = store.manifest.record, RowReader()
    with Ring(store, iter(batches), max(context_shapes(index, kind)), pinned=False) as ring:
        for expected in batches:
            filled = ring.take()
            assert filled.micro_batch == expected
            batch = filled.batch
            seen = torch.zeros(batch.tokens, dtype=torch.bool)
            for number, row in enumerate(expected.rows):
                here = slice(row.first, row.first + row.length)
                seen[here] = True
                bucket = store.buckets[row.ceiling]
                stored = torch.zeros(bucket.geometry.row_bytes, dtype=torch.uint8)
                bucket.read_row(reader, row.row, stored.numpy())
                assert torch.equal(batch.records[here], stored.view(-1, spec.record_bytes)[: row.length])
                tokens = bucket.samples.tokens(row.row)
                assert batch.input_ids[here].tolist() == bucket.samples.input_ids[tokens].tolist()
                assert batch.loss_mask[here].tolist() == bucket.samples.loss_mask[tokens].tolist()
                assert batch.positions[here].tolist() == list(range(row.length))
                assert set(batch.documents[here].tolist()) == {number}
                assert set(batch.samples[here].tolist()) == {row.sample}
            assert set(batch.documents[~seen].tolist()) <= {-1}
            assert not batch.loss_mask[~seen].any()
            assert not batch.records[~seen].any()
            assert int(batch.epoch) == 1
            ring.give_back(filled)


def test_the_ring_never_has_more_than_its_buffers_in_use(store: Store) -> None:
    kind = Batching(kind="bucket", token_budget=64)
    index = bucket_index(store)
    batches = epoch_batches(index, kind, seed=0, epoch=0)
    assert len(batches) > BUFFERS
    with Ring(store, iter(batches), max(context_shapes(index, kind)), pinned=False) as ring:
        held = [ring.take() for _ in range(BUFFERS)]
        assert len({filled.buffer for filled in held}) == BUFFERS
        ring.give_back(held[1])
        assert ring.take().buffer == held[1].buffer


def test_records_reach_the_step_as_the_bits_that_were_stored(store: Store) -> None:
    kind = Batching(kind="bucket", token_budget=256)
    index = bucket_index(store)
    (batch, *_) = epoch_batches(index, kind, seed=0, epoch=0)
    with Ring(store, iter([batch]), max(context_shapes(index, kind)), pinned=False) as ring:
        records = ring.take().batch.records
        taps = record_field(records, store.manifest.record, "taps")
        assert taps.data_ptr() == records.data_ptr()
        assert taps.shape == (batch.tokens, 3 * 32)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete", "zero", "swap"])
def test_training_stops_at_a_damaged_shard_and_names_it(tmp_path: Path, copied: Store, damage: str) -> None:
    path, other = (copied.buckets[128].shard_path(shard) for shard in (1, 0))
    size = path.stat().st_size
    if damage == "flip":
        flip_bit(path, size // 3)
    elif damage == "delete":
        path.unlink()
    elif damage == "swap":  # as long, and with checksums that are right
        assert other.stat().st_size == size
        shutil.copyfile(other, path)
    else:
        path.write_bytes({"truncate": path.read_bytes()[: size // 2], "empty": b"", "zero": bytes(size)}[damage])
    with pytest.raises(DamageError, match=str(path)):
        train(config(copied, tmp_path / "run"))


def test_bytes_read_are_counted(store: Store) -> None:
    kind = Batching(kind="bucket", token_budget=256)
    (batch, *_) = epoch_batches(bucket_index(store), kind, seed=0, epoch=0)
    with Ring(store, iter([batch]), batch.tokens, pinned=False) as ring:
        target = ring.take().batch
        reader = RowReader()
        first, second = (fill_batch(store, reader, batch, target) for _ in range(2))
    spans = sum(-(-row.length // 64) * store.buckets[row.ceiling].geometry.chunk_span for row in batch.rows)
    shards = {(row.ceiling, row.row // store.buckets[row.ceiling].rows) for row in batch.rows}
    assert first == spans + 4096 * len(shards)  # each shard's index, once
    assert second == spans
