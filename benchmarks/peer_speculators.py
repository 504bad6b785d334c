"""The speculators package as a peer: imports its DFlash model without the packages that only its data path needs.

Install it with `pip install --no-deps speculators==0.9.0 pydantic-settings`. It also asks for an older transformers
than this project's and for packages of its training pipeline; the model itself works without.
"""

import importlib
import importlib.util
import sys
import types
from typing import Any

_UNUSED = (
    "openai",
    "openai.types",
    "openai.types.chat",
    "openai.types.completion",
    "datasets",
    "hs_connectors",
    "aiohttp",
    "httpx",
    "loguru",
)


class _Placeholder(types.ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("speculators") is not None


def import_dflash() -> tuple[Any, Any]:
    """The package's DFlash modules `core` and `config`. Its compiled mask builder, which can hang, is switched off."""
    for name in _UNUSED:
        parent = name.partition(".")[0]
        if name not in sys.modules and (parent in sys.modules or importlib.util.find_spec(parent) is None):
            sys.modules[name] = _Placeholder(name)
    core = importlib.import_module("speculators.models.dflash.core")
    core._compiled_create_block_mask = core.create_block_mask  # type: ignore[attr-defined]
    return core, importlib.import_module("speculators.models.dflash.config")
