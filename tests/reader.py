"""A DFlash drafter as an engine would run it, written from its published description: plain functions over a folder.

It shares no code with `train`. One block at a time, context keys beside block keys, dense masks, float32.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

PER_LAYER = [
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]


@dataclass(frozen=True, slots=True)
class Folder:
    """config.json and the tensors in float32."""

    config: dict[str, Any]
    weights: dict[str, Tensor]


def read_folder(path: Path) -> Folder:
    """Read a folder of the z-lab layout; asserts that its names are exactly the published ones."""
    config = json.loads((path / "config.json").read_text())
    weights = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    layers = range(config["num_hidden_layers"])
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    names |= {f"layers.{i}.{name}.weight" for i in layers for name in PER_LAYER}
    if config["attention_bias"]:
        names |= {f"layers.{i}.self_attn.{p}_proj.bias" for i in layers for p in "qkvo"}
    assert set(weights) == names
    return Folder(config, weights)


def engine_causality(config: dict[str, Any], layer: int) -> bool:
    """Whether vLLM runs a layer causally: is_causal, else dflash_config.causal, else only sliding layers."""
    for value in (config.get("is_causal"), config["dflash_config"].get("causal")):
        if value is not None:
            return bool(value)
    return bool(config["layer_types"][layer] == "sliding_attention")


def block_logits(
    folder: Folder,
    taps: Tensor,  # [n, K * H], of the tokens before the anchor
    token: int,  # at the anchor, which stands at position n
    embedding: Tensor,  # [V, H]
    head: Tensor,  # [V, H]
) -> Tensor:  # [B, V]
    """Logits of every slot of one block."""
    c, w = folder.config, folder.weights
    n, size = len(taps), c["dflash_config"]["block_size"]
    context = norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"], c)
    x = embedding[torch.tensor([token] + [c["dflash_config"]["mask_token_id"]] * (size - 1))]
    for i in range(c["num_hidden_layers"]):
        layer = {name: w[f"layers.{i}.{name}.weight"] for name in PER_LAYER}
        bias = {p: w.get(f"layers.{i}.self_attn.{p}_proj.bias", torch.zeros(1)) for p in "qkvo"}
        h = norm(x, layer["input_layernorm"], c)
        both = torch.cat([context, h])
        q = rotate(norm(heads(h, layer, bias, "q", c), layer["self_attn.q_norm"], c), torch.arange(n, n + size), c)
        k = rotate(norm(heads(both, layer, bias, "k", c), layer["self_attn.k_norm"], c), torch.arange(n + size), c)
        v = heads(both, layer, bias, "v", c)
        mixed = attend(q, k, v, visible(c, i, n, size)).flatten(1)
        x = x + mixed @ layer["self_attn.o_proj"].T + bias["o"]
        h = norm(x, layer["post_attention_layernorm"], c)
        gate = h @ layer["mlp.gate_proj"].T
        x = x + (gate * gate.sigmoid() * (h @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    return norm(x, w["norm.weight"], c) @ head.T


def norm(x: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    """Root-mean-square norm."""
    scaled: Tensor = weight * x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
    return scaled


def heads(x: Tensor, layer: dict[str, Tensor], bias: dict[str, Tensor], name: str, config: dict[str, Any]) -> Tensor:
    """A projection split into heads: [n, heads, d]."""
    split: Tensor = (x @ layer[f"self_attn.{name}_proj"].T + bias[name]).unflatten(-1, (-1, config["head_dim"]))
    return split


def rotate(x: Tensor, positions: Tensor, config: dict[str, Any]) -> Tensor:
    """Half-split rotary embedding as complex numbers."""
    half = config["head_dim"] // 2
    base = config["rope_parameters"]["rope_theta"]
    assert base == config["rope_theta"]
    angles = positions[:, None].double() * base ** -(torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1).float()


def visible(config: dict[str, Any], layer: int, n: int, size: int) -> Tensor:
    """[B, n + B] bool: a layer's mask, with the window that engines give sliding layers."""
    slot, key = torch.arange(n, n + size)[:, None], torch.arange(n + size)
    mask = torch.ones(size, n + size, dtype=torch.bool)
    if engine_causality(config, layer):
        mask &= key <= slot
    if config["layer_types"][layer] == "sliding_attention":
        mask &= key > slot - config["sliding_window"]
    return mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention, key heads shared by equal groups of query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
