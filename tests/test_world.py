"""Two processes (gloo, on the CPU) against one: the same batches, the same run up to rounding, and never a hang."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftcache.common.errors import UsageError
from draftcache.common.store import Store
from draftcache.tests.helpers import gpu
from draftcache.tests.runs import metrics, outcome, small_run, steps_until
from draftcache.tests.stores import tiny_store
from draftcache.tests.world_worker import SCENARIOS
from draftcache.train.checkpoint import checkpoint_path, checkpoints, newest_checkpoint, read_run
from draftcache.train.run import resume, train
from draftcache.train.world import ALONE, join_world, local_device

PATIENCE_S = 240


@pytest.fixture(scope="module")
def folder(store: Store, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left behind, beside the runs of one process that they are compared with."""
    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(store.path, folder / "store")
    tiny_store(folder / "one-sample", target=target_folder, count=1)
    train(small_run(store, folder / "alone", accumulate=4))
    for name, accumulate in (("resumed", 4), ("uneven", 3)):
        with pytest.MonkeyPatch.context() as patch:
            steps_until(patch, 3)
            train(small_run(store, folder / name, accumulate=accumulate))
    train(small_run(store, folder / "uneven-alone", accumulate=3))
    _run_two(folder)
    return folder


def _run_two(folder: Path) -> None:
    sockets = [socket.socket() for _ in SCENARIOS]
    for held in sockets:
        held.bind(("127.0.0.1", 0))
    (folder / "ports.json").write_text(json.dumps([held.getsockname()[1] for held in sockets]))
    for held in sockets:
        held.close()
    command = [sys.executable, "-m", "draftcache.tests.world_worker", str(folder)]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=os.environ | world | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


def ended(folder: Path, name: str) -> list[dict[str, Any]]:
    """How a scenario ended in both processes."""
    found = [json.loads((folder / f"ended-{rank}.json").read_text())[name] for rank in range(2)]
    assert [set(end) for end in found] in ([{"reason", "taken"}] * 2, [{"error"}] * 2)
    return found


def close_to(found: Path, wanted: Path, rel: float) -> None:
    """Assert that two runs are equal up to rounding: rows, validations, weights."""
    for name in ("metrics.jsonl", "validation.jsonl"):
        for a, b in zip(metrics(found, name), metrics(wanted, name), strict=True):
            assert a.pop("accuracy") == pytest.approx(b.pop("accuracy"), rel=rel)
            assert a == pytest.approx(b, rel=rel)
    a, b = (load_file(newest_checkpoint(run) / "drafter.safetensors") for run in (found, wanted))
    for tensor in a:
        torch.testing.assert_close(a[tensor], b[tensor], rtol=10 * rel, atol=rel)


def test_two_processes_equal_one_with_twice_the_accumulation(folder: Path) -> None:
    assert ended(folder, "fresh") == [{"reason": "finished", "taken": 9}] * 2
    assert read_run(folder / "fresh").micro_batches == read_run(folder / "alone").micro_batches == 4
    close_to(folder / "fresh", folder / "alone", 1e-4)


def test_reduction_in_bfloat16_is_another_rounding(folder: Path) -> None:
    close_to(folder / "narrow", folder / "alone", 3e-2)
    assert outcome(folder / "narrow") != outcome(folder / "fresh")


def test_a_run_goes_on_in_two_processes_and_again_in_one(folder: Path, tmp_path: Path) -> None:
    assert ended(folder, "resumed") == [{"reason": "finished", "taken": 9}] * 2
    close_to(folder / "resumed", folder / "alone", 1e-4)
    again = tmp_path / "again"
    shutil.copytree(folder / "resumed", again)
    for path in checkpoints(again):
        if path > checkpoint_path(again, 6):
            shutil.rmtree(path)
    assert checkpoints(again)[-1] == checkpoint_path(again, 6)
    resume(again, {"save_every": 2})
    close_to(again, folder / "alone", 1e-4)


def test_a_step_that_does_not_divide_is_filled_up(folder: Path) -> None:
    assert ended(folder, "uneven") == [{"reason": "finished", "taken": 9}] * 2
    close_to(folder / "uneven", folder / "uneven-alone", 1e-4)


def test_fewer_samples_than_processes_finish(folder: Path) -> None:
    assert ended(folder, "one_sample") == [{"reason": "finished", "taken": 3}] * 2
    assert [row["loss"] > 0 and row["applied"] for row in metrics(folder / "lonely")] == [True] * 3


def test_all_stop_when_one_is_asked(folder: Path) -> None:
    assert ended(folder, "stopped") == [{"reason": "stopped", "taken": 5}] * 2
    assert newest_checkpoint(folder / "stopped") == checkpoint_path(folder / "stopped", 5)


def test_processes_with_other_flags_are_refused(folder: Path) -> None:
    errors = [end["error"] for end in ended(folder, "other_flags")]
    assert all("seed: found 1, wanted 0" in error for error in errors)
    assert not (folder / "other-flags").exists()


def test_one_process_without_the_store_stops_all(folder: Path) -> None:
    errors = [end["error"] for end in ended(folder, "no_store")]
    assert all("store-missing has no manifest.json" in error for error in errors)
    assert errors[0].startswith("process 1: ")


def test_a_process_that_dies_leaves_the_other_with_an_error_and_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    error = json.loads((folder / "ended-0.json").read_text())["deserted"]["error"]
    assert error.startswith("process 0 of 2 lost touch with the others")
    assert newest_checkpoint(folder / "deserted") == checkpoint_path(folder / "deserted", 4)  # the best validation's
    shutil.copytree(folder / "deserted", tmp_path / "deserted")
    assert resume(tmp_path / "deserted", {}).end.reason == "finished"


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_equal_one_with_twice_the_accumulation(store: Store, tmp_path: Path) -> None:
    """Through NCCL, with the reduction inside the captured update; started as a user would."""
    flags = ["--store", store.path, "--num-layers", 1, "--block-size", 4, "--token-budget", 256, "--anchors", 32]
    flags += ["--steps", 9, "--validation-share", 0.2, "--validate-every", 4, "--log-every", 2, "--device", "cuda"]
    alone = [sys.executable, "-m", "draftcache", "train", "--out", tmp_path / "alone", "--accumulate", 4, *flags]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m"]
    both = [*launcher, "draftcache", "train", "--out", tmp_path / "both", "--accumulate", 2, *flags]
    for command in (alone, both):
        subprocess.run(list(map(str, command)), check=True, timeout=PATIENCE_S)
    assert read_run(tmp_path / "both").micro_batches == 4
    close_to(tmp_path / "both", tmp_path / "alone", 3e-2)


@pytest.mark.parametrize(("size", "rank"), [("0", "0"), ("2", "2"), ("two", "0")])
def test_impossible_worlds_are_refused(monkeypatch: pytest.MonkeyPatch, size: str, rank: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(UsageError, match="torchrun"), join_world():
        pass


def test_a_process_without_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with join_world() as world:
        assert world is ALONE
    assert local_device("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [local_device(name) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:3", "cuda:1", "cpu"]
