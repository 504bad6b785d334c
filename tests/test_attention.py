"""Which keys a slot sees: golden sets of specification 1.8, a brute-force twin, and the three ways to attend."""

import functools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from draftcache.tests.helpers import MASK_TOKEN, Document, blocks_at, flat_batch, supervised
from draftcache.train.batch import FlatBatch
from draftcache.train.model import attention
from draftcache.train.model.anchors import Blocks, draw_anchors, lay_out_blocks
from draftcache.train.model.attention import (
    TILE,
    Attention,
    DenseAttention,
    FlexAttention,
    GroupedAttention,
    Visibility,
    dense_mask,
    flex_mask,
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


def from_tiles(batch: FlatBatch, blocks: Blocks, rule: Visibility) -> tuple[Tensor, int]:
    """What a kernel computes from `flex_mask`: [Q, T + Q] bool, and the number of tiles it never masks."""
    mask = flex_mask(blocks, batch.tokens, rule)
    queries = blocks.positions.numel()
    dense = torch.zeros(queries, batch.tokens + queries, dtype=torch.bool)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    whole = 0
    zero = torch.zeros((), dtype=torch.int64)
    for row in range(queries // TILE):
        here = slice(row * TILE, (row + 1) * TILE)
        q = torch.arange(row * TILE, (row + 1) * TILE)[:, None]
        partial = mask.kv_indices[0, 0, row, : int(mask.kv_num_blocks[0, 0, row])].tolist()
        full = mask.full_kv_indices[0, 0, row, : int(mask.full_kv_num_blocks[0, 0, row])].tolist()
        assert len(set(partial + full)) == len(partial) + len(full)
        for column in partial:
            k = torch.arange(column * TILE, (column + 1) * TILE)
            dense[here, column * TILE : (column + 1) * TILE] = mask.mask_mod(zero, zero, q, k)
        for column in full:
            dense[here, column * TILE : (column + 1) * TILE] = True
        whole += len(full)
    return dense, whole


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
    """Output, and gradients of query, key and value under a random upstream gradient."""
    generator = torch.Generator().manual_seed(3)
    queries = blocks.positions.numel()
    query = torch.randn(queries, 4, 16, generator=generator, requires_grad=True)
    key = torch.randn(batch.tokens + queries, 2, 16, generator=generator, requires_grad=True)
    value = torch.randn(batch.tokens + queries, 2, 16, generator=generator, requires_grad=True)
    out = attention(query, key, value, rule)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    assert value.grad is not None
    return [out.detach(), query.grad, key.grad, value.grad]


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
    out = DenseAttention(blocks, batch.tokens, {rule})(query, key, value, rule)
    for q, row in enumerate(brute_force_mask(batch, blocks, rule)):
        seen = row.nonzero().flatten()
        for head in range(4):
            scores = key[seen, head // 2] @ query[q, head] * 16**-0.5
            torch.testing.assert_close(out[q, head], scores.softmax(0) @ value[seen, head // 2])


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_tiles_of_flex_mask_equal_dense_mask(seed: int, rule: Visibility, size: int) -> None:
    batch, blocks = random_blocks(seed, size, count=256 // size)
    dense, _ = from_tiles(batch, blocks, rule)
    assert torch.equal(dense, dense_mask(blocks, batch.tokens, rule))


def long_context(anchors: list[int]) -> tuple[FlatBatch, Blocks]:
    """Three documents over 2,048 tokens, with two tiles of blocks."""
    batch = flat_batch([supervised(n, prompt=1, sample=i) for i, n in enumerate((300, 1300, 400))])
    return batch, blocks_at(batch, anchors)


@pytest.mark.parametrize(
    ("rule", "whole"),
    [
        (FULL_RULE, 7 + 7),  # the second document begins at 320, so tiles 3..9 lie below every anchor
        (Visibility(900, causal=True), 6 + 5),  # the last windows begin at 1365 - 899 and 1441 - 899: tiles 4..9, 5..9
        (Visibility(8, causal=True), 0),
    ],
)
def test_tiles_that_every_slot_sees_whole_are_not_masked(rule: Visibility, whole: int) -> None:
    batch, blocks = long_context([*range(1300, 1364, 2), *range(1376, 1440, 2)])
    found, unmasked = from_tiles(batch, blocks, rule)
    dense = dense_mask(blocks, batch.tokens, rule)
    assert torch.equal(found, dense)
    assert unmasked == whole == int(dense.view(2, TILE, -1, TILE).all(3).all(1).sum())


@pytest.mark.parametrize("first", [1279, 1280, 1281])
@pytest.mark.parametrize("window", [None, *range(667, 675)])  # the last block's windows begin around tile 6, at 768
def test_borders_of_tiles_that_are_not_masked(first: int, window: int | None) -> None:
    batch, blocks = long_context([*range(first, first + 31), *range(1405, 1437), 1438])
    rule = Visibility(window, causal=True)
    found, unmasked = from_tiles(batch, blocks, rule)
    dense = dense_mask(blocks, batch.tokens, rule)
    assert torch.equal(found, dense)
    assert unmasked == int(dense.view(2, TILE, -1, TILE).all(3).all(1).sum()) > 0


@pytest.mark.parametrize("rule", [FULL_RULE, Visibility(4, causal=True), Visibility(900, causal=False)])
def test_only_tiles_with_a_visible_key_are_visited(rule: Visibility) -> None:
    batch, blocks = long_context([*range(1300, 1364, 2), *range(1700, 1764, 2)])
    mask = flex_mask(blocks, batch.tokens, rule)
    assert mask.full_kv_num_blocks is not None
    visited = (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten().tolist()
    tiles = dense_mask(blocks, batch.tokens, rule).view(2, TILE, -1, TILE).any(3).any(1)
    assert visited == tiles.sum(1).tolist()


def test_a_dropped_block_keeps_its_tile_from_being_whole() -> None:
    anchors = list(range(1300, 1364, 2))
    batch = flat_batch([supervised(1500, prompt=1)])
    every, _ = from_tiles(batch, blocks_at(batch, anchors), FULL_RULE)
    blocks = blocks_at(batch, anchors, keep=[True] * 31 + [False])
    dropped, whole = from_tiles(batch, blocks, FULL_RULE)
    assert whole == 0
    assert torch.equal(dropped[:124], every[:124])
    assert not dropped[124:, : batch.tokens].any()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, nothing kept after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_no_shape_or_rule_of_full_scale_falls_back_to_unfused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six contexts with two rules, as six buckets and mixed layers have. The fallback warns, so it fails here."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(attention, "_compiled", None)
    rules = {FULL_RULE, Visibility(8, causal=True)}
    generator = torch.Generator().manual_seed(0)
    for tokens in range(128, 7 * 128, 128):
        batch = flat_batch([supervised(100, prompt=2)], tokens=tokens)
        blocks = blocks_at(batch, list(range(3, 35)))
        query = torch.randn(TILE, 2, 16, generator=generator)
        key, value = torch.randn(2, tokens + TILE, 1, 16, generator=generator)
        for rule in rules:
            found = FlexAttention(blocks, tokens, rules)(query, key, value, rule)
            wanted = DenseAttention(blocks, tokens, rules)(query, key, value, rule)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
