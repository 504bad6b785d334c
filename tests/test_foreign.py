"""Arrays and shards that another tool wrote anew: read through zarr-python, and held against the journal's digests."""

import shutil
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from draftcache.common.errors import DamageError
from draftcache.common.stats import read_row_records
from draftcache.common.store import Store, open_store
from draftcache.common.verify import verify_store
from draftcache.tests.stores import flip_bit


def rewritten(store: Store, ceiling: int, **layout: Any) -> Store:
    """The store with one bucket's records written anew by zarr-python, in another layout if given."""
    path = store.path / "buckets" / str(ceiling) / "records"
    array: Any = zarr.open_array(str(path), mode="r")
    values, attributes, geometry = np.asarray(array[...]), dict(array.attrs), store.buckets[ceiling].geometry
    shutil.rmtree(path)
    ours = {
        "chunks": (1, 64, geometry.record_bytes),
        "shards": (geometry.rows, geometry.stride, geometry.record_bytes),
        "compressors": [Crc32cCodec()],
    }
    array = zarr.create_array(
        str(path), shape=values.shape, dtype="uint8", fill_value=0, attributes=attributes, **(ours | layout)
    )
    array[...] = values
    return open_store(store.path)


FOREIGN: dict[str, dict[str, Any]] = {
    "without gaps": {},
    "compressed": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "other chunks": {"chunks": (1, 32, 256)},
    "without shards": {"shards": None, "chunks": (2, 100, 256)},
}


@pytest.mark.parametrize("layout", FOREIGN)
def test_an_array_that_zarr_wrote_anew_is_read(copied: Store, store: Store, layout: str) -> None:
    bucket = rewritten(copied, 128, **FOREIGN[layout]).buckets[128]
    assert bucket.shard_path(0).read_bytes() != store.buckets[128].shard_path(0).read_bytes()
    for row in range(5):
        assert np.array_equal(read_row_records(bucket, row), read_row_records(store.buckets[128], row))


@pytest.mark.parametrize("layout", FOREIGN)
def test_an_array_that_zarr_wrote_anew_is_held_against_the_digests(copied: Store, layout: str) -> None:
    bucket = rewritten(copied, 128, **FOREIGN[layout]).buckets[128]
    array: Any = zarr.open_array(str(copied.path / "buckets/128/records"), mode="r+")
    array[2, 5, 9] = np.asarray(array[2, 5, 9]) ^ 1  # with checksums of its own
    for row in (0, 1, 3, 4):
        assert len(read_row_records(bucket, row))
    with pytest.raises(DamageError, match="holds in row 0 other data than was written there") as caught:
        read_row_records(bucket, 2)
    assert f"(samples {bucket.samples.samples[2]})" in caught.value.found


@pytest.mark.parametrize("layout", FOREIGN)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_to_an_array_that_zarr_wrote_anew_is_found(copied: Store, layout: str, damage: str) -> None:
    bucket = rewritten(copied, 128, **FOREIGN[layout]).buckets[128]
    folder = copied.path / "buckets" / "128" / "records" / "c"
    path = min(p for p in folder.rglob("*") if p.is_file())
    if damage == "flip":
        flip_bit(path, 1000)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()  # zarr reads a missing chunk as zeros
    with pytest.raises(DamageError) as caught:
        read_row_records(bucket, 0)
    assert str(bucket.samples.samples[0]) in caught.value.found


def test_a_shard_that_zarr_wrote_anew_verifies_as_long_as_it_holds_the_same_data(copied: Store) -> None:
    bucket = copied.buckets[128]
    array: Any = zarr.open_array(str(copied.path / "buckets/128/records"), mode="r+")
    array[2:4] = np.asarray(array[2:4])
    assert bucket.shard_path(1).stat().st_size < bucket.shard(1).size  # its gaps are gone
    assert verify_store(copied.path).damage == ()
    array[3, 0, 0] = np.asarray(array[3, 0, 0]) ^ 1
    (damage,) = verify_store(copied.path).damage
    assert str(bucket.shard_path(1)) in damage
    assert f"(samples {bucket.samples.samples[3]})" in damage


def test_verify_says_that_an_arrays_metadata_is_another(copied: Store) -> None:
    rewritten(copied, 128, **FOREIGN["compressed"])
    (damage,) = verify_store(copied.path).damage
    assert "buckets/128/records/zarr.json is not the file that extraction wrote" in damage
