"""The drafter's forward pass as training runs it: the network of `drafter.py` on the step's own products.

Same weights, same formulas, fewer passes over memory: query, key and value are one product, gate and up another,
residuals are added inside products, the first layer projects A + 1 different inputs, not Q equal ones, and the last one
leaves slot 0, which is never trained, behind its attention. `Drafter` itself is the plain twin.

Legend: T context tokens, Q block slots, K taps, H width, N / M query / key heads, d head width.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftcache.train.kernels.float8 import Float8Weight
from draftcache.train.model.attention import Attention, Visibility
from draftcache.train.model.drafter import Drafter, Layer, Linear, RMSNorm
from draftcache.train.model.heads import key_value, query_key_value, rotary_tables
from draftcache.train.model.linear import (
    Matrix,
    Norm,
    gated_linear,
    linear,
    norm_linear,
    normed,
)
from draftcache.train.model.weights import ComputeWeights


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

    def __init__(self, drafter: Drafter, weights: ComputeWeights, matmul: str) -> None:
        """`matmul` "fp8": the MLPs' products in 8 bits, except those that give weight gradients."""
        self._matmul = matmul
        self._float8: list[Float8Weight] = []
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
    ) -> Tensor:  # [A, B - 1, H], ready for the target's head
        """Hidden states of slots 1..B-1."""
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
            keys = key_value(linear(context, layer.key_value), layer.key_norm, context_rotary, self._config)
            query, key, value = query_key_value(joint, layer.query_norm, layer.key_norm, rotary, self._config)
            mixed = attention(query, *keys, key, value, layer.rule).flatten(1)
            if layer is self._layers[-1]:
                mixed, x = _trained(mixed, size), _trained(x, size)
            x = linear(mixed, layer.out, residual=x)
            gate_up, x = norm_linear(x, layer.post_norm, layer.gate_up)
            x = gated_linear(gate_up, layer.down, residual=x)
        return normed(x, self._final_norm).view(len(positions), size - 1, -1)

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
            gate_up=self._mlp_matrix(mlp.gate_proj, mlp.up_proj),
            down=self._mlp_matrix(mlp.down_proj),
        )

    def refresh_float8(self) -> None:
        """Encode the weights anew; needed after every change of them."""
        for weight in self._float8:
            weight.refresh()

    def _mlp_matrix(self, *layers: Linear) -> Matrix:
        matrix = self._matrix(*layers)
        if self._matmul != "fp8":
            return matrix
        self._float8.append(Float8Weight(matrix.weight.value))
        return dataclasses.replace(matrix, float8=self._float8[-1])

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


def _trained(
    rows: Tensor,  # [Q, n]
    block_size: int,
) -> Tensor:  # [A * (B - 1), n]
    """Rows of slots 1..B-1."""
    return rows.view(-1, block_size, rows.shape[1])[:, 1:].flatten(0, 1)
