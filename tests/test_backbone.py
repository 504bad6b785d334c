"""The drafter as training runs it equals the plain `Drafter`: hidden states, and the gradient of every parameter."""

import dataclasses

import pytest
import torch
from torch import Tensor

from draftcache.tests.helpers import (
    blocks_at,
    flat_batch,
    random_parts,
    supervised,
    taps_of,
    tiny_config,
    tiny_drafter,
    tiny_record,
)
from draftcache.train.model.attention import GroupedAttention
from draftcache.train.model.backbone import Backbone
from draftcache.train.model.drafter import FULL, SLIDING, Drafter, DrafterConfig
from draftcache.train.model.weights import ComputeWeights
from draftcache.train.optim import OptimConfig, Optimizer

SPEC = tiny_record()
PARTS = random_parts(seed=1)
BASE = tiny_config()
CONFIGS = {
    "one-layer": dataclasses.replace(BASE, layer_types=(FULL,)),
    "biases": dataclasses.replace(BASE, attention_bias=True),
    "one-sliding-layer-with-biases": dataclasses.replace(BASE, layer_types=(SLIDING,), attention_bias=True),
    "sliding-full-sliding": dataclasses.replace(BASE, layer_types=(SLIDING, FULL, SLIDING), attention_bias=True),
    "not-causal": dataclasses.replace(BASE, layer_types=(SLIDING, FULL), sliding_causal=False),
    "window-of-one": dataclasses.replace(BASE, layer_types=(FULL, SLIDING), sliding_window=1),
    "block-of-two": dataclasses.replace(BASE, block_size=2, attention_bias=True),
    "block-of-three": dataclasses.replace(BASE, block_size=3),
    "kv-heads-equal-heads": dataclasses.replace(BASE, num_heads=3, num_kv_heads=3, attention_bias=True),
    "head-dim-10": dataclasses.replace(BASE, num_heads=6, num_kv_heads=2, head_dim=10, attention_bias=True),
    "head-dim-2": dataclasses.replace(BASE, head_dim=2),
    "one-tap": dataclasses.replace(BASE, layer_ids=(1,)),
    "narrow-mlp": dataclasses.replace(BASE, intermediate_size=1),
}


def drafter_of(config: DrafterConfig) -> Drafter:
    """A drafter whose biases and norms are as random as its matrices."""
    drafter = tiny_drafter(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return drafter


def both(config: DrafterConfig, dtype: torch.dtype, runs: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output and every parameter's gradient, of the plain drafter and of the backbone, summed over `runs`."""
    batch = flat_batch([supervised(20, 2, 1), supervised(70, 5, 2), supervised(9, 1, 3)], spec=SPEC)
    anchors, keep = [3, 5, 6, 17, 64 + 5, 64 + 66, 192 + 1, 192 + 7], [True] * 7 + [False]
    blocks = blocks_at(batch, anchors, keep, size=config.block_size)
    taps = taps_of(batch, SPEC)[:, : len(config.layer_ids) * config.hidden_size].to(dtype)
    attention = GroupedAttention(blocks, batch.tokens, config.rules)
    embedding = PARTS.embedding.to(dtype)
    trained = len(anchors), config.block_size - 1, config.hidden_size
    asked = torch.randn(trained, generator=torch.Generator().manual_seed(2))

    plain = drafter_of(config)
    context = plain.context_keys(taps, batch.positions)
    every = plain(embedding[blocks.input_ids.flatten()], blocks.positions.flatten(), context, attention)
    found = every.view(*blocks.positions.shape, -1)[:, 1:]
    for _ in range(runs):
        found.backward(asked.to(dtype), retain_graph=True)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None} | {"output": found.detach()}

    fast = drafter_of(config)
    optimizer = Optimizer(fast.parameters(), OptimConfig(), 1)
    backbone = Backbone(fast, ComputeWeights(optimizer, dtype), "bf16")
    distinct = embedding[torch.cat([torch.tensor([config.mask_token_id]), blocks.input_ids[:, 0]])]
    for _ in range(runs):
        found = backbone(distinct, blocks.positions, taps, batch.positions, attention)
        found.backward(asked.to(dtype))
    gradients = {name: p.grad for name, p in fast.named_parameters() if p.grad is not None}
    return gradients | {"output": found.detach()}, wanted


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_backbone_equals_the_plain_drafter(config: DrafterConfig) -> None:
    found, wanted = both(config, torch.float32)
    assert found.keys() == wanted.keys() == {"output", *dict(Drafter(config).named_parameters())}
    for name, value in wanted.items():
        scale = value.abs().max().item()
        assert scale > 0 or config.head_dim == 2, name
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5 * max(scale, 1e-3), msg=name)


def test_gradients_of_several_micro_batches_add_up() -> None:
    found, wanted = both(CONFIGS["sliding-full-sliding"], torch.float32, runs=3)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5 * value.abs().max().item(), msg=name)
