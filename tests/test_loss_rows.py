"""The Triton passes over logits and the fp8 head, each against its plain twin on the same device."""

import pytest
import torch
from torch import Tensor

from draftcache.tests.helpers import gpu
from draftcache.tests.kernel_device import DEVICE, kernels
from draftcache.train.kernels.float8 import plain_quantise_rows
from draftcache.train.kernels.loss_rows import (
    TeacherRows,
    plain_row_statistics,
    plain_write_difference,
)
from draftcache.train.model.head import Fp8Head, Head

LOSS, FLOAT8 = "train.kernels.loss_kernels", "train.kernels.float8_kernel"
SHAPES = [(3, 97), (2, 8193)] if DEVICE == "cpu" else [(3, 97), (5, 8192), (2, 8193), (7, 151_936)]
OUTS = [torch.bfloat16, torch.float32] + (
    [] if DEVICE == "cpu" else [torch.float8_e5m2]
)  # interpreted, float8 is cut off


def logits_pair(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two sets of logits of different scale, peaked like a language model's."""
    generator = torch.Generator(device=DEVICE).manual_seed(rows * vocabulary)
    pair = [torch.randn(rows, vocabulary, device=DEVICE, generator=generator) * scale for scale in (2.0, 3.0)]
    for logits in pair:
        logits[:, ::89] += 6
    return pair[0].to(dtype), pair[1].to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_equal_the_plain_twin(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits, _ = logits_pair(*shape, dtype)
    found, wanted = kernels(LOSS).row_statistics(logits), plain_row_statistics(logits)
    torch.testing.assert_close(found.log_normaliser, wanted.log_normaliser, rtol=1e-6, atol=1e-5)
    first = (logits == logits.amax(1, keepdim=True)).int().argmax(1)
    assert torch.equal(found.best, first)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked columns too
@pytest.mark.parametrize("out", OUTS, ids=str)
@pytest.mark.parametrize("with_teacher", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_differences_equal_the_plain_twin(shape: tuple[int, int], with_teacher: bool, out: torch.dtype) -> None:
    logits, stored = logits_pair(*shape, torch.bfloat16)
    place = torch.arange(shape[0], device=DEVICE).flip(0) // 2  # rows share a teacher
    teacher = TeacherRows(stored, plain_row_statistics(stored).log_normaliser, place) if with_teacher else None
    normaliser = plain_row_statistics(logits).log_normaliser
    coefficients = torch.rand(shape[0], device=DEVICE)
    factor = 2.0**15 if out == torch.float8_e5m2 else 1.0
    found, wanted = (torch.empty(shape, dtype=out, device=DEVICE) for _ in range(2))
    divergence = kernels(LOSS).write_difference(logits, normaliser, coefficients, teacher, factor, found)
    wanted_divergence = plain_write_difference(logits, normaliser, coefficients, teacher, factor, wanted)
    step = {torch.bfloat16: 2**-7, torch.float32: 1e-5, torch.float8_e5m2: 0.26}[out]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=step, atol=factor * 1e-7)
    torch.testing.assert_close(divergence, wanted_divergence, rtol=1e-4, atol=1e-4)
    assert found.float().abs().sum() > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_that_overwrites_its_own_logits_is_the_same() -> None:
    logits, stored = logits_pair(4, 9000, torch.bfloat16)
    normaliser, teacher = (
        plain_row_statistics(logits).log_normaliser,
        TeacherRows(stored, plain_row_statistics(stored).log_normaliser, torch.arange(4, device=DEVICE)),
    )
    ones = torch.ones(4, device=DEVICE)
    apart = torch.empty_like(logits)
    kernels(LOSS).write_difference(logits, normaliser, ones, teacher, 1.0, apart)
    kernels(LOSS).write_difference(logits, normaliser, ones, teacher, 1.0, logits)
    assert torch.equal(apart, logits)


@gpu
def test_the_fp8_head_is_near_the_plain_one() -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    weight = (torch.randn(4096, 256, device=DEVICE, generator=generator) * 0.05).bfloat16()
    hidden = torch.randn(128, 256, device=DEVICE, generator=generator).bfloat16()
    plain, fp8 = Head(weight), Fp8Head(weight)
    wanted, found = plain.logits(hidden).float(), fp8.logits(hidden).float()
    assert ((found - wanted).norm() / wanted.norm()).item() < 0.05
    derivative = plain.logits(hidden).float().softmax(-1)
    weights = torch.rand(128, device=DEVICE)
    wanted = plain.hidden_gradient(derivative.bfloat16(), weights).float()
    coded = (derivative * fp8.factor).to(torch.float8_e5m2)
    found = fp8.hidden_gradient(coded, weights).float()
    assert ((found - wanted).norm() / wanted.norm()).item() < 0.1


@gpu
@pytest.mark.parametrize("shape", [(3, 64), (257, 5120), (64, 17_408)], ids=str)
def test_rows_are_coded_as_the_plain_twin_codes_them(shape: tuple[int, int]) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(3)
    x = torch.randn(shape, device=DEVICE, generator=generator).bfloat16()
    x[0] = 0
    coded, wanted = (torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in range(2))
    scales, wanted_scales = (torch.empty(shape[0], 1, device=DEVICE) for _ in range(2))
    kernels(FLOAT8).quantise_rows(x, coded, scales)
    plain_quantise_rows(x, wanted, wanted_scales)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
    differing = (coded.view(torch.uint8) != wanted.view(torch.uint8)).float().mean().item()
    assert differing < 1e-3  # a quotient on a rounding border may fall to either side
    assert (coded[0].float() == 0).all()
