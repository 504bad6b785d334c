"""The store's small arrays, its journal and its manifest: they survive, and no damage to them goes unnoticed."""

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from draftcache.common.config import fingerprint, to_dict
from draftcache.common.errors import DamageError, MismatchError, StoreError
from draftcache.common.journal import Journal, JournalEntry, read_journal
from draftcache.common.layout import LAYOUT_VERSION
from draftcache.common.manifest import BucketSummary, check_same, read_manifest
from draftcache.common.record import record_spec
from draftcache.common.store import Bucket, BucketSamples, Store, create_store, is_store, open_store
from draftcache.tests.stores import flip_bit

JOURNAL = Path("journal") / "rank-0.jsonl"
RECORD = record_spec(2, 32, "bf16", "last")
ARRAYS = ("sample", "length", "input_ids", "loss_mask")
ENTRIES = [
    JournalEntry(bucket=8192, shard=0, rows=6, size=123_456),
    JournalEntry(bucket=8192, shard=1, rows=2, size=99, void=(0, 1)),
    JournalEntry(bucket=770, shard=0, rows=59, size=2**40),
]


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
def copied(store: Store, tmp_path: Path) -> Path:
    """A copy of the tiny store that may be damaged."""
    shutil.copytree(store.path, tmp_path / "copied")
    return tmp_path / "copied"


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


# The journal


def write_journal(path: Path) -> Path:
    """Append ENTRIES through `Journal`; returns the journal's file."""
    with Journal(path) as journal:
        for entry in ENTRIES:
            journal.append(entry)
    return path / JOURNAL


def test_the_journal_keeps_entries_in_order(tmp_path: Path) -> None:
    write_journal(tmp_path)
    assert list(read_journal(tmp_path)) == ENTRIES


def test_without_a_journal_nothing_exists(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path)) == []


def test_a_journal_opened_again_goes_on(tmp_path: Path) -> None:
    write_journal(tmp_path)
    with Journal(tmp_path) as journal:
        journal.append(ENTRIES[0])
    assert list(read_journal(tmp_path)) == [*ENTRIES, ENTRIES[0]]


def test_an_entry_is_flushed_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flushed = os.fsync, list[int]()

    def watched(fd: int) -> None:
        flushed.append(os.fstat(fd).st_size)
        real(fd)

    with Journal(tmp_path) as journal:
        monkeypatch.setattr(os, "fsync", watched)
        journal.append(ENTRIES[0])
        assert flushed == [(tmp_path / JOURNAL).stat().st_size]
        assert list(read_journal(tmp_path)) == ENTRIES[:1]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    file = write_journal(tmp_path)
    whole = file.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for kept in range(len(last)):  # every possible tear, down to nothing
        file.write_bytes(whole[: len(whole) - len(last) + kept])
        assert list(read_journal(tmp_path)) == ENTRIES[:2]


def test_a_flipped_bit_in_a_complete_line_is_damage(tmp_path: Path) -> None:
    file = write_journal(tmp_path)
    whole = file.read_bytes()
    first = len(whole.splitlines(keepends=True)[0])
    for at in range(first):  # its newline included
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(DamageError) as caught:
            list(read_journal(tmp_path))
        assert f"{file}: line 1 " in caught.value.found


def test_damage_in_the_middle_names_its_line(tmp_path: Path) -> None:
    file = write_journal(tmp_path)
    first, second, third = file.read_bytes().splitlines(keepends=True)
    for second_line in (b"\n", b"null\n", b"[]\n", second[:20] + b"\n", second.replace(b"1", b"2", 1)):
        file.write_bytes(first + second_line + third)
        with pytest.raises(DamageError) as caught:
            list(read_journal(tmp_path))
        assert "line 2 " in caught.value.found


# Opening and creating


def test_a_finished_store_opens(store: Store) -> None:
    found = open_store(store.path)
    assert found.manifest == store.manifest
    assert found.committed() == store.committed()
    assert sorted(found.buckets) == [64, 128, 190]


def test_an_unfinished_store_is_refused(copied: Path) -> None:
    lines = (copied / JOURNAL).read_bytes().splitlines(keepends=True)
    assert len(lines) == 9
    for kept in (8, 1, 0):
        (copied / JOURNAL).write_bytes(b"".join(lines[:kept]))
        with pytest.raises(StoreError) as caught:
            open_store(copied)
        assert f"{copied} holds {kept} of 9 shards" in caught.value.found
    (copied / JOURNAL).unlink()
    with pytest.raises(StoreError):
        open_store(copied)


def test_a_shard_named_twice_counts_once(copied: Path) -> None:
    lines = (copied / JOURNAL).read_bytes().splitlines(keepends=True)
    (copied / JOURNAL).write_bytes(b"".join([*lines[:-1], lines[0]]))
    with pytest.raises(StoreError):
        open_store(copied)


def test_a_strange_shard_does_not_stand_in_for_a_missing_one(copied: Path) -> None:
    lines = (copied / JOURNAL).read_bytes().splitlines(keepends=True)
    (copied / JOURNAL).write_bytes(b"".join(lines[:-1]))
    with Journal(copied) as journal:
        journal.append(JournalEntry(bucket=64, shard=77, rows=4, size=1))
    with pytest.raises(StoreError):
        open_store(copied)


def test_damage_to_ids_is_found_when_a_store_is_opened(copied: Path) -> None:
    (chunk,) = (file for file in (copied / "buckets/128/input_ids/c").rglob("*") if file.is_file())
    flip_bit(chunk, chunk.stat().st_size // 2)
    with pytest.raises(DamageError):
        open_store(copied)


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


# The manifest


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest's JSON in place, its checksum with it."""
    values = json.loads((path / "manifest.json").read_text())
    del values["checksum"]
    change(values)
    (path / "manifest.json").write_text(json.dumps(values | {"checksum": fingerprint(values)}))


def refusal(path: Path) -> StoreError:
    """The error with which opening a store is refused."""
    with pytest.raises(StoreError) as caught:
        open_store(path)
    assert str(path) in caught.value.found
    return caught.value


def test_the_manifest_survives(store: Store) -> None:
    assert read_manifest(store.path) == store.manifest
    values = json.loads((store.path / "manifest.json").read_text())
    checksum = values.pop("checksum")
    assert values == to_dict(store.manifest)
    assert checksum == fingerprint(values)


def test_a_changed_digit_in_the_manifest_is_damage(copied: Path) -> None:
    text = (copied / "manifest.json").read_text()
    digits = [at for at, letter in enumerate(text) if letter.isdigit()]
    for at in random.Random(0).sample(digits, 30):
        if "layout_version" not in text[text.rfind("\n", 0, at) : at]:
            (copied / "manifest.json").write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
            with pytest.raises(DamageError) as caught:
                read_manifest(copied)
            assert "fails its checksum" in caught.value.found


def test_a_manifest_without_its_checksum_is_damage(copied: Path) -> None:
    values = json.loads((copied / "manifest.json").read_text())
    del values["checksum"]
    (copied / "manifest.json").write_text(json.dumps(values))
    assert isinstance(refusal(copied), DamageError)


def test_the_order_of_keys_in_the_manifest_does_not_matter(copied: Path, store: Store) -> None:
    values = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(dict(reversed(values.items()))))
    assert read_manifest(copied) == store.manifest


@pytest.mark.parametrize("folder", ["", "missing"])
def test_a_folder_without_a_manifest_is_no_store(tmp_path: Path, folder: str) -> None:
    assert "has no manifest.json" in refusal(tmp_path / folder).found


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("mine")
    refusal(tmp_path / "store")


@pytest.mark.parametrize("raw", [b"", b"{", b"nonsense", b"\xff\xfe\x00", b'{"layout_version": 1'])
def test_a_garbled_manifest_is_refused(copied: Path, raw: bytes) -> None:
    (copied / "manifest.json").write_bytes(raw)
    assert "is not JSON" in refusal(copied).found


@pytest.mark.parametrize("raw", ["null", "[]", "3", "{}", '{"layout_version": null}', '{"layout_version": 99}'])
def test_another_layout_version_is_refused(copied: Path, raw: str) -> None:
    (copied / "manifest.json").write_text(raw)
    error = refusal(copied)
    assert "has layout version" in error.found
    assert error.needed == f"version {LAYOUT_VERSION}"


def test_a_later_layout_version_is_refused_before_its_keys(copied: Path) -> None:
    rewrite(copied, lambda values: values.update(layout_version=LAYOUT_VERSION + 1, news=True))
    assert f"has layout version {LAYOUT_VERSION + 1}" in refusal(copied).found


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda values: values.pop("target"), "lacks ['target']"),
        (lambda values: values["settings"].pop("layer_ids"), "lacks ['layer_ids']"),
        (lambda values: values.update(colour="red"), "unknown keys ['colour']"),
        (lambda values: values["target"].update(hidden_size="32"), "hidden_size is '32'"),
        (lambda values: values["buckets"][0].update(rows=1.5), "rows is 1.5"),
        (lambda values: values["target"].update(tied_head=0), "tied_head is 0"),
    ],
)
def test_a_manifest_with_wrong_keys_or_types_is_refused(
    copied: Path, change: Callable[[dict[str, Any]], object], word: str
) -> None:
    rewrite(copied, change)
    assert word in refusal(copied).found


def test_the_same_manifest_is_the_same(store: Store) -> None:
    renamed = dataclasses.replace(store.manifest.target, name="other")  # its folder moved
    other = dataclasses.replace(store.manifest, draftcache_version="other", target=renamed, files=())
    check_same(store.manifest, other, "the store")


def test_a_stranger_is_refused_by_every_difference(store: Store) -> None:
    other = dataclasses.replace(
        store.manifest,
        target=dataclasses.replace(store.manifest.target, weights_digest="abc"),
        settings=dataclasses.replace(store.manifest.settings, layer_ids=(0, 2)),
    )
    with pytest.raises(MismatchError) as caught:
        check_same(store.manifest, other, "the store")
    assert "settings.layer_ids: found [1, 3, 5], wanted [0, 2]" in caught.value.found
    assert "target.weights_digest" in caught.value.found
    assert caught.value.found.startswith("the store was made from something else")


def test_a_manifests_identity_leaves_out_the_version_that_wrote_it(store: Store) -> None:
    manifest = store.manifest
    assert dataclasses.replace(manifest, draftcache_version="other").identity == manifest.identity
    assert dataclasses.replace(manifest, final_norm_applied=False).identity != manifest.identity
