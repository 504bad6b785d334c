"""Where a step's time goes: each part alone on the same shapes, beside the least that it could take.

    ranges      anchors, blocks and the ranges that attention walks
    context     taps through fc, norm and every layer's key and value, forward and backward
    linears     every layer's products over block slots with norms, gate and residuals, forward and backward
    attention   heads, rotation and attention of every layer, forward and backward
    loss        head, teacher and gradient in chunks
    update      norm, clipping, AdamW, copies in the compute dtype

The floor of products is that of bench_step; attention's is its operations at the rate of a large product; the update's
is its bytes at the rate of a device copy. Legend as in step_cases.
"""

from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

from draftcache.benchmarks.rows import append_row
from draftcache.benchmarks.step_cases import DEVICE, Built, Geometry, drawn_blocks, random_batch
from draftcache.benchmarks.step_floor import attention_seconds, products, seconds, sustained_seconds, total_seconds
from draftcache.train.batch import FlatBatch
from draftcache.train.estimate import UPDATE_BYTES
from draftcache.train.model.attention import PrefixAttention
from draftcache.train.model.chunked_loss import chunked_loss
from draftcache.train.model.drafter import Drafter
from draftcache.train.model.head import Head
from draftcache.train.model.heads import key_value, query_key_value, rotary_tables
from draftcache.train.model.linear import Matrix, Norm, gated_linear, linear, norm_linear, normed
from draftcache.train.model.loss import LossConfig, LossInputs
from draftcache.train.model.weights import ComputeWeights


def run_parts(name: str, g: Geometry, teacher: str, built: Built) -> None:
    """Time every part, print the table and append the row."""
    batch = random_batch(g, built.spec, g.tokens, g.stride)
    weights = ComputeWeights(built.optimizer, torch.bfloat16)
    floors = _floors(g, teacher, built)
    times = {
        "ranges": seconds(lambda: _ranges(g, batch)),
        "context": seconds(_context(g, built.drafter, weights), inner=1),
        "linears": seconds(_linears(g, built.drafter, weights), inner=1),
        "attention": seconds(_attention(g, batch, built.drafter, weights), inner=1),
        "loss": seconds(_loss(g, batch, built, teacher), inner=1),
        "update": seconds(lambda: built.optimizer.update(torch.ones((), device=DEVICE), weights.values), inner=1),
    }
    rows = [
        [part, 1000 * t, 1000 * floors.get(part, 0.0) or None, floors.get(part, 0.0) / t or None]
        for part, t in times.items()
    ]
    rows.append(
        ["sum", 1000 * sum(times.values()), 1000 * sum(floors.values()), sum(floors.values()) / sum(times.values())]
    )
    print(tabulate(rows, headers=["part", "ms", "floor, ms", "share"], floatfmt=(".1f", ".1f", ".1f", ".2f")))
    metrics = {f"{part}_s": t for part, t in times.items()}
    metrics |= {f"{part}_floor_share": floors[part] / times[part] for part in floors}
    append_row("bench_step", name, metrics)


def _floors(g: Geometry, teacher: str, built: Built) -> dict[str, float]:
    found = products(g, teacher, "bf16")
    in_context, in_loss = ("fc", "context"), ("head", "teacher")
    weights = built.optimizer.gradients.numel()
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / sustained_seconds(lambda: target.copy_(source))
    return {
        "context": total_seconds([p for p in found if p.name.startswith(in_context)]),
        "linears": total_seconds([p for p in found if not p.name.startswith(in_context + in_loss)]),
        "attention": attention_seconds(g),
        "loss": total_seconds([p for p in found if p.name.startswith(in_loss)]),
        "update": UPDATE_BYTES * weights / copied,
    }


def _ranges(g: Geometry, batch: FlatBatch) -> PrefixAttention:
    return PrefixAttention(drawn_blocks(g, batch), g.tokens, g.drafter.rules)


def _context(g: Geometry, drafter: Drafter, weights: ComputeWeights) -> Callable[[], None]:
    taps = _random(g.tokens, g.taps * g.hidden)
    fc, norm = Matrix(weights.weight(drafter.fc.weight)), Norm(weights.weight(drafter.hidden_norm.weight), 1e-6)
    parts = [
        Matrix(weights.weight(layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight)) for layer in drafter.layers
    ]
    gradient = _random(g.tokens, 2 * g.kv_heads * g.head_dim)

    def run() -> None:
        context = normed(linear(taps, fc), norm)
        torch.autograd.backward([linear(context, part) for part in parts], [gradient] * len(parts))

    return run


def _linears(g: Geometry, drafter: Drafter, weights: ComputeWeights) -> Callable[[], None]:
    x = _random(g.slots, g.hidden).requires_grad_()
    mixed = _random(g.slots, g.heads * g.head_dim)

    def run() -> None:
        y = x
        joints = []
        for number, layer in enumerate(drafter.layers):
            attention, mlp = layer.self_attn, layer.mlp
            if number:  # the first layer's is over distinct inputs alone
                joint = Matrix(
                    weights.weight(*(p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)))
                )
                projected, y = norm_linear(y, Norm(weights.weight(layer.input_layernorm.weight), 1e-6), joint)
                joints.append(projected)
            y = linear(mixed, Matrix(weights.weight(attention.o_proj.weight)), residual=y)
            gate_up = Matrix(weights.weight(mlp.gate_proj.weight, mlp.up_proj.weight))
            inner, y = norm_linear(y, Norm(weights.weight(layer.post_attention_layernorm.weight), 1e-6), gate_up)
            y = gated_linear(inner, Matrix(weights.weight(mlp.down_proj.weight)), residual=y)
        torch.autograd.backward([y, *joints], [torch.ones_like(y), *(torch.ones_like(j) for j in joints)])

    return run


def _attention(g: Geometry, batch: FlatBatch, drafter: Drafter, weights: ComputeWeights) -> Callable[[], None]:
    attend = _ranges(g, batch)
    config = drafter.config
    rule = config.rule(g.layer_type)
    context = _random(g.tokens, 2 * g.kv_heads * g.head_dim).requires_grad_()
    joint = _random(g.slots, (g.heads + 2 * g.kv_heads) * g.head_dim).requires_grad_()
    rotary, context_rotary = (
        rotary_tables(torch.arange(n, device=DEVICE) % g.stride, config) for n in (g.slots, g.tokens)
    )

    def run() -> None:
        for layer in drafter.layers:
            query_norm = Norm(weights.weight(layer.self_attn.q_norm.weight), 1e-6)
            key_norm = Norm(weights.weight(layer.self_attn.k_norm.weight), 1e-6)
            query, key, value = query_key_value(joint, query_norm, key_norm, rotary, config)
            keys, values = key_value(context, key_norm, context_rotary, config)
            attend(query, keys, values, key, value, rule).backward(torch.ones_like(query))
        context.grad = joint.grad = None

    return run


def _loss(g: Geometry, batch: FlatBatch, built: Built, teacher: str) -> Callable[[], None]:
    shape = g.anchors, g.block_size - 1
    hidden = _random(*shape, g.hidden).requires_grad_()
    inputs = LossInputs(
        labels=torch.zeros(shape, dtype=torch.int64, device=DEVICE),
        valid=torch.ones(shape, dtype=torch.bool, device=DEVICE),
        teacher_hidden=_random(g.tokens, g.hidden) if teacher == "last" else None,
        teacher_rows=drawn_blocks(g, batch).teacher_rows[:, 1:],
        teacher_ids=torch.arange(64, device=DEVICE, dtype=torch.int32).expand(*shape, 64),
        teacher_log_probs=torch.full((*shape, 64), -4.5, device=DEVICE, dtype=torch.bfloat16),
    )
    head = Head(built.parts.head)
    config = LossConfig(teacher="top" if teacher == "top64" else teacher)

    def run() -> None:
        chunked_loss(hidden, head, inputs, config).loss.backward()
        hidden.grad = None

    return run


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
