"""Opens and creates the Zarr group, its small arrays and its shards; knows from the journal what must exist.

Order of creation: group, ids and masks and lengths of all samples, the target's parts, manifest. Then shard after
shard, and only after a shard is safe on disk does the journal learn of it. So whatever the moment of a crash, what the
journal names is whole.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import Crc32cCodec

from draftcache.common.errors import DamageError, StoreError, first_line
from draftcache.common.files import PARTIAL_SUFFIX
from draftcache.common.journal import FOLDER as JOURNAL_FOLDER
from draftcache.common.journal import JournalEntry, read_journal
from draftcache.common.layout import CHUNK_TOKENS, ShardGeometry, row_stride
from draftcache.common.manifest import MANIFEST_NAME, BucketSummary, Manifest, StoredFile, digest_file, read_manifest
from draftcache.common.padded import read_array, read_padded, write_array, write_padded
from draftcache.common.record import RecordSpec, fields_attribute
from draftcache.common.shard import Bytes, RowReader, ShardFile, check_digest, crc32c, shard_damage


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSamples:
    """Ids, masks and lengths of one bucket's samples, back to back. Sample i lies at offsets[i] : offsets[i + 1]."""

    ceiling: int
    samples: npt.NDArray[np.int64]  # [N] 0-based line number over all data files
    offsets: npt.NDArray[np.int64]  # [N + 1]
    input_ids: npt.NDArray[np.int32]  # [tokens]
    loss_mask: npt.NDArray[np.uint8]  # [tokens]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[N] real tokens of each sample."""
        return np.diff(self.offsets)

    def rows(self, rows: range) -> tuple[list[int], list[int]]:
        """Lengths and sample numbers of consecutive rows."""
        lengths: list[int] = np.diff(self.offsets[rows.start : rows.stop + 1]).tolist()
        return lengths, self.samples[rows.start : rows.stop].tolist()

    def tokens(self, row: int) -> slice:
        """Where the tokens of one row lie in `input_ids` and `loss_mask`."""
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))

    def digest(self) -> int:
        """crc32c over all four arrays."""
        return crc32c(np.array([crc32c(a) for a in (self.samples, self.offsets, self.input_ids, self.loss_mask)]))


class Bucket:
    """One bucket of an open store: its samples and where its shards lie."""

    def __init__(self, store: Path, summary: BucketSummary, record: RecordSpec) -> None:
        self.ceiling = summary.ceiling
        self.rows = summary.rows
        self.geometry = ShardGeometry(rows=summary.rows, ceiling=summary.ceiling, record_bytes=record.record_bytes)
        self.committed: dict[int, JournalEntry] = {}
        """What the journal says of this bucket's shards, by number; empty until `Store.read_journal`."""
        self.void_rows: frozenset[int] = frozenset()
        """The bucket's rows that the journal calls void: nobody trains on them."""
        self._folder = store / bucket_path(summary.ceiling)
        self._digest = summary.digest
        self._shards: dict[int, ShardFile] = {}

    @cached_property
    def samples(self) -> BucketSamples:
        """Ids, masks and lengths, read and checked once."""
        samples = _read_samples(self._folder, self.ceiling)
        if samples.digest() != self._digest:
            raise DamageError(
                f"{self._folder}: ids, masks or lengths differ from the manifest's digest",
                needed="the arrays that were written",
                do="run extract --resume",
            )
        return samples

    @property
    def shard_count(self) -> int:
        """Number of shards this bucket has when complete."""
        return -(-len(self.samples.samples) // self.rows)

    def shard_rows(self, shard: int) -> range:
        """The bucket's rows that this shard holds."""
        return range(shard * self.rows, min((shard + 1) * self.rows, len(self.samples.samples)))

    def shard_path(self, shard: int) -> Path:
        """The shard's file."""
        return self._folder / "records" / "c" / str(shard) / "0" / "0"

    @cached_property
    def aligned(self) -> bool:
        """Whether the shards have this project's layout; another tool may have written the array anew."""
        path = self._folder / "records" / "zarr.json"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise DamageError(
                f"{path}: {first_line(error)}", needed="the array's metadata", do="run extract --resume"
            ) from None
        try:
            grid, codec = found["chunk_grid"]["configuration"]["chunk_shape"], found["codecs"][0]["configuration"]
            chunks, codecs = codec["chunk_shape"], [c["name"] for c in codec["codecs"]]
        except (LookupError, TypeError):  # an array without shards, or whatever zarr-python makes of it
            return False
        g = self.geometry
        ours = [g.rows, g.stride, g.record_bytes], [1, CHUNK_TOKENS, g.record_bytes], ["bytes", "crc32c"]
        return (grid, chunks, codecs) == ours

    def learn(self, committed: dict[int, JournalEntry]) -> None:
        """Take over what the journal says."""
        self.committed = committed
        self.void_rows = frozenset(n * self.rows + row for n, entry in committed.items() for row in entry.void)
        self._shards = {}

    def shard(self, number: int) -> ShardFile:
        """One shard as it must be. Raises DamageError unless the journal names it and agrees with the plan."""
        found = self._shards.get(number)
        if found is None:
            found = self._shards[number] = self._shard(number)
        return found

    def _shard(self, number: int) -> ShardFile:
        lengths, samples = self.samples.rows(self.shard_rows(number))
        entry = self.committed.get(number)
        path = self.shard_path(number)
        if entry is None:
            raise shard_damage(path, samples, "is not in the journal")
        shard = ShardFile(
            path=path, geometry=self.geometry, lengths=tuple(lengths), samples=tuple(samples), digests=entry.digests
        )
        if (len(entry.digests), entry.size) != (len(lengths), shard.size):
            found = f"has {len(entry.digests)} rows in {entry.size} bytes by the journal"
            raise shard_damage(path, samples, f"{found}, {len(lengths)} in {shard.size} by the plan")
        return shard

    def read_row(self, reader: RowReader, row: int, out: Bytes) -> int:
        """Fill `out` ([at least the row's chunks] uint8) with one row's records, all checked; returns bytes read.

        An array, or a single shard, that another tool wrote anew is read through zarr-python, and held against the
        journal's digests too.
        """
        shard, position = self.shard(row // self.rows), row % self.rows
        if not self.aligned:
            return self._read_foreign(shard, row, position, out)
        try:
            return reader.read_row(shard, position, out)
        except DamageError:
            if not _is_packed(shard):
                raise
        return self._read_foreign(shard, row, position, out)

    def _read_foreign(self, shard: ShardFile, row: int, position: int, out: Bytes) -> int:
        length = shard.lengths[position]
        try:
            array = zarr.open_array(str(self._folder / "records"), mode="r")
            values = np.asarray(array[row, :length])
        except Exception as error:  # zarr raises a dozen unrelated types
            raise DamageError(
                f"{self._folder}/records: {first_line(error)} (sample {shard.samples[position]})",
                needed="an array that zarr-python reads",
                do="run extract --resume",
            ) from None
        out[: values.size] = values.reshape(-1)
        out[values.size :] = 0
        live, size = self.geometry.live_chunks(length), self.geometry.chunk_bytes
        check_digest(shard, position, [crc32c(chunk) for chunk in out[: live * size].reshape(live, size)])
        return values.size


class Store:
    """An open store."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.buckets = {s.ceiling: Bucket(path, s, manifest.record) for s in manifest.buckets}

    def read_journal(self) -> None:
        """Learn which shards exist. Raises DamageError for a damaged journal, or one that names a stranger."""
        found: dict[int, dict[int, JournalEntry]] = {ceiling: {} for ceiling in self.buckets}
        for entry in read_journal(self.path):
            bucket = self.buckets.get(entry.bucket)
            if bucket is None or entry.shard >= bucket.shard_count:
                raise DamageError(
                    f"{self.path}: the journal names shard {entry.shard} of bucket {entry.bucket}, not in the plan",
                    needed="the journal of this store",
                    do="delete its folder and run `draftcache extract --resume`, which then writes every shard again",
                )
            found[entry.bucket][entry.shard] = entry
        for ceiling, bucket in self.buckets.items():
            bucket.learn(found[ceiling])

    @property
    def void_samples(self) -> int:
        """Samples that the journal calls void."""
        return sum(len(bucket.void_rows) for bucket in self.buckets.values())

    def check_complete(self) -> None:
        """Raise StoreError unless the journal names every shard."""
        expected = sum(bucket.shard_count for bucket in self.buckets.values())
        held = sum(len(bucket.committed) for bucket in self.buckets.values())
        if held < expected:
            raise StoreError(
                f"{self.path} holds {held} of {expected} shards",
                needed="a finished extraction",
                do="run `draftcache extract --resume` with the first run's settings",
            )


def open_store(path: Path) -> Store:
    """Open a store for reading. Raises StoreError if it is none, of another layout, or not finished."""
    store = Store(path, read_manifest(path))
    store.read_journal()
    store.check_complete()
    return store


def create_store(path: Path, record: RecordSpec, rows: dict[int, int], buckets: Iterable[BucketSamples]) -> None:
    """Write the Zarr group with every bucket's small arrays and empty record array. The manifest follows later.

    `rows` gives rows per shard by ceiling. Raises StoreError if `path` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise StoreError(
            f"{path} exists", needed="a new folder for the store", do="choose another, or pass --overwrite"
        )
    root = zarr.create_group(str(path), zarr_format=3, attributes={"draftcache": "see manifest.json"})
    for bucket in buckets:
        group = root.create_group(bucket_path(bucket.ceiling), overwrite=False)
        count = len(bucket.samples)
        write_padded(group, "input_ids", bucket.input_ids, bucket.lengths, bucket.ceiling)
        write_padded(group, "loss_mask", bucket.loss_mask, bucket.lengths, bucket.ceiling)
        write_array(group, "length", bucket.lengths.astype(np.int32), max(count, 1))
        write_array(group, "sample", bucket.samples, max(count, 1))
        group.create_array(
            "records",
            shape=(count, bucket.ceiling, record.record_bytes),
            dtype="uint8",
            chunks=(1, CHUNK_TOKENS, record.record_bytes),
            shards=(rows[bucket.ceiling], row_stride(bucket.ceiling), record.record_bytes),
            compressors=[Crc32cCodec()],
            fill_value=0,
            attributes={"fields": fields_attribute(record), "record_bytes": record.record_bytes},
            dimension_names=("row", "token", "byte"),
        )


def bucket_path(ceiling: int) -> str:
    """A bucket's group within the store."""
    return f"buckets/{ceiling}"


def is_store(path: Path) -> bool:
    """Whether `path` holds a store, or what a crash left of the making of one."""
    return (path / MANIFEST_NAME).exists() or (path / "zarr.json").exists()


def clear_store(path: Path) -> None:
    """Remove everything in a store's folder, the journal first: without it nothing counts. The folder stays."""
    for child in sorted(path.iterdir(), key=lambda child: child.name != JOURNAL_FOLDER):
        shutil.rmtree(child) if child.is_dir() else child.unlink()


@contextmanager
def lock_store(path: Path) -> Iterator[None]:
    """Hold a store's folder against every other writer; StoreError if one holds it. Makes the folder if need be."""
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", needed="a folder to write into", do="choose another") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StoreError(f"{path} is being written by another run", needed="one writer", do="wait for it") from None
    finally:
        os.close(fd)
        if made and not any(path.iterdir()):
            path.rmdir()


def committed_files(path: Path) -> tuple[StoredFile, ...]:
    """Every file that the making of a store wrote before the first shard, with size and SHA-256, by name."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.endswith(PARTIAL_SUFFIX))
    return tuple(StoredFile(name=str(p.relative_to(path)), size=p.stat().st_size, digest=digest_file(p)) for p in files)


def _is_packed(shard: ShardFile) -> bool:
    """Whether a shard has the size that stock Zarr gives it, which puts no gaps between chunks."""
    packed = shard.geometry.packed_bytes(list(shard.lengths))
    return shard.path.is_file() and shard.path.stat().st_size == packed


def _read_samples(folder: Path, ceiling: int) -> BucketSamples:
    try:
        group = zarr.open_group(str(folder), mode="r")
        samples, lengths = read_array(group["sample"]), read_array(group["length"]).astype(np.int64)
        input_ids, loss_mask = (read_padded(group[name], lengths) for name in ("input_ids", "loss_mask"))
    except Exception as error:  # zarr raises a dozen unrelated types for damaged metadata and chunks
        raise DamageError(
            f"{folder}: {type(error).__name__}: {error}",
            needed="readable ids, masks and lengths",
            do="run extract --resume",
        ) from None
    return BucketSamples(
        ceiling=ceiling,
        samples=samples,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        input_ids=input_ids,
        loss_mask=loss_mask,
    )
