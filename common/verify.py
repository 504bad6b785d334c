"""Reads a whole store back and says what is not as it was written: every file, checksum, gap and journal line."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from draftcache.common.errors import DamageError
from draftcache.common.files import PARTIAL_SUFFIX
from draftcache.common.journal import FOLDER as JOURNAL_FOLDER
from draftcache.common.manifest import MANIFEST_NAME, check_file, read_manifest
from draftcache.common.memory import aligned_bytes
from draftcache.common.shard import Bytes, RowReader
from draftcache.common.store import Bucket, Store

THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was checked, what is damaged (one line each), and files that nobody reads.

    `samples` are those to train on; `void` ones, whose states are not finite or all zero, are checked but not counted.
    """

    files: int
    shards: int
    samples: int
    void: int
    bytes_read: int
    damage: tuple[str, ...]
    strays: tuple[str, ...]


def verify_store(path: Path) -> VerifyReport:
    """Check every byte of a store. Raises StoreError if there is none, and DamageError if its manifest is damaged."""
    store = Store(path, read_manifest(path))
    damage = [error.found for file in store.manifest.files if (error := file_damage(store, file.name))]
    shards = bytes_read = 0
    try:
        for result in check_shards(store, "verify"):
            shards += 1
            if result.damage is not None:
                damage.append(result.damage.found)
            bytes_read += result.bytes_read
    except DamageError as error:  # of the journal, or of the ids that say what a shard must hold
        damage.append(error.found)
    return VerifyReport(
        files=len(store.manifest.files),
        shards=shards,
        samples=sum(summary.samples for summary in store.manifest.buckets) - store.void_samples,
        void=store.void_samples,
        bytes_read=bytes_read,
        damage=tuple(dict.fromkeys(damage)),
        strays=tuple(_strays(store)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedShard:
    """One shard read whole: the error that says what is wrong with it, or None."""

    bucket: int
    shard: int
    bytes_read: int
    damage: DamageError | None


def check_shards(store: Store, title: str) -> Iterator[CheckedShard]:
    """Read every shard that the store must have, several at a time; `title` names the progress bar.

    Raises DamageError if the journal, or the ids that say what a shard must hold, are damaged themselves.
    """
    store.read_journal()
    work = [(bucket, shard) for bucket in store.buckets.values() for shard in range(bucket.shard_count)]
    longest = max(bucket.geometry.row_bytes for bucket in store.buckets.values())
    scratch: SimpleQueue[tuple[RowReader, Bytes]] = SimpleQueue()
    for _ in range(THREADS):
        scratch.put((RowReader(past_cache=True), aligned_bytes(longest)))

    def check(item: tuple[Bucket, int]) -> CheckedShard:
        bucket, shard = item
        reader, out = scratch.get()
        try:
            return _check_shard(bucket, shard, reader, out)
        finally:
            scratch.put((reader, out))

    with ThreadPoolExecutor(THREADS) as pool, tqdm(total=len(work), desc=title, unit=" shards", disable=None) as bar:
        for result in pool.map(check, work):
            bar.update()
            yield result


def _check_shard(bucket: Bucket, shard: int, reader: RowReader, out: Bytes) -> CheckedShard:
    read, damage, geometry = 0, None, bucket.geometry
    try:
        lengths = bucket.shard(shard).lengths
        for row, length in zip(bucket.shard_rows(shard), lengths, strict=True):
            read += bucket.read_row(reader, row, out[: geometry.live_chunks(length) * geometry.chunk_bytes])
    except DamageError as error:
        damage = error
    return CheckedShard(bucket=bucket.ceiling, shard=shard, bytes_read=read, damage=damage)


def leftovers(path: Path) -> list[Path]:
    """Files and folders that a killed run left unfinished."""
    return sorted(path.rglob(f"*{PARTIAL_SUFFIX}"))


def file_damage(store: Store, name: str) -> DamageError | None:
    """What is wrong with a file that the manifest lists, or None."""
    try:
        check_file(store.path, store.manifest, name)
    except DamageError as error:
        return error
    return None


def _strays(store: Store) -> Iterator[str]:
    known = {MANIFEST_NAME} | {file.name for file in store.manifest.files}
    known |= {
        str(store.buckets[summary.ceiling].shard_path(shard).relative_to(store.path))
        for summary in store.manifest.buckets  # not from the ids, which may be what is damaged
        for shard in range(-(-summary.samples // summary.rows))
    }
    for path in sorted(p for p in store.path.rglob("*") if p.is_file()):
        name = str(path.relative_to(store.path))
        if name not in known and path.parent.name != JOURNAL_FOLDER:
            yield name
