"""Which keys a slot sees: golden sets of specification 1.8, a brute-force twin, and the ways to attend everywhere."""

import random

import pytest
import torch
from torch import Tensor

from draftcache.tests.helpers import MASK_TOKEN, Document, blocks_at, flat_batch, supervised
from draftcache.train.batch import FlatBatch
from draftcache.train.model.anchors import Blocks, draw_anchors, lay_out_blocks
from draftcache.train.model.attention import (
    Attention,
    DenseAttention,
    GroupedAttention,
    Visibility,
    dense_mask,
)

FULL_RULE = Visibility(None, causal=False)
RULES = (FULL_RULE, Visibility(4, causal=True), Visibility(1, causal=True), Visibility(37, causal=False))
SEEDS = range(6)


def random_blocks(seed: int, size: int = 4, count: int = 40) -> tuple[FlatBatch, Blocks]:
    """Several documents of random lengths, with blocks drawn over them; some are dropped."""
    choose = random.Random(seed)
    documents: list[Document] = []
    for sample in range(choose.randint(2, 4)):
        length = choose.choice([2, 9, 40, 64, 65, 128, 200])
        documents.append(supervised(length, choose.randint(0, length), sample))
    batch = flat_batch(documents)
    anchors, keep = draw_anchors(batch, seed, count)
    keep &= torch.tensor([choose.random() < 0.9 for _ in range(count)])
    return batch, lay_out_blocks(batch, anchors, keep, size, MASK_TOKEN)


def brute_force_mask(batch: FlatBatch, blocks: Blocks, rule: Visibility) -> Tensor:
    """Specification 1.8, one query and key at a time, with SpecForge's window; from documents and positions."""
    documents, positions = batch.documents.tolist(), batch.positions.tolist()
    anchors, keep = blocks.anchors.tolist(), blocks.keep.tolist()
    count, size = blocks.positions.shape
    mask = torch.zeros(count * size, batch.tokens + count * size, dtype=torch.bool)
    for b in range(count):
        for j in range(size):
            at = positions[anchors[b]]
            for t in range(batch.tokens):
                same_document = documents[t] == documents[anchors[b]] >= 0
                in_window = rule.window is None or positions[t] >= at + j - (rule.window - 1)
                if keep[b] and same_document and positions[t] < at and in_window:
                    mask[b * size + j, t] = True
            for i in range(size):
                if i <= j or not rule.causal:
                    mask[b * size + j, batch.tokens + b * size + i] = True
    return mask


def context_keys_seen(mask: Tensor, tokens: int) -> list[list[int]]:
    """Per query, the context keys that it sees."""
    return [row[:tokens].nonzero().flatten().tolist() for row in mask]


def block_keys_seen(mask: Tensor, tokens: int) -> list[list[int]]:
    """Per query, the block slots that it sees, counted from the first block's slot 0."""
    return [row[tokens:].nonzero().flatten().tolist() for row in mask]


@pytest.mark.parametrize(
    ("window", "context"),
    [
        (None, [[0, 1, 2, 3, 4, 5]] * 4),
        (4, [[3, 4, 5], [4, 5], [5], []]),
        (1, [[], [], [], []]),
        (8, [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [2, 3, 4, 5]]),
    ],
)
def test_context_of_the_specification_example(window: int | None, context: list[list[int]]) -> None:
    batch = flat_batch([supervised(12, prompt=5)])
    mask = dense_mask(blocks_at(batch, [6]), batch.tokens, Visibility(window, causal=True))
    assert context_keys_seen(mask, batch.tokens) == context


@pytest.mark.parametrize(
    ("causal", "own"), [(True, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]), (False, [[0, 1, 2, 3]] * 4)]
)
def test_slots_of_a_block_see_each_other_as_the_rule_says(causal: bool, own: list[list[int]]) -> None:
    batch = flat_batch([supervised(12, prompt=5)])
    mask = dense_mask(blocks_at(batch, [6]), batch.tokens, Visibility(4, causal=causal))
    assert block_keys_seen(mask, batch.tokens) == own


def test_a_window_of_w_holds_w_keys_in_all() -> None:
    batch = flat_batch([supervised(40, prompt=5)])
    mask = dense_mask(blocks_at(batch, [20, 30]), batch.tokens, Visibility(4, causal=True))
    assert mask.sum(1).tolist() == [4] * 8


def test_the_window_does_not_reach_into_the_document_before() -> None:
    batch = flat_batch([supervised(64, prompt=5), supervised(12, prompt=1, sample=1)])
    blocks = blocks_at(batch, [64 + 2])
    for rule in (FULL_RULE, Visibility(30, causal=True)):
        assert context_keys_seen(dense_mask(blocks, batch.tokens, rule), batch.tokens) == [[64, 65]] * 4


@pytest.mark.parametrize("rule", RULES)
def test_a_dropped_block_sees_exactly_its_own_slots(rule: Visibility) -> None:
    batch = flat_batch([supervised(40, prompt=5)])
    mask = dense_mask(blocks_at(batch, [6, 20, 30], keep=[True, False, True]), batch.tokens, rule)
    own = [[4], [4, 5], [4, 5, 6], [4, 5, 6, 7]] if rule.causal else [[4, 5, 6, 7]] * 4
    assert context_keys_seen(mask, batch.tokens)[4:8] == [[]] * 4
    assert block_keys_seen(mask, batch.tokens)[4:8] == own


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_dense_mask_equals_brute_force(seed: int, rule: Visibility) -> None:
    batch, blocks = random_blocks(seed, count=6)
    assert torch.equal(dense_mask(blocks, batch.tokens, rule), brute_force_mask(batch, blocks, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_query_sees_a_key(seed: int, rule: Visibility) -> None:
    batch, blocks = random_blocks(seed)
    assert dense_mask(blocks, batch.tokens, rule).any(1).all()


def attend(attention: Attention, rule: Visibility, batch: FlatBatch, blocks: Blocks) -> list[Tensor]:
    """Output, and gradients of query, keys and values under a random upstream gradient."""
    generator = torch.Generator().manual_seed(3)
    queries, tokens = blocks.positions.numel(), batch.tokens
    shapes = [(queries, 4), (tokens, 2), (tokens, 2), (queries, 2), (queries, 2)]
    inputs = [torch.randn(*shape, 16, generator=generator, requires_grad=True) for shape in shapes]
    query, context_key, context_value, key, value = inputs
    out = attention(query, context_key, context_value, key, value, rule)
    gradients = torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=generator))
    return [out.detach(), *gradients]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_grouped_attention_equals_dense_attention(seed: int, rule: Visibility) -> None:
    batch, blocks = random_blocks(seed)
    grouped = attend(GroupedAttention(blocks, batch.tokens, {rule}), rule, batch, blocks)
    dense = attend(DenseAttention(blocks, batch.tokens, {rule}), rule, batch, blocks)
    for found, wanted in zip(grouped, dense, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_grouped_attention_serves_a_batch_without_any_anchor() -> None:
    batch = flat_batch([])
    anchors, keep = draw_anchors(batch, 0, 20)
    blocks = lay_out_blocks(batch, anchors, keep, 4, MASK_TOKEN)
    grouped = attend(GroupedAttention(blocks, batch.tokens, {FULL_RULE}), FULL_RULE, batch, blocks)
    dense = attend(DenseAttention(blocks, batch.tokens, {FULL_RULE}), FULL_RULE, batch, blocks)
    for found, wanted in zip(grouped, dense, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_dense_attention_is_softmax_over_the_visible_keys() -> None:
    batch, blocks = random_blocks(1, count=5)
    rule = Visibility(4, causal=True)
    generator = torch.Generator().manual_seed(0)
    queries = blocks.positions.numel()
    query = torch.randn(queries, 4, 16, generator=generator)
    key, value = torch.randn(2, batch.tokens + queries, 2, 16, generator=generator)
    context_key, own_key, context_value, own_value = (
        part for x in (key, value) for part in x.split([batch.tokens, queries])
    )
    attend = DenseAttention(blocks, batch.tokens, {rule})
    out = attend(query, context_key, context_value, own_key, own_value, rule)
    for q, row in enumerate(brute_force_mask(batch, blocks, rule)):
        seen = row.nonzero().flatten()
        for head in range(4):
            scores = key[seen, head // 2] @ query[q, head] * 16**-0.5
            torch.testing.assert_close(out[q, head], scores.softmax(0) @ value[seen, head // 2])
