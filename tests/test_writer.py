"""The writer behind the forward: its order, its errors, and what it leaves when the disk fails."""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draftcache.common import shard
from draftcache.common.errors import StoreError
from draftcache.common.journal import Journal, read_journal
from draftcache.common.layout import ShardGeometry
from draftcache.common.shard import Bytes
from draftcache.common.store import Store, open_store
from draftcache.extract import writer
from draftcache.extract.buckets import Batch
from draftcache.extract.run import extract
from draftcache.extract.writer import Writer
from draftcache.tests.states import stored
from draftcache.tests.stores import (
    tiny_config,
    tiny_data,
)


@pytest.mark.parametrize("call", [1, 2, 3, 6])
def test_an_error_in_the_writer_thread_surfaces(
    tmp_path: Path, target_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    real, calls = shard.write_shard, list[Path]()

    def broken_disk(path: Path, geometry: ShardGeometry, records: Bytes, lengths: Sequence[int]) -> tuple[int, ...]:
        calls.append(path)
        if len(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, geometry, records, lengths)

    monkeypatch.setattr(writer, "write_shard", broken_disk)
    data = tiny_data(data, count=9)
    with pytest.raises(StoreError, match="store: Input/output error"):
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    with pytest.raises(StoreError):
        open_store(tmp_path / "store")
    kept = list(read_journal(tmp_path / "store"))
    present = {str(path) for path in (tmp_path / "store").glob("buckets/*/records/c/*/0/0")}
    named = {str(tmp_path / "store/buckets" / f"{e.bucket}/records/c/{e.shard}/0/0") for e in kept}
    assert str(calls[call - 1]) not in named
    assert named == present
    assert len(named) >= call - 1


def test_records_may_be_overwritten_once_they_are_submitted(copied: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = copied.buckets[64]
    batch, go_on = Batch(ceiling=64, shard=1, first=4, count=1), threading.Event()

    def slow(path: Path, geometry: ShardGeometry, records: Bytes, lengths: Sequence[int]) -> tuple[int, ...]:
        assert go_on.wait(timeout=30)
        return shard.write_shard(path, geometry, records, lengths)

    monkeypatch.setattr(writer, "write_shard", slow)
    records = stored(bucket, 4)[None]
    wanted = records.clone()
    with Journal(copied.path) as journal, Writer(journal, records.numel()) as commits:
        commits.submit(batch, bucket, records, [int(bucket.samples.lengths[4])])
        records.fill_(7)  # the next forward, while the thread still has to write
        go_on.set()
    assert torch.equal(stored(open_store(copied.path).buckets[64], 4), wanted[0])


def test_a_full_disk_is_told_as_such(
    tmp_path: Path, target_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_fd: int, _buffers: Sequence[Any], _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full_disk)
    with pytest.raises(StoreError) as caught:
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    assert caught.value.found == f"{tmp_path / 'store'}: No space left on device"


def test_records_are_flushed_before_the_journal_names_them(
    tmp_path: Path, target_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, events = os.fsync, list[str]()

    def watched(fd: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path / "store")))
        real(fd)

    monkeypatch.setattr(os, "fsync", watched)
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    writes = events[events.index("journal") + 1 :]
    shards = [event for event in writes if event.endswith(".partial")]
    assert len(shards) == 4
    for number, name in enumerate(shards):
        folder = str(Path(name).parent)
        assert writes[3 * number : 3 * number + 3] == [name, folder, "journal/rank-0.jsonl"]
