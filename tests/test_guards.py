"""What stops a run or speaks up: updates that change nothing, numbers that are not finite, no memory, a leak."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from draftcache.common.errors import TrainingError
from draftcache.common.store import Store
from draftcache.tests.runs import metrics, outcome, small_run, steps_until
from draftcache.train.batch import FlatBatch
from draftcache.train.checkpoint import Progress, checkpoint_path, checkpoints, newest_checkpoint, read_progress
from draftcache.train.guards import StopRequest, is_stuck, naming_memory, too_good
from draftcache.train.optim import Optimizer
from draftcache.train.report import RunLog, read_rows
from draftcache.train.run import resume, train
from draftcache.train.saver import Saver
from draftcache.train.step import EagerStep, Work, sum_names


def spoil(patch: pytest.MonkeyPatch, updates: set[int]) -> None:
    """Make the gradients of these updates, numbered from 0, not finite."""
    update, count = Optimizer.update, 0

    def spoiling(optimizer: Optimizer, weight: torch.Tensor, copies: torch.Tensor | None) -> None:
        nonlocal count
        if count in updates:
            optimizer.gradients[7] = math.nan
        count += 1
        update(optimizer, weight, copies)

    patch.setattr(Optimizer, "update", spoiling)


def test_a_skipped_update_is_no_step_and_the_run_makes_up_for_it(store: Store, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, {2, 3, 6})
        result = train(small_run(store, tmp_path / "run", steps=6))
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 3, 4, 5, 5, 6]
    assert [row["skipped"] for row in rows] == [0, 0, 1, 2, 2, 2, 3, 3, 3]
    assert [row["applied"] for row in rows] == [True, True, False, False, True, True, False, True, True]
    assert [row["grad_norm"] is None for row in rows] == [not row["applied"] for row in rows]
    assert rows[4]["lr"] == rows[3]["lr"] == rows[2]["lr"]  # the schedule waits
    progress = read_progress(result.checkpoint)
    assert (progress.step, progress.skipped, progress.skipped_in_a_row) == (6, 3, 0)
    assert result.end.progress == progress


def test_a_run_with_skipped_updates_resumes_exactly(store: Store, tmp_path: Path) -> None:
    for name, stop in (("whole", None), ("stopped", 5)):
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, {2, 4})
            if stop is not None:
                steps_until(patch, stop)
            train(small_run(store, tmp_path / name, steps=7))
    resume(tmp_path / "stopped", {})
    assert read_progress(newest_checkpoint(tmp_path / "whole")).skipped == 2
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_a_run_stops_after_three_skipped_updates_with_a_sound_checkpoint(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, {2, 3, 4, 5, 6, 7})
        with pytest.raises(TrainingError, match="3 updates in a row, for step 3, changed nothing"):
            train(small_run(store, out, save_every=None, log_every=1))
    progress = read_progress(newest_checkpoint(out))
    assert (progress.step, progress.skipped, progress.skipped_in_a_row) == (2, 3, 3)
    assert all(row["step"] <= 3 for row in metrics(out))
    assert resume(out, {}).end.progress.step == 9
    assert [is_stuck(n) for n in (0, 2, 3, 4)] == [False, False, True, True]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_never_become_a_checkpoint(tmp_path: Path, value: float) -> None:
    weights = {"x": nn.Parameter(torch.ones(5)), "n": torch.ones(1, dtype=torch.int64)}
    with Saver(tmp_path, {"drafter.safetensors": weights}, keep=2) as saver:
        saver.save(Progress(step=1))
        saver.wait()
        with torch.no_grad():
            weights["x"][2] = value
        saver.save(Progress(step=2))
        with pytest.raises(TrainingError, match="not finite after step 2"):
            saver.wait()
    assert checkpoints(tmp_path) == [checkpoint_path(tmp_path, 1)]


def test_a_checkpoint_holds_the_moment_of_its_saving(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    with Saver(tmp_path, {"drafter.safetensors": {"x": tensor}}, keep=5) as saver:
        for step in (1, 2, 3):
            saver.save(Progress(step=step))
            saver.before_update()
            tensor += 1
    from safetensors.torch import load_file

    for step in (1, 2, 3):
        held = load_file(checkpoint_path(tmp_path, step) / "drafter.safetensors")["x"]
        assert torch.equal(held, torch.arange(1000.0) + step - 1)


def test_a_failed_write_is_raised_in_the_loop(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Saver(folder, {"drafter.safetensors": {"x": torch.ones(3)}}, keep=1) as saver:
        folder.rmdir()
        saver.save(Progress(step=1))
        with pytest.raises(FileNotFoundError):
            saver.wait()


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    with Saver(None, {"drafter.safetensors": {"x": torch.ones(3)}}, keep=1) as saver:
        saver.save(Progress(step=1))
    with RunLog(None, Progress(), 3, tensorboard=False) as log:
        log.steps([{"step": 1, "loss": 1.0, "accepted_length": 1.0, "tokens_s": 3.0, "wait_share": 0.0}])
        log.validation({"step": 1, "loss": 1.0, "accepted_length": 1.0})
        log.sync()
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory_names_the_part_and_what_to_lower(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as raised, naming_memory("the moon", "--gravity"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert str(raised.value) == "out of memory for the moon; needed: memory for it; do: lower --gravity"

    def greedy(_step: EagerStep, _batch: FlatBatch, _loaded: Work) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerStep, "micro_step", greedy)
        with pytest.raises(TrainingError, match=r"out of memory for a step.*--token-budget"):
            train(small_run(store, tmp_path / "run"))


def test_a_second_signal_acts_at_once() -> None:
    with StopRequest() as request:
        assert request.signal is None
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("step", "accepted", "block", "warned"),
    [(5, 15.9, 16, True), (200, 14.5, 16, True), (201, 15.9, 16, False), (5, 12.0, 16, False), (5, None, 16, False)],
)
def test_results_too_good_too_early_are_called_so(step: int, accepted: float | None, block: int, warned: bool) -> None:
    assert (too_good(step, accepted, block) is not None) == warned


def test_a_run_that_sees_its_labels_is_warned_about(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = EagerStep.update
    names = sum_names(4)

    def seeing(step: EagerStep) -> None:
        step._sums[names.index("accepted")] = 4 * step._sums[names.index("blocks")]
        update(step)

    monkeypatch.setattr(EagerStep, "update", seeing)
    train(small_run(store, tmp_path / "run", steps=3))
    said = capsys.readouterr().err
    assert said.count("too good to be true") == 1
    assert "accepted length 4.00 of at most 4 at step 1" in said


def test_rows_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    path.write_text(json.dumps({"step": 1, "skipped": 0}) + "\n" + '{"step"')
    assert read_rows(path) == [{"step": 1, "skipped": 0}]
