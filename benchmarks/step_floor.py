"""The least that a step's products can take on this GPU, from rates measured in the same run, shape by shape.

Legend as in step_cases.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from functools import cache

import torch
from tabulate import tabulate

from draftcache.benchmarks.step_cases import DEVICE, SUPERVISED_FROM, Geometry, drawn_blocks, random_batch
from draftcache.common.record import record_spec
from draftcache.train import work
from draftcache.train.model.loss import LossConfig
from draftcache.train.work import Product

SUSTAIN_S = 0.4
"""Every product runs so long before it is timed, as it does within a training run."""


def products(g: Geometry, teacher: str, matmul: str) -> list[Product]:
    """Every product of one step of this geometry, a teacher's rows as often as they are distinct within a chunk."""
    chunk = LossConfig().chunk_slots
    shared = _distinct_rows(g, chunk // g.block_size) if teacher == "last" and matmul == "bf16" else None
    return work.products(g.drafter, g.tokens, g.anchors, teacher.removesuffix("64"), matmul, chunk, shared)


@cache
def _distinct_rows(g: Geometry, blocks: int) -> int:
    """Mean number of distinct teacher rows in a chunk of so many blocks."""
    rows = drawn_blocks(g, random_batch(g, record_spec(1, 64, "bf16", "none"), g.tokens, g.stride)).teacher_rows
    counts = [len(chunk[:, 1:].unique()) for chunk in rows.split(blocks)]
    print(f"distinct teacher rows: {sum(counts)} of {rows[:, 1:].numel()}")
    return round(sum(counts) / len(counts))


@cache
def product_seconds(product: Product) -> float:
    """What one such product takes, on random data, back to back with itself."""
    a = torch.randn(product.rows, product.inner, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(product.columns, product.inner, device=DEVICE, dtype=torch.bfloat16)
    if product.float8:
        scale_a, scale_b = torch.ones(product.rows, 1, device=DEVICE), torch.ones(1, product.columns, device=DEVICE)
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        return sustained_seconds(
            lambda: torch._scaled_mm(x, y.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
        )
    if product.accumulates:
        total = torch.zeros(product.rows, product.columns, device=DEVICE)
        columns, rows = a.t().contiguous(), b.t().contiguous()
        return sustained_seconds(lambda: torch.addmm(total, columns.t(), rows, out_dtype=torch.float32, out=total))
    weight = b if "gradient" not in product.name else b.t().contiguous().t()
    return sustained_seconds(lambda: a @ weight.t())


def sustained_seconds(work: Callable[[], object]) -> float:
    """Seconds of `work` when it runs on and on: a GPU at its power limit clocks lower than in a short burst."""
    once = seconds(work)
    for _ in range(max(1, int(SUSTAIN_S / once))):
        work()
    return seconds(work)


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


def total_seconds(found: Sequence[Product]) -> float:
    """What these products take in all; prints each one's rate."""
    rows, total = [], 0.0
    for product in found:
        once = product_seconds(dataclasses.replace(product, count=1))
        torch.cuda.empty_cache()
        total += once * product.count
        rate = product.operations / product.count / once / 1e12
        rows.append([product.name, product.count, product.operations / 1e12, rate, once * product.count * 1000])
    print(tabulate(rows, headers=["product", "count", "TFLOP", "TFLOP/s", "ms"], floatfmt=".1f"))
    return total


def attention_seconds(g: Geometry) -> float:
    """Attention's operations, forward and backward, at the rate of a product of 8192 cubed."""
    operations = work.attention_operations(g.drafter, g.anchors, g.document * (SUPERVISED_FROM + 1) / 2)
    peak = 2 * 8192**3 / product_seconds(Product("8192 cubed", 8192, 8192, 8192, 1))
    print(f"8192 cubed: {peak / 1e12:.1f} TFLOP/s; attention: {operations / 1e12:.1f} TFLOP")
    return operations / peak
