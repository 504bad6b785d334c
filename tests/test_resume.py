"""A run stopped anywhere and resumed is the run that was never stopped; whatever does not fit is refused by name."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftcache.common.errors import CheckpointError, MismatchError, StoreError, UsageError
from draftcache.common.store import Store, lock_store
from draftcache.tests.commands import Outcome, run
from draftcache.tests.helpers import gpu, tiny_config
from draftcache.tests.runs import metrics, outcome, small_run, steps_until
from draftcache.tests.stores import tiny_store
from draftcache.train.checkpoint import (
    Best,
    Progress,
    best_checkpoint,
    checkpoint_path,
    checkpoints,
    newest_checkpoint,
    prune,
    read_progress,
    read_run,
    read_settings,
    write_checkpoint,
)
from draftcache.train.model.drafter import Drafter
from draftcache.train.optim import OptimConfig, Optimizer
from draftcache.train.order import Cursor
from draftcache.train.run import resume, train
from draftcache.train.settings import build_config, resumed_config
from draftcache.train.step import CapturedStep

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", params=["bucket", "packed"])
def uninterrupted(request: pytest.FixtureRequest, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, in each batching."""
    batching: str = request.param
    out = tmp_path_factory.mktemp("uninterrupted") / batching
    train(small_run(store, out, batching=batching))
    return out


@pytest.mark.parametrize("stops", [(1,), (3,), (4, 8), (2, 3, 5, 8)], ids=str)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    store: Store, uninterrupted: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    out, done = tmp_path / "run", 0
    for stop in (*stops, None):
        with pytest.MonkeyPatch.context() as patch:
            if stop is not None:
                steps_until(patch, stop - done)
            begun = train(small_run(store, out, batching=uninterrupted.name)) if not done else resume(out, {})
        assert begun.end.reason == ("finished" if stop is None else "stopped")
        assert begun.end.signal == (None if stop is None else signal.SIGTERM)
        done = begun.end.progress.taken
        assert done == (9 if stop is None else stop)
        assert begun.checkpoint == newest_checkpoint(out) == checkpoint_path(out, done)
    assert outcome(out) == outcome(uninterrupted)


def test_the_rows_of_a_run_are_its_steps_and_its_validations(uninterrupted: Path) -> None:
    rows, validations = metrics(uninterrupted), metrics(uninterrupted, "validation.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert all(row["applied"] and row["skipped"] == 0 for row in rows)
    assert [row["step"] for row in validations] == [4, 8, 9]
    assert len({row["blocks"] for row in validations}) == 1
    assert read_progress(newest_checkpoint(uninterrupted)).cursor.epoch >= 1


def test_a_killed_run_goes_on_from_its_newest_whole_checkpoint(
    store: Store, uninterrupted: Path, tmp_path: Path
) -> None:
    """A SIGKILL leaves rows that no checkpoint knows, a torn last row, and a checkpoint half written."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 8)
        train(small_run(store, out, batching=uninterrupted.name))
    shutil.rmtree(checkpoint_path(out, 8))
    half = out / "checkpoint-00000007.partial"
    shutil.copytree(checkpoint_path(out, 6), half)
    (half / "state.json").unlink()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "los')
    assert resume(out, {}).end.reason == "finished"
    assert outcome(out) == outcome(uninterrupted)
    assert not half.exists()


def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    store: Store, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 2)
        train(small_run(store, out, batching=uninterrupted.name))
    shutil.rmtree(checkpoint_path(out, 2))
    resume(out, {})
    assert outcome(out) == outcome(uninterrupted)


def test_kills_at_random_moments_leave_no_trace(tmp_path: Path) -> None:
    """A few of the campaign of benchmarks/train_kills.py, in a process of its own because it forks."""
    code = (
        "import json, pathlib, sys, torch; torch.set_num_threads(1)\n"
        "from draftcache.benchmarks.train_kills import kill_campaign\n"
        "print(json.dumps(kill_campaign(pathlib.Path(sys.argv[1]), 5, 'cpu', 30)))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["runs"] >= 5
    assert figures["equal"] == figures["finished"] >= 1


def test_a_finished_run_is_left_as_it_is(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = train(small_run(store, out, steps=2))
    before = outcome(out)
    again = resume(out, {})
    assert outcome(out) == before
    assert (again.end.reason, again.checkpoint) == ("finished", first.checkpoint)
    assert again.metrics == first.metrics


def test_ctrl_c_stops_like_sigterm_and_a_second_one_at_once(store: Store, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 2, signal.SIGINT)
        stopped = train(small_run(store, tmp_path / "once"))
    assert (stopped.end.progress.step, stopped.end.signal) == (2, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 1, signal.SIGINT)
        patch.setattr("draftcache.train.loop.metrics_row", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train(small_run(store, tmp_path / "twice", save_every=None))
    assert not checkpoints(tmp_path / "twice")


def test_changed_settings_are_refused_by_name(store: Store, tmp_path: Path) -> None:
    saved = small_run(store, tmp_path)
    with pytest.raises(CheckpointError) as refused:
        resumed_config(saved, {"seed": 4, "block_size": 8, "lr": 0.5, "validation_share": 0.3, "steps": 9, "keep": 9})
    assert "seed 0 is now 4, block_size 4 is now 8, lr 0.0006 is now 0.5, validation_share 0.2 is now 0.3;" in str(
        refused.value
    )
    with pytest.raises(CheckpointError, match="device cpu is now cuda"):
        resumed_config(saved, {"device": "cuda"})


def test_settings_that_do_not_touch_the_weights_may_change(store: Store, tmp_path: Path) -> None:
    saved = small_run(store, tmp_path)
    wanted = resumed_config(saved, {"keep": 1, "log_every": 5, "patience": 2, "store": tmp_path})
    validation = dataclasses.replace(saved.validation, patience=2)
    assert wanted == dataclasses.replace(saved, keep=1, log_every=5, store=tmp_path, validation=validation)


def test_another_rhythm_of_logging_and_saving_changes_no_weight(
    store: Store, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 4)
        train(small_run(store, out, batching=uninterrupted.name))
    resume(out, {"log_every": 3, "save_every": 1, "keep": 1})
    assert outcome(out) == outcome(uninterrupted)
    assert read_settings(out).log_every == 3


def test_another_store_is_refused(store: Store, target_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(small_run(store, out, steps=1))
    other = tiny_store(tmp_path / "other", target=target_folder, count=6, seed=9)
    with pytest.raises(MismatchError, match="not the store"):
        resume(out, {"store": other.path})


def test_a_moved_store_and_a_moved_run_go_on(store: Store, tmp_path: Path) -> None:
    train(small_run(store, tmp_path / "here", steps=2))
    (tmp_path / "here").rename(tmp_path / "there")
    shutil.copytree(store.path, tmp_path / "copy")
    resume(tmp_path / "there", {"store": tmp_path / "copy"})
    assert not (tmp_path / "here").exists()


def test_a_run_has_one_writer(store: Store, tmp_path: Path) -> None:
    train(small_run(store, tmp_path / "run", steps=1))
    with lock_store(tmp_path / "run"), pytest.raises(StoreError, match="another run"):
        resume(tmp_path / "run", {})


def test_the_newest_checkpoints_and_the_best_one_stay(tmp_path: Path) -> None:
    best = Best(step=2, accepted_length=1.5)
    for step in range(1, 7):
        progress = Progress(step=step, best=best if step >= 2 else None)
        write_checkpoint(tmp_path, progress, {"drafter.safetensors": {"x": torch.ones(1)}})
    prune(tmp_path, keep=2)
    assert [read_progress(path).step for path in checkpoints(tmp_path)] == [2, 5, 6]
    assert best_checkpoint(tmp_path) == checkpoint_path(tmp_path, 2)
    shutil.rmtree(checkpoint_path(tmp_path, 2))
    with pytest.raises(CheckpointError, match="is gone"):
        best_checkpoint(tmp_path)


def test_step_numbers_beyond_eight_digits_are_still_ordered(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        write_checkpoint(tmp_path, Progress(step=step, cursor=Cursor(3, 4)), {})
    assert read_progress(newest_checkpoint(tmp_path)) == Progress(step=100_000_000, cursor=Cursor(3, 4))


def test_an_optimizer_is_loaded_in_place_and_strictly() -> None:
    drafter = Drafter(tiny_config())
    optimizer = Optimizer(drafter.parameters(), OptimConfig(), 10)
    addresses = {name: value.data_ptr() for name, value in optimizer.state().items()}
    other = {name: torch.full_like(value, 3) for name, value in optimizer.state().items()}
    optimizer.load(other)
    assert {name: value.data_ptr() for name, value in optimizer.state().items()} == addresses
    assert all((value == 3).all() for value in optimizer.state().values())
    del other["skipped"]
    with pytest.raises(CheckpointError, match="skipped"):
        optimizer.load(other)


def command(capsys: Capture, *args: object) -> Outcome:
    return run(capsys, "train", *args, "--device", "cpu")


def test_resume_from_the_command_line(capsys: Capture, store: Store, tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ("--steps", 2, "--num-layers", 1, "--block-size", 4, "--token-budget", 256)
    flags = ("--store", store.path, "--out", out, *small, "--mask-token-id", 300)
    assert command(capsys, *flags, "--resume").code == 0  # nothing is there yet, and the flags say what to begin
    assert command(capsys, "--resume", out).code == 0
    assert command(capsys, "--out", out, "--resume").code == 0
    assert command(capsys, *flags, "--resume").code == 0
    refused = command(capsys, *flags[:-1], 301, "--resume")
    assert refused.code == 2
    assert "mask_token_id 300 is now 301" in refused.message
    assert command(capsys, *flags[:-2], "--resume", "--head-dim", 16).code == 0  # the target's own, so nothing changed
    assert "holds a run" in command(capsys, *flags).message
    assert "needed: a run" in command(capsys, "--resume").message
    assert "needed: one run" in command(capsys, "--resume", out, "--out", tmp_path).message
    assert "holds no run" in command(capsys, "--resume", tmp_path / "none").message
    assert not (tmp_path / "none").exists()
    assert len(metrics(out)) == 2


def test_a_stopped_run_says_how_to_go_on(capsys: Capture, store: Store, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 1)
        flags = ("--store", store.path, "--out", tmp_path / "run", "--block-size", 4, "--token-budget", 256)
        stopped = command(capsys, *flags, "--num-layers", 1, "--steps", 3)
    assert stopped.code == 128 + signal.SIGTERM
    assert f"draftcache train --resume {tmp_path / 'run'}" in stopped.out
    assert command(capsys, "--resume", tmp_path / "run").code == 0


def test_flags_may_stand_in_a_file(capsys: Capture, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(
        f'store = "{store.path}"\nnum-layers = 1\nblock-size = 4\ntoken-budget = 256\nsteps = 5\nlr = 1e-3\n'
        'layer-types = "full"\ngraph = false\n'
    )
    assert command(capsys, "--config", file, "--out", tmp_path / "run", "--steps", 1).code == 0
    settings = read_settings(tmp_path / "run")
    assert (settings.steps, settings.optim.lr, settings.geometry.num_layers, settings.graph) == (1, 1e-3, 1, False)
    assert read_run(tmp_path / "run").versions["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("stepz = 3", "stepz"),
        ("no-graph = true", "no-graph"),
        ("steps = 1.5", "1.5"),
        ("steps = true", "True"),
        ("[optim]\nlr = 1.0", "optim"),
        ("steps =", "Invalid value"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(capsys: Capture, tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "train.toml"
    file.write_text(text)
    refused = command(capsys, "--config", file, "--store", tmp_path, "--out", tmp_path / "run")
    assert refused.code == 2
    assert word in refused.err
    assert not (tmp_path / "run").exists()


def test_a_run_needs_store_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no --store"):
        build_config({"out": tmp_path})
    with pytest.raises(UsageError, match="no --out"):
        build_config({"store": tmp_path})


def test_state_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Progress(step=3, best=Best(step=2, accepted_length=1.25)), {})
    state = json.loads((checkpoint_path(tmp_path, 3) / "state.json").read_text())
    assert state["best"] == {"step": 2, "accepted_length": 1.25}


@gpu
def test_a_stopped_and_resumed_run_is_bit_equal_on_the_gpu_too(store: Store, tmp_path: Path) -> None:
    """Captured, with `--deterministic`; the checkpoint is loaded before the graphs are captured."""
    config = dataclasses.replace(small_run(store, tmp_path / "whole"), device="cuda", deterministic=True)
    train(config)
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 5, kind=CapturedStep)
        stopped = train(dataclasses.replace(config, out=tmp_path / "stopped"))
    assert stopped.end.progress.step == 5
    resume(tmp_path / "stopped", {})
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
