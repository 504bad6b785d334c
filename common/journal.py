"""The journal: the only word on which shards exist.

One file per writing process, one line of JSON with its own crc32c per shard, appended and flushed after the shard
itself is safe on disk. A shard written again has a second line, which counts. A torn last line is the mark of a crash:
readers leave it out, and the next writer cuts it off.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from draftcache.common.errors import DamageError
from draftcache.common.files import atomic_path, sync_directory
from draftcache.common.shard import crc32c

FOLDER = "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One committed shard."""

    bucket: int  # its ceiling
    shard: int
    size: int  # bytes
    digests: tuple[int, ...]  # of every row, see `shard.row_digest`
    void: tuple[int, ...] = ()  # rows of the shard with states not finite or all zero: nobody trains on them


class Journal:
    """Appends entries, each flushed to disk before `append` returns."""

    def __init__(self, store: Path, rank: int = 0) -> None:
        path = store / FOLDER / f"rank-{rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        whole = self._file.read().rfind(b"\n") + 1
        self._file.truncate(whole)
        sync_directory(path.parent)

    def append(self, entry: JournalEntry) -> None:
        """Record one shard that is safe on disk."""
        self._file.write(journal_line(entry))
        os.fsync(self._file.fileno())

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()


def read_journal(store: Path) -> Iterator[JournalEntry]:
    """The shards that a store's journals name; of two entries for one shard the later counts.

    Raises DamageError for a complete line that fails its checksum.
    """
    for path in journal_files(store):
        try:
            *lines, _torn = path.read_bytes().split(b"\n")
        except OSError as error:
            raise DamageError(
                f"{path} cannot be read: {error.strerror}", needed="a readable journal", do="check the store's folder"
            ) from None
        for number, line in enumerate(lines, 1):
            entry = _parse(line)
            if entry is None:
                raise DamageError(
                    f"{path}: line {number} fails its checksum",
                    needed="an undamaged journal",
                    do="delete the file and run `draftcache extract --resume`, which then writes its shards again",
                )
            yield entry


def merge_journals(store: Path, entries: Iterable[JournalEntry]) -> None:
    """Make these entries the whole journal, in rank 0's file, so that no other rank's older entry counts as the later.

    A crash in between leaves entries twice, never fewer.
    """
    first = store / FOLDER / "rank-0.jsonl"
    with atomic_path(first) as partial:
        partial.write_bytes(b"".join(map(journal_line, entries)))
    for path in journal_files(store):
        if path != first:
            path.unlink()
    sync_directory(store / FOLDER)


def journal_files(store: Path) -> list[Path]:
    """The journals that there are, one per rank that ever wrote."""
    return sorted((store / FOLDER).glob("rank-*.jsonl"))


def journal_line(entry: JournalEntry) -> bytes:
    """One entry as it is written."""
    values = {
        "bucket": entry.bucket,
        "shard": entry.shard,
        "size": entry.size,
        "digests": list(entry.digests),
        "void": list(entry.void),
    }
    return json.dumps(values | {"crc32c": _checksum(values)}).encode() + b"\n"


def _parse(line: bytes) -> JournalEntry | None:
    try:
        values = json.loads(line)
        checksum = values.pop("crc32c")
        if checksum != _checksum(values):
            return None
        return JournalEntry(**(values | {name: tuple(values[name]) for name in ("digests", "void")}))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def _checksum(values: dict[str, Any]) -> int:
    return crc32c(np.frombuffer(json.dumps(values, sort_keys=True).encode(), dtype=np.uint8))
