"""The DFlash network: its geometry, its tensors and their names, how they begin, and the rotation of positions."""

import dataclasses
import math

import pytest
import torch

from draftcache.common.errors import UsageError
from draftcache.tests.helpers import (
    VOCABULARY,
    tiny_config,
)
from draftcache.train.model.drafter import FULL, Drafter, DrafterConfig, Rotation


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
