"""Products in 8 bits on the CPU: near the plain ones, row by row, whatever their sizes; broken numbers stay broken."""

import math

import pytest
import torch
from torch import Tensor

from draftcache.train.kernels.float8 import Float8Weight, encoded
from draftcache.train.model.head import Fp8Head, Head

MAX_ERROR = 2**-4 * 2**0.5
"""Of a row: two operands, each rounded by at most half of e4m3's last of three bits."""
ROWS, INNER, OUTER = 32, 48, 64


def random(*shape: int, seed: int) -> Tensor:
    """Normally distributed float32."""
    x: Tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Relative error of every row."""
    errors: Tensor = (found.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_near_the_plain_ones(dtype: torch.dtype) -> None:
    """Rows of x span ten orders of magnitude: each has a scale of its own."""
    sizes = torch.logspace(-5, 5, ROWS)[:, None]
    x, gradient = random(ROWS, INNER, seed=0) * sizes, random(ROWS, OUTER, seed=1) * sizes
    plain = random(OUTER, INNER, seed=2) * 0.05
    weight = Float8Weight(plain.to(dtype))
    found, found_gradient = weight.product(x.to(dtype)), weight.input_gradient(gradient.to(dtype))
    assert found.dtype == found_gradient.dtype == dtype
    assert row_errors(found, x @ plain.T).max() < MAX_ERROR
    assert row_errors(found_gradient, gradient @ plain).max() < MAX_ERROR


def test_a_changed_weight_counts_after_a_refresh() -> None:
    plain, x = random(OUTER, INNER, seed=2), random(ROWS, INNER, seed=0)
    weight = Float8Weight(plain)
    before = weight.product(x)
    plain.mul_(2)
    assert torch.equal(weight.product(x), before)
    weight.refresh()
    assert torch.equal(weight.product(x), 2 * before)
    assert torch.equal(weight.input_gradient(before), Float8Weight(plain).input_gradient(before))


def test_the_head_in_8_bits_is_near_the_plain_one() -> None:
    plain, hidden = (random(OUTER, INNER, seed=2) * 0.05).bfloat16(), random(ROWS, INNER, seed=0).bfloat16()
    head, fp8 = Head(plain), Fp8Head(plain)
    wanted = head.logits(hidden).float()
    assert row_errors(fp8.logits(hidden), wanted).max() < MAX_ERROR
    derivative, weights = wanted.softmax(-1), torch.linspace(0.1, 1, ROWS)
    coded = (derivative * fp8.factor).to(torch.float8_e5m2)
    wanted = head.hidden_gradient(derivative.bfloat16(), weights).float()
    assert row_errors(fp8.hidden_gradient(coded, weights), wanted).max() < 2 * MAX_ERROR


@pytest.mark.parametrize("value", [0.0, 1e38, -1e38, 3.4e38])
def test_rows_of_any_finite_size_survive(value: float) -> None:
    coded, scales = encoded(torch.full((1, 16), value))
    torch.testing.assert_close(coded.float() * scales, torch.full((1, 16), value), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_made_finite(value: float) -> None:
    x = random(2, 16, seed=0)
    x[0, 3] = value
    product = Float8Weight(random(32, 16, seed=1)).product(x)
    assert not product[0].isfinite().any()
    assert product[1].isfinite().all()
