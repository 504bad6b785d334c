"""Stock Zarr readers open a store of every codec and return the same bytes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorstore
import zarr
import zarrs  # noqa: F401 - importing it registers its pipeline

from draftcache.common.stats import read_row_records
from draftcache.common.store import Store
from draftcache.extract.run import extract
from draftcache.tests.stores import tiny_config

Reader = Callable[[Path], npt.NDArray[Any]]


def by_zarr(path: Path) -> npt.NDArray[Any]:
    """zarr-python with its own pipeline."""
    return np.asarray(zarr.open_array(str(path), mode="r")[...])


def by_zarrs(path: Path) -> npt.NDArray[Any]:
    """zarr-python with the zarrs pipeline."""
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return by_zarr(path)


def by_tensorstore(path: Path) -> npt.NDArray[Any]:
    """tensorstore's zarr3 driver."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(tensorstore.open(spec, read=True).result().read().result())


@pytest.mark.parametrize("reader", [by_zarr, by_zarrs, by_tensorstore])
@pytest.mark.parametrize(("codec", "teacher"), [("bf16", "last"), ("mxfp8", "top"), ("mxfp4", "top")])
def test_every_engine_returns_the_stored_records(
    tmp_path: Path, store: Store, target_folder: Path, codec: str, teacher: str, reader: Reader
) -> None:
    base = tiny_config(tmp_path / "store", target=target_folder, data=[store.path.parent / "data.jsonl"])
    made = extract(dataclasses.replace(base, codec=codec, teacher=teacher))
    for ceiling, bucket in made.buckets.items():
        array = reader(made.path / "buckets" / str(ceiling) / "records")
        for row, length in enumerate(bucket.samples.lengths.tolist()):
            assert np.array_equal(array[row, :length], read_row_records(bucket, row))
            assert not array[row, length:].any()
