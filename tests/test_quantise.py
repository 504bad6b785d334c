"""The quantised codecs: their numpy twins, their rules, and what reaches a record and comes back."""

import numpy as np
import pytest
import torch

from draftcache.common.codec import field_tensor, put_tap, put_teacher, read_taps
from draftcache.common.quantise import (
    FORMATS,
    GROUP,
    MXFP4,
    MXFP8,
    NON_FINITE,
    Format,
    dequantise,
    dequantise_numpy,
    quantise,
    quantise_numpy,
)
from draftcache.common.record import TOP_K, record_spec
from draftcache.tests.helpers import gpu

FORMAT = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
LARGEST = {MXFP8: 448.0, MXFP4: 6.0}


def wild_states(rows: int = 512, width: int = 96, seed: int = 0) -> torch.Tensor:
    """bfloat16 rows of all magnitudes with outlier channels, zeros, denormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.exp(6 * torch.randn(rows, 1, generator=generator))
    x[:, 7] *= 3000
    x[0], x[1, :32], x[2, 5], x[3, 40], x[4], x[5] = 0.0, -0.0, torch.nan, -torch.inf, 1e-39, 3.3e38
    return x.bfloat16()


@FORMAT
def test_encoding_equals_its_numpy_twin_bit_for_bit(form: Format) -> None:
    x = wild_states()
    values, codes = quantise(x, form)
    twin_values, twin_codes = quantise_numpy(x.float().numpy(), form)
    assert np.array_equal(values.numpy(), twin_values)
    assert np.array_equal(codes.numpy(), twin_codes)


@FORMAT
def test_decoding_equals_its_numpy_twin_bit_for_bit(form: Format) -> None:
    values, codes = quantise(wild_states(), form)
    decoded = dequantise(values, codes, form, torch.float32).numpy()
    wanted = dequantise_numpy(values.numpy(), codes.numpy(), form)
    assert np.array_equal(decoded, wanted, equal_nan=True)
    numbers = ~np.isnan(wanted)
    assert np.array_equal(decoded[numbers].view(np.int32), wanted[numbers].view(np.int32))  # the sign of zeros too


@gpu
@FORMAT
def test_the_device_codes_the_same_bits(form: Format) -> None:
    x = wild_states(rows=4096)
    on_host = quantise(x, form)
    on_device = quantise(x.cuda(), form)
    for a, b in zip(on_host, on_device, strict=True):
        assert torch.equal(a, b.cpu())
    decoded = dequantise(*on_device, form, torch.bfloat16).cpu()
    wanted = dequantise(*on_host, form, torch.bfloat16)
    finite = wanted.isfinite()
    assert torch.equal(decoded[finite].view(torch.int16), wanted[finite].view(torch.int16))
    torch.testing.assert_close(decoded[~finite], wanted[~finite], rtol=0, atol=0, equal_nan=True)


@FORMAT
def test_every_scale_is_the_smallest_that_does_not_saturate(form: Format) -> None:
    x = wild_states()[10:]
    _, codes = quantise(x, form)
    amax = x.float().abs().unflatten(-1, (-1, GROUP)).amax(-1).double()
    scale = torch.exp2(codes.double() - 127)
    assert (amax / scale <= LARGEST[form]).all()
    assert (amax / (scale / 2) > LARGEST[form])[codes > 1].all()


@FORMAT
def test_what_the_format_holds_survives_exactly(form: Format) -> None:
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = torch.cat([levels, -levels, levels, -levels]).repeat(3, 1) * torch.tensor([[1.0], [2.0**-9], [2.0**20]])
    assert torch.equal(dequantise(*quantise(x, form), form, torch.float32), x)


def test_ties_go_to_the_even_code() -> None:
    x = torch.zeros(GROUP)
    x[:8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    decoded = dequantise(*quantise(x, MXFP4), MXFP4, torch.float32)
    assert decoded[:8].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@FORMAT
def test_a_group_that_is_not_finite_stays_so_and_its_neighbours_do_not(form: Format) -> None:
    values, codes = quantise(wild_states(), form)
    decoded = dequantise(values, codes, form, torch.float32)
    assert codes[2, 0] == codes[3, 1] == NON_FINITE
    assert not decoded[2, :32].isfinite().any()
    assert not decoded[3, 32:64].isfinite().any()
    assert decoded[2, 32:].isfinite().all()
    assert decoded[3, :32].isfinite().all()


@pytest.mark.parametrize(("codec", "worst"), [("bf16", 0.0), ("mxfp8", 0.0625), ("mxfp4", 0.34)])
def test_taps_come_back_from_records_within_the_codecs_error(codec: str, worst: float) -> None:
    spec = record_spec(2, 64, codec, "none")
    hidden = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    records = torch.zeros(3, 5, spec.record_bytes, dtype=torch.uint8)
    for position in range(2):
        put_tap(records, spec, position, hidden[position])
    taps = read_taps(records, spec, torch.float32).unflatten(-1, (2, 64))
    for position in range(2):
        want = hidden[position].float()
        error = (taps[..., position, :] - want).abs().unflatten(-1, (-1, GROUP))
        assert (error <= worst * want.abs().unflatten(-1, (-1, GROUP)).amax(-1, keepdim=True)).all()


def test_the_top_teacher_is_the_targets_own_distribution() -> None:
    generator = torch.Generator().manual_seed(2)
    spec = record_spec(1, 32, "bf16", "top")
    last, head = torch.randn(2, 70, 32, generator=generator), torch.randn(200, 32, generator=generator)
    records = torch.zeros(2, 70, spec.record_bytes, dtype=torch.uint8)
    put_teacher(records, spec, last, head)
    ids, log_probs = (field_tensor(records, spec.field(name)) for name in ("top_ids", "top_log_probs"))
    want = torch.log_softmax(last @ head.T, -1)
    assert ids.shape == (2, 70, TOP_K)
    assert torch.equal(ids[..., 0].long(), want.argmax(-1))
    torch.testing.assert_close(log_probs.float(), want.gather(-1, ids.long()), rtol=2**-8, atol=2**-8)
    assert (want.gather(-1, ids.long()).amin(-1) >= want.topk(TOP_K + 1).values[..., -1]).all()


@pytest.mark.parametrize(
    ("codec", "teacher", "wanted"),
    [
        ("bf16", "last", 61_440),
        ("bf16", "top", 51_584),
        ("mxfp8", "top", 26_784),
        ("mxfp4", "top", 13_984),
        ("mxfp4", "last", 23_840),
    ],
)
def test_bytes_per_token_at_full_scale(codec: str, teacher: str, wanted: int) -> None:
    spec = record_spec(5, 5120, codec, teacher)
    assert sum(field.nbytes for field in spec.fields) == wanted
    assert 0 <= spec.record_bytes - wanted < 64
