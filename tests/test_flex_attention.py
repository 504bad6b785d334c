"""The baseline of bench_attention: the tiles of flex_attention's mask, and that it compiles for every shape."""

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from draftcache.benchmarks import flex_attention
from draftcache.benchmarks.flex_attention import TILE, FlexAttention, flex_mask
from draftcache.tests.helpers import blocks_at, flat_batch, supervised
from draftcache.tests.test_attention import FULL_RULE, RULES, SEEDS, random_blocks
from draftcache.train.batch import FlatBatch
from draftcache.train.model.anchors import Blocks
from draftcache.train.model.attention import Attention, DenseAttention, Visibility, dense_mask


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
    monkeypatch.setattr(flex_attention, "_compiled", None)
    rules = {FULL_RULE, Visibility(8, causal=True)}
    generator = torch.Generator().manual_seed(0)
    for tokens in range(128, 7 * 128, 128):
        batch = flat_batch([supervised(100, prompt=2)], tokens=tokens)
        blocks = blocks_at(batch, list(range(3, 35)))
        query = torch.randn(TILE, 2, 16, generator=generator)
        context, own = (torch.randn(2, rows, 1, 16, generator=generator) for rows in (tokens, TILE))
        for rule in rules:
            kinds: tuple[Attention, ...] = FlexAttention(blocks, tokens, rules), DenseAttention(blocks, tokens, rules)
            found, wanted = (attend(query, context[0], context[1], own[0], own[1], rule) for attend in kinds)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
