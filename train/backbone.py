"""The drafter's forward pass as training runs it: the network of `drafter.py` on the step's own products.

Same weights, same formulas, fewer passes over memory: query, key and value are one product, gate and up another,
residuals are added inside products, and the first layer projects A + 1 different inputs, not Q equal ones. `Drafter`
itself is the plain twin.

Legend: T context tokens, Q block slots, K taps, H width, N / M query / key heads, d head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftcache.train.attention import Attention, Visibility
from draftcache.train.drafter import Drafter, DrafterConfig, Layer, Linear, RMSNorm
from draftcache.train.linear import (
    Matrix,
    Norm,
    gated_linear,
    linear,
    norm_linear,
    normed,
    normed_and_rotated,
)
from draftcache.train.weights import ComputeWeights


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation tables of one set of positions, [S, d / 2] float32 each."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer's weights, as its products read them."""

    rule: Visibility
    input_norm: Norm
    joint: Matrix  # query, key and value
    key_value: Matrix  # rows of the one above, for the context
    query_norm: Norm
    key_norm: Norm
    out: Matrix
    post_norm: Norm
    gate_up: Matrix
    down: Matrix


class Backbone:
    """The drafter on its compute weights."""

    def __init__(self, drafter: Drafter, weights: ComputeWeights) -> None:
        self._config = drafter.config
        self._weights = weights
        self._fc = self._matrix(drafter.fc)
        self._context_norm = self._norm(drafter.hidden_norm)
        self._layers = [
            self._layer(layer, drafter.config.rule(kind))
            for layer, kind in zip(drafter.layers, drafter.config.layer_types, strict=True)
        ]
        self._final_norm = self._norm(drafter.norm)

    def __call__(
        self,
        distinct: Tensor,  # [1 + A, H], input embeddings: the mask token's, then each anchor's
        positions: Tensor,  # [A, B]
        taps: Tensor,  # [T, K * H], raw
        context_positions: Tensor,  # [T]
        attention: Attention,
    ) -> Tensor:  # [Q, H], ready for the target's head
        """Hidden states of the block slots."""
        context = normed(linear(taps, self._fc), self._context_norm)
        context_rotary = rotary_tables(context_positions, self._config)
        rotary = rotary_tables(positions.flatten(), self._config)
        size = positions.shape[1]
        joint, x = (
            _spread(rows, size) for rows in norm_linear(distinct, self._layers[0].input_norm, self._layers[0].joint)
        )
        for number, layer in enumerate(self._layers):
            if number:
                joint, x = norm_linear(x, layer.input_norm, layer.joint)
            context_key, context_value = self._keys(linear(context, layer.key_value), layer, context_rotary)
            x = self._run(layer, joint, x, rotary, context_key, context_value, attention)
        return normed(x, self._final_norm)

    def _run(
        self,
        layer: _Layer,
        joint: Tensor,  # [Q, (N + 2 M) * d]
        x: Tensor,  # [Q, H]
        rotary: Rotary,
        context_key: Tensor,  # [T, M, d]
        context_value: Tensor,  # [T, M, d]
        attention: Attention,
    ) -> Tensor:  # [Q, H]
        width = self._config.num_heads * self._config.head_dim
        query, key_value = joint.split([width, joint.shape[1] - width], dim=1)
        query = normed_and_rotated(self._heads(query), layer.query_norm, rotary.cos, rotary.sin)
        key, value = self._keys(key_value, layer, rotary)
        mixed = attention(query, _joined(context_key, key), _joined(context_value, value), layer.rule)
        x = linear(mixed.flatten(1), layer.out, residual=x)
        gate_up, x = norm_linear(x, layer.post_norm, layer.gate_up)
        return gated_linear(gate_up, layer.down, residual=x)

    def _keys(self, key_value: Tensor, layer: _Layer, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, [S, M, d] each, of a joint projection [S, 2 * M * d]."""
        key, value = (self._heads(part) for part in key_value.chunk(2, dim=-1))
        return normed_and_rotated(key, layer.key_norm, rotary.cos, rotary.sin), value

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self._config.head_dim)

    def _layer(self, layer: Layer, rule: Visibility) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            rule=rule,
            input_norm=self._norm(layer.input_layernorm),
            joint=self._matrix(attention.q_proj, attention.k_proj, attention.v_proj),
            key_value=self._matrix(attention.k_proj, attention.v_proj),
            query_norm=self._norm(attention.q_norm),
            key_norm=self._norm(attention.k_norm),
            out=self._matrix(attention.o_proj),
            post_norm=self._norm(layer.post_attention_layernorm),
            gate_up=self._matrix(mlp.gate_proj, mlp.up_proj),
            down=self._matrix(mlp.down_proj),
        )

    def _norm(self, norm: RMSNorm) -> Norm:
        return Norm(self._weights.weight(norm.weight), norm.eps)

    def _matrix(self, *layers: Linear) -> Matrix:
        biases = [layer.bias for layer in layers if isinstance(layer.bias, nn.Parameter)]
        weight = self._weights.weight(*(layer.weight for layer in layers))
        return Matrix(weight, self._weights.weight(*biases) if biases else None)


def _spread(
    rows: Tensor,  # [1 + A, n]: the mask token's, then each anchor's
    block_size: int,
) -> Tensor:  # [Q, n]
    """Rows of distinct inputs at the slots that have them: the anchor's at slot 0, the mask token's at all others."""
    anchors = len(rows) - 1
    masks = rows[0].expand(anchors, block_size - 1, -1)
    return torch.cat([rows[1:, None], masks], dim=1).flatten(0, 1)


def _joined(
    context: Tensor,  # [T, M, d]
    block: Tensor,  # [Q, M, d]
) -> Tensor:  # [T + Q, M, d], head after head in memory
    """Context followed by block, laid out as attention reads it."""
    return torch.cat([context.transpose(0, 1), block.transpose(0, 1)], dim=1).transpose(0, 1)


def rotary_tables(positions: Tensor, config: DrafterConfig) -> Rotary:
    """The rotation of [S] positions."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    angles = positions.float()[:, None] * config.rope_theta**-exponent
    return Rotary(angles.cos(), angles.sin())
