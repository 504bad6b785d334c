"""Samples whose states are broken: found on the device, kept in the journal, and left out by everything that reads."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftcache.common.errors import TargetError
from draftcache.common.journal import read_journal
from draftcache.common.layout import row_stride
from draftcache.common.record import record_spec
from draftcache.common.stats import store_stats
from draftcache.common.store import Store, open_store
from draftcache.common.target import load_target
from draftcache.common.verify import verify_store
from draftcache.extract import run as stage_one
from draftcache.extract.buckets import Batch, fill_buckets
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.run import extract
from draftcache.extract.template import Tokens
from draftcache.tests.commands import run
from draftcache.tests.helpers import gpu
from draftcache.tests.stores import HIDDEN, LAYER_IDS, messages, tiny_config, tiny_target, write_jsonl
from draftcache.train.order import Batching, epoch_batches
from draftcache.train.setup import bucket_index

CPU = torch.device("cpu")
BAD, GOOD = ord("~"), ord("a")
BROKEN = (2, 7)
"""Lines that hold the byte whose embedding is not finite."""


@pytest.fixture(scope="module")
def broken_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with NaN in the embedding of one byte."""
    folder = tiny_target(tmp_path_factory.mktemp("broken"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lines(count: int = 10, broken: Sequence[int] = BROKEN) -> list[dict[str, Any]]:
    """Short exchanges, all in the smallest bucket; some ask with the bad byte, whose trace then lies in the answer."""
    return [{"messages": messages("hi~" if n in broken else "hi!", "yo man")} for n in range(count)]


@pytest.fixture(scope="module")
def void_store(broken_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Ten samples, two of them void."""
    folder = tmp_path_factory.mktemp("void")
    data = write_jsonl(folder / "data.jsonl", lines())
    config = tiny_config(folder / "store", target=broken_target, data=[data])
    return extract(dataclasses.replace(config, max_void=0.2))


def flags(
    codec: str, teacher: str, spoil: tuple[int, float] | None, target_folder: Path, device: torch.device = CPU
) -> list[bool]:
    """Void flags of three samples of 10, 30 and 20 tokens, after `spoil` (layer, factor) of the second's token 12."""
    target = load_target(target_folder, device)
    tokens = [(n, Tokens(input_ids=[GOOD] * size, loss_mask=[1] * size)) for n, size in enumerate((10, 30, 20))]
    (bucket,) = fill_buckets(tokens, (64,))

    def change(_layer: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        output[1, 12] *= spoil[1] if spoil else 1.0
        output[0, 12] *= 0.0  # padding of the first sample, which nobody reads
        return output

    target.layers[spoil[0] if spoil else LAYER_IDS[0]].register_forward_hook(change)
    spec = record_spec(len(LAYER_IDS), HIDDEN, codec, teacher)
    with Forward(target, LAYER_IDS, spec, 3 * row_stride(64), device) as forward:
        forward(*batch_inputs(bucket, Batch(ceiling=64, shard=0, first=0, count=3), device))
        found: list[bool] = forward.void.tolist()
    return found


@pytest.mark.parametrize("codec", ["bf16", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("teacher", ["last", "top", "none"])
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0])
def test_a_broken_state_is_seen_in_its_sample_alone(
    target_folder: Path, codec: str, teacher: str, factor: float
) -> None:
    assert flags(codec, teacher, (LAYER_IDS[1], factor), target_folder) == [False, True, False]


@gpu
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0])
def test_a_broken_state_is_seen_on_a_gpu(target_folder: Path, factor: float) -> None:
    found = flags("bf16", "last", (LAYER_IDS[1], factor), target_folder, torch.device("cuda"))
    assert found == [False, True, False]


def test_sound_states_are_not_void(target_folder: Path) -> None:
    assert flags("bf16", "last", None, target_folder) == [False, False, False]


def test_the_teacher_is_looked_at_too(target_folder: Path) -> None:
    assert flags("bf16", "top", (LAYER_IDS[-1] + 1, float("nan")), target_folder) == [False, True, False]


def test_the_journal_marks_void_rows(void_store: Store) -> None:
    marked = {(entry.shard, row) for entry in read_journal(void_store.path) for row in entry.void}
    assert marked == {(n // 4, n % 4) for n in BROKEN}  # four rows a shard
    assert open_store(void_store.path).buckets[64].void_rows == set(BROKEN)
    assert void_store.void_samples == 2


@pytest.mark.parametrize("kind", ["bucket", "packed"])
def test_training_never_meets_a_void_row(void_store: Store, kind: str) -> None:
    batching = Batching(kind=kind, token_budget=256)
    for epoch in range(3):
        batches = epoch_batches(bucket_index(void_store), batching, 0, epoch)
        rows = sorted(row.row for batch in batches for row in batch.rows)
        assert rows == [n for n in range(10) if n not in BROKEN]


def test_stats_and_verify_count_void_samples_apart(void_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    figures = store_stats(void_store)
    assert figures.void == 2
    assert figures.buckets[0].samples == 8
    assert all(plane.non_finite == 0 for plane in figures.planes)
    assert {plane.tokens for plane in figures.planes} == {figures.buckets[0].tokens}
    report = verify_store(void_store.path)
    assert (report.samples, report.void, report.damage) == (8, 2, ())
    assert "2 samples are void" in run(capsys, "stats", "--store", void_store.path).out
    assert "2 void" in run(capsys, "verify", "--store", void_store.path).out
    shown = run(capsys, "stats", "--store", void_store.path, "--show", 3).out
    assert [line.endswith(", void") for line in shown.splitlines() if line.startswith("sample ")] == [
        False,
        False,
        True,
    ]


def test_too_many_void_samples_stop_the_run(tmp_path: Path, broken_target: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", lines())
    config = tiny_config(tmp_path / "store", target=broken_target, data=[data])
    with pytest.raises(TargetError, match="2 of 10 samples have states that are not finite or all zero"):
        extract(config)


def test_a_resumed_run_counts_the_void_samples_that_were_there(tmp_path: Path, broken_target: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", lines())
    config = dataclasses.replace(tiny_config(tmp_path / "store", target=broken_target, data=[data]), max_void=0.2)
    store = extract(config)
    store.buckets[64].shard_path(2).unlink()  # the shard of lines 8 and 9
    resumed = extract(dataclasses.replace(config, resume=True))
    assert resumed.void_samples == 2
    store.buckets[64].shard_path(2).unlink()
    with pytest.raises(TargetError):
        extract(dataclasses.replace(config, resume=True, max_void=0.1))


def test_nothing_is_written_if_the_whole_first_batch_is_void(tmp_path: Path, broken_target: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", lines(broken=range(10)))
    config = tiny_config(tmp_path / "store", target=broken_target, data=[data])
    with pytest.raises(TargetError, match="all 4 samples of the first batch"):
        extract(dataclasses.replace(config, max_void=1.0))
    assert not (tmp_path / "store").exists()


def test_the_proof_takes_a_sound_sample(tmp_path: Path, broken_target: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": messages("~", "yo")}, *lines(8, ())])
    config = tiny_config(tmp_path / "store", target=broken_target, data=[data])
    assert extract(dataclasses.replace(config, max_void=0.2)).void_samples == 1


def test_later_batches_are_proven_too(tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose states go wrong on the way stops there, and what was committed before is right."""
    monkeypatch.setattr(stage_one, "PROVE_EVERY", 2)
    real, calls = Forward._tap, [0]

    def wrong_later(self: Forward, position: int, hidden: torch.Tensor) -> None:
        calls[0] += 1
        late = calls[0] > 3 * len(LAYER_IDS)  # the proof's batch, and two more
        real(self, position, hidden.flip(-1) if late else hidden)

    monkeypatch.setattr(Forward, "_tap", wrong_later)
    data = write_jsonl(tmp_path / "data.jsonl", lines(12, ()))
    with pytest.raises(TargetError, match="differs from transformers' own"):
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    assert len(list(read_journal(tmp_path / "store"))) == 2
