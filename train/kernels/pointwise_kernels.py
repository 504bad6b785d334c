"""The Triton kernels of `pointwise.py`. Import it only where there is a CUDA device.

Every kernel reads its inputs once and writes its outputs once. Gradients of scales are summed by each program over its
own rows and then over programs in a fixed order: equal inputs give equal bits.

Legend: S rows, N heads, d head width, I inner width of the MLP.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 528  # of the norm's backward pass: four for each of an H200's processors
_HEAD_ROWS = 32
_GATE_BLOCK = 1024


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """See pointwise.rms_norm."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    y = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](x, scale, y, width, eps, BLOCK=block, num_warps=_warps(block))
    return y


def rms_norm_backward(
    gradient: Tensor, x: Tensor, scale: Tensor, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See pointwise.rms_norm_backward."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    programs = min(rows, _PROGRAMS)
    dx = torch.empty_like(x)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_backward_kernel[(programs,)](
        gradient.contiguous(),
        x,
        scale,
        x if residual is None else residual.contiguous(),
        dx,
        partial,
        rows,
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return dx, partial.sum(0)


def norm_rotate(x: Tensor, scale: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """See pointwise.norm_rotate."""
    rows, heads, width = x.shape
    y = torch.empty(heads, rows, width, dtype=x.dtype, device=x.device)
    _norm_rotate_kernel[(triton.cdiv(rows, _HEAD_ROWS), heads)](
        x,
        x.stride(0),
        x.stride(1),
        scale,
        cos,
        sin,
        y,
        rows,
        width // 2,
        eps,
        ROWS=_HEAD_ROWS,
        HALF=triton.next_power_of_2(width // 2),
        num_warps=4,
    )
    return y.transpose(0, 1)


def norm_rotate_backward(
    gradient: Tensor, x: Tensor, scale: Tensor, eps: float, cos: Tensor, sin: Tensor, dx: Tensor
) -> Tensor:
    """See pointwise.norm_rotate_backward."""
    rows, heads, width = x.shape
    if gradient.stride(2) != 1:
        gradient = gradient.contiguous()
    programs = triton.cdiv(rows, _HEAD_ROWS)
    partial = torch.empty(programs, heads, width, dtype=torch.float32, device=x.device)
    _norm_rotate_backward_kernel[(programs, heads)](
        gradient,
        gradient.stride(0),
        gradient.stride(1),
        x,
        x.stride(0),
        x.stride(1),
        scale,
        cos,
        sin,
        dx,
        dx.stride(0),
        dx.stride(1),
        partial,
        rows,
        heads,
        width // 2,
        eps,
        ROWS=_HEAD_ROWS,
        HALF=triton.next_power_of_2(width // 2),
        num_warps=4,
    )
    return partial.sum((0, 1))


def swiglu(gate_up: Tensor) -> Tensor:
    """See pointwise.swiglu."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(inner, _GATE_BLOCK))
    _swiglu_kernel[grid](gate_up, y, inner, BLOCK=_GATE_BLOCK, num_warps=4)
    return y


def swiglu_backward(gradient: Tensor, gate_up: Tensor) -> None:
    """See pointwise.swiglu_backward."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    grid = (rows, triton.cdiv(inner, _GATE_BLOCK))
    _swiglu_backward_kernel[grid](gradient, gate_up, inner, BLOCK=_GATE_BLOCK, num_warps=4)


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


@triton.jit
def _norm_kernel(x_ptr, scale_ptr, y_ptr, width, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + at + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(y_ptr + at + columns, (x * inverse * scale).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    gradient_ptr,
    x_ptr,
    scale_ptr,
    residual_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + columns
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
        normal = x * inverse
        total += gradient * normal
        scaled = gradient * scale
        dx = inverse * (scaled - normal * (tl.sum(scaled * normal, axis=0) / width))
        if HAS_RESIDUAL:
            dx += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + tl.program_id(0) * width + columns, total, mask=inside)


@triton.jit
def _norm_rotate_kernel(
    x_ptr,
    x_row_stride,
    x_head_stride,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rows,
    half,
    eps,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    head = tl.program_id(1)
    inside = (row < rows) & (column < half)
    x_at = row.to(tl.int64) * x_row_stride + head * x_head_stride + column
    a = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + x_at + half, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * half) + eps)[:, None]
    a *= inverse * tl.load(scale_ptr + column, mask=column < half, other=0.0).to(tl.float32)
    b *= inverse * tl.load(scale_ptr + half + column, mask=column < half, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * half + column, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row * half + column, mask=inside, other=0.0)
    y_at = (head.to(tl.int64) * rows + row) * (2 * half) + column
    tl.store(y_ptr + y_at, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + y_at + half, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rotate_backward_kernel(
    gradient_ptr,
    gradient_row_stride,
    gradient_head_stride,
    x_ptr,
    x_row_stride,
    x_head_stride,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    dx_ptr,
    dx_row_stride,
    dx_head_stride,
    partial_ptr,
    rows,
    heads,
    half,
    eps,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    head = tl.program_id(1)
    inside = (row < rows) & (column < half)
    at = row.to(tl.int64) * gradient_row_stride + head.to(tl.int64) * gradient_head_stride + column
    rotated_a = tl.load(gradient_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rotated_b = tl.load(gradient_ptr + at + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * half + column, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + row * half + column, mask=inside, other=0.0)
    d_a, d_b = rotated_a * cos + rotated_b * sin, rotated_b * cos - rotated_a * sin
    at = row.to(tl.int64) * x_row_stride + head * x_head_stride + column
    a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + half, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * half) + eps)[:, None]
    a *= inverse
    b *= inverse
    at = (tl.program_id(0) * heads + head) * (2 * half) + tl.arange(0, HALF)
    tl.store(partial_ptr + at, tl.sum(d_a * a, axis=0), mask=tl.arange(0, HALF) < half)
    tl.store(partial_ptr + at + half, tl.sum(d_b * b, axis=0), mask=tl.arange(0, HALF) < half)
    d_a *= tl.load(scale_ptr + column, mask=column < half, other=0.0).to(tl.float32)
    d_b *= tl.load(scale_ptr + half + column, mask=column < half, other=0.0).to(tl.float32)
    mean = ((tl.sum(d_a * a, axis=1) + tl.sum(d_b * b, axis=1)) / (2 * half))[:, None]
    at = row.to(tl.int64) * dx_row_stride + head * dx_head_stride + column
    tl.store(dx_ptr + at, (inverse * (d_a - a * mean)).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + at + half, (inverse * (d_b - b * mean)).to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_kernel(gate_up_ptr, y_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    gate = tl.load(gate_up_ptr + row * 2 * inner + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * inner + inner + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * inner + columns, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gradient_ptr, gate_up_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    at = row * 2 * inner + columns
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + inner, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + row * inner + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    kind = gate_up_ptr.dtype.element_ty
    tl.store(gate_up_ptr + at, d_gate.to(kind), mask=inside)
    tl.store(gate_up_ptr + at + inner, (gradient * silu).to(kind), mask=inside)
    tl.store(gradient_ptr + row * inner + columns, (silu * up).to(kind), mask=inside)
