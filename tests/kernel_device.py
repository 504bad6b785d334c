"""Where kernels are tested: on CUDA if there is a device, else on the CPU in Triton's interpreter (see conftest.py)."""

import importlib
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The interpreter runs one program after another in Python: tests keep their shapes small there."""


def kernels(module: str) -> Any:
    """A module of Triton kernels."""
    pytest.importorskip("triton")
    return importlib.import_module(f"draftcache.{module}")
