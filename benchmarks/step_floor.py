"""The least that a step's products can take on this GPU, from rates measured in the same run, shape by shape.

Legend as in step_cases.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate

from draftcache.benchmarks.step_cases import DEVICE, Geometry
from draftcache.train.drafter import SLIDING

SUSTAIN_S = 0.4
"""Every product runs so long before it is timed, as it does within a training run."""


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
        once = product_seconds(product)
        torch.cuda.empty_cache()
        total += once * product.count
        rate = product.operations / product.count / once / 1e12
        rows.append([product.name, product.count, product.operations / 1e12, rate, once * product.count * 1000])
    print(tabulate(rows, headers=["product", "count", "TFLOP", "TFLOP/s", "ms"], floatfmt=".1f"))
    return total


def attention_seconds(g: Geometry) -> float:
    """Attention's operations, forward and backward, at the rate of a product of 8192 cubed."""
    operations = visible_pairs(g) * g.layers * 4 * g.heads * g.head_dim * 3.5
    peak = 2 * 8192**3 / product_seconds(Product("8192 cubed", 8192, 8192, 8192, 1))
    print(f"8192 cubed: {peak / 1e12:.1f} TFLOP/s; attention: {operations / 1e12:.1f} TFLOP")
    return operations / peak


def visible_pairs(g: Geometry) -> float:
    """Query-key pairs that attention must compute per layer: each slot's share of its prefix, and its own block."""
    length = g.document
    mean_prefix = (length * 0.3 + length) / 2
    if g.layer_type == SLIDING:
        mean_prefix = min(mean_prefix, 2048.0)
    return g.slots * (mean_prefix + g.block_size)
