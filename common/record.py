"""What one token's record holds, field by field.

A record is R bytes: its fields one after another, each from a multiple of FIELD_ALIGNMENT, then zeros up to a multiple
of RECORD_ALIGNMENT. The same list stands in the store as the attribute `fields` of every `records` array, so that a few
lines of numpy decode it. With K tapped layers of width H:

    taps            codec bf16: bfloat16 [K, H]; mxfp8: uint8 [K, H] (e4m3); mxfp4: uint8 [K, H / 2] (e2m1 pairs)
    tap_scales      mxfp8 and mxfp4: uint8 [K, H / 32], powers of two
    last            teacher last: bfloat16 [H], the target's last hidden state after the final norm
    top_ids         teacher top: int32 [64], the most probable next tokens, best first
    top_log_probs   teacher top: bfloat16 [64], their log-probabilities under the target
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from draftcache.common.errors import UsageError
from draftcache.common.layout import RECORD_ALIGNMENT, round_up

CODECS = ("bf16", "mxfp8", "mxfp4")
TEACHERS = ("last", "top", "none")
TOP_K = 64
SCALE_GROUP = 32
FIELD_ALIGNMENT = 16
_STORED_AS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "uint8": np.dtype("u1"),
    "int32": np.dtype("<i4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a record: logical dtype, shape per token, and byte offset within the record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        return math.prod(self.shape) * _STORED_AS[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSpec:
    """The codec and fields of a record, and its padded size in bytes."""

    codec: str
    fields: tuple[Field, ...]
    record_bytes: int

    def field(self, name: str) -> Field:
        """The field called `name`; KeyError if the record has none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    def has(self, name: str) -> bool:
        """Whether the record holds a field called `name`."""
        return any(field.name == name for field in self.fields)


def record_spec(taps: int, hidden: int, codec: str, teacher: str) -> RecordSpec:
    """The record of a target of width `hidden` with `taps` tapped layers."""
    if codec not in CODECS or teacher not in TEACHERS:
        raise UsageError(
            f"codec {codec!r} with teacher {teacher!r}",
            needed=f"a codec of {list(CODECS)} and a teacher of {list(TEACHERS)}",
            do="choose one of each",
        )
    if codec != "bf16" and hidden % SCALE_GROUP:
        raise UsageError(
            f"codec {codec} with a target of width {hidden}",
            needed=f"a width that is a multiple of {SCALE_GROUP}",
            do="use --codec bf16",
        )
    parts: list[tuple[str, str, tuple[int, ...]]] = []
    if codec == "bf16":
        parts.append(("taps", "bfloat16", (taps, hidden)))
    else:
        parts.append(("taps", "uint8", (taps, hidden if codec == "mxfp8" else hidden // 2)))
        parts.append(("tap_scales", "uint8", (taps, hidden // SCALE_GROUP)))
    if teacher == "last":
        parts.append(("last", "bfloat16", (hidden,)))
    elif teacher == "top":
        parts += [("top_ids", "int32", (TOP_K,)), ("top_log_probs", "bfloat16", (TOP_K,))]
    fields: list[Field] = []
    end = 0
    for name, dtype, shape in parts:
        fields.append(Field(name=name, dtype=dtype, shape=shape, offset=round_up(end, FIELD_ALIGNMENT)))
        end = fields[-1].offset + fields[-1].nbytes
    return RecordSpec(codec=codec, fields=tuple(fields), record_bytes=round_up(end, RECORD_ALIGNMENT))


def field_view(
    records: npt.NDArray[np.uint8],  # [..., R]
    field: Field,
) -> npt.NDArray[Any]:  # [..., *field.shape]; bfloat16 appears as uint16
    """One field of an array of records, as a view without a copy."""
    cut = records[..., field.offset : field.offset + field.nbytes]
    return cut.view(_STORED_AS[field.dtype]).reshape(*records.shape[:-1], *field.shape)


def widen_bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """bfloat16 bit patterns (uint16) as float32, exactly."""
    return (np.ascontiguousarray(values, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def fields_attribute(spec: RecordSpec) -> list[dict[str, str | int | Sequence[int]]]:
    """The record's fields as the JSON attribute that the store carries."""
    return [
        {"name": f.name, "dtype": f.dtype, "shape": list(f.shape), "offset": f.offset, "nbytes": f.nbytes}
        for f in spec.fields
    ]
