"""A tiny target, its tokenizer and a store made from it, built once a run and read only: copy before changing one.

The builders are imported inside, so that tests without a model start without torch and transformers.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

if TYPE_CHECKING:
    from draftcache.common.store import Store
    from draftcache.common.target import Target


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Ctrl-C works, also where a shell that put the tests into the background had switched it off."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny target, head not tied."""
    from draftcache.tests.stores import tiny_target

    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_folder: Path) -> "Target":
    """The tiny target, loaded."""
    import torch

    from draftcache.common.target import load_target

    return load_target(target_folder, torch.device("cpu"))


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


@pytest.fixture
def copied(store: "Store", tmp_path: Path) -> "Store":
    """A copy of the tiny store that may be damaged."""
    from draftcache.common.store import open_store

    shutil.copytree(store.path, tmp_path / "store")
    return open_store(tmp_path / "store")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six good lines in all three buckets."""
    from draftcache.tests.stores import tiny_data

    return tiny_data(tmp_path / "data.jsonl", count=6)
