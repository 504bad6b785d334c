"""Writes safetensors files; what the file system refuses is an OSError, as for every other file."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftcache.common.errors import first_line


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write contiguous tensors on the host by their names. Raises OSError for a full or unwritable disk."""
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{path}: {first_line(error)}") from None
