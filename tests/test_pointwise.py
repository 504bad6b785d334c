"""Pointwise parts of the step: formulas against autograd, Triton kernels against the plain twins."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from draftcache.tests.kernel_device import DEVICE, kernels
from draftcache.train.kernels import pointwise as p

EPS = 1e-6
KERNELS = "train.kernels.pointwise_kernels"
WIDTHS = [16, 576] if DEVICE == "cpu" else [16, 576, 5120]
ROWS = [3, 40] if DEVICE == "cpu" else [3, 1000]
HEADS = [(5, 2, 16), (130, 3, 64), (64, 1, 80)]


def randoms(*shapes: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    """Normal float32 tensors, the same on every device."""
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def angles(rows: int, width: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Rotation tables of consecutive positions."""
    at = torch.arange(rows)[:, None] * 10_000.0 ** -(torch.arange(0, width, 2) / width)
    return at.cos().to(device), at.sin().to(device)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The half-split rotation by its definition."""
    a, b = x.chunk(2, dim=-1)
    return (
        torch.cat([a, b], -1) * torch.cat([cos, cos], -1)[:, None]
        + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)[:, None]
    )


def test_rms_norm_and_its_gradients_equal_autograd() -> None:
    x, scale, gradient, residual = randoms((7, 24), (24,), (7, 24), (7, 24))
    x.requires_grad_()
    scale.requires_grad_()
    y = functional.rms_norm(x, (24,), scale, EPS)
    torch.testing.assert_close(p.rms_norm(x, scale, EPS), y)
    wanted = torch.autograd.grad(y, (x, scale), gradient)
    torch.testing.assert_close(p.rms_norm_backward(gradient, x, scale, EPS), wanted)
    found, _ = p.rms_norm_backward(gradient, x, scale, EPS, residual)
    torch.testing.assert_close(found, wanted[0] + residual)


def test_norm_rotate_and_its_gradients_equal_autograd() -> None:
    x, scale, gradient = randoms((9, 3, 16), (16,), (9, 3, 16))
    cos, sin = angles(9, 16)
    x.requires_grad_()
    scale.requires_grad_()
    y = rotated(functional.rms_norm(x, (16,), scale, EPS), cos, sin)
    torch.testing.assert_close(p.norm_rotate(x, scale, EPS, cos, sin), y)
    wanted = torch.autograd.grad(y, (x, scale), gradient)
    dx = torch.empty_like(x)
    d_scale = p.norm_rotate_backward(gradient, x, scale, EPS, cos, sin, dx)
    torch.testing.assert_close((dx, d_scale), wanted)


def test_swiglu_and_its_gradient_equal_autograd() -> None:
    gate_up, gradient = randoms((5, 48), (5, 24))
    gate_up.requires_grad_()
    gate, up = gate_up.chunk(2, dim=-1)
    y = functional.silu(gate) * up
    torch.testing.assert_close(p.swiglu(gate_up), y)
    (wanted,) = torch.autograd.grad(y, gate_up, gradient)
    found, again = gate_up.detach().clone(), gradient.clone()
    p.swiglu_backward(again, found)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(again, y)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Equal to one rounding of the dtype."""
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(
        found.float(), wanted.float(), rtol=tolerance, atol=tolerance * wanted.abs().max().item()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_norm_kernels_equal_the_twins(rows: int, width: int, dtype: torch.dtype) -> None:
    k = kernels(KERNELS)
    x, scale, gradient, residual = (
        t.to(dtype) for t in randoms((rows, width), (width,), (rows, width), (rows, width), device=DEVICE)
    )
    close(k.rms_norm(x, scale, EPS), p.plain_rms_norm(x, scale, EPS), dtype)
    for added in (None, residual):
        found = k.rms_norm_backward(gradient, x, scale, EPS, added)
        wanted = p.plain_rms_norm_backward(gradient, x, scale, EPS, added)
        close(found[0], wanted[0], dtype)
        close(found[1], wanted[1], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_norm_rotate_kernels_equal_the_twins(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    k = kernels(KERNELS)
    rows, heads, width = shape
    joint, scale, gradient = (
        t.to(dtype) for t in randoms((rows, (heads + 2) * width), (width,), (heads, rows, width), device=DEVICE)
    )
    x, gradient = joint[:, width : (heads + 1) * width].unflatten(1, (heads, width)), gradient.transpose(0, 1)
    cos, sin = angles(rows, width, DEVICE)
    close(k.norm_rotate(x, scale, EPS, cos, sin), p.plain_norm_rotate(x, scale, EPS, cos, sin), dtype)
    found, wanted = (
        torch.zeros_like(joint)[:, width : (heads + 1) * width].unflatten(1, (heads, width)) for _ in range(2)
    )
    d_scale = k.norm_rotate_backward(gradient, x, scale, EPS, cos, sin, found)
    wanted_d_scale = p.plain_norm_rotate_backward(gradient, x, scale, EPS, cos, sin, wanted)
    close(found, wanted, dtype)
    close(d_scale, wanted_d_scale, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [24, 3000])
def test_swiglu_kernels_equal_the_twins(inner: int, dtype: torch.dtype) -> None:
    k = kernels(KERNELS)
    gate_up, gradient = (t.to(dtype) for t in randoms((33, 2 * inner), (33, inner), device=DEVICE))
    close(k.swiglu(gate_up), p.plain_swiglu(gate_up), dtype)
    found, wanted = ([gradient.clone(), gate_up.clone()] for _ in range(2))
    k.swiglu_backward(*found)
    p.plain_swiglu_backward(*wanted)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, dtype)
