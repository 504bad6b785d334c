"""A store's figures against numbers computed by hand, and damage that stops them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from draftcache.common.errors import DamageError
from draftcache.common.journal import Journal
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import write_shard
from draftcache.common.stats import plane_names, read_row_records, store_stats
from draftcache.common.store import Store
from draftcache.common.target import load_parts
from draftcache.tests.stores import CEILINGS, HIDDEN, LAYER_IDS, flip_bit, tiny_store

WIDTH = len(LAYER_IDS) + 1


def planes(store: Store, ceiling: int, row: int) -> torch.Tensor:
    """[length, 4, H] float32: one sample's states through zarr-python and torch."""
    group: Any = zarr.open_group(str(store.path), mode="r")[f"buckets/{ceiling}"]
    raw = np.array(group["records"][row, : int(group["length"][row])])
    return torch.from_numpy(raw).view(torch.bfloat16).float().view(len(raw), WIDTH, HIDDEN)


def rewrite_row(store: Store, ceiling: int, row: int, values: torch.Tensor) -> None:
    """Write the shard of one row again with other states for that row, and its journal line with the new digests."""
    bucket = store.buckets[ceiling]
    shard = row // bucket.rows
    rows = bucket.shard_rows(shard)
    lengths = bucket.samples.lengths[rows.start : rows.stop].tolist()
    records = aligned_bytes(len(rows) * bucket.geometry.row_bytes).reshape(len(rows), bucket.geometry.stride, -1)
    for position, other in enumerate(rows):
        held = values if other == row else planes(store, ceiling, other)
        raw = held.to(torch.bfloat16).view(torch.uint8).reshape(len(held), -1)
        records[position, : len(held)] = raw.numpy()
    digests = write_shard(bucket.shard_path(shard), bucket.geometry, records, lengths)
    with Journal(store.path) as journal:
        journal.append(dataclasses.replace(bucket.committed[shard], digests=digests))
    store.read_journal()


def test_bucket_figures(store: Store) -> None:
    group: Any = zarr.open_group(str(store.path), mode="r")["buckets"]
    found = store_stats(store).buckets
    assert [bucket.ceiling for bucket in found] == list(CEILINGS)
    for bucket, shards, samples in zip(found, (2, 3, 4), (5, 5, 4), strict=True):
        lengths = np.asarray(group[f"{bucket.ceiling}/length"])
        tokens = int(lengths.sum())
        folder = store.path / "buckets" / str(bucket.ceiling) / "records" / "c"
        disk = sum(file.stat().st_size for file in folder.rglob("0") if file.is_file())
        real = tokens * WIDTH * HIDDEN * 2
        assert dataclasses.asdict(bucket) == {
            "ceiling": bucket.ceiling,
            "samples": samples,
            "shards": shards,
            "tokens": tokens,
            "supervised": int(np.asarray(group[f"{bucket.ceiling}/loss_mask"]).sum()),
            "fill": tokens / (samples * bucket.ceiling),
            "real_bytes": real,
            "disk_bytes": disk,
            "stored_per_real": disk / real,
        }


def test_label_agreement_is_the_share_of_supervised_tokens_that_head_of_last_chooses(store: Store) -> None:
    equal = total = 0
    head = load_parts(store.path, store.manifest, torch.device("cpu")).head.float()
    for ceiling, bucket in store.buckets.items():
        for row in range(len(bucket.samples.samples)):
            at = bucket.samples.tokens(row)
            ids, mask = bucket.samples.input_ids[at], bucket.samples.loss_mask[at]
            chosen = (planes(store, ceiling, row)[:, -1] @ head.T).argmax(-1)
            for position in range(1, len(ids)):
                if mask[position]:
                    total += 1
                    equal += int(chosen[position - 1]) == int(ids[position])
    assert store_stats(store).label_agreement == pytest.approx(equal / total)


def test_label_agreement_counts_what_was_changed(copied: Store) -> None:
    head = load_parts(copied.path, copied.manifest, torch.device("cpu")).head.float()
    before = store_stats(copied).label_agreement
    assert before is not None
    at = copied.buckets[190].samples.tokens(1)
    ids, mask = copied.buckets[190].samples.input_ids[at], copied.buckets[190].samples.loss_mask[at]
    values = planes(copied, 190, 1)
    chosen = (values[:, -1] @ head.T).argmax(-1)
    gained = 0
    for position in range(1, len(ids)):
        state = torch.linalg.lstsq(head, torch.eye(len(head))[int(ids[position])]).solution * 100
        if mask[position] and int((state.bfloat16().float() @ head.T).argmax()) == ids[position]:
            gained += int(chosen[position - 1]) != int(ids[position])
            values[position - 1, -1] = state
    assert gained > 10
    rewrite_row(copied, 190, 1, values)
    after = store_stats(copied).label_agreement
    supervised = sum(int(bucket.samples.loss_mask.sum()) for bucket in copied.buckets.values())
    assert after == pytest.approx(before + gained / supervised)


def test_plane_figures(store: Store) -> None:
    every = torch.cat([planes(store, c, row) for c in CEILINGS for row in range(len(store.buckets[c].samples.samples))])
    found = store_stats(store)
    assert found.bytes_per_token == WIDTH * HIDDEN * 2
    assert found.report == store.manifest.report
    assert [plane.name for plane in found.planes] == ["layer 1", "layer 3", "layer 5", "last"]
    for number, plane in enumerate(found.planes):
        values = every[:, number]
        assert plane.tokens == len(values)
        assert plane.mean_norm == pytest.approx(float(values.double().norm(dim=-1).mean()), rel=1e-12)
        assert plane.max_abs == float(values.abs().max())
        energy = values.double().square().sum(0)
        assert plane.top_channel == pytest.approx(float(energy.max() / energy.sum()), rel=1e-12)
        assert (plane.zero_groups, plane.at_limit) == (0.0, 0.0)  # bfloat16 has no codes
        assert (plane.non_finite, plane.zero_tokens) == (0, 0)


def test_non_finite_values_and_zero_tokens_are_counted(copied: Store) -> None:
    values = planes(copied, 128, 2)
    values[3, 0, 5:8] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    values[4, 1] = 0.0
    values[5, 1] = 0.0
    values[6, 3, 0] = 1e30
    values[7, 2] = 0.0
    values[7, 2, 9] = float("nan")  # not a zero token
    clean = store_stats(copied).planes
    rewrite_row(copied, 128, 2, values)
    found = store_stats(copied).planes
    assert [plane.non_finite for plane in found] == [3, 0, 1, 0]
    assert [plane.zero_tokens for plane in found] == [0, 2, 0, 0]
    assert found[3].max_abs == pytest.approx(1e30, rel=0.01)
    assert found[3].mean_norm == pytest.approx(1e30 / found[3].tokens, rel=0.01)
    assert all(np.isfinite(plane.mean_norm) for plane in found)
    assert found[1].mean_norm < clean[1].mean_norm


def test_fewer_samples_are_evenly_spread(store: Store) -> None:
    found = store_stats(store, max_samples=2)
    rows = {64: (0, 4), 128: (0, 4), 190: (0, 3)}
    every = torch.cat([planes(store, c, row) for c in CEILINGS for row in rows[c]])
    for number, plane in enumerate(found.planes):
        assert plane.tokens == len(every)
        assert plane.mean_norm == pytest.approx(float(every[:, number].double().norm(dim=-1).mean()), rel=1e-12)
    assert found.buckets == store_stats(store).buckets  # of the whole store all the same


@pytest.mark.parametrize("most", [5, 100])
def test_more_samples_than_there_are_means_all(store: Store, most: int) -> None:
    assert store_stats(store, max_samples=most) == store_stats(store)


def test_without_a_teacher_there_is_no_last(tmp_path: Path, target_folder: Path) -> None:
    bare = tiny_store(tmp_path, target=target_folder, count=3, teacher="none")
    assert plane_names(bare) == ["layer 1", "layer 3", "layer 5"]
    found = store_stats(bare)
    assert found.bytes_per_token == len(LAYER_IDS) * HIDDEN * 2
    assert [plane.name for plane in found.planes] == plane_names(bare)
    assert found.label_agreement is None


def test_row_records_are_the_real_tokens(store: Store) -> None:
    bucket = store.buckets[128]
    for row, length in enumerate(bucket.samples.lengths.tolist()):
        records = read_row_records(bucket, row)
        assert records.shape == (length, WIDTH * HIDDEN * 2)
        assert torch.equal(
            torch.from_numpy(records).view(torch.bfloat16).float().view(length, WIDTH, -1), planes(store, 128, row)
        )


@pytest.mark.parametrize("at", [0, 64 * 256 - 1, 64 * 256, -1, -2000])
def test_damage_stops_the_figures(copied: Store, at: int) -> None:
    path = copied.buckets[128].shard_path(1)
    flip_bit(path, at)
    with pytest.raises(DamageError) as caught:
        store_stats(copied)
    assert str(path) in caught.value.found
    assert "samples 7" in caught.value.found


def test_a_missing_shard_stops_the_figures(copied: Store) -> None:
    copied.buckets[190].shard_path(3).unlink()
    with pytest.raises(DamageError):
        store_stats(copied)


def test_a_missing_shard_that_is_not_read_is_damage_too(tmp_path: Path, target_folder: Path) -> None:
    bare = tiny_store(tmp_path, target=target_folder, teacher="none")  # no teacher, so no samples read for agreement
    path = bare.buckets[190].shard_path(2)
    path.unlink()
    with pytest.raises(DamageError) as caught:
        store_stats(bare, max_samples=2)
    assert str(path) in caught.value.found
