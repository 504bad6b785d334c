"""The step fed from a store beside the same step fed from device memory: does the graph ever wait for the disk?

The physics: a step of 0.8 to 1 s eats 49,152 tokens, at 61,440 bytes (bf16+last) 2.9 GB/s, at 14,016 bytes
(mxfp4+top64) 0.7 to 0.9 GB/s. What the disk gives is measured in the same run by raw O_DIRECT reads of the same files.

    python -m draftcache.benchmarks.bench_stream FOLDER CASE... [--small]

CASE is CODEC+TEACHER[=GB], for example bf16+last=12 or mxfp4+top64=6: the store's size; memory: 500 micro-batches of
the small geometry and the host's memory meanwhile; speculators: after bf16+last, the speculators package's data set
and loader (speculators_peer.py) feeding the same step from the same states, which are written for it once more. FOLDER
lies on the disk to be measured. `--small` runs a tiny geometry, on the CPU if there is no GPU, and keeps no rows.

    resident    the same micro-batch again and again, on the device
    cold        from the disk: nothing of the store in the page cache before, checked by mincore, nor after
    warm        from the page cache, all of it there, checked likewise
    x_resident  step rate over that of `resident`
    x_ours      the peer's seconds of a step over ours from the page cache
    x_raw       step rate over the lesser of `resident` and what raw reads of so many bytes would allow
"""

import argparse
import dataclasses
import gc
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from draftcache.benchmarks.disk import check_cold, evict, read_raw, warm
from draftcache.benchmarks.rows import append_row
from draftcache.benchmarks.step_cases import FULL_SCALE, Built, Geometry, build
from draftcache.benchmarks.stream_stores import peer_samples, write_store
from draftcache.common.codec import field_tensor
from draftcache.common.layout import round_up
from draftcache.common.record import RecordSpec
from draftcache.common.store import Store
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.meter import Traffic
from draftcache.train.model.drafter import FULL
from draftcache.train.order import CONTEXT_MULTIPLE, Batching, Cursor, MicroBatch, training_steps
from draftcache.train.ring import THREADS, Ring
from draftcache.train.setup import bucket_index
from draftcache.train.slots import DeviceSlots, HostSlots
from draftcache.train.step import CapturedStep, Stepper

SMALL = Geometry(
    tokens=1024,
    anchors=32,
    block_size=4,
    layer_type=FULL,
    hidden=64,
    inner=128,
    heads=2,
    kv_heads=1,
    head_dim=32,
    vocabulary=512,
    layers=2,
    taps=3,
    document=110,
    stride=128,
)
GB = {"bf16+last": 12.0, "mxfp4+top64": 6.0}
WARM_STEPS, STEPS, MEMORY_STEPS, MEMORY_EVERY = 2, 12, 500, 50
PEER_WORKERS, PEER_PREFETCH, PEER_EPOCH = 4, 2, 5
"""Its loader holds workers x prefetch micro-batches in shared memory; an epoch of its data set repeats the files, so
that the measured steps lie within one."""
TEACHERS = {"last": "last", "top64": "top", "none": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The step that is fed, and what feeds it."""

    folder: Path
    geometry: Geometry
    device: torch.device
    store: Store
    built: Built
    stepper: Stepper
    keep: bool  # rows, in results.jsonl

    def row(self, case: str, metrics: dict[str, float]) -> None:
        """Print a row, and keep it."""
        append_row("bench_stream", case, metrics, keep=self.keep)

    @property
    def tokens(self) -> int:
        """T."""
        return context_tokens(self.geometry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """What so many steps took: seconds and real tokens of one, and what came from the store for all."""

    step_s: float
    tokens: float
    steps: int
    traffic: Traffic

    @property
    def metrics(self) -> dict[str, float]:
        """The columns of any row."""
        seconds, moved = self.step_s * self.steps, self.traffic
        found = {
            "step_s": self.step_s,
            "tokens_s": self.tokens / self.step_s,
            "wait_share": moved.wait_seconds / seconds,
            "read_gb_s": moved.read_bytes / seconds / 1e9,
            "host_gb": host_bytes() / 1e9,
        }
        return found | ({"copy_gb_s": moved.copied_bytes / moved.copy_seconds / 1e9} if moved.copy_seconds else {})


def context_tokens(geometry: Geometry) -> int:
    """T of a micro-batch of the store's one bucket."""
    return round_up(geometry.tokens // geometry.stride * geometry.stride, CONTEXT_MULTIPLE)


def host_bytes() -> int:
    """Resident memory of this process, the ring's buffers included."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def micro_batches(store: Store, geometry: Geometry) -> Iterator[MicroBatch]:
    """Shuffled rows, epoch after epoch; an epoch's last, short micro-batch is left out."""
    index = bucket_index(store)
    full = geometry.tokens // geometry.stride
    for step in training_steps(index, Batching(kind="bucket", token_budget=geometry.tokens), 0, 1, Cursor()):
        yield from (batch for batch in step.batches if len(batch.rows) == full)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(bench: Bench, steps: int, feed: Callable[[], float], traffic: Callable[[], Traffic] = Traffic) -> Fed:
    """Let `feed` run the micro-step of each step; it returns the micro-batch's real tokens."""
    for _ in range(WARM_STEPS):
        feed()
        bench.stepper.update()
    synchronize(bench.device)
    traffic()
    began, tokens = time.perf_counter(), 0.0
    for _ in range(steps):
        tokens += feed()
        bench.stepper.update()
    synchronize(bench.device)
    return Fed(step_s=(time.perf_counter() - began) / steps, tokens=tokens / steps, steps=steps, traffic=traffic())


def stream(bench: Bench, steps: int, look: Callable[[int], None] | None = None) -> Fed:
    """Steps fed from the store by the ring and the slot, as training feeds them."""
    spec, waiting = bench.store.manifest.record, list[MicroBatch]()

    def noted() -> Iterator[MicroBatch]:
        for micro_batch in micro_batches(bench.store, bench.geometry):
            waiting.append(micro_batch)
            yield micro_batch

    with Ring(bench.store, noted(), bench.tokens, pinned=bench.device.type == "cuda") as ring:
        slots = (
            DeviceSlots(ring, bench.tokens, spec.record_bytes, bench.device)
            if bench.device.type == "cuda"
            else HostSlots(ring)
        )
        count = 0

        def feed() -> float:
            nonlocal count
            bench.stepper.micro_step(slots.take(), slots.release)
            count += 1
            if look:
                look(count)
            return waiting.pop(0).real_tokens

        return timed(bench, steps, feed, slots.traffic)


def resident(bench: Bench, steps: int) -> Fed:
    """Steps on the store's first micro-batch, which lies on the device."""
    first = next(micro_batches(bench.store, bench.geometry))
    record_bytes = bench.store.manifest.record.record_bytes
    block = torch.zeros(batch_bytes(bench.tokens, record_bytes), dtype=torch.uint8, device=bench.device)
    with Ring(bench.store, iter([first]), bench.tokens, pinned=False) as ring:
        block.copy_(ring.take().batch.block)
    batch = view_batch(block, bench.tokens, record_bytes)

    def feed() -> float:
        bench.stepper.micro_step(batch)
        return first.real_tokens

    return timed(bench, steps, feed)


def open_bench(folder: Path, geometry: Geometry, case: str, gigabytes: float, keep: bool) -> Bench:
    """Write the store, build the step, capture it."""
    codec, teacher = case.split("+")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    store = write_store(folder / case, geometry, codec, TEACHERS[teacher], gigabytes * 1e9)
    written = sum(path.stat().st_size for path in (folder / case).rglob("*") if path.is_file())
    print(f"{case}: {written / 1e9:.1f} GB written in {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    built = build(geometry, codec, TEACHERS[teacher], "bf16", device=device)
    stepper: Stepper = built.step
    if device.type == "cuda":
        stepper = CapturedStep(built.step, built.spec.record_bytes, {context_tokens(geometry)}, device)
    print(f"{case}: step built and captured in {time.perf_counter() - began:.1f} s")
    return Bench(
        folder=folder / case, geometry=geometry, device=device, store=store, built=built, stepper=stepper, keep=keep
    )


def run_case(
    folder: Path, geometry: Geometry, case: str, gigabytes: float, *, steps: int, peer: bool, keep: bool
) -> None:
    """Resident, raw, cold and warm of one codec and teacher, then the peer."""
    bench = open_bench(folder, geometry, case, gigabytes, keep)
    on_device = resident(bench, steps)
    bench.row(f"resident/{case}", on_device.metrics)
    shards = sorted((bench.folder / "buckets").rglob("records/c/*/0/0"))
    evict(bench.folder)
    raw = read_raw(shards, THREADS)
    cold = stream(bench, steps)
    check_cold(bench.folder / "buckets" / str(geometry.stride) / "records")
    bench.row(f"cold/{case}", cold.metrics | ratios(cold, on_device, raw))
    warm(bench.folder, THREADS)
    warmed = stream(bench, steps)
    bench.row(f"warm/{case}", warmed.metrics | ratios(warmed, on_device))
    if peer:
        run_peer(bench, steps, on_device, warmed)
    shutil.rmtree(folder)


def ratios(fed: Fed, on_device: Fed, raw: float | None = None) -> dict[str, float]:
    """Step rates over the resident step's, and over what raw reads allow. `raw`: bytes per second."""
    found = {"x_resident": on_device.step_s / fed.step_s}
    if raw is None:
        return found
    allowed = max(on_device.step_s, fed.traffic.read_bytes / fed.steps / raw)
    return found | {"x_raw": allowed / fed.step_s, "raw_gb_s": raw / 1e9}


def run_peer(bench: Bench, steps: int, on_device: Fed, ours: Fed) -> None:
    """The speculators package's data set and loader, its files in the page cache, feeding the same step."""
    from draftcache.benchmarks.speculators_peer import peer_batches, peer_loader, write_peer_dataset

    folder = bench.folder.with_name("speculators")
    write_peer_dataset(folder, peer_samples(bench.store), repeat=PEER_EPOCH)
    warm(folder, THREADS)
    geometry = dataclasses.replace(bench.geometry, tokens=bench.tokens)
    loader = peer_loader(folder, geometry, workers=PEER_WORKERS, prefetch=PEER_PREFETCH)
    batches = peer_batches(loader, bench.device)
    spec = bench.store.manifest.record
    block = torch.zeros(batch_bytes(bench.tokens, spec.record_bytes), dtype=torch.uint8, device=bench.device)
    flat = view_batch(block, bench.tokens, spec.record_bytes)
    real: list[torch.Tensor] = []

    def feed() -> float:
        load_peer_batch(next(batches), flat, spec)
        bench.stepper.micro_step(flat)
        real.append((flat.documents >= 0).sum())
        return 0.0

    fed = timed(bench, min(steps, len(loader) - WARM_STEPS), feed)
    fed = dataclasses.replace(fed, tokens=float(torch.stack(real[WARM_STEPS:]).double().mean()))
    metrics = {name: value for name, value in fed.metrics.items() if name in ("step_s", "tokens_s")}
    metrics |= ratios(fed, on_device) | {"x_ours": fed.step_s / ours.step_s}
    bench.row("warm/bf16+last/speculators", metrics)


def load_peer_batch(
    batch: dict[str, torch.Tensor],  # the peer's, on the device, see speculators_peer.Batch
    flat: FlatBatch,  # overwritten
    spec: RecordSpec,
) -> None:
    """The peer's micro-batch as ours, on the device."""
    taps, last = (field_tensor(flat.records, spec.field(name)) for name in ("taps", "last"))
    taps.copy_(batch["hidden_states"].view(taps.shape))
    last.copy_(batch["verifier_last_hidden_states"].view(last.shape))
    flat.input_ids.copy_(batch["input_ids"][0])
    flat.loss_mask.copy_(batch["loss_mask"][0])
    flat.positions.copy_(batch["position_ids"][0])
    flat.documents.copy_(batch["document_ids"][0])
    flat.samples.copy_(batch["document_ids"][0])


def run_memory(folder: Path, keep: bool) -> None:
    """Host memory while micro-batch after micro-batch comes from the store."""
    bench = open_bench(folder, SMALL, "bf16+last", 0.02, keep)
    seen: list[int] = []
    fed = stream(bench, MEMORY_STEPS, lambda count: None if count % MEMORY_EVERY else seen.append(host_bytes()))
    settled = seen[2:]
    metrics = fed.metrics | {"drift_bytes": settled[-1] - settled[0], "spread_bytes": max(settled) - min(settled)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    bench.row("memory", metrics | {"batches": MEMORY_STEPS, "peak_gb": peak / 1e9})


def main() -> None:
    """Run the cases given."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    keep = not options.small
    try:
        for case in options.cases:
            if case == "speculators":
                continue
            if case == "memory":
                run_memory(options.folder / "memory", keep)
                continue
            name, _, size = case.partition("=")
            peer = name == "bf16+last" and "speculators" in options.cases
            gigabytes = float(size) if size else (0.02 if options.small else GB[name])
            geometry = SMALL if options.small else FULL_SCALE
            folder = options.folder / name
            run_case(folder, geometry, name, gigabytes, steps=options.steps, peer=peer, keep=keep)
            gc.collect()
            torch.cuda.empty_cache()
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
