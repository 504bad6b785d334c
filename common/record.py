"""What one token's record holds, field by field.

A record is R bytes: the fields below, one after another, padded with zeros to a multiple of RECORD_ALIGNMENT. The same
list stands in the store as the attribute `fields` of every `records` array, so a few lines of numpy decode it.

    taps   [K, H] bfloat16   outputs of the tapped decoder layers, in the manifest's order
    last   [H]    bfloat16   the target's last hidden state, after the final norm (teacher "last")
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from draftcache.common.errors import UsageError
from draftcache.common.layout import RECORD_ALIGNMENT, round_up

CODECS = ("bf16",)
TEACHERS = ("last", "none")
_STORED_AS: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype("<u2"), "uint8": np.dtype("u1"), "int32": np.dtype("<i4")}


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
    """The fields of a record and its padded size in bytes."""

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
    parts: list[tuple[str, str, tuple[int, ...]]] = [("taps", "bfloat16", (taps, hidden))]
    if teacher == "last":
        parts.append(("last", "bfloat16", (hidden,)))
    fields: list[Field] = []
    offset = 0
    for name, dtype, shape in parts:
        fields.append(Field(name=name, dtype=dtype, shape=shape, offset=offset))
        offset += fields[-1].nbytes
    return RecordSpec(fields=tuple(fields), record_bytes=round_up(offset, RECORD_ALIGNMENT))


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
