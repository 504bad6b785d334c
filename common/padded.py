"""A bucket's small arrays: ids and masks lie padded in the store, [samples, ceiling], and back to back in memory."""

from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

_CHUNK_BYTES = 4 << 20
_BLOCK_BYTES = 4 * _CHUNK_BYTES


def write_array(group: zarr.Group, name: str, values: npt.NDArray[Any], chunk_rows: int) -> None:
    """Write one compressed, checked array."""
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=(chunk_rows, *values.shape[1:]),
        compressors=[ZstdCodec(level=3), Crc32cCodec()],
        fill_value=0,
    )
    array[...] = values


def write_padded(
    group: zarr.Group,
    name: str,
    flat: npt.NDArray[Any],  # [tokens]
    lengths: npt.NDArray[np.int64],  # [N]
    ceiling: int,
) -> None:
    """Write samples that lie back to back as an array [N, ceiling]."""
    padded = np.zeros((len(lengths), ceiling), dtype=flat.dtype)
    padded[_real_tokens(lengths, ceiling)] = flat
    write_array(group, name, padded, max(1, _CHUNK_BYTES // (ceiling * flat.itemsize)))


def read_array(stored: object, rows: slice = slice(None)) -> npt.NDArray[Any]:
    """All of a stored array, or some rows of it."""
    assert isinstance(stored, zarr.Array), "a group in an array's place"
    return np.asarray(stored[rows])


def read_padded(
    stored: object,  # [N, ceiling]
    lengths: npt.NDArray[np.int64],  # [N]
) -> npt.NDArray[Any]:  # [tokens]
    """The samples of a padded array back to back; some rows at a time, since padding may be most of it."""
    assert isinstance(stored, zarr.Array), "a group in an array's place"
    count, ceiling = stored.shape
    flat = np.empty(int(lengths.sum()), dtype=stored.dtype)
    step = max(1, _BLOCK_BYTES // (ceiling * stored.dtype.itemsize) // stored.chunks[0]) * stored.chunks[0]
    used = 0
    for begin in range(0, count, step):
        part = read_array(stored, slice(begin, begin + step))
        real = part[_real_tokens(lengths[begin : begin + step], ceiling)]
        flat[used : used + len(real)] = real
        used += len(real)
    return flat


def _real_tokens(lengths: npt.NDArray[np.int64], ceiling: int) -> npt.NDArray[np.bool_]:
    """[N, ceiling] bool, True where a padded row holds a token."""
    return np.arange(ceiling)[None, :] < lengths[:, None]
