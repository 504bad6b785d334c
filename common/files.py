"""Files that are there whole or not at all: written aside, flushed to disk, then moved into place by one rename."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftcache.common.errors import UsageError

PARTIAL_SUFFIX = ".partial"


def check_writable(path: Path, flag: str) -> None:
    """Raise UsageError, before the work whose result goes there, if `path` cannot become a file."""
    folder = path.parent
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK) or path.is_dir():
        raise UsageError(f"{flag} {path}", needed="a file in a folder that can be written", do=f"correct {flag}")


def sync_file(path: Path) -> None:
    """Flush a file's bytes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's entries, so that a rename in it survives a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; on success flush it and rename it to `path`, on error remove it."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        yield partial
        sync_file(partial)
        partial.replace(path)
        sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")
