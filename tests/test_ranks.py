"""Several processes make one store: the same as one process makes, whoever was killed on the way."""

import dataclasses
import shutil
import time
from pathlib import Path

import pytest

from draftcache.common.errors import UsageError
from draftcache.common.journal import journal_files, read_journal
from draftcache.common.store import Store, open_store
from draftcache.common.verify import verify_store
from draftcache.extract.run import extract
from draftcache.tests.rank_processes import Ended, Rank, start_ranks
from draftcache.tests.stores import tiny_config, tiny_data

SAMPLES = 14


def finish(ranks: list[Rank]) -> list[Ended]:
    """How every rank ended."""
    return [rank.wait() for rank in ranks]


def held(store: Path) -> dict[str, bytes]:
    """Every file of a store but its journals."""
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.parent.name != "journal")
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


def entries(store: Path) -> set[str]:
    return {str(entry) for entry in read_journal(store)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's store's data."""
    return tiny_data(tmp_path_factory.mktemp("data") / "data.jsonl", SAMPLES)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, target_folder: Path, data: Path) -> tuple[Path, list[Ended]]:
    """A store made by two processes, and how they ended."""
    folder = tmp_path_factory.mktemp("two") / "store"
    return folder, finish(start_ranks(2, target_folder, data, folder, folder.parent / "logs"))


def test_two_processes_make_the_store_of_one(two: tuple[Path, list[Ended]], store: Store) -> None:
    folder, ended = two
    assert [rank.code for rank in ended] == [0, 0], ended
    assert held(folder) == held(store.path)
    assert entries(folder) == entries(store.path)
    assert verify_store(folder).damage == ()


def test_every_rank_keeps_its_own_journal_of_its_share(two: tuple[Path, list[Ended]]) -> None:
    folder, _ = two
    shares = [path.read_text().count("\n") for path in journal_files(folder)]
    assert [path.name for path in journal_files(folder)] == ["rank-0.jsonl", "rank-1.jsonl"]
    assert shares == [5, 4]


def test_one_rank_reports_and_each_names_its_slower_side(two: tuple[Path, list[Ended]]) -> None:
    _, ended = two
    assert f"{SAMPLES} of {SAMPLES} samples kept" in ended[0].out
    assert ended[1].out == ""
    for number, rank in enumerate(ended):
        assert f"rank {number}: forward " in rank.err
        assert "is the slower side" in rank.err


def test_a_store_of_two_is_finished_by_three(
    two: tuple[Path, list[Ended]],
    tmp_path: Path,
    target_folder: Path,
    data: Path,
    store: Store,
) -> None:
    """Both ranks of two were killed in the middle, one of them while it wrote its journal."""
    folder = tmp_path / "store"
    shutil.copytree(two[0], folder)
    lost = Store(folder, store.manifest)
    lost.read_journal()
    for path in journal_files(folder):
        first, *others = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(first + others[0][:20])
    kept = {(entry.bucket, entry.shard) for entry in read_journal(folder)}
    for ceiling, bucket in lost.buckets.items():
        for shard in range(bucket.shard_count):
            if (ceiling, shard) not in kept:
                bucket.shard_path(shard).unlink()
    ended = finish(start_ranks(3, target_folder, data, folder, tmp_path / "logs", "--resume"))
    assert [rank.code for rank in ended] == [0, 0, 0], ended
    assert "2 of 9 shards already done" in ended[0].err
    assert held(folder) == held(store.path)
    assert entries(folder) == entries(store.path)
    assert open_store(folder).manifest == store.manifest


def test_killed_in_the_middle_of_writing_and_resumed_alone(
    tmp_path: Path, target_folder: Path, data: Path, store: Store
) -> None:
    """A real kill -9 of both ranks once a journal names a shard."""
    folder = tmp_path / "store"
    ranks = start_ranks(2, target_folder, data, folder, tmp_path / "logs")
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in journal_files(folder)) and time.monotonic() < deadline:
        time.sleep(0.002)
    for rank in ranks:
        rank.kill()
    finish(ranks)
    config = dataclasses.replace(tiny_config(folder, target=target_folder, data=[data]), resume=True)
    assert entries(extract(config).path) == entries(store.path)
    assert held(folder) == held(store.path)
    assert verify_store(folder).damage == ()


def test_a_repaired_shard_counts_whichever_rank_wrote_it_before(
    two: tuple[Path, list[Ended]], tmp_path: Path, target_folder: Path, data: Path
) -> None:
    """After a resume one journal is left, so an older entry of a rank that is no more cannot speak against it."""
    folder = tmp_path / "store"
    shutil.copytree(two[0], folder)
    config = dataclasses.replace(tiny_config(folder, target=target_folder, data=[data]), resume=True)
    open_store(folder).buckets[190].shard_path(1).write_bytes(b"x")  # rank 1's
    extract(config)
    assert [path.name for path in journal_files(folder)] == ["rank-0.jsonl"]
    shards = [(entry.bucket, entry.shard) for entry in read_journal(folder)]
    assert len(shards) == len(set(shards)) == 9
    assert verify_store(folder).damage == ()


def test_a_mistake_stops_every_rank_and_writes_nothing(tmp_path: Path, target_folder: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n")
    first, second = finish(start_ranks(2, target_folder, bad, tmp_path / "store", tmp_path / "logs"))
    assert (first.code, second.code) == (2, 2)
    assert "bad.jsonl:1: not JSON" in first.err
    assert "another rank has stopped" in second.err
    assert not (tmp_path / "store").exists()


def test_a_device_map_under_torchrun_is_refused(
    tmp_path: Path, target_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = tiny_config(tmp_path / "store", target=target_folder, data=[data])
    with pytest.raises(UsageError, match="--device-map under torchrun"):
        extract(dataclasses.replace(config, device_map="auto"))


def test_nonsense_in_the_environment_is_refused(
    tmp_path: Path, target_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="WORLD_SIZE"):
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
