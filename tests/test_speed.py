"""What keeps extraction near the bare forward: no logits, buffers allocated once, two clocks, writing behind."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draftcache.benchmarks import bench_extract
from draftcache.benchmarks.extract_cases import QWEN3_8B, SMALL
from draftcache.common import shard
from draftcache.common.codec import put_teacher
from draftcache.common.layout import ShardGeometry
from draftcache.common.shard import Bytes
from draftcache.common.stats import read_row_records
from draftcache.common.target import load_target
from draftcache.extract import forward as forward_module
from draftcache.extract import run as stage_one
from draftcache.extract import writer
from draftcache.extract.buckets import plan_batches
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.run import extract
from draftcache.extract.speed import ForwardClock, Speed
from draftcache.tests.helpers import gpu
from draftcache.tests.stores import LAYER_IDS, TOKEN_BUDGET, tiny_config, tiny_data

CPU = torch.device("cpu")


@pytest.mark.parametrize("teacher", ["last", "none", "top"])
def test_the_targets_own_head_never_runs(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch, teacher: str
) -> None:
    """Logits of a whole batch would be larger than everything else; for `top` chunks of rows go through the head."""
    real, largest = torch.nn.Linear.forward, [0]

    def watched(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = real(self, x)
        largest[0] = max(largest[0], out.shape[-1] if in_forward[0] else 0)
        return out

    in_forward = [False]
    call = Forward.__call__

    def marked(self: Forward, *inputs: torch.Tensor) -> torch.Tensor:
        in_forward[0] = True
        try:
            return call(self, *inputs)
        finally:
            in_forward[0] = False

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    monkeypatch.setattr(Forward, "__call__", marked)
    data = tiny_data(tmp_path / "d.jsonl", 4)
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data], teacher=teacher))
    assert 0 < largest[0] < 320  # the MLP's width, and never the vocabulary's


def test_buffers_are_allocated_once(tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device_memory, host_memory = set[int](), set[int]()
    real_teacher = put_teacher

    def teacher(records: torch.Tensor, *rest: Any) -> None:
        device_memory.add(records.data_ptr())
        real_teacher(records, *rest)

    def written(path: Path, geometry: ShardGeometry, records: Bytes, lengths: Sequence[int]) -> tuple[int, ...]:
        host_memory.add(records.ctypes.data)
        return shard.write_shard(path, geometry, records, lengths)

    monkeypatch.setattr(forward_module, "put_teacher", teacher)
    monkeypatch.setattr(writer, "write_shard", written)
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[tiny_data(tmp_path / "d.jsonl", 14)]))
    assert len(device_memory) == 1
    assert len(host_memory) == 2


def test_writing_lies_behind_the_next_forward(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine batches whose forward and writing take 0.1 s each are done in little more than nine forwards."""
    wait = 0.1
    real_call = Forward.__call__

    def slow_forward(self: Forward, *inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(wait)
        return real_call(self, *inputs)

    def slow_write(path: Path, geometry: ShardGeometry, records: Bytes, lengths: Sequence[int]) -> tuple[int, ...]:
        time.sleep(0.9 * wait)
        return shard.write_shard(path, geometry, records, lengths)

    speeds: list[Speed] = []
    real_write_all = stage_one.write_all

    def kept(*inputs: Any) -> Speed | None:
        speed = real_write_all(*inputs)
        assert speed is not None
        speeds.append(speed)
        return speed

    monkeypatch.setattr(Forward, "__call__", slow_forward)
    monkeypatch.setattr(writer, "write_shard", slow_write)
    monkeypatch.setattr(stage_one, "write_all", kept)
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[tiny_data(tmp_path / "d.jsonl", 14)]))
    (speed,) = speeds
    assert speed.overall > 0.6 * speed.forward  # one after the other it would be half
    assert str(speed) in capsys.readouterr().err


@gpu
@pytest.mark.parametrize("teacher", ["last", "top"])
def test_pinned_copies_behind_the_forward_hold_what_it_computed(
    tmp_path: Path, target_folder: Path, teacher: str
) -> None:
    """Every batch again, alone and waited for: the same bytes, though buffers were used again and again."""
    device, data = torch.device("cuda"), tiny_data(tmp_path / "d.jsonl", 14)
    config = tiny_config(tmp_path / "store", target=target_folder, data=[data], teacher=teacher)
    store = extract(dataclasses.replace(config, device="cuda"))
    target, spec = load_target(target_folder, device), store.manifest.record
    checked = 0
    for batch in plan_batches([bucket.samples for bucket in store.buckets.values()], TOKEN_BUDGET):
        bucket = store.buckets[batch.ceiling]
        with Forward(target, LAYER_IDS, spec, TOKEN_BUDGET, device) as forward:
            records = forward(*batch_inputs(bucket.samples, batch, device)).cpu()
        for row in range(batch.count):
            held = torch.from_numpy(read_row_records(bucket, batch.first + row))
            assert torch.equal(held, records[row, : len(held)])
            checked += 1
    assert checked == 14


def test_the_slower_side_is_named() -> None:
    slow_disk = Speed(forward=2000.0, writing=1000.0, overall=990.0)
    assert str(slow_disk).endswith("writing is the slower side")
    assert str(Speed(forward=1000.0, writing=2000.0, overall=990.0)).endswith("the forward is the slower side")
    assert "forward 2,000 tokens/s, writing 1,000 tokens/s, both 990" in str(slow_disk)


def test_the_forwards_clock_counts_forwards_alone() -> None:
    clock, begin = ForwardClock(CPU), time.perf_counter()
    for _ in range(2):
        with clock.running():
            time.sleep(0.02)
        time.sleep(0.05)
    assert 0.04 <= clock.seconds() <= time.perf_counter() - begin - 0.1


@pytest.mark.parametrize("teacher", ["last", "top"])
def test_the_benchmark_runs_on_a_toy(tmp_path: Path, teacher: str) -> None:
    metrics = bench_extract.measure(SMALL, teacher, 1, tmp_path, CPU)
    assert metrics["tokens"] > 500
    assert metrics["x_forward"] > 0
    assert metrics["write_gb_s"] == pytest.approx(metrics["x_raw"] * metrics["raw_gb_s"])
    assert list(tmp_path.iterdir()) == []


def test_the_benchmark_counts_operations_as_the_model_has_weights() -> None:
    """Qwen3-8B has 6.95 G weights outside embedding and head; attention adds a tenth at 8192 tokens."""
    products = QWEN3_8B.operations(1, 1) / 2
    assert products == pytest.approx(6.946e9, rel=1e-3)
    assert QWEN3_8B.operations(6, 8192) / (2 * 6 * 8192) == pytest.approx(products * 1.174, rel=1e-2)
