"""The DFlash network: its tensors, and that a block is one forward of its own whatever stands beside it."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftcache.common.errors import UsageError
from draftcache.tests.helpers import (
    LAYER_IDS,
    MASK_TOKEN,
    VOCABULARY,
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
from draftcache.train.anchors import Blocks
from draftcache.train.attention import Attention, DenseAttention, GroupedAttention
from draftcache.train.batch import FlatBatch
from draftcache.train.drafter import FULL, SLIDING, Drafter, DrafterConfig, Rotation
from draftcache.train.loss import LossConfig, LossInputs, LossSums, plain_loss

SPEC = tiny_record()
PARTS = random_parts(seed=1)
MIXES = [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)]


def released_config(hidden: int, intermediate: int, heads: int, kv_heads: int) -> DrafterConfig:
    """The geometry of a released drafter: five layers, five taps, head_dim 128."""
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        layer_types=(FULL,) * 5,
        sliding_window=2048,
        sliding_causal=True,
        block_size=16,
        layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=0,
        vocab_size=1,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        attention_bias=False,
    )


@pytest.mark.parametrize(
    ("hidden", "intermediate", "heads", "kv_heads", "parameters"),
    [
        pytest.param(1024, 3072, 16, 8, 83_899_648, id="Qwen3-0.6B"),
        pytest.param(2048, 6144, 16, 8, 272_655_616, id="Qwen3-1.7B"),
        pytest.param(2560, 9728, 32, 8, 537_427_200, id="Qwen3-4B"),
        pytest.param(4096, 12288, 32, 8, 1_048_626_432, id="Qwen3-8B"),
        pytest.param(5120, 17408, 40, 8, 1_782_641_920, id="Qwen3-14B"),
        pytest.param(5120, 17408, 32, 8, 1_730_213_120, id="Qwen3.6-27B"),
    ],
)
def test_parameter_counts_of_released_drafters(
    hidden: int, intermediate: int, heads: int, kv_heads: int, parameters: int
) -> None:
    with torch.device("meta"):
        drafter = Drafter(released_config(hidden, intermediate, heads, kv_heads))
    assert sum(p.numel() for p in drafter.parameters()) == parameters


def test_tensor_names_and_shapes_are_those_of_released_checkpoints() -> None:
    with torch.device("meta"):
        state = Drafter(released_config(4096, 12288, 32, 8)).state_dict()
    layer = {
        "input_layernorm.weight": (4096,),
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.k_proj.weight": (1024, 4096),
        "self_attn.v_proj.weight": (1024, 4096),
        "self_attn.o_proj.weight": (4096, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "post_attention_layernorm.weight": (4096,),
        "mlp.gate_proj.weight": (12288, 4096),
        "mlp.up_proj.weight": (12288, 4096),
        "mlp.down_proj.weight": (4096, 12288),
    }
    wanted = {"fc.weight": (4096, 20480), "hidden_norm.weight": (4096,), "norm.weight": (4096,)}
    wanted |= {f"layers.{i}.{name}": shape for i in range(5) for name, shape in layer.items()}
    assert len(state) == 58
    assert {name: tuple(value.shape) for name, value in state.items()} == wanted


def test_attention_bias_adds_four_biases_per_layer() -> None:
    drafter = Drafter(dataclasses.replace(tiny_config(), attention_bias=True))
    biases = {name for name in drafter.state_dict() if name.endswith("bias")}
    assert biases == {f"layers.{i}.self_attn.{p}_proj.bias" for i in range(2) for p in "qkvo"}


def test_initialise_is_the_same_for_the_same_seed() -> None:
    first, same, other = (Drafter(tiny_config()) for _ in range(3))
    first.initialise(3)
    torch.manual_seed(99)
    same.initialise(3)
    other.initialise(4)
    for name, value in first.state_dict().items():
        assert torch.equal(value, same.state_dict()[name])
        assert torch.equal(value, other.state_dict()[name]) == (value.dim() == 1)


def test_initialise_draws_matrices_and_sets_norms_and_biases() -> None:
    drafter = Drafter(dataclasses.replace(tiny_config(), attention_bias=True))
    drafter.initialise(0)
    for name, value in drafter.state_dict().items():
        if value.dim() == 2:
            assert value.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(value.mean().item()) < 0.003
        else:
            assert (value == (0.0 if name.endswith("bias") else 1.0)).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ()),
        ("layer_types", (FULL, "chunked_attention")),
        ("num_kv_heads", 3),
        ("head_dim", 15),
        ("block_size", 1),
        ("sliding_window", 0),
        ("mask_token_id", VOCABULARY),
        ("mask_token_id", -1),
    ],
)
def test_impossible_geometry_is_refused(field: str, value: object) -> None:
    with pytest.raises(UsageError):
        dataclasses.replace(tiny_config(), **{field: value})  # type: ignore[arg-type]


def test_rotation_equals_complex_numbers() -> None:
    config = tiny_config()
    positions = torch.tensor([0, 1, 7, 513, 8191])
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    turned = Rotation(positions, config, torch.float32).apply(x)
    for row, position in enumerate(positions.tolist()):
        for i in range(8):
            angle = position * config.rope_theta ** (-2 * i / 16)
            turn = complex(math.cos(angle), math.sin(angle))
            for head in range(3):
                wanted = complex(x[row, head, i], x[row, head, i + 8]) * turn
                found = complex(turned[row, head, i], turned[row, head, i + 8])
                assert abs(found - wanted) < 2e-3 * max(1.0, abs(wanted))


def test_rotation_makes_products_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 16, generator=generator)

    def product(q_position: int, k_position: int) -> float:
        q = Rotation(torch.tensor([q_position]), tiny_config(), torch.float32).apply(query)
        k = Rotation(torch.tensor([k_position]), tiny_config(), torch.float32).apply(key)
        return (q * k).sum().item()

    assert product(12, 5) == pytest.approx(product(107, 100), abs=1e-4)
    assert abs(product(12, 5) - product(12, 6)) > 1e-2


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
