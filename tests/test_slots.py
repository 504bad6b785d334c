"""Slots hand out what the ring read, one micro-batch at a time, and the meter says what that took."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from draftcache.common.store import Store
from draftcache.tests.helpers import flat_batch, gpu, tiny_record
from draftcache.tests.runs import metrics, small_run
from draftcache.tests.test_ring import Twin, endless, longest, open_ring
from draftcache.tests.test_step import training
from draftcache.train import ring as rings
from draftcache.train.batch import batch_bytes, view_batch
from draftcache.train.meter import SPEED_NAMES, Traffic, disk_limit, speed_columns
from draftcache.train.order import MicroBatch
from draftcache.train.report import read_rows
from draftcache.train.ring import Ring, fill_row
from draftcache.train.run import train
from draftcache.train.slots import DeviceSlots, HostSlots


def test_host_slots_hand_out_one_micro_batch_at_a_time(store: Store) -> None:
    wanted, twin = endless(store), Twin(store)
    with open_ring(store) as ring:
        slots = HostSlots(ring)
        for _ in range(30):
            twin.check(next(wanted), slots.take())
            with pytest.raises(AssertionError, match="before the last"):
                slots.take()
            slots.release()
        with pytest.raises(AssertionError, match="before a micro-batch"):
            slots.release()
        found = slots.traffic()
        assert found.read_bytes > 0
        assert found.copied_bytes == 0
        assert slots.traffic() == Traffic()


@pytest.mark.parametrize("work", ["micro_step", "evaluate"])
def test_a_step_says_when_it_needs_its_batch_no_more(work: str) -> None:
    run, calls = training(), list[int]()
    getattr(run.step, work)(flat_batch([], spec=tiny_record()), lambda: calls.append(1))
    assert calls == [1]


@gpu
def test_the_device_slot_holds_a_micro_batch_until_it_is_released(store: Store) -> None:
    device, record_bytes = torch.device("cuda"), store.manifest.record.record_bytes
    static = torch.empty(batch_bytes(longest(store), record_bytes), dtype=torch.uint8, device=device)
    wanted, twin = endless(store), Twin(store)
    kept: list[tuple[MicroBatch, torch.Tensor]] = []
    with Ring(store, endless(store), longest(store), pinned=True) as ring:
        slots = DeviceSlots(ring, longest(store), record_bytes, device)
        for number in range(200):
            micro_batch, batch = next(wanted), slots.take()
            torch.cuda._sleep(200_000 * (number % 3))  # the device is behind the host, or not
            view_batch(static, micro_batch.tokens, record_bytes).block.copy_(batch.block)
            slots.release()
            kept.append((micro_batch, static.clone()))
        torch.cuda.synchronize()
        found = slots.traffic()
    for micro_batch, block in kept:
        twin.check(micro_batch, view_batch(block.cpu(), micro_batch.tokens, record_bytes))
    assert found.copied_bytes == sum(batch_bytes(micro_batch.tokens, record_bytes) for micro_batch, _ in kept)
    assert found.copy_seconds > 0
    assert found.wait_seconds >= 0


def test_a_report_is_arithmetic() -> None:
    rows = [{"tokens": 100, "blocks": 10, "supervised": 30}, {"tokens": 300, "blocks": 20, "supervised": 50}]
    moved = Traffic(read_bytes=6_000_000_000) + Traffic(copied_bytes=8_000_000_000, copy_seconds=0.2, wait_seconds=1.0)
    found = speed_columns(rows, 4.0, moved)
    assert list(found.values()) == [2.0, 100.0, 7.5, 20.0, 0.25, 1.5, 40.0]
    assert tuple(found) == SPEED_NAMES
    assert speed_columns(rows, 4.0, Traffic())["copy_gb_s"] is None


def test_the_disk_is_called_the_limit_with_what_would_be_needed() -> None:
    assert disk_limit(0.02, 1.5) is None
    line = disk_limit(0.25, 1.5)
    assert line is not None
    assert "25% of the time" in line
    assert "gave 1.50 GB/s, and 2.00 GB/s would be needed" in line
    assert "only waited" in str(disk_limit(1.0, 0.1))


@pytest.mark.parametrize("slow", [False, True])
def test_a_run_says_so_when_the_disk_is_slow(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slow: bool
) -> None:
    def fill(*args: Any) -> int:
        time.sleep(0.2 if slow else 0)
        return fill_row(*args)

    monkeypatch.setattr(rings, "fill_row", fill)
    result = train(small_run(store, tmp_path / "run", steps=7, log_every=3, save_every=None, share=0))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    said = capsys.readouterr().err
    assert said.count("first step after") == 1
    assert all(row["seconds"] > 0 and row["tokens_s"] > 0 and row["read_gb_s"] > 0 for row in rows)
    assert rows[0]["seconds"] != rows[1]["seconds"] == rows[3]["seconds"] != rows[4]["seconds"]
    assert set(SPEED_NAMES) <= set(result.metrics)
    assert not set(SPEED_NAMES) & set(metrics(tmp_path / "run")[0])
    if slow:
        assert said.count("the disk is the limit") == 1
        assert rows[-1]["wait_share"] > 0.3
