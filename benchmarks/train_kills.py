"""Kills a training run at random moments, resumes it until it finishes, and compares it with one that was left alone.

    python -m draftcache.benchmarks.train_kills [--count 25] [--device cpu] [--steps 60]

On CUDA both runs are made with --deterministic; --steps 2000 there makes the training longer than the loading. Each
attempt is a forked process, killed by SIGKILL after a random time: while it loads, trains, validates or writes. Final
weights, moments and state must be equal byte for byte, and the rows of all steps and validations too. The row is
bench_train's.
"""

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from draftcache.benchmarks.rows import append_row
from draftcache.common.store import open_store
from draftcache.tests.runs import outcome, small_run
from draftcache.tests.stores import tiny_store
from draftcache.train.checkpoint import holds_run
from draftcache.train.report import METRICS_NAME, read_rows
from draftcache.train.run import resume, train
from draftcache.train.settings import TrainConfig


def kill_campaign(folder: Path, count: int, device: str, steps: int) -> dict[str, float]:
    """Kill `count` attempts in all; figures of how many finished runs equal the one that was left alone."""
    in_child(lambda: tiny_store(folder / "made"), None)
    store = open_store(folder / "made" / "store")
    config = small_run(
        store, folder / "alone", steps=steps, save_every=max(1, steps // 12), validate_every=max(1, steps // 8)
    )
    config = dataclasses.replace(config, device=device, deterministic=device.startswith("cuda"))
    seconds = -time.perf_counter()
    in_child(lambda: go_on(config), None)
    seconds += time.perf_counter()
    wanted = outcome(config.out)
    loading = seconds - sum(row["seconds"] for row in read_rows(config.out / METRICS_NAME))
    rng = random.Random(0)
    killed = finished = equal = 0
    moments: set[int] = set()
    with tqdm(total=count, desc="kills", disable=None) as bar:
        while killed < count:
            again = dataclasses.replace(config, out=folder / f"killed-{finished}")
            while not in_child(lambda run=again: go_on(run), rng.uniform(0.5 * loading, seconds)):  # type: ignore[misc]
                killed += 1
                moments.add(rows_in(again.out))
                bar.update()
            finished += 1
            equal += outcome(again.out) == wanted
    return {"runs": killed, "finished": finished, "equal": equal, "moments": len(moments)}


def go_on(config: TrainConfig) -> None:
    """Begin the run or resume it."""
    if holds_run(config.out):
        resume(config.out, {})
    else:
        train(config)


def in_child(work: Callable[[], object], patience_s: float | None) -> bool:
    """Do it in a forked process, killed after so many seconds; whether it finished first."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):  # noqa: PTH123
                work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.perf_counter() + (patience_s or 600)
    while time.perf_counter() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, f"a process failed with status {status}"
            return True
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def rows_in(run: Path) -> int:
    """Steps that a killed run had written down: where the kill found it."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> None:
    """Run the campaign in a temporary folder; exits 1 if any run differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked process must not find a pool of threads that it does not have
    with tempfile.TemporaryDirectory() as folder:
        figures = kill_campaign(Path(folder), options.count, options.device, options.steps)
    append_row("bench_train", f"kills/{options.device.split(':')[0]}", figures)
    if figures["equal"] != figures["finished"]:
        sys.exit("a resumed run differs from the uninterrupted one")


if __name__ == "__main__":
    main()
