"""The captured training step at full scale: time, share of the hardware's floor, memory, and where the time goes.

The physics: a step is matrix products. Each product's floor is its operations over the rate that this GPU reaches for
that product's own shape, measured here in the same run; the step's floor is their sum. What the step takes beyond it is
memory traffic between products, attention's masks and the update.

    python -m draftcache.benchmarks.bench_step CASE...

CASE is GEOMETRY/TEACHER[/fp8], for example full/last or qwen3-8b/top64/fp8; GEOMETRY/TEACHER/parts for the breakdown;
full/mixed-buckets; GEOMETRY/TEACHER/speculators for the speculators package (speculators_peer.py) with teacher last or
argmax. Data lies on the device, so that the disk plays no part. Medians; needs a CUDA device.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tabulate import tabulate

from draftcache.benchmarks.rows import append_row
from draftcache.benchmarks.step_cases import DEVICE, FULL_SCALE, GEOMETRIES, Built, Geometry, build, random_batch
from draftcache.common.layout import DEFAULT_CEILINGS, DEFAULT_TOKEN_BUDGET, round_up, row_stride, rows_per_batch
from draftcache.train.batch import FlatBatch
from draftcache.train.order import CONTEXT_MULTIPLE
from draftcache.train.step import CapturedStep, Stepper, log_row_names

WARM, TIMED = 3, 8
MIXED_STEPS = 200
TEACHERS = {"tokens": "none", "last": "last", "top64": "top"}


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of the step: [rows, inner] x [inner, columns], `count` times."""

    name: str
    rows: int
    columns: int
    inner: int
    count: int
    accumulates: bool = False  # a weight gradient, summed into float32
    float8: bool = False

    @property
    def operations(self) -> int:
        """Multiplications and additions of all of them."""
        return 2 * self.rows * self.columns * self.inner * self.count


def products(g: Geometry, teacher: str, matmul: str) -> list[Product]:
    """Every product that one step executes, attention apart."""
    query, key = g.heads * g.head_dim, g.kv_heads * g.head_dim
    found: list[Product] = []

    def linear(name: str, rows: int, columns: int, inner: int, count: int, float8: bool = False) -> None:
        found.append(Product(f"{name} forward", rows, columns, inner, count, float8=float8))
        if name != "fc":  # nothing asks for the taps' gradient
            found.append(Product(f"{name} input gradient", rows, inner, columns, count, float8=float8))
        found.append(Product(f"{name} weight gradient", columns, inner, rows, count, accumulates=True))

    float8 = matmul == "fp8"
    linear("fc", g.tokens, g.hidden, g.taps * g.hidden, 1)
    linear("context keys", g.tokens, 2 * key, g.hidden, g.layers)
    linear("query-key-value", g.slots, query + 2 * key, g.hidden, g.layers - 1)
    linear("query-key-value of the first layer", g.anchors + 1, query + 2 * key, g.hidden, 1)
    linear("out", g.slots, g.hidden, query, g.layers)
    linear("gate-up", g.slots, 2 * g.inner, g.hidden, g.layers, float8)
    linear("down", g.slots, g.hidden, g.inner, g.layers, float8)
    rows = 4096 // g.block_size * (g.block_size - 1)
    chunks = -(-g.anchors // (4096 // g.block_size))
    heads = 2 if teacher == "last" else 1
    found.append(Product("head forward", rows, g.vocabulary, g.hidden, heads * chunks, float8=float8))
    found.append(Product("head input gradient", rows, g.hidden, g.vocabulary, chunks, float8=float8))
    return found


def product_seconds(product: Product) -> float:
    """What one such product takes, on random data, back to back with itself."""
    a = torch.randn(product.rows, product.inner, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(product.columns, product.inner, device=DEVICE, dtype=torch.bfloat16)
    if product.float8:
        scale_a, scale_b = torch.ones(product.rows, 1, device=DEVICE), torch.ones(1, product.columns, device=DEVICE)
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        return seconds(lambda: torch._scaled_mm(x, y.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16))
    if product.accumulates:
        total = torch.zeros(product.rows, product.columns, device=DEVICE)
        columns, rows = a.t().contiguous(), b.t().contiguous()
        return seconds(lambda: torch.addmm(total, columns.t(), rows, out_dtype=torch.float32, out=total))
    weight = b if "gradient" not in product.name else b.t().contiguous().t()
    return seconds(lambda: a @ weight.t())


def seconds(work: Callable[[], object], repeat: int = 5, inner: int = 4) -> float:
    """Median seconds of `work` on the device, several launches at a time."""
    work()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(inner):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / inner)
    return float(statistics.median(times))


def floor_seconds(g: Geometry, teacher: str, matmul: str, attention_operations: float) -> float:
    """The least that the step's products can take on this device; prints each product's rate."""
    rows, total = [], 0.0
    for product in products(g, teacher, matmul):
        once = product_seconds(product)
        torch.cuda.empty_cache()
        total += once * product.count
        rate = product.operations / product.count / once / 1e12
        rows.append([product.name, product.count, product.operations / 1e12, rate, once * product.count * 1000])
    peak = 2 * 8192**3 / product_seconds(Product("8192 cubed", 8192, 8192, 8192, 1))
    rows.append(["attention, at the rate of 8192 cubed", 1, attention_operations / 1e12, peak / 1e12, None])
    total += attention_operations / peak
    print(tabulate(rows, headers=["product", "count", "TFLOP", "TFLOP/s", "ms"], floatfmt=".1f"))
    return total


def visible_pairs(g: Geometry) -> float:
    """Query-key pairs that attention must compute per layer: each slot's share of its prefix, and its own block."""
    length = g.document
    mean_prefix = (length * 0.3 + length) / 2
    if g.layer_type == "sliding_attention":
        mean_prefix = min(mean_prefix, 2048.0)
    return g.slots * (mean_prefix + g.block_size)


def timed_steps(stepper: Stepper, batch: FlatBatch) -> float:
    """Median seconds of a step."""

    def step() -> None:
        stepper.micro_step(batch)
        stepper.update()

    for _ in range(WARM):
        step()
    return seconds(step, repeat=TIMED, inner=1)


def captured(built: Built, shapes: set[int]) -> CapturedStep:
    """The step as CUDA graphs."""
    return CapturedStep(built.step, built.spec.record_bytes, shapes, DEVICE)


def run_case(name: str, geometry_name: str, teacher: str, matmul: str) -> float:
    """One geometry, captured; small ones eagerly too. Returns seconds per step."""
    g = GEOMETRIES[geometry_name]
    torch.cuda.reset_peak_memory_stats()
    built = build(g, "bf16", TEACHERS[teacher], matmul)
    batch = random_batch(g, built.spec, g.tokens, g.stride)
    metrics: dict[str, float] = {}
    if geometry_name != "full":
        metrics["eager_s"] = timed_steps(built.step, batch)
    started = time.perf_counter()
    stepper = captured(built, {g.tokens})
    print(f"captured in {time.perf_counter() - started:.1f} s")
    before = torch.cuda.memory_stats()
    step_s = timed_steps(stepper, batch)
    after = torch.cuda.memory_stats()
    metrics |= {
        "step_s": step_s,
        "tokens_s": g.tokens / step_s,
        "blocks_s": g.anchors / step_s,
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
        "device_allocs": after["num_device_alloc"] - before["num_device_alloc"],
        "drift_bytes": after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"],
    }
    losses = built.step.log[: WARM + TIMED, log_row_names(g.block_size).index("loss")].tolist()
    assert all(0 < loss < float("inf") for loss in losses), f"losses {losses}"
    attention = visible_pairs(g) * g.layers * 4 * g.heads * g.head_dim * 3.5
    del stepper, built, batch
    torch.cuda.empty_cache()
    floor = floor_seconds(g, teacher, matmul, attention)
    append_row("bench_step", name, metrics | {"floor_s": floor, "floor_share": floor / step_s})
    return step_s


def run_peer(name: str, geometry_name: str, teacher: str, ours: dict[str, float]) -> None:
    """The speculators package's own step, beside those of ours that were timed before it in this run."""
    from draftcache.benchmarks.speculators_peer import build_peer  # not installed by default

    g = GEOMETRIES[geometry_name]
    torch.cuda.reset_peak_memory_stats()
    peer = build_peer(g, teacher, compile_mask=geometry_name != "qwen3-0.6b")
    for _ in range(WARM + 2):
        peer.step()
    step_s = seconds(peer.step, repeat=TIMED, inner=1)
    metrics = {
        "step_s": step_s,
        "tokens_s": g.tokens / step_s,
        "blocks_s": g.anchors / step_s,
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
    }
    for case, seconds_of_ours in ours.items():
        if case.startswith(geometry_name):
            metrics[f"x_ours/{case}"] = step_s / seconds_of_ours
    append_row("bench_step", name, metrics)
    torch.compiler.reset()


def run_mixed() -> None:
    """All six default buckets in random order through one captured step."""
    g = FULL_SCALE
    torch.cuda.reset_peak_memory_stats()
    built = build(g, "mxfp4", "top", "bf16")
    shapes = {}
    for ceiling in DEFAULT_CEILINGS:
        stride = row_stride(ceiling)
        shapes[round_up(rows_per_batch(DEFAULT_TOKEN_BUDGET, ceiling) * stride, CONTEXT_MULTIPLE)] = stride
    batches = [random_batch(g, built.spec, tokens, stride, seed=tokens) for tokens, stride in shapes.items()]
    batches.append(random_batch(g, built.spec, DEFAULT_TOKEN_BUDGET, 1728))
    stepper = captured(built, {batch.tokens for batch in batches})
    order = torch.randint(0, len(batches), (MIXED_STEPS,), generator=torch.Generator().manual_seed(1)).tolist()
    for index in range(len(batches)):
        timed = timed_steps(stepper, batches[index])
        print(f"T = {batches[index].tokens}: {timed:.4f} s")
    before = torch.cuda.memory_stats()
    begin = time.perf_counter()
    for index in order:
        stepper.micro_step(batches[index])
        stepper.update()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - begin) / MIXED_STEPS
    after = torch.cuda.memory_stats()
    append_row(
        "bench_step",
        "full/mixed-buckets",
        {
            "step_s": step_s,
            "tokens_s": sum(batches[i].tokens for i in order) / MIXED_STEPS / step_s,
            "blocks_s": g.anchors / step_s,
            "device_allocs": after["num_device_alloc"] - before["num_device_alloc"],
            "drift_bytes": after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"],
            "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
        },
    )


def main() -> None:
    """Run the cases given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="+")
    ours: dict[str, float] = {}
    for case in parser.parse_args().cases:
        print(f"--- {case}")
        if case == "full/mixed-buckets":
            run_mixed()
        else:
            geometry, teacher, *rest = case.split("/")
            if rest == ["speculators"]:
                run_peer(case, geometry, teacher, ours)
            else:
                ours[case] = run_case(case, geometry, teacher, rest[0] if rest else "bf16")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
