"""The drafter's attention by flex_attention and by our own kernels (train/kernels/prefix_attention.py), both ways.

The physics: a slot sees the prefix of its document within the window, and its block. Both multiply whole tiles; what
counts is how many keys they visit that nobody sees, and how near to the rate of a large product they run.

    python -m draftcache.benchmarks.bench_attention [full] [qwen3-8b] [qwen3-0.6b]

One layer at the geometries of step_cases, random values, medians; needs a CUDA device.
"""

import argparse
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

from draftcache.benchmarks.flex_attention import FlexAttention
from draftcache.benchmarks.rows import append_row
from draftcache.benchmarks.step_cases import DEVICE, GEOMETRIES, Geometry, drawn_blocks, random_batch
from draftcache.benchmarks.step_floor import attention_seconds, seconds
from draftcache.common.record import record_spec
from draftcache.train.model.attention import PrefixAttention


def run_case(name: str, g: Geometry) -> None:
    """One geometry."""
    batch = random_batch(g, record_spec(1, 64, "bf16", "none"), g.tokens, g.stride)
    blocks = drawn_blocks(g, batch)
    rule = g.drafter.rule(g.layer_type)
    query = _random(g.slots, g.heads, g.head_dim)
    context_key, context_value = (_random(g.tokens, g.kv_heads, g.head_dim) for _ in range(2))
    key, value = (_random(g.slots, g.kv_heads, g.head_dim) for _ in range(2))
    inputs = [query, context_key, context_value, key, value]
    gradient = torch.randn_like(query)
    flex, prefix = (kind(blocks, g.tokens, {rule}) for kind in (FlexAttention, PrefixAttention))

    def by_flex() -> Tensor:
        return flex(query, context_key, context_value, key, value, rule)

    def by_prefix() -> Tensor:
        return prefix(query, context_key, context_value, key, value, rule)

    found, wanted = (torch.autograd.grad(f(), inputs, gradient) for f in (by_prefix, by_flex))
    torch.testing.assert_close(by_prefix(), by_flex(), rtol=2e-2, atol=2e-2)
    for a, b in zip(found, wanted, strict=True):
        assert ((a - b).float().norm() / b.float().norm()).item() < 2e-2, "gradients differ"
    floor = attention_seconds(g) / g.layers
    rows = []
    for engine, work in (("flex", by_flex), ("prefix", by_prefix)):
        forward, both = seconds(work), seconds(_with_backward(work, inputs, gradient))
        rows.append([engine, 1000 * forward, 1000 * both, floor / both])
        metrics = {"forward_s": forward, "both_s": both, "floor_share": floor / both}
        append_row("bench_attention", f"{name}/{engine}", metrics)
    print(tabulate(rows, headers=["engine", "forward, ms", "with backward, ms", "of the floor"], floatfmt=".2f"))


def _with_backward(work: Callable[[], Tensor], inputs: list[Tensor], gradient: Tensor) -> Callable[[], None]:
    def both() -> None:
        torch.autograd.grad(work(), inputs, gradient)

    return both


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()


def main() -> None:
    """Run the geometries given, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("geometries", nargs="*", choices=[*GEOMETRIES, []])
    for name in parser.parse_args().geometries or GEOMETRIES:
        print(f"--- {name}")
        run_case(name, GEOMETRIES[name])


if __name__ == "__main__":
    main()
