"""Kills a training run at random moments, resumes it until it finishes, and compares it with one that was left alone.

    python -m draftcache.benchmarks.train_kills [--count 25] [--device cpu] [--steps 60]

On CUDA both runs are made with --deterministic. Each attempt is a process of its own, killed by SIGKILL after a random
time: while it loads, trains, validates or writes. Final weights, moments and state must be equal byte for byte, and the
rows of all steps and validations too. The row is bench_train's.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from draftcache.benchmarks.rows import append_row
from draftcache.tests.runs import outcome
from draftcache.tests.stores import tiny_store


def flags(store: Path, device: str, steps: int) -> list[str]:
    """A small run over several epochs, with a checkpoint every five steps."""
    given = {
        "--store": store,
        "--num-layers": 1,
        "--block-size": 4,
        "--token-budget": 256,
        "--anchors": 16,
        "--accumulate": 2,
        "--validation-share": 0.2,
        "--validate-every": 7,
        "--save-every": 5,
        "--log-every": 3,
        "--steps": steps,
        "--device": device,
    }
    words = [str(word) for pair in given.items() for word in pair]
    return [*words, "--deterministic"] if device.startswith("cuda") else words


def attempt(arguments: Sequence[str], patience_s: float | None) -> bool:
    """Start `draftcache train`; kill it after `patience_s`. Whether it finished first."""
    command = [sys.executable, "-m", "draftcache", "train", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment())
    try:
        _, said = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return False
    assert process.returncode == 0, said.decode()
    return True


def environment() -> dict[str, str]:
    """One thread per process, so that sums are made in one order on any machine."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def main() -> None:
    """Run the campaign in a temporary folder; exits 1 if any run differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = flags(tiny_store(folder / "made").path, options.device, options.steps)
        seconds = -time.perf_counter()
        assert attempt([*given, "--out", str(folder / "alone")], None)
        seconds += time.perf_counter()
        wanted = outcome(folder / "alone")
        begun = first_step_after(folder / "alone", seconds)
        rng, killed, finished, equal, at = random.Random(0), 0, 0, 0, set()
        with tqdm(total=options.count, desc="kills", disable=None) as bar:
            while killed < options.count:
                out = folder / f"killed-{finished}"
                while not attempt([*given, "--out", str(out), "--resume"], rng.uniform(begun, 1.05 * seconds)):
                    killed += 1
                    at.add(rows_in(out))
                    bar.update()
                finished += 1
                equal += outcome(out) == wanted
    metrics = {"runs": killed, "finished": finished, "equal": equal, "moments": len(at)}
    append_row("bench_train", f"kills/{options.device.split(':')[0]}", metrics)
    if equal != finished:
        sys.exit("a resumed run differs from the uninterrupted one")


def first_step_after(run: Path, seconds: float) -> float:
    """How long a process of this run takes to its first step, so that most kills hit a run at work."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return max(0.0, 0.9 * (seconds - sum(row["seconds"] for row in rows)))


def rows_in(run: Path) -> int:
    """Steps that a killed run had written down."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    main()
