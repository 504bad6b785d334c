"""Microscaling formats: values of 8 or 4 bits with one power-of-two scale for every 32 of them.

    mxfp8   e4m3 values, one byte each
    mxfp4   e2m1 values, two to a byte: the even one in the low four bits

Layout and scale encoding (E8M0, bias 127) are OCP's microscaling specification. The scale's rule is this project's: the
smallest power of two with amax / scale <= the format's largest value, so nothing saturates; its exponent comes from
integer operations on amax's bits, so every device computes the same. Values round to nearest, ties to even. A group of
zeros has scale code 0; a group with a value that is not finite has code 255 and decodes to values that are not finite.

Each function stands beside its numpy twin, and tests hold the two to the same bits.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftcache.common.fused import fused
from draftcache.common.record import SCALE_GROUP

GROUP = SCALE_GROUP
SCALE_BIAS = 127
NON_FINITE = 255
_E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Format:
    """A value format. Its largest value is (1 + largest_mantissa / 2^23) * 2^largest_exponent."""

    name: str
    values_per_byte: int
    largest_exponent: int
    largest_mantissa: int


MXFP8 = Format("mxfp8", 1, 8, 0x600000)  # 448
MXFP4 = Format("mxfp4", 2, 2, 0x400000)  # 6
FORMATS = {form.name: form for form in (MXFP8, MXFP4)}


def quantise(
    x: Tensor,  # [..., n] bfloat16 or float32, n a multiple of GROUP
    form: Format,
) -> tuple[Tensor, Tensor]:  # values [..., n / values_per_byte] uint8, scale codes [..., n / GROUP] uint8
    """Encode on x's device."""
    grouped = x.float().unflatten(-1, (-1, GROUP))
    amax = grouped.abs().amax(-1)
    bits = amax.view(torch.int32)
    mantissa_over = ((bits & 0x7FFFFF) > form.largest_mantissa).int()
    code = ((bits >> 23) - form.largest_exponent + mantissa_over).clamp(1, NON_FINITE - 1)
    code = torch.where(bits >= 0x7F800000, NON_FINITE, torch.where(bits == 0, 0, code))
    # dividing by 2^(code - 127) is multiplying by 2^(127 - code), whose exponent field is 254 - code
    inverse = ((254 - code).clamp(0, 254) << 23).view(torch.float32)
    scaled = torch.where((code == NON_FINITE)[..., None], 1.0, grouped * inverse[..., None]).flatten(-2)
    values = _encode_e4m3(scaled) if form is MXFP8 else _encode_e2m1(scaled)
    return values, code.to(torch.uint8)


@fused
def dequantise(
    values: Tensor,  # [..., n / values_per_byte] uint8
    codes: Tensor,  # [..., n / GROUP] uint8
    form: Format,
    dtype: torch.dtype,
) -> Tensor:  # [..., n]
    """Decode on the values' device."""
    scale = (codes.int() << 23).view(torch.float32)
    plain = values.view(torch.float8_e4m3fn).float() if form is MXFP8 else _decode_e2m1(values)
    decoded: Tensor = (plain.unflatten(-1, (-1, GROUP)) * scale[..., None]).flatten(-2)
    return decoded.to(dtype)


def _decode_e2m1(values: Tensor) -> Tensor:
    codes = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2).int()
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    normal = ((exponent + 126) << 23 | mantissa << 22).view(torch.float32)
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, normal)
    return (magnitude.view(torch.int32) | (codes >> 3) << 31).view(torch.float32)


def quantise_numpy(x: npt.NDArray[np.float32], form: Format) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """The plain twin of `quantise`."""
    grouped = x.reshape(*x.shape[:-1], -1, GROUP)
    amax = np.abs(grouped).max(-1)
    bits = amax.view(np.int32)
    code = (bits >> 23) - form.largest_exponent + ((bits & 0x7FFFFF) > form.largest_mantissa)
    code = np.where(bits == 0, 0, np.clip(code, 1, NON_FINITE - 1))
    finite = np.isfinite(amax)
    with np.errstate(invalid="ignore"):  # what is not finite is replaced at once
        scaled = np.ldexp(grouped, SCALE_BIAS - code[..., None]).astype(np.float32)
    scaled = np.where(finite[..., None], scaled, np.float32(1)).reshape(x.shape)
    table = _levels(form)
    magnitude = np.abs(scaled)
    low = np.searchsorted((table[1:] + table[:-1]) / 2, magnitude, side="left")
    high = np.searchsorted((table[1:] + table[:-1]) / 2, magnitude, side="right")
    index = np.where(low % 2 == 0, low, high).astype(np.uint8)  # a tie lies between an even and an odd code
    if form is MXFP8:
        values = index | (np.signbit(scaled).astype(np.uint8) << 7)
    else:
        nibbles = index | (np.signbit(scaled).astype(np.uint8) << 3)
        values = nibbles[..., ::2] | (nibbles[..., 1::2] << 4)
    return values.astype(np.uint8), np.where(finite, code, NON_FINITE).astype(np.uint8)


def dequantise_numpy(
    values: npt.NDArray[np.uint8], codes: npt.NDArray[np.uint8], form: Format
) -> npt.NDArray[np.float32]:
    """The plain twin of `dequantise`, to float32."""
    if form is MXFP8:
        plain = np.concatenate([_levels(form), [np.nan], -_levels(form), [np.nan]])[values]
    else:
        plain = np.array(_signed_levels())[np.stack([values & 15, values >> 4], axis=-1)].reshape(
            *values.shape[:-1], -1
        )
    scale = np.where(codes == NON_FINITE, np.inf, np.ldexp(1.0, codes.astype(np.int32) - SCALE_BIAS))
    grouped = plain.reshape(*plain.shape[:-1], -1, GROUP) * scale[..., None]
    with np.errstate(over="ignore"):  # the very largest bfloat16 values round up to infinity, and count as such
        return np.asarray(grouped.reshape(plain.shape), dtype=np.float32)


def _encode_e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _encode_e2m1(x: Tensor) -> Tensor:
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for lower, (a, b) in enumerate(pairwise(_E2M1_LEVELS)):
        middle = (a + b) / 2
        code += (magnitude >= middle) if lower % 2 else (magnitude > middle)  # ties go to the even code
    code |= torch.signbit(x).to(torch.uint8) << 3
    pairs = code.unflatten(-1, (-1, 2))
    packed: Tensor = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed


def _levels(form: Format) -> npt.NDArray[Any]:
    """The format's values >= 0 in the order of their codes."""
    if form is MXFP4:
        return np.array(_E2M1_LEVELS)
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))


def _signed_levels() -> tuple[float, ...]:
    return _E2M1_LEVELS + tuple(-level for level in _E2M1_LEVELS)
