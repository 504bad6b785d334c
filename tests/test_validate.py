"""Validation: the evaluation twin of a micro-step, what is held out, the best checkpoint, and stopping by it."""

from pathlib import Path

import pytest
import torch

from draftcache.common.store import Store
from draftcache.tests.helpers import flat_batch, gpu, on_device, supervised, tiny_record
from draftcache.tests.runs import metrics, outcome, small_run
from draftcache.tests.test_captured import device_batches
from draftcache.tests.test_step import Training, sentences, training
from draftcache.train.batch import FlatBatch
from draftcache.train.checkpoint import best_checkpoint, checkpoint_path, checkpoints
from draftcache.train.order import Batching, held_out_batches
from draftcache.train.report import validation_row
from draftcache.train.run import resume, train
from draftcache.train.setup import split_samples
from draftcache.train.step import CapturedStep, EagerStep, Work, sum_names


def changed(run: Training) -> list[torch.Tensor]:
    """Copies of everything that training changes."""
    return [
        *run.changing(),
        run.optimizer.gradients.clone(),
        run.step.log.clone(),
        *map(torch.clone, run.step.counters),
    ]


@pytest.mark.parametrize("teacher", ["tokens", "last"])
def test_an_evaluation_sums_what_a_step_would_sum_and_changes_nothing_else(teacher: str) -> None:
    run = training(teacher=teacher)
    batches = [flat_batch(sentences(first, 2), spec=tiny_record()) for first in (0, 10)]
    run.take(flat_batch(sentences(20, 2), spec=tiny_record()))
    before = changed(run)
    for batch in batches:
        run.step.evaluate(batch)
    sums = dict(zip(sum_names(4), run.step.held_out_sums.tolist(), strict=True))
    run.step.held_out_sums.zero_()
    assert all(torch.equal(a, b) for a, b in zip(changed(run), before, strict=True))
    row = run.take(*batches)
    assert sums == pytest.approx({name: row[name] for name in sum_names(4)})
    assert sums["blocks"] > 40


def test_an_empty_micro_batch_evaluates_to_nothing() -> None:
    run = training()
    run.step.evaluate(flat_batch([], spec=tiny_record()))
    assert not run.step.held_out_sums.any()
    run.step.evaluate(flat_batch([supervised(20, 20)], spec=tiny_record()))
    assert not run.step.held_out_sums.any()


def test_the_held_out_samples_are_never_trained_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: set[int] = set()
    seen: set[int] = set()
    micro_step, evaluate = EagerStep.micro_step, EagerStep.evaluate

    def stepping(step: EagerStep, batch: FlatBatch, loaded: Work) -> None:
        trained.update(batch.samples[batch.documents >= 0].tolist())
        micro_step(step, batch, loaded)

    def evaluating(step: EagerStep, batch: FlatBatch, loaded: Work) -> None:
        seen.update(batch.samples[batch.documents >= 0].tolist())
        evaluate(step, batch, loaded)

    monkeypatch.setattr(EagerStep, "micro_step", stepping)
    monkeypatch.setattr(EagerStep, "evaluate", evaluating)
    train(small_run(store, tmp_path / "run", steps=16))
    everyone = {int(n) for bucket in store.buckets.values() for n in bucket.samples.samples}
    assert trained | seen == everyone
    assert not trained & seen
    assert len(seen) == 2


def test_without_held_out_samples_there_is_no_validation(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(small_run(store, tmp_path / "run", share=0.0, steps=3))
    assert metrics(tmp_path / "run", "validation.jsonl") == []
    assert result.end.progress.best is None
    assert best_checkpoint(tmp_path / "run") == result.checkpoint
    assert "no sample is held out" in capsys.readouterr().err


def qualities(patch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Let the validations' accepted lengths be these."""
    left = iter(values)
    patch.setattr(
        "draftcache.train.loop.validation_row",
        lambda *args: validation_row(*args) | {"accepted_length": next(left)},
    )


def test_the_best_checkpoint_is_saved_and_kept(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qualities(monkeypatch, [1.2, 1.5, 1.4, 1.3, 1.5])
    result = train(small_run(store, tmp_path, validate_every=2, steps=9, save_every=1, keep=2))
    assert best_checkpoint(tmp_path) == checkpoint_path(tmp_path, 4)
    assert checkpoints(tmp_path) == [checkpoint_path(tmp_path, step) for step in (4, 8, 9)]
    assert result.end.progress.validations_since_best == 3


def test_the_best_checkpoint_is_saved_even_where_no_other_is(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qualities(monkeypatch, [1.2, 1.5, 1.4, 1.3, 1.5])
    train(small_run(store, tmp_path, validate_every=2, steps=9, save_every=None))
    assert checkpoints(tmp_path) == [checkpoint_path(tmp_path, step) for step in (2, 4, 9)]


def test_a_run_stops_when_patience_is_out_and_stays_stopped(store: Store, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        qualities(patch, [1.2, 1.5, 1.4, 1.5, 9.0])
        result = train(small_run(store, tmp_path, validate_every=2, steps=30, patience=2))
    assert (result.end.reason, result.end.progress.step) == ("patience", 8)
    before = outcome(tmp_path)
    assert resume(tmp_path, {}).end.reason == "patience"
    assert outcome(tmp_path) == before
    assert resume(tmp_path, {"patience": 30}).end.reason == "finished"


@pytest.mark.parametrize("kind", ["bucket", "packed"])
def test_equal_samples_are_on_one_side_and_the_share_decides_how_many(store: Store, kind: str) -> None:
    sizes = []
    for share in (0.0, 0.2, 0.6):
        trained, held_out = split_samples(store, share)
        assert set(trained) == set(store.buckets)
        sizes.append(sum(len(index.samples) for index in held_out.values()))
        batches = held_out_batches(held_out, Batching(kind=kind, token_budget=256))
        assert sum(len(batch.rows) for batch in batches) == sizes[-1]
    assert sizes[0] == 0 < sizes[1] < sizes[2] < 14


@gpu
def test_the_captured_evaluation_equals_the_eager_one() -> None:
    eager, captured = (training(anchors=64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    batches = device_batches()
    shapes = {batch.tokens for batch in batches}
    graphs = CapturedStep(
        captured.step, tiny_record().record_bytes, shapes, torch.device("cuda"), held_out_shapes=frozenset(shapes)
    )
    before = captured.changing()
    for batch in batches:
        copied = on_device(batch, "cuda")
        eager.step.evaluate(copied)
        graphs.evaluate(copied)
    torch.testing.assert_close(captured.step.held_out_sums, eager.step.held_out_sums, rtol=2e-2, atol=1.0)
    assert all(torch.equal(a, b) for a, b in zip(captured.changing(), before, strict=True))
    assert not captured.optimizer.gradients.any()
