"""Products of the step: weight gradients land in the float32 buffer, and pointwise inputs are computed twice, not kept.

    linear         y = x W'
    norm_linear    y = rms_norm(x) W', and x for the residual path
    gated_linear   y = swiglu(x) W' + residual

A weight's gradient is one product that accumulates in float32 where the weight's gradient lives: no bfloat16 gradient
exists, and several micro-batches sum without rounding. `functional.linear` on the plain modules is the twin.

Legend: S rows, n / m input and output width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftcache.train.kernels.float8 import Float8Weight
from draftcache.train.kernels.pointwise import (
    rms_norm,
    rms_norm_backward,
    swiglu,
    swiglu_backward,
)
from draftcache.train.model.weights import Weight


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weight [m, n] and bias [m] of a linear layer."""

    weight: Weight
    bias: Weight | None = None
    float8: Float8Weight | None = None  # then x W' and the input's gradient are products in 8 bits


@dataclass(frozen=True, slots=True)
class Norm:
    """The scale [n] of an RMSNorm and its epsilon."""

    scale: Weight
    eps: float


def linear(
    x: Tensor,  # [S, n]
    matrix: Matrix,
    residual: Tensor | None = None,  # [S, m]
) -> Tensor:  # [S, m]
    """x W' + bias + residual; keeps x for the backward pass."""
    y: Tensor = _Linear.apply(x, residual, matrix.weight.parameter, matrix)  # type: ignore[no-untyped-call]
    return y


def norm_linear(
    x: Tensor,  # [S, n]
    norm: Norm,
    matrix: Matrix,
) -> tuple[Tensor, Tensor]:  # [S, m], and x [S, n]
    """rms_norm(x) W' + bias, and x itself: the residual path's gradient then comes back here and costs no pass."""
    y, same = _NormLinear.apply(x, matrix.weight.parameter, norm, matrix)  # type: ignore[no-untyped-call]
    return y, same


def gated_linear(
    gate_up: Tensor,  # [S, 2 n]
    matrix: Matrix,
    residual: Tensor,  # [S, m]
) -> Tensor:  # [S, m]
    """swiglu(gate_up) W' + bias + residual; keeps gate_up."""
    y: Tensor = _GatedLinear.apply(gate_up, residual, matrix.weight.parameter, matrix)  # type: ignore[no-untyped-call]
    return y


def normed(
    x: Tensor,  # [..., n]
    norm: Norm,
) -> Tensor:  # [..., n]
    """rms_norm(x); keeps x."""
    y: Tensor = _Norm.apply(x, norm.scale.parameter, norm)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, _asks: Tensor, matrix: Matrix) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix = matrix
        return _product(x, matrix, residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        (gradient,) = gradients
        _add_weight_gradient(ctx.matrix, gradient, x)
        dx = _input_gradient(gradient, ctx.matrix) if ctx.needs_input_grad[0] else None
        return dx, gradient if ctx.needs_input_grad[1] else None, None, None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _asks: Tensor, norm: Norm, matrix: Matrix) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.norm, ctx.matrix = norm, matrix
        return _product(rms_norm(x, norm.scale.value, norm.eps), matrix, None), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        gradient, residual = gradients
        norm, matrix = ctx.norm, ctx.matrix
        _add_weight_gradient(matrix, gradient, rms_norm(x, norm.scale.value, norm.eps))
        dx, d_scale = rms_norm_backward(_input_gradient(gradient, matrix), x, norm.scale.value, norm.eps, residual)
        norm.scale.gradient.add_(d_scale)
        return dx, None, None, None


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, residual: Tensor, _asks: Tensor, matrix: Matrix) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.matrix = matrix
        return _product(swiglu(gate_up), matrix, residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        (gradient,) = gradients
        inner = _input_gradient(gradient, ctx.matrix)
        swiglu_backward(inner, gate_up)  # in place: this is where a step's memory peaks
        _add_weight_gradient(ctx.matrix, gradient, inner)
        return gate_up, gradient, None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _asks: Tensor, norm: Norm) -> Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        return rms_norm(x, norm.scale.value, norm.eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        dx, d_scale = rms_norm_backward(gradients[0], x, ctx.norm.scale.value, ctx.norm.eps)
        ctx.norm.scale.gradient.add_(d_scale)
        return dx, None, None


def _product(x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
    if matrix.float8 is not None:
        y = matrix.float8.product(x)
        for term in (residual, None if matrix.bias is None else matrix.bias.value):
            y = y if term is None else y.add_(term)
        return y
    transposed = matrix.weight.value.t()
    if residual is not None:
        y = torch.addmm(residual, x, transposed)
        return y if matrix.bias is None else y.add_(matrix.bias.value)
    return x @ transposed if matrix.bias is None else torch.addmm(matrix.bias.value, x, transposed)


def _input_gradient(gradient: Tensor, matrix: Matrix) -> Tensor:
    if matrix.float8 is not None:
        return matrix.float8.input_gradient(gradient)
    return gradient @ matrix.weight.value


def _add_weight_gradient(matrix: Matrix, gradient: Tensor, x: Tensor) -> None:
    total = matrix.weight.gradient
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), x)
    else:
        torch.addmm(total, gradient.t(), x, out_dtype=total.dtype, out=total)
    if matrix.bias is not None:
        matrix.bias.gradient.add_(gradient.sum(0, dtype=torch.float32))
