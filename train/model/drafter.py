"""The DFlash network. Its module names are the tensor names of released checkpoints (z-lab/dflash).

The context path has no layer norm of its own: keys and values of context tokens are projections of
C = RMSNorm(fc(taps)), computed once for all layers. Block slots pass through ordinary pre-norm decoder layers and
attend to context keys followed by block keys. Embedding and head belong to the frozen target.

Parameters are float32 masters; every product runs in the dtype of its input.

Legend: T context tokens, Q block slots, K taps, H width of target and drafter, N / M query / key heads, d head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftcache.common.errors import UsageError
from draftcache.train.model.attention import Attention, Visibility

FULL, SLIDING = "full_attention", "sliding_attention"
INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """The drafter's geometry and everything a server must know to run it."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]  # one per layer
    sliding_window: int  # tokens a slot of a sliding layer sees, itself included
    sliding_causal: bool  # whether slots of sliding layers see only earlier slots of their block
    block_size: int
    layer_ids: tuple[int, ...]  # tapped target layers, 0-based, in the order of fc's input
    mask_token_id: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    attention_bias: bool

    def __post_init__(self) -> None:
        if not self.layer_types or set(self.layer_types) - {FULL, SLIDING}:
            raise UsageError(
                f"layer types {list(self.layer_types)}", needed=f"{FULL} or {SLIDING} per layer", do="see --layer-types"
            )
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.num_heads} heads with {self.num_kv_heads} kv heads",
                needed="a multiple",
                do="correct --heads or --kv-heads",
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim {self.head_dim}", needed="an even width", do="correct --head-dim")
        if self.block_size < 2:
            raise UsageError(f"block size {self.block_size}", needed="at least 2", do="correct --block-size")
        if self.sliding_window < 1:
            raise UsageError(f"window {self.sliding_window}", needed="at least 1", do="correct --sliding-window")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UsageError(
                f"mask token id {self.mask_token_id}",
                needed=f"a row of the target's embedding, 0..{self.vocab_size - 1}",
                do="correct --mask-token-id",
            )

    def rule(self, layer_type: str) -> Visibility:
        """The visibility rule of a layer type."""
        if layer_type == FULL:
            return Visibility(None, causal=False)
        return Visibility(self.sliding_window, causal=self.sliding_causal)

    @property
    def rules(self) -> set[Visibility]:
        """The visibility rules in use."""
        return {self.rule(layer_type) for layer_type in self.layer_types}


@dataclass(frozen=True, slots=True)
class ContextKeys:
    """Keys and values of the context for one layer, rotated: [T, M, d] each."""

    key: Tensor
    value: Tensor


class Linear(nn.Linear):
    """A linear layer whose float32 weight is cast to the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class SelfAttention(nn.Module):
    """Projections of one layer; k_proj, v_proj and k_norm serve context and block alike."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, d, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = Linear(width, config.num_heads * d, bias=bias)
        self.k_proj = Linear(width, config.num_kv_heads * d, bias=bias)
        self.v_proj = Linear(width, config.num_kv_heads * d, bias=bias)
        self.o_proj = Linear(config.num_heads * d, width, bias=bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)
        self._head_dim = d

    def keys(self, x: Tensor, rotation: "Rotation") -> ContextKeys:
        """Keys and values of [S, H]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self._head_dim)))
        value = self.v_proj(x).unflatten(-1, (-1, self._head_dim))
        return ContextKeys(rotation.apply(key), value)

    def forward(
        self,
        x: Tensor,  # [Q, H]
        rotation: "Rotation",  # of the Q slots
        context: ContextKeys,
        attention: Attention,
        rule: Visibility,
    ) -> Tensor:  # [Q, H]
        """Attend from the block's slots to context and block."""
        query = rotation.apply(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self._head_dim))))
        block = self.keys(x, rotation)
        seen = attention(query, context.key, context.value, block.key, block.value, rule)
        mixed: Tensor = self.o_proj(seen.flatten(1))
        return mixed


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[Q, H] -> [Q, H]."""
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    """One pre-norm decoder layer over block slots."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: Tensor, rotation: "Rotation", context: ContextKeys, attention: Attention, rule: Visibility
    ) -> Tensor:
        """[Q, H] -> [Q, H]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, attention, rule)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Drafter(nn.Module):
    """The trainable part of a DFlash drafter."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.fc = Linear(len(config.layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers: Sequence[Layer] = nn.ModuleList(Layer(config) for _ in config.layer_types)  # type: ignore[assignment]
        self.norm = RMSNorm(width, config.rms_norm_eps)

    def initialise(self, seed: int) -> None:
        """Normal(0, INIT_STD) for every matrix, zeros for biases, ones for norms; the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def context_keys(
        self,
        taps: Tensor,  # [T, K * H], raw
        positions: Tensor,  # [T]
    ) -> list[ContextKeys]:
        """Every layer's keys and values of the context."""
        context = self.hidden_norm(self.fc(taps))
        rotation = Rotation(positions, self.config, context.dtype)
        return [layer.self_attn.keys(context, rotation) for layer in self.layers]

    def forward(
        self,
        embedded: Tensor,  # [Q, H], the slots' input embeddings
        positions: Tensor,  # [Q]
        context: list[ContextKeys],
        attention: Attention,
    ) -> Tensor:  # [Q, H], ready for the target's head
        """Hidden states of the block slots."""
        rotation = Rotation(positions, self.config, embedded.dtype)
        x = embedded
        for layer, layer_type, keys in zip(self.layers, self.config.layer_types, context, strict=True):
            x = layer(x, rotation, keys, attention, self.config.rule(layer_type))
        y: Tensor = self.norm(x)
        return y


class Rotation:
    """Rotary position embedding over the whole head, half-split, with its tables for one set of positions."""

    def __init__(self, positions: Tensor, config: DrafterConfig, dtype: torch.dtype) -> None:
        exponent = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
        angles = positions.float()[:, None] * config.rope_theta**-exponent
        self._cos = angles.cos().to(dtype)[:, None]  # [S, 1, d / 2]
        self._sin = angles.sin().to(dtype)[:, None]

    def apply(self, x: Tensor) -> Tensor:
        """Rotate [S, heads, d]."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self._cos - b * self._sin, b * self._cos + a * self._sin], dim=-1)
