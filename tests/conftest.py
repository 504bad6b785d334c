"""A tiny target, its tokenizer and a store made from it, built once a run and read only: copy before changing one.

The builders are imported inside, so that tests without a model start without torch and transformers.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from draftcache.common.store import Store


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny target, head not tied."""
    from draftcache.tests.stores import tiny_target

    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tokenizer(target_folder: Path) -> Any:
    """The tiny target's tokenizer, as extraction loads it."""
    from draftcache.common.target import load_tokenizer

    return load_tokenizer(target_folder)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> "Store":
    """A finished store of 14 samples in 9 shards of 3 buckets."""
    from draftcache.tests.stores import tiny_store

    return tiny_store(tmp_path_factory.mktemp("store"), target=target_folder)
