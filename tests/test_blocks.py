"""A block is one forward of its own, whatever stands beside it: other blocks, other documents, the future, padding."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftcache.tests.helpers import (
    LAYER_IDS,
    MASK_TOKEN,
    WIDTH,
    Document,
    blocks_at,
    flat_batch,
    random_parts,
    run_drafter,
    supervised,
    taps_of,
    tiny_config,
    tiny_drafter,
    tiny_record,
)
from draftcache.train.batch import FlatBatch
from draftcache.train.model.anchors import Blocks
from draftcache.train.model.attention import Attention, DenseAttention, GroupedAttention
from draftcache.train.model.drafter import FULL, SLIDING, Drafter
from draftcache.train.model.loss import LossConfig, LossInputs, LossSums, plain_loss

SPEC = tiny_record()
PARTS = random_parts(seed=1)
MIXES = [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)]


def three_documents() -> tuple[FlatBatch, list[int]]:
    """Three documents, and anchors in each of them; the first document's are closer than a block."""
    documents = [supervised(20, 2, 1), supervised(70, 5, 2), supervised(9, 1, 3)]
    return flat_batch(documents, spec=SPEC), [3, 5, 6, 17, 64 + 5, 64 + 66, 192 + 1, 192 + 7]


def hidden_states(
    drafter: Drafter,
    batch: FlatBatch,
    anchors: list[int],
    kind: Callable[..., Attention] = DenseAttention,
    taps: Tensor | None = None,  # [T, K * H]; None: the batch's
    ids: Tensor | None = None,  # [A, B]; None: the blocks' own
) -> Tensor:
    """[A, B, H]: the drafter over all blocks at once."""
    blocks = blocks_at(batch, anchors)
    if taps is None:
        taps = taps_of(batch, SPEC)
    if ids is not None:
        blocks = dataclasses.replace(blocks, input_ids=ids)
    with torch.no_grad():
        return run_drafter(drafter, PARTS, taps, batch, blocks, kind(blocks, batch.tokens, drafter.config.rules))


def one_block(drafter: Drafter, batch: FlatBatch, anchor: int) -> Tensor:
    """[B, H]: the drafter as a server runs it: one block behind a context of its own document and nothing else."""
    position = int(batch.positions[anchor])
    here = slice(anchor - position, anchor)
    ids = torch.tensor([int(batch.input_ids[anchor])] + [MASK_TOKEN] * 3)
    positions = torch.arange(position, position + 4)
    blocks = Blocks(
        anchors=torch.tensor([position]),
        keep=torch.tensor([True]),
        first=torch.tensor([0]),
        input_ids=ids[None],
        positions=positions[None],
        labels=ids[None],
        teacher_rows=ids[None],
        valid=torch.zeros(1, 4, dtype=torch.bool),
    )
    with torch.no_grad():
        context = drafter.context_keys(taps_of(batch, SPEC)[here], torch.arange(position))
        attention = DenseAttention(blocks, position, drafter.config.rules)
        hidden: Tensor = drafter(PARTS.embedding[ids], positions, context, attention)
    return hidden


def reference_block(drafter: Drafter, batch: FlatBatch, anchor: int) -> Tensor:
    """[B, H] float64: specification 1.7 for one block, head by head and query by query."""
    config, w = drafter.config, {name: value.double() for name, value in drafter.state_dict().items()}
    start = int(batch.positions[anchor])

    def norm(x: Tensor, name: str) -> Tensor:
        scale: Tensor = w[f"{name}.weight"] / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        return x * scale

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] * config.rope_theta ** (-torch.arange(8, dtype=torch.float64) / 8)
        turned = torch.complex(x[:, :8], x[:, 8:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)

    taps = taps_of(batch, SPEC)[anchor - start : anchor].double()
    context = norm(taps @ w["fc.weight"].T, "hidden_norm")
    x = PARTS.embedding[[int(batch.input_ids[anchor]), *[MASK_TOKEN] * 3]].double()
    slots, everywhere = torch.arange(start, start + 4), torch.arange(start + 4)
    for layer, layer_type in enumerate(config.layer_types):
        at = f"layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        source = torch.cat([context, h])
        keys = rotated(norm(source @ w[f"{at}.self_attn.k_proj.weight"].T, f"{at}.self_attn.k_norm"), everywhere)
        values = source @ w[f"{at}.self_attn.v_proj.weight"].T
        queries = h @ w[f"{at}.self_attn.q_proj.weight"].T
        mixed = torch.zeros(4, 32, dtype=torch.float64)
        for head in range(2):
            here = slice(16 * head, 16 * head + 16)
            query = rotated(norm(queries[:, here], f"{at}.self_attn.q_norm"), slots)
            for j in range(4):
                low, high = (0, start + 4) if layer_type == FULL else (max(0, start + j - 3), start + j + 1)
                scores = keys[low:high] @ query[j] / math.sqrt(16)
                mixed[j, here] = scores.softmax(0) @ values[low:high]
        x = x + mixed @ w[f"{at}.self_attn.o_proj.weight"].T
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = h @ w[f"{at}.mlp.gate_proj.weight"].T
        up = h @ w[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "norm")


@pytest.mark.parametrize("layer_types", MIXES)
def test_a_block_follows_the_specification(layer_types: tuple[str, ...]) -> None:
    drafter = tiny_drafter(tiny_config(layer_types))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    batch, anchors = three_documents()
    together = hidden_states(drafter, batch, anchors)
    for block, anchor in zip(together, anchors, strict=True):
        torch.testing.assert_close(block.double(), reference_block(drafter, batch, anchor), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [DenseAttention, GroupedAttention])
@pytest.mark.parametrize("layer_types", MIXES)
def test_blocks_together_equal_each_block_alone(layer_types: tuple[str, ...], kind: Callable[..., Attention]) -> None:
    drafter = tiny_drafter(tiny_config(layer_types))
    batch, anchors = three_documents()
    together = hidden_states(drafter, batch, anchors, kind)
    for block, anchor in zip(together, anchors, strict=True):
        torch.testing.assert_close(block, one_block(drafter, batch, anchor), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [DenseAttention, GroupedAttention])
@pytest.mark.parametrize("layer_types", MIXES)
def test_states_at_or_behind_the_anchor_never_reach_its_block(
    layer_types: tuple[str, ...], kind: Callable[..., Attention]
) -> None:
    drafter = tiny_drafter(tiny_config(layer_types))
    batch, anchors = three_documents()
    before = hidden_states(drafter, batch, anchors, kind)
    for number, anchor in enumerate(anchors):
        taps = taps_of(batch, SPEC)
        taps[anchor:] = 1e3
        after = hidden_states(drafter, batch, anchors, kind, taps=taps)
        assert torch.equal(after[number], before[number])


@pytest.mark.parametrize("kind", [DenseAttention, GroupedAttention])
@pytest.mark.parametrize("layer_types", MIXES)
def test_the_state_before_the_anchor_reaches_its_block(
    layer_types: tuple[str, ...], kind: Callable[..., Attention]
) -> None:
    drafter = tiny_drafter(tiny_config(layer_types))
    batch, anchors = three_documents()
    before = hidden_states(drafter, batch, anchors, kind)
    for number, anchor in enumerate(anchors):
        taps = taps_of(batch, SPEC)
        taps[anchor - 1] *= -1
        after = hidden_states(drafter, batch, anchors, kind, taps=taps)
        assert (after[number] - before[number]).abs().amax(1).min() > 1e-4


@pytest.mark.parametrize("kind", [DenseAttention, GroupedAttention])
@pytest.mark.parametrize("layer_types", MIXES)
def test_other_documents_never_reach_a_block(layer_types: tuple[str, ...], kind: Callable[..., Attention]) -> None:
    drafter = tiny_drafter(tiny_config(layer_types))
    batch, anchors = three_documents()
    before = hidden_states(drafter, batch, anchors, kind)
    taps = taps_of(batch, SPEC)
    taps[:64] = 1e3
    taps[192:] = -1e3
    after = hidden_states(drafter, batch, anchors, kind, taps=taps)
    assert torch.equal(after[4:6], before[4:6])
    assert not torch.equal(after[:4], before[:4])


@pytest.mark.parametrize("kind", [DenseAttention, GroupedAttention])
@pytest.mark.parametrize("layer_types", MIXES)
def test_neighbour_blocks_never_reach_a_block(layer_types: tuple[str, ...], kind: Callable[..., Attention]) -> None:
    drafter = tiny_drafter(tiny_config(layer_types))
    batch, anchors = three_documents()
    before = hidden_states(drafter, batch, anchors, kind)
    for number in range(len(anchors)):
        ids = blocks_at(batch, anchors).input_ids
        ids[number] = 11
        after = hidden_states(drafter, batch, anchors, kind, ids=ids)
        changed = [i for i in range(len(anchors)) if not torch.equal(after[i], before[i])]
        assert changed == [number]


@pytest.mark.parametrize(("layer_type", "changed"), [(SLIDING, [False, False, True, True]), (FULL, [True] * 4)])
def test_sliding_slots_do_not_see_later_slots(layer_type: str, changed: list[bool]) -> None:
    drafter = tiny_drafter(tiny_config((layer_type, layer_type)))
    batch, anchors = three_documents()
    before = hidden_states(drafter, batch, anchors)
    ids = blocks_at(batch, anchors).input_ids
    ids[:, 2] = 11
    after = hidden_states(drafter, batch, anchors, ids=ids)
    assert [not torch.equal(after[:, j], before[:, j]) for j in range(4)] == changed


def test_the_window_limits_how_far_back_a_slot_sees() -> None:
    drafter = tiny_drafter(tiny_config((SLIDING,)))
    batch, anchors = three_documents()
    before = hidden_states(drafter, batch, anchors)
    taps = taps_of(batch, SPEC)
    taps[17 - 2] *= -1
    after = hidden_states(drafter, batch, anchors, taps=taps)
    assert [torch.equal(after[3, j], before[3, j]) for j in range(4)] == [False, False, True, True]


def test_taps_are_concatenated_in_the_order_of_the_layer_ids() -> None:
    drafter = tiny_drafter(tiny_config())
    batch, _ = three_documents()
    taps = taps_of(batch, SPEC)
    with torch.no_grad():
        drafter.fc.weight[:, WIDTH:] = 0
        keys = drafter.context_keys(taps, batch.positions)
        taps[:, WIDTH:] += 1
        same = drafter.context_keys(taps, batch.positions)
        taps[:, :WIDTH] *= -1
        other = drafter.context_keys(taps, batch.positions)
    assert len(LAYER_IDS) * WIDTH == taps.shape[1]
    assert torch.equal(keys[0].value, same[0].value)
    assert not torch.equal(keys[0].value, other[0].value)


def sample_loss(batch: FlatBatch, first: int, positions: list[int], drafter: Drafter) -> LossSums:
    """The loss of one document's blocks at these positions; the document begins at `first`."""
    blocks = blocks_at(batch, [first + p for p in positions])
    attention = GroupedAttention(blocks, batch.tokens, drafter.config.rules)
    hidden = run_drafter(drafter, PARTS, taps_of(batch, SPEC), batch, blocks, attention)
    inputs = LossInputs(labels=blocks.labels[:, 1:], valid=blocks.valid[:, 1:], teacher_hidden=None)
    return plain_loss(hidden[:, 1:], PARTS.head, inputs, LossConfig(teacher="tokens"))


@pytest.mark.parametrize("layer_types", MIXES)
def test_padding_and_packing_do_not_change_a_samples_loss(layer_types: tuple[str, ...]) -> None:
    drafter = tiny_drafter(tiny_config(layer_types))
    one: Document = supervised(50, 9, sample=4)
    positions = [9, 20, 33, 47, 48]
    layouts = [
        (flat_batch([one], spec=SPEC), 0),
        (flat_batch([one], stride=320, spec=SPEC), 0),
        (flat_batch([supervised(100, 3, sample=8), one, supervised(70, 3, sample=9)], spec=SPEC), 128),
    ]
    losses = [sample_loss(batch, first, positions, drafter) for batch, first in layouts]
    assert losses[0].counted.tolist() == [5, 4, 3]
    for other in losses[1:]:
        torch.testing.assert_close(other.loss, losses[0].loss, rtol=1e-6, atol=1e-6)
        assert torch.equal(other.weight, losses[0].weight)
        assert torch.equal(other.counted, losses[0].counted)


def test_products_run_in_the_dtype_of_their_input() -> None:
    drafter = tiny_drafter(tiny_config())
    batch, anchors = three_documents()
    blocks = blocks_at(batch, anchors)
    context = drafter.context_keys(taps_of(batch, SPEC).bfloat16(), batch.positions)
    embedded = PARTS.embedding[blocks.input_ids.flatten()].bfloat16()
    attention = DenseAttention(blocks, batch.tokens, drafter.config.rules)
    hidden = drafter(embedded, blocks.positions.flatten(), context, attention)
    assert hidden.dtype == torch.bfloat16
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    full = hidden_states(drafter, batch, anchors).flatten(0, 1)
    assert ((hidden.float() - full).norm() / full.norm()).item() < 0.03
