"""Extraction against the bare forward, and the forward against the matrix products it is made of.

The physics: the target's forward is matrix products, 2 operations per weight and padded token, and attention; its
ceiling is the rate that a large product reaches on this device, measured here in the same run. Extraction adds copies
of K + 1 states per token on the device, their way to the host (PCIe) and to the folder. All of that can lie behind the
next forward, so what extraction should take is the forward alone, or, where the folder's disk is slower than that, what
writing the same bytes takes. For teacher `top` the target's head belongs to the work, so the reference is forward and
head.

    python -m draftcache.benchmarks.bench_extract FOLDER --case tmpfs|disk [--teacher last|top] [--batches N] [--small]

Qwen3-8B's geometry with random weights in bfloat16, samples of every default bucket, 5 taps; the case's name says what
FOLDER lies on. About 45 GB are written there, again and again, and removed (fewer with --batches). Bare and extracting
passes alternate; the medians count. An extraction's time begins when its buffers stand and ends with its last journal
line, so the last batch's writing, which no forward hides, is in it. Tokens are real ones, padding left out. `--small`
tries the same on any device with a toy and appends no row.
"""

import argparse
import os
import resource
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch.nn import functional

from draftcache.benchmarks.extract_cases import QWEN3_8B, SMALL, Geometry, random_plan, random_target
from draftcache.benchmarks.rows import append_row
from draftcache.common.codec import LOGIT_ROWS
from draftcache.common.memory import aligned_bytes
from draftcache.common.store import Store, clear_store, create_store
from draftcache.common.target import Target
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.plan import Plan
from draftcache.extract.ranks import Ranks
from draftcache.extract.run import write_all
from draftcache.extract.speed import Speed

PASSES = 2
ALONE = Ranks(rank=0, size=1)


def bare_seconds(target: Target, plan: Plan, device: torch.device) -> float:
    """The decoder over every batch, and for teacher `top` the head in the same chunks; nothing kept."""
    _wait(device)
    begin = time.perf_counter()
    with torch.no_grad():
        for batch in plan.batches:
            ids, _ = batch_inputs(plan.bucket(batch), batch, device)
            last = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
            if plan.manifest.settings.teacher == "top":
                for row in last:
                    for cut in row.split(LOGIT_ROWS):
                        functional.linear(cut, target.head)
    _wait(device)
    return time.perf_counter() - begin


def extract_pass(target: Target, plan: Plan, forward: Forward, folder: Path) -> Speed:
    """One extraction into `folder`, which is emptied before."""
    if folder.exists():
        clear_store(folder)
    rows = {summary.ceiling: summary.rows for summary in plan.manifest.buckets}
    create_store(folder, plan.manifest.record, rows, plan.buckets)
    speed = write_all(plan, plan.batches, Store(folder, plan.manifest), forward, target, 0.0, ALONE)
    assert speed is not None, "a plan without batches"
    return speed


def raw_write_rate(folder: Path, file_bytes: list[int]) -> float:
    """GB/s of writing files of these sizes from one thread: one write from aligned memory and one flush each."""
    memory = aligned_bytes(max(file_bytes))
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    for number, size in enumerate(file_bytes):
        fd = _open_direct(folder / str(number))
        done = 0
        while done < size:
            done += os.pwrite(fd, memory[done:size].data, done)
        os.fsync(fd)
        os.close(fd)
    rate = sum(file_bytes) / (time.perf_counter() - begin) / 1e9
    shutil.rmtree(folder)
    return rate


def product_rate(side: int, device: torch.device) -> float:
    """Operations per second of a large square product in bfloat16: the ceiling of all others."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / _median_seconds(lambda: a @ b, device)


@contextmanager
def host_memory(every: float = 0.05) -> Iterator[list[int]]:
    """Resident bytes of this process while the block runs, sampled by a thread."""
    seen: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(every):
            seen.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def measure(g: Geometry, teacher: str, batches: int, folder: Path, device: torch.device) -> dict[str, float]:
    """Every figure of one case, with so many batches of every bucket."""
    target, plan = random_target(g, device), random_plan(g, teacher, batches)
    store = folder / "bench_extract"
    ceiling = product_rate(g.product, device)
    bare, speeds, drifts, peaks = [], [], [], []
    forward = Forward(target, plan.manifest.settings.layer_ids, plan.manifest.record, plan.max_tokens, device)
    bare_seconds(target, plan, device)  # warm: kernels chosen, memory of every shape reserved
    for _ in range(PASSES):
        bare.append(bare_seconds(target, plan, device))
        with host_memory() as seen:
            speeds.append(extract_pass(target, plan, forward, store))
        settled = seen[len(seen) // 3 :] or [0]
        drifts.append(settled[-1] - settled[0])
        peaks.append(max(seen, default=0))
    sizes = [path.stat().st_size for path in sorted(store.glob("buckets/*/records/c/*/0/0"))]
    shutil.rmtree(store)
    raw = raw_write_rate(folder / "bench_extract_raw", sizes)
    tokens = sum(len(bucket.input_ids) for bucket in plan.buckets)
    operations = sum(g.operations(batch.count, batch.ceiling) for batch in plan.batches)
    bare_s, tokens_s = statistics.median(bare), statistics.median(speed.overall for speed in speeds)
    write = sum(sizes) / tokens * tokens_s / 1e9
    return {
        "tokens": tokens,
        "tokens_s": tokens_s,
        "bare_tokens_s": tokens / bare_s,
        "x_forward": tokens_s * bare_s / tokens,
        "matmul_share": operations / bare_s / ceiling,
        "ceiling_tflops": ceiling / 1e12,
        "write_gb_s": write,
        "raw_gb_s": raw,
        "x_raw": write / raw,
        "forward_tokens_s": statistics.median(speed.forward for speed in speeds),
        "writing_tokens_s": statistics.median(speed.writing for speed in speeds),
        "host_gb": max(peaks) / 1e9,
        "drift_bytes": statistics.median(drifts),
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0,
    }


def main() -> None:
    """Measure one case, print it, and append its row unless it is the small one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", choices=["tmpfs", "disk"], default="disk")
    parser.add_argument("--teacher", choices=["last", "top"], default="last")
    parser.add_argument("--batches", type=int, default=4, help="of every bucket")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    metrics = measure(SMALL if args.small else QWEN3_8B, args.teacher, args.batches, args.folder, device)
    print(tabulate([(name, f"{value:,.4g}") for name, value in metrics.items()], headers=["figure", "value"]))
    if not args.small:
        append_row("bench_extract", args.case if args.teacher == "last" else f"{args.case}/{args.teacher}", metrics)


def _open_direct(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:  # tmpfs
        return os.open(path, flags, 0o644)


def _median_seconds(work: Callable[[], object], device: torch.device, repeat: int = 5, inner: int = 4) -> float:
    work()
    times = []
    for _ in range(repeat):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(inner):
            work()
        _wait(device)
        times.append((time.perf_counter() - begin) / inner)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
