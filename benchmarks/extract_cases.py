"""Targets with random weights and plans of random samples, for benchmarks of extraction."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftcache.common.layout import DEFAULT_CEILINGS, DEFAULT_TOKEN_BUDGET, LAYOUT_VERSION, rows_per_batch
from draftcache.common.manifest import (
    PLAIN_ENDS,
    BucketSummary,
    DataReport,
    ExtractSettings,
    Manifest,
    TargetIdentity,
)
from draftcache.common.target import Target, default_layer_ids
from draftcache.common.version import VERSION
from draftcache.extract.buckets import fill_buckets, plan_batches
from draftcache.extract.plan import Plan
from draftcache.extract.template import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A target's sizes, and how its samples are batched."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    ceilings: tuple[int, ...]
    token_budget: int
    product: int  # side of the square product that gives the ceiling

    def operations(self, rows: int, ceiling: int) -> float:
        """Multiplications and additions of one batch's forward: products over padded tokens, and causal attention."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.layers * (self.hidden * (2 * query + 2 * key) + 3 * self.hidden * self.inner)
        attention = self.layers * query * ceiling  # scores and values over half of the ceiling each, 2 operations
        return 2.0 * rows * ceiling * (weights + attention)


QWEN3_8B = Geometry(
    hidden=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    inner=12_288,
    vocabulary=151_936,
    ceilings=DEFAULT_CEILINGS,
    token_budget=DEFAULT_TOKEN_BUDGET,
    product=8192,
)
SMALL = Geometry(
    hidden=64,
    layers=8,
    heads=4,
    kv_heads=2,
    head_dim=16,
    inner=128,
    vocabulary=512,
    ceilings=(64, 100, 192),
    token_budget=512,
    product=256,
)


def random_target(g: Geometry, device: torch.device) -> Target:
    """A Qwen3 of this geometry with random weights in bfloat16."""
    config = Qwen3Config(
        hidden_size=g.hidden,
        num_hidden_layers=g.layers,
        num_attention_heads=g.heads,
        num_key_value_heads=g.kv_heads,
        head_dim=g.head_dim,
        intermediate_size=g.inner,
        vocab_size=g.vocabulary,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    return Target(
        model=model,
        decoder=model.model,
        layers=model.model.layers,
        embedding=model.model.embed_tokens.weight,
        head=model.lm_head.weight,
        ends=PLAIN_ENDS,
    )


def random_plan(g: Geometry, teacher: str, batches_per_bucket: int) -> Plan:
    """Samples of random ids for so many full batches of every bucket, lengths evenly spread within it."""
    rng = np.random.default_rng(0)
    samples: list[tuple[int, Tokens]] = []
    shortest = g.ceilings[0] // 2
    for ceiling in g.ceilings:
        for _ in range(batches_per_bucket * rows_per_batch(g.token_budget, ceiling)):
            length = int(rng.integers(shortest + 1, ceiling + 1))
            ids = rng.integers(0, g.vocabulary, length).tolist()
            samples.append((len(samples), Tokens(input_ids=ids, loss_mask=[1] * length)))
        shortest = ceiling
    buckets = tuple(fill_buckets(samples, g.ceilings))
    manifest = Manifest(
        layout_version=LAYOUT_VERSION,
        draftcache_version=VERSION,
        target=_identity(g),
        settings=ExtractSettings(
            layer_ids=default_layer_ids(g.layers, 5),
            ceilings=g.ceilings,
            token_budget=g.token_budget,
            max_length=g.ceilings[-1],
            min_supervised=2,
            limit=None,
            codec="bf16",
            teacher=teacher,
        ),
        final_norm_applied=True,
        data=(),
        report=DataReport(
            read=len(samples),
            kept=len(samples),
            dropped={},
            truncated=0,
            supervised_tokens=0,
            supervised_tokens_cut=0,
            notes={},
        ),
        buckets=tuple(
            BucketSummary(
                ceiling=b.ceiling,
                samples=len(b.samples),
                rows=rows_per_batch(g.token_budget, b.ceiling),
                digest=b.digest(),
            )
            for b in buckets
        ),
    )
    batches = tuple(plan_batches(buckets, g.token_budget))
    return Plan(manifest=manifest, buckets=buckets, batches=batches, chat_template=None)


def _identity(g: Geometry) -> TargetIdentity:
    return TargetIdentity(
        name="random",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        dtype="bfloat16",
        hidden_size=g.hidden,
        vocab_size=g.vocabulary,
        num_layers=g.layers,
        num_heads=g.heads,
        num_kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        intermediate_size=g.inner,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40_960,
        attention_bias=False,
        tied_head=False,
        tokenizer_size=g.vocabulary,
        special_token_ids=(),
        config_digest="",
        weights_digest="",
        tokenizer_digest="",
        template_digest="",
    )
