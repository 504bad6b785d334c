"""Writes safetensors files: readable as other files are, and a disk that fails is an OSError here too."""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write named tensors to `path`. Raises OSError, for example when the disk is full."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from None
    path.chmod(mode)  # safetensors keeps its files from other users
