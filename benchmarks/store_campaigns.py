"""Long campaigns against the store, run by hand: random faults, and SIGKILLs at random moments.

    python -m draftcache.benchmarks.store_campaigns faults [--count 2000]
    python -m draftcache.benchmarks.store_campaigns kills [--count 100]

`faults` changes one file of a small store at random (bits, bursts, cuts, deletions, another file of the same size in
its place; shards, index, gaps, journal, metadata, ids, masks, the target's parts) and asks `verify`. A fault is
harmless only if the file's bytes are unchanged, or if all that it did was to put half a line behind a journal that is
complete, which is what a crash leaves and readers pass over.
`kills` starts an extraction with --resume again and again and kills each at a random moment, until one finishes; then
it compares the store with an uninterrupted one, byte for byte, and begins anew. Rows are bench_store's.
"""

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from draftcache.benchmarks.rows import append_row
from draftcache.common.errors import StoreError
from draftcache.common.journal import FOLDER
from draftcache.common.verify import verify_store
from draftcache.extract.plan import ExtractConfig
from draftcache.extract.run import extract
from draftcache.tests.stores import flip_bit, tiny_config, tiny_data, tiny_store, tiny_target


def inject(path: Path, files: list[Path], rng: random.Random) -> str:
    """Damage one of a store's files; returns what was done."""
    before = path.read_bytes()
    twins = [other for other in files if other != path and other.stat().st_size == len(before)]
    kinds = ["flip", "flip", "flip", "burst", "cut", "longer", "zero", "empty", "delete"]
    kind = rng.choice(kinds + ["swap", "swap"] * bool(twins))
    at = rng.randrange(len(before))
    if kind == "flip":
        flip_bit(path, at, rng.randrange(8))
    elif kind == "delete":
        path.unlink()
    elif kind == "swap":  # a shard among them has checksums that are right
        shutil.copyfile(rng.choice(twins), path)
    else:
        burst = before[:at] + rng.randbytes(min(64, len(before) - at)) + before[at + 64 :]
        contents = {"burst": burst, "cut": before[:at], "longer": before + bytes(4096), "empty": b""}
        path.write_bytes(contents.get(kind, bytes(len(before))))
    return kind


def faults(folder: Path, count: int) -> None:
    """Inject `count` faults, each into a sound store, and see whether verify finds it."""
    store = tiny_store(folder).path
    files = sorted(p for p in store.rglob("*") if p.is_file())
    rng = random.Random(0)
    outcome: Counter[str] = Counter()
    for _ in tqdm(range(count), desc="faults", disable=None):
        path = rng.choice(files)
        before = path.read_bytes()
        kind = inject(path, files, rng)
        try:
            found = bool(verify_store(store).damage)
        except StoreError:
            found = True
        result = "detected" if found else "harmless" if _harmless(path, before) else "silent"
        path.write_bytes(before)
        outcome[result] += 1
        outcome["swaps"] += kind == "swap"
        if result == "silent":
            print(f"SILENT: {kind} in {path}")
    metrics = {"injected": count, **{name: outcome[name] for name in ("swaps", "detected", "harmless", "silent")}}
    append_row("bench_store", "faults", metrics)
    if outcome["silent"]:
        sys.exit("faults went unnoticed")


def _harmless(path: Path, before: bytes) -> bool:
    """Whether a file is as it was, or a journal behind whose complete lines stands half a one."""
    now = path.read_bytes() if path.exists() else None
    half_a_line = now is not None and now.startswith(before) and b"\n" not in now[len(before) :]
    return now == before or (path.parent.name == FOLDER and half_a_line)


def kills(folder: Path, count: int) -> None:
    """Kill extractions `count` times in all; every store that a resumed run finishes must equal the reference."""
    target, data = tiny_target(folder / "target"), tiny_data(folder / "data.jsonl", count=40)
    config = dataclasses.replace(tiny_config(folder / "reference", target=target, data=[data]), resume=True)
    seconds = -time.perf_counter()
    _in_child(config, patience=None)
    seconds += time.perf_counter()
    rng, killed, finished, equal = random.Random(0), 0, 0, 0
    with tqdm(total=count, desc="kills", disable=None) as bar:
        while killed < count:
            attempt = dataclasses.replace(config, store=folder / f"killed-{finished}")
            while not _in_child(attempt, patience=rng.uniform(0.05, 1.0) * seconds):
                killed += 1
                bar.update()
            finished += 1
            equal += _contents(attempt.store) == _contents(config.store) and not verify_store(attempt.store).damage
    append_row("bench_store", "kills", {"runs": killed, "finished": finished, "equal": equal})
    if equal != finished:
        sys.exit("a resumed store differs from the uninterrupted one")


def _in_child(config: ExtractConfig, patience: float | None) -> bool:
    """Extract in a forked process, killed after `patience` seconds; whether it finished."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):  # noqa: PTH123
                extract(config)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:  # never back into the parent's frames
            os._exit(status)
    deadline = time.perf_counter() + (patience or 600)
    while time.perf_counter() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, f"extraction failed with status {status}"
            return True
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _contents(store: Path) -> dict[str, bytes]:
    """Every file but the journal, whose lines stand in the order of writing."""
    return {
        str(p.relative_to(store)): p.read_bytes() for p in store.rglob("*") if p.is_file() and p.parent.name != FOLDER
    }


def main() -> None:
    """Parse and run one campaign in a temporary folder."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("campaign", choices=["faults", "kills"])
    parser.add_argument("--count", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.campaign == "faults":
            faults(Path(folder), options.count or 2000)
        else:
            kills(Path(folder), options.count or 100)


if __name__ == "__main__":
    main()
