"""The store: its small arrays, opening and creating one, and the plan, the journal and the shards held together."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from draftcache.common.errors import DamageError, StoreError
from draftcache.common.journal import Journal, JournalEntry
from draftcache.common.manifest import BucketSummary
from draftcache.common.record import record_spec
from draftcache.common.stats import read_row_records
from draftcache.common.store import Bucket, BucketSamples, Store, create_store, is_store, open_store
from draftcache.tests.stores import flip_bit

JOURNAL = Path("journal") / "rank-0.jsonl"
RECORD = record_spec(2, 32, "bf16", "last")
ARRAYS = ("sample", "length", "input_ids", "loss_mask")


def random_bucket(ceiling: int, lengths: list[int], seed: int = 0) -> BucketSamples:
    """Random ids and masks of these lengths, under ascending numbers with gaps."""
    rng = np.random.default_rng(seed)
    return BucketSamples(
        ceiling=ceiling,
        samples=np.cumsum(rng.integers(1, 2**40, len(lengths))),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        input_ids=rng.integers(0, 2**31 - 1, sum(lengths), dtype=np.int32),
        loss_mask=rng.integers(0, 2, sum(lengths), dtype=np.uint8),
    )


def opened(path: Path, samples: BucketSamples, rows: int = 2) -> Bucket:
    """The bucket of a store's folder, with nothing read yet."""
    summary = BucketSummary(ceiling=samples.ceiling, samples=len(samples.samples), rows=rows, digest=samples.digest())
    return Bucket(path, summary, RECORD)


@pytest.fixture(scope="module")
def small_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BucketSamples]:
    """A group of one bucket without records, and what was put into it; not to be changed."""
    path, samples = tmp_path_factory.mktemp("small") / "store", random_bucket(100, [100, 1, 65, 33, 70])
    create_store(path, RECORD, {100: 2}, [samples])
    return path, samples


@pytest.fixture
def small(small_once: tuple[Path, BucketSamples], tmp_path: Path) -> tuple[Path, BucketSamples]:
    """The same as a copy that may be damaged."""
    path, samples = small_once
    shutil.copytree(path, tmp_path / "store")
    return tmp_path / "store", samples


@pytest.fixture
def folder(copied: Store) -> Path:
    """A store's folder that may be damaged."""
    return copied.path


# The small arrays


@pytest.mark.parametrize("lengths", [[7], [100] * 5, [1, 100, 64, 65, 2, 99]])
def test_samples_survive_bit_for_bit(tmp_path: Path, lengths: list[int]) -> None:
    written = [random_bucket(100, lengths), random_bucket(300, [201, *lengths], seed=1)]
    create_store(tmp_path / "store", RECORD, {100: 2, 300: 1}, written)
    for samples in written:
        found = opened(tmp_path / "store", samples).samples
        assert found.ceiling == samples.ceiling
        for name in ("samples", "offsets", "input_ids", "loss_mask"):
            array, wanted = getattr(found, name), getattr(samples, name)
            assert array.dtype == wanted.dtype
            assert np.array_equal(array, wanted)
        assert found.lengths.tolist() == np.diff(samples.offsets).tolist()


def test_any_reader_sees_padded_arrays_and_an_empty_record_array(small: tuple[Path, BucketSamples]) -> None:
    path, samples = small
    group: Any = zarr.open_group(str(path), mode="r")["buckets/100"]
    ids, mask = np.asarray(group["input_ids"]), np.asarray(group["loss_mask"])
    assert ids.shape == mask.shape == (5, 100)
    for row, length in enumerate([100, 1, 65, 33, 70]):
        assert np.array_equal(ids[row, :length], samples.input_ids[samples.tokens(row)])
        assert np.array_equal(mask[row, :length], samples.loss_mask[samples.tokens(row)])
        assert not ids[row, length:].any()
    records = group["records"]
    assert records.shape == (5, 100, RECORD.record_bytes)
    assert (records.chunks, records.shards) == ((1, 64, RECORD.record_bytes), (2, 128, RECORD.record_bytes))
    assert not np.asarray(records[...]).any()  # what no shard holds reads as zero
    assert [field["name"] for field in records.attrs["fields"]] == ["taps", "last"]
    assert records.attrs["record_bytes"] == RECORD.record_bytes


def test_shards_and_rows_of_a_bucket(small: tuple[Path, BucketSamples]) -> None:
    bucket = opened(*small)
    assert bucket.shard_count == 3
    assert [bucket.samples.rows(bucket.shard_rows(shard))[0] for shard in range(3)] == [[100, 1], [65, 33], [70]]
    assert bucket.samples.rows(range(2, 4))[1] == small[1].samples[2:4].tolist()
    assert [bucket.shard_rows(shard) for shard in range(3)] == [range(0, 2), range(2, 4), range(4, 5)]
    assert bucket.shard_path(1) == small[0] / "buckets" / "100" / "records" / "c" / "1" / "0" / "0"


@pytest.mark.parametrize("name", ARRAYS)
def test_a_flipped_bit_in_a_small_array_is_damage(small: tuple[Path, BucketSamples], name: str) -> None:
    path, samples = small
    (chunk,) = (file for file in (path / "buckets" / "100" / name / "c").rglob("*") if file.is_file())
    size = chunk.stat().st_size
    for at in {0, size - 1, *random.Random(0).sample(range(size), 20)}:
        flip_bit(chunk, at, at % 8)
        with pytest.raises(DamageError) as caught:
            _ = opened(path, samples).samples
        assert str(path / "buckets" / "100") in caught.value.found
        flip_bit(chunk, at, at % 8)
    assert opened(path, samples).samples.digest() == samples.digest()


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("how", ["missing", "empty", "cut", "zeroed", "without metadata", "missing array"])
def test_other_damage_to_a_small_array_is_found(small: tuple[Path, BucketSamples], name: str, how: str) -> None:
    path, samples = small
    array = path / "buckets" / "100" / name
    (chunk,) = (file for file in (array / "c").rglob("*") if file.is_file())
    whole = chunk.read_bytes()
    match how:
        case "missing":
            chunk.unlink()  # zarr reads a missing chunk as zeros
        case "without metadata":
            (array / "zarr.json").unlink()
        case "missing array":
            shutil.rmtree(array)
        case _:
            chunk.write_bytes({"empty": b"", "cut": whole[:-1], "zeroed": bytes(len(whole))}[how])
    with pytest.raises(DamageError) as caught:
        _ = opened(path, samples).samples
    assert str(path / "buckets" / "100") in caught.value.found


def resize(path: Path, name: str, shape: int | tuple[int, ...]) -> None:
    """Change the shape that an array's metadata gives."""
    array: Any = zarr.open_group(str(path), mode="r+")[f"buckets/100/{name}"]
    array.resize(shape)


@pytest.mark.parametrize("count", [4, 6])
def test_more_or_fewer_sample_numbers_are_damage(small: tuple[Path, BucketSamples], count: int) -> None:
    path, samples = small
    resize(path, "sample", count)
    with pytest.raises(DamageError):
        _ = opened(path, samples).samples


@pytest.mark.parametrize(("name", "shape"), [("length", 6), ("input_ids", (5, 99)), ("loss_mask", (6, 100))])
def test_an_array_of_another_shape_is_damage(
    small: tuple[Path, BucketSamples], name: str, shape: int | tuple[int, ...]
) -> None:
    path, samples = small
    resize(path, name, shape)
    with pytest.raises(DamageError):
        _ = opened(path, samples).samples


@pytest.mark.parametrize("changed", ["samples", "offsets", "input_ids", "loss_mask"])
def test_the_digest_sees_every_array(changed: str) -> None:
    samples = random_bucket(100, [3, 4])
    array = getattr(samples, changed).copy()
    array[1] ^= 1
    assert dataclasses.replace(samples, **{changed: array}).digest() != samples.digest()


# Opening and creating


def test_a_finished_store_opens(store: Store) -> None:
    found = open_store(store.path)
    assert found.manifest == store.manifest
    assert sorted(found.buckets) == [64, 128, 190]
    for ceiling, bucket in found.buckets.items():
        assert bucket.committed == store.buckets[ceiling].committed
        assert sorted(bucket.committed) == list(range(bucket.shard_count))


def test_an_unfinished_store_is_refused(folder: Path) -> None:
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    assert len(lines) == 9
    for kept in (8, 1, 0):
        (folder / JOURNAL).write_bytes(b"".join(lines[:kept]))
        with pytest.raises(StoreError) as caught:
            open_store(folder)
        assert f"{folder} holds {kept} of 9 shards" in caught.value.found
    (folder / JOURNAL).unlink()
    with pytest.raises(StoreError):
        open_store(folder)


def test_a_shard_named_twice_counts_once(folder: Path) -> None:
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    (folder / JOURNAL).write_bytes(b"".join([*lines[:-1], lines[0]]))
    with pytest.raises(StoreError):
        open_store(folder)


@pytest.mark.parametrize(
    "stranger",
    [
        JournalEntry(bucket=64, shard=77, size=1, digests=(1,) * 4),
        JournalEntry(bucket=65, shard=0, size=1, digests=(1,) * 4),
    ],
)
def test_a_strange_shard_does_not_stand_in_for_a_missing_one(folder: Path, stranger: JournalEntry) -> None:
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    (folder / JOURNAL).write_bytes(b"".join(lines[:-1]))
    with Journal(folder) as journal:
        journal.append(stranger)
    with pytest.raises(DamageError) as caught:
        open_store(folder)
    assert f"names shard {stranger.shard} of bucket {stranger.bucket}" in caught.value.found


def test_damage_to_ids_is_found_when_a_store_is_opened(folder: Path) -> None:
    (chunk,) = (file for file in (folder / "buckets/128/input_ids/c").rglob("*") if file.is_file())
    flip_bit(chunk, chunk.stat().st_size // 2)
    with pytest.raises(DamageError):
        open_store(folder)


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "note.txt").write_text("mine")
    with pytest.raises(StoreError) as caught:
        create_store(tmp_path / "store", RECORD, {100: 2}, [random_bucket(100, [3])])
    assert str(tmp_path / "store") in caught.value.found
    assert [file.name for file in (tmp_path / "store").iterdir()] == ["note.txt"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("mine")
    with pytest.raises(StoreError):
        create_store(tmp_path / "store", RECORD, {}, [])
    assert (tmp_path / "store").read_text() == "mine"


def test_an_empty_folder_may_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    create_store(tmp_path / "store", RECORD, {}, [])
    assert is_store(tmp_path / "store")


def test_what_is_a_store(store: Store, tmp_path: Path) -> None:
    assert is_store(store.path)
    assert not is_store(tmp_path)
    assert not is_store(tmp_path / "missing")


# The plan, the journal and the shards


def test_a_shard_that_the_journal_does_not_name_is_not_read(copied: Store) -> None:
    bucket = Store(copied.path, copied.manifest).buckets[64]
    with pytest.raises(DamageError) as caught:
        read_row_records(bucket, 0)
    assert f"{bucket.shard_path(0)} is not in the journal (samples 0, 3, 6, 9)" == caught.value.found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: dataclasses.replace(e, size=e.size + 4096), "has 4 rows in "),
        (lambda e: dataclasses.replace(e, digests=e.digests[1:]), "has 3 rows in "),
        (lambda e: dataclasses.replace(e, digests=()), "has 0 rows in "),
    ],
)
def test_a_journal_that_disagrees_with_the_plan_is_damage(
    copied: Store, change: Callable[[JournalEntry], JournalEntry], words: str
) -> None:
    with Journal(copied.path) as journal:
        journal.append(change(copied.buckets[64].committed[0]))
    found = open_store(copied.path).buckets[64]
    with pytest.raises(DamageError) as caught:
        read_row_records(found, 0)
    assert f"{found.shard_path(0)} {words}" in caught.value.found
    assert len(read_row_records(found, 4))  # the other shard


def test_a_row_is_held_against_the_journals_newest_digest(copied: Store) -> None:
    entry = copied.buckets[64].committed[0]
    with Journal(copied.path) as journal:
        journal.append(dataclasses.replace(entry, digests=(entry.digests[0], entry.digests[1] ^ 1, *entry.digests[2:])))
    found = open_store(copied.path).buckets[64]
    assert len(read_row_records(found, 0))
    with pytest.raises(DamageError, match="holds in row 1 other data"):
        read_row_records(found, 1)
