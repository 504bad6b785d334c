"""Verify, and resuming after damage and after crashes: what is found, what is written again, what never is."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from draftcache.common.codec import read_taps
from draftcache.common.errors import DamageError, MismatchError, StoreError
from draftcache.common.journal import FOLDER, Journal, JournalEntry
from draftcache.common.shard import write_shard
from draftcache.common.stats import read_row_records
from draftcache.common.store import Store, lock_store, open_store
from draftcache.common.verify import verify_store
from draftcache.extract import estimate, forward, run, writer
from draftcache.extract.plan import ExtractConfig
from draftcache.extract.run import extract
from draftcache.tests.commands import run as draftcache
from draftcache.tests.stores import files_of, flip_bit, tiny_config, tiny_data, tiny_store

SHARDS = 9


@pytest.fixture
def config(tmp_path: Path, store: Store, target_folder: Path) -> ExtractConfig:
    """The extraction that made the tiny store, into the copy's folder, to be resumed."""
    data = tiny_data(store.path.parent / "data.jsonl")
    return resumed(tiny_config(tmp_path / "store", target=target_folder, data=[data]))


def resumed(config: ExtractConfig, **changes: object) -> ExtractConfig:
    return dataclasses.replace(config, resume=True, **changes)  # type: ignore[arg-type]


def written_files(path: Path) -> dict[str, bytes]:
    """Every file but the journal, whose lines stand in the order of writing."""
    return {name: data for name, data in files_of(path).items() if not name.startswith(f"{FOLDER}/")}


def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the batches that are run and written."""
    seen: list[int] = []

    def counted(*args: object) -> object:
        seen.append(1)
        return forward.batch_inputs(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "batch_inputs", counted)
    return seen


def first_taps(store: Store, ceiling: int) -> torch.Tensor:
    """The taps of a bucket's first sample, [tokens, K * H]."""
    records = torch.from_numpy(read_row_records(store.buckets[ceiling], 0))
    return read_taps(records, store.manifest.record, torch.float32)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def swap(path: Path) -> None:
    """Put the bucket's first shard in this one's place: as long, and with checksums that are right."""
    first = path.parents[2] / "0" / "0" / "0"
    assert first.stat().st_size == path.stat().st_size
    shutil.copyfile(first, path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flip": lambda p: flip_bit(p, p.stat().st_size // 3),
    "truncate": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "delete": lambda p: p.unlink(),
    "empty": lambda p: p.write_bytes(b""),
    "zero": zero,
    "longer": lambda p: p.write_bytes(p.read_bytes() + bytes(4096)),
    "swap": swap,
}


def test_a_sound_store_verifies(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify_store(store.path)
    assert (report.shards, report.damage, report.strays) == (SHARDS, (), ())
    assert draftcache(capsys, "verify", "--store", store.path).code == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_only_it_is_written_again(
    copied: Store,
    store: Store,
    config: ExtractConfig,
    damage: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = copied.buckets[128].shard_path(1)
    DAMAGES[damage](path)
    outcome = draftcache(capsys, "verify", "--store", copied.path)
    assert outcome.code == 1
    rows = copied.buckets[128].shard_rows(1)
    assert str(path) in outcome.err
    assert str(copied.buckets[128].samples.samples[rows.start]) in outcome.err
    seen = forwards(monkeypatch)
    extract(config)
    assert len(seen) == 2  # once to prove, once to write
    assert written_files(copied.path) == written_files(store.path)
    assert verify_store(copied.path).damage == ()


def test_every_file_of_a_store_is_covered(copied: Store) -> None:
    for name in sorted(written_files(copied.path)):
        path = copied.path / name
        before = path.read_bytes()
        flip_bit(path, len(before) // 2)
        try:
            found = verify_store(copied.path).damage
        except (DamageError, StoreError) as error:
            found = (error.found,)
        path.write_bytes(before)
        assert found, f"a flipped bit in {name} went unnoticed"
    assert verify_store(copied.path).damage == ()


def test_random_faults_are_found_or_change_nothing(copied: Store) -> None:
    """A short campaign; the long one is benchmarks/store_campaigns.py's."""
    rng = random.Random(0)
    files = [copied.path / name for name in (*sorted(written_files(copied.path)), f"{FOLDER}/rank-0.jsonl")]
    for _ in range(120):
        path = rng.choice(files)
        before = path.read_bytes()
        kind = rng.choice(["flip", "cut", "gone", "burst", "swap"])
        if kind == "flip":
            flip_bit(path, rng.randrange(len(before)), rng.randrange(8))
        elif kind == "cut":
            path.write_bytes(before[: rng.randrange(len(before))])
        elif kind == "gone":
            path.unlink()
        elif kind == "swap":
            path.write_bytes(rng.choice([p for p in files if p.stat().st_size == len(before)]).read_bytes())
        else:
            at = rng.randrange(len(before))
            path.write_bytes(before[:at] + rng.randbytes(min(16, len(before) - at)) + before[at + 16 :])
        changed = not path.exists() or path.read_bytes() != before
        try:
            found = verify_store(copied.path).damage
        except (DamageError, StoreError) as error:
            found = (error.found,)
        path.write_bytes(before)
        assert found or not changed, f"{kind} in {path} went unnoticed"


def test_a_journal_that_names_a_stranger_is_damage_and_resuming_asks_for_its_end(
    copied: Store, config: ExtractConfig
) -> None:
    with Journal(copied.path) as journal:
        journal.append(JournalEntry(bucket=64, shard=2, size=1, digests=(1,)))
    (damage,) = verify_store(copied.path).damage
    assert "names shard 2 of bucket 64" in damage
    with pytest.raises(DamageError, match="names shard 2 of bucket 64"):
        extract(config)
    shutil.rmtree(copied.path / FOLDER)  # as the message says
    extract(config)
    assert verify_store(copied.path).damage == ()


def test_strays_are_reported_and_never_read(copied: Store) -> None:
    (copied.path / "buckets" / "64" / "records" / "c" / "0" / "0" / "0.partial").write_bytes(b"half")
    report = verify_store(copied.path)
    assert report.damage == ()
    assert report.strays == ("buckets/64/records/c/0/0/0.partial",)


def test_resuming_a_finished_store_runs_nothing(
    copied: Store, config: ExtractConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = forwards(monkeypatch)
    extract(config)
    assert not seen
    assert f"{SHARDS} of {SHARDS} shards already done" in capsys.readouterr().err
    assert copied.path.exists()


def test_resuming_starts_a_store_that_is_not_there(config: ExtractConfig, store: Store) -> None:
    extract(config)
    assert written_files(config.store) == written_files(store.path)


@pytest.mark.parametrize("left", [0, 1, 5])
def test_resuming_after_a_crash_gives_the_uninterrupted_store(
    copied: Store, store: Store, config: ExtractConfig, left: int
) -> None:
    journal = copied.path / FOLDER / "rank-0.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:left]) + lines[left][:20])  # killed while appending
    (copied.buckets[64].shard_path(0).parent / "0.partial").write_bytes(b"killed while writing")
    with pytest.raises(StoreError, match=f"{left} of {SHARDS}"):
        open_store(copied.path)
    extract(config)
    assert written_files(copied.path) == written_files(store.path)
    assert verify_store(copied.path).damage == ()


def test_resuming_a_start_without_manifest_begins_again(copied: Store, store: Store, config: ExtractConfig) -> None:
    (copied.path / "manifest.json").unlink()
    shutil.rmtree(copied.path / FOLDER)  # the journal begins after the manifest
    extract(config)
    assert written_files(copied.path) == written_files(store.path)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_ids": (1, 3, 6)}, "layer_ids"),
        ({"token_budget": 512}, "token_budget"),
        ({"codec": "mxfp8"}, "codec"),
        ({"limit": 3}, "limit"),
    ],
)
def test_resuming_with_other_settings_is_refused_by_name(
    copied: Store, store: Store, config: ExtractConfig, changes: dict[str, object], word: str
) -> None:
    with pytest.raises(MismatchError, match=word):
        extract(resumed(config, **changes))
    assert written_files(copied.path) == written_files(store.path)


def test_resuming_with_other_data_is_refused(copied: Store, config: ExtractConfig, tmp_path: Path) -> None:
    other = tiny_data(tmp_path / "data.jsonl", seed=1)
    with pytest.raises(MismatchError, match="data"):
        extract(resumed(config, data=(other,)))
    assert verify_store(copied.path).damage == ()


def test_a_second_writer_is_refused(copied: Store, config: ExtractConfig) -> None:
    with lock_store(copied.path), pytest.raises(StoreError, match="another run"):
        extract(config)


def test_the_disk_being_full_leaves_a_store_that_resumes(
    store: Store, config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def full(*args: object) -> tuple[int, ...]:
        calls.append(1)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        return write_shard(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "write_shard", full)
    with pytest.raises(StoreError, match="No space left"):
        extract(config)
    monkeypatch.undo()
    extract(config)
    assert written_files(config.store) == written_files(store.path)


def test_too_little_space_is_refused_before_anything_is_written(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "free_bytes", lambda _path: 1000)
    with pytest.raises(StoreError, match="1000 bytes free"):
        extract(config)
    assert not config.store.exists()


def test_the_dry_run_names_the_size_of_the_real_store(store: Store, config: ExtractConfig) -> None:
    estimated, free = run.dry_run(config)
    real = sum(p.stat().st_size for p in store.path.rglob("*") if p.is_file())
    assert real <= estimated.disk_bytes <= 1.02 * real
    assert estimated.logical_bytes == sum(
        len(bucket.samples.samples) * ceiling * estimated.bytes_per_token for ceiling, bucket in store.buckets.items()
    )
    assert free > 0
    assert not config.store.exists()


@pytest.mark.parametrize("codec", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("teacher", ["top", "none"])
def test_compact_stores_verify_and_hold_what_bf16_holds(
    tmp_path: Path, store: Store, target_folder: Path, codec: str, teacher: str
) -> None:
    base = tiny_config(tmp_path / "store", target=target_folder, data=[store.path.parent / "data.jsonl"])
    compact = extract(dataclasses.replace(base, codec=codec, teacher=teacher))
    assert verify_store(compact.path).damage == ()
    for bucket in store.buckets.values():
        wanted, found = (
            read_taps(
                torch.from_numpy(read_row_records(s.buckets[bucket.ceiling], 0)), s.manifest.record, torch.float32
            )
            for s in (store, compact)
        )
        cosine = torch.nn.functional.cosine_similarity(wanted, found, dim=-1)
        assert float(cosine.min()) > {"mxfp8": 0.999, "mxfp4": 0.98}[codec]


def test_another_store_is_another_store(store: Store, tmp_path: Path, target_folder: Path) -> None:
    other = tiny_store(tmp_path, target=target_folder, seed=3)
    assert other.manifest.identity != store.manifest.identity
    assert not np.array_equal(other.buckets[64].samples.input_ids, store.buckets[64].samples.input_ids)
