"""One token's record: sizes, offsets, views of its fields, and the exact widening of bfloat16."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftcache.common.errors import UsageError
from draftcache.common.layout import RECORD_ALIGNMENT
from draftcache.common.record import (
    FIELD_ALIGNMENT,
    TEACHERS,
    field_view,
    fields_attribute,
    record_spec,
    widen_bfloat16,
)

TEACHER_BYTES: dict[str, Callable[[int], int]] = {
    "last": lambda hidden: 2 * hidden,
    "top": lambda _: 64 * 4 + 64 * 2,
    "none": lambda _: 0,
}


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Random records."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_a_full_scale_record_takes_61440_bytes() -> None:
    spec = record_spec(taps=5, hidden=5120, codec="bf16", teacher="last")
    assert spec.record_bytes == 61_440
    assert [(f.name, f.dtype, f.shape, f.offset, f.nbytes) for f in spec.fields] == [
        ("taps", "bfloat16", (5, 5120), 0, 51_200),
        ("last", "bfloat16", (5120,), 51_200, 10_240),
    ]


def test_without_a_teacher_only_taps_are_stored() -> None:
    spec = record_spec(taps=5, hidden=5120, codec="bf16", teacher="none")
    assert spec.record_bytes == 51_200
    assert spec.has("taps")
    assert not spec.has("last")
    with pytest.raises(KeyError):
        spec.field("last")


@pytest.mark.parametrize(
    ("codec", "teacher", "record_bytes"),
    [
        ("mxfp8", "last", 5 * (5120 + 160) + 10_240 + 32),
        ("mxfp4", "last", 5 * (2560 + 160) + 10_240 + 32),
        ("mxfp8", "top", 5 * (5120 + 160) + 384 + 32),
        ("mxfp4", "top", 5 * (2560 + 160) + 384 + 32),
        ("bf16", "top", 51_200 + 384),
    ],
)
def test_sizes_of_the_other_full_scale_records(codec: str, teacher: str, record_bytes: int) -> None:
    spec = record_spec(5, 5120, codec, teacher)
    assert spec.codec == codec
    assert spec.record_bytes == record_bytes
    if codec != "bf16":
        assert [(f.name, f.dtype, f.shape) for f in spec.fields[:2]] == [
            ("taps", "uint8", (5, 5120 if codec == "mxfp8" else 2560)),
            ("tap_scales", "uint8", (5, 160)),
        ]
    if teacher == "top":
        assert [(f.name, f.dtype, f.shape) for f in spec.fields[-2:]] == [
            ("top_ids", "int32", (64,)),
            ("top_log_probs", "bfloat16", (64,)),
        ]


@pytest.mark.parametrize("codec", ["mxfp8", "mxfp4"])
def test_quantised_records_need_whole_groups(codec: str) -> None:
    with pytest.raises(UsageError) as caught:
        record_spec(2, 48, codec, "last")
    assert "width 48" in caught.value.found


@pytest.mark.parametrize(("taps", "hidden", "record_bytes"), [(1, 10, 64), (1, 16, 64), (2, 11, 128), (5, 576, 6912)])
def test_records_are_padded_to_64_bytes(taps: int, hidden: int, record_bytes: int) -> None:
    assert record_spec(taps, hidden, "bf16", "last").record_bytes == record_bytes


@given(taps=st.integers(1, 12), hidden=st.integers(1, 6000), teacher=st.sampled_from(TEACHERS))
def test_fields_follow_one_another_and_padding_is_less_than_an_alignment(taps: int, hidden: int, teacher: str) -> None:
    spec = record_spec(taps, hidden, "bf16", teacher)
    end = 0
    for field in spec.fields:
        assert field.offset % FIELD_ALIGNMENT == 0
        assert 0 <= field.offset - end < FIELD_ALIGNMENT
        end = field.offset + field.nbytes
    assert sum(field.nbytes for field in spec.fields) == 2 * hidden * taps + TEACHER_BYTES[teacher](hidden)
    assert spec.record_bytes % RECORD_ALIGNMENT == 0
    assert 0 <= spec.record_bytes - end < RECORD_ALIGNMENT


@pytest.mark.parametrize(("codec", "teacher"), [("fp32", "last"), ("bf16", "first"), ("", "none")])
def test_unknown_codecs_and_teachers_are_refused(codec: str, teacher: str) -> None:
    with pytest.raises(UsageError) as caught:
        record_spec(2, 16, codec, teacher)
    assert repr(codec) in caught.value.found
    assert repr(teacher) in caught.value.found


def test_field_view_is_a_view() -> None:
    spec = record_spec(3, 20, "bf16", "last")
    records = random_bytes(4, 7, spec.record_bytes)
    for name, shape in (("taps", (4, 7, 3, 20)), ("last", (4, 7, 20))):
        view = field_view(records, spec.field(name))
        assert view.shape == shape
        assert np.shares_memory(view, records)


def test_field_view_decodes_what_was_put() -> None:
    spec = record_spec(3, 20, "bf16", "last")
    records = np.zeros((6, spec.record_bytes), dtype=np.uint8)
    rng = np.random.default_rng(0)
    taps = rng.integers(0, 2**16, (6, 3, 20), dtype=np.uint16)
    last = rng.integers(0, 2**16, (6, 20), dtype=np.uint16)
    for token in range(6):  # byte by byte, as the format says
        raw = taps[token].astype("<u2").tobytes() + bytes(8) + last[token].astype("<u2").tobytes()  # 120 is no 16s
        records[token, : len(raw)] = np.frombuffer(raw, dtype=np.uint8)
    assert np.array_equal(field_view(records, spec.field("taps")), taps)
    assert np.array_equal(field_view(records, spec.field("last")), last)


def test_widening_is_exact_for_every_bfloat16() -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    wanted = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(widen_bfloat16(patterns).view(np.uint32), wanted.view(np.uint32))  # NaN payloads included


def test_widening_takes_views_and_keeps_their_shape() -> None:
    patterns = random_bytes(6, 8).view(np.uint16)[::2, 1:3]
    assert widen_bfloat16(patterns).shape == (3, 2)
    assert np.array_equal(widen_bfloat16(patterns), widen_bfloat16(patterns.copy()), equal_nan=True)


def test_the_fields_attribute_alone_decodes_a_record() -> None:
    spec = record_spec(3, 20, "bf16", "last")
    records = random_bytes(5, spec.record_bytes)
    attribute = json.loads(json.dumps(fields_attribute(spec)))

    found = {}
    for field in attribute:
        assert field["dtype"] == "bfloat16"
        cut = records[:, field["offset"] : field["offset"] + field["nbytes"]]
        found[field["name"]] = (cut.view("<u2").astype("<u4") << 16).view("<f4").reshape(-1, *field["shape"])

    assert list(found) == ["taps", "last"]
    for name, values in found.items():
        assert np.array_equal(values, widen_bfloat16(field_view(records, spec.field(name))), equal_nan=True)
