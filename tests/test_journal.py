"""The journal: entries survive in order, a torn line is left out, and no damage to a line goes unnoticed."""

import json
import os
from pathlib import Path

import pytest

from draftcache.common.errors import DamageError
from draftcache.common.journal import Journal, JournalEntry, _checksum, read_journal

JOURNAL = Path("journal") / "rank-0.jsonl"
ENTRIES = [
    JournalEntry(bucket=8192, shard=0, size=123_456, digests=(0, 1, 2**32 - 1)),
    JournalEntry(bucket=8192, shard=1, size=99, digests=(3, 3), void=(0, 1)),
    JournalEntry(bucket=770, shard=0, size=2**40, digests=tuple(range(59))),
]


def write_journal(path: Path) -> Path:
    """Append ENTRIES through `Journal`; returns the journal's file."""
    with Journal(path) as journal:
        for entry in ENTRIES:
            journal.append(entry)
    return path / JOURNAL


def test_the_journal_keeps_entries_in_order(tmp_path: Path) -> None:
    write_journal(tmp_path)
    assert list(read_journal(tmp_path)) == ENTRIES


def test_without_a_journal_nothing_exists(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path)) == []


def test_a_journal_opened_again_goes_on(tmp_path: Path) -> None:
    write_journal(tmp_path)
    with Journal(tmp_path) as journal:
        journal.append(ENTRIES[0])
    assert list(read_journal(tmp_path)) == [*ENTRIES, ENTRIES[0]]


def test_an_entry_is_flushed_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flushed = os.fsync, list[int]()

    def watched(fd: int) -> None:
        flushed.append(os.fstat(fd).st_size)
        real(fd)

    with Journal(tmp_path) as journal:
        monkeypatch.setattr(os, "fsync", watched)
        journal.append(ENTRIES[0])
        assert flushed == [(tmp_path / JOURNAL).stat().st_size]
        assert list(read_journal(tmp_path)) == ENTRIES[:1]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    file = write_journal(tmp_path)
    whole = file.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for kept in range(len(last)):  # every possible tear, down to nothing
        file.write_bytes(whole[: len(whole) - len(last) + kept])
        assert list(read_journal(tmp_path)) == ENTRIES[:2]


def test_a_flipped_bit_in_a_complete_line_is_damage(tmp_path: Path) -> None:
    file = write_journal(tmp_path)
    whole = file.read_bytes()
    first = len(whole.splitlines(keepends=True)[0])
    for at in range(first):  # its newline included
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(DamageError) as caught:
            list(read_journal(tmp_path))
        assert f"{file}: line 1 " in caught.value.found


def test_damage_in_the_middle_names_its_line(tmp_path: Path) -> None:
    file = write_journal(tmp_path)
    first, second, third = file.read_bytes().splitlines(keepends=True)
    for second_line in (b"\n", b"null\n", b"[]\n", second[:20] + b"\n", second.replace(b"1", b"2", 1)):
        file.write_bytes(first + second_line + third)
        with pytest.raises(DamageError) as caught:
            list(read_journal(tmp_path))
        assert "line 2 " in caught.value.found


def test_a_line_without_digests_is_damage(tmp_path: Path) -> None:
    file = write_journal(tmp_path)
    values = {"bucket": 8192, "shard": 0, "size": 9, "void": []}
    file.write_bytes(json.dumps(values | {"crc32c": _checksum(values)}).encode() + b"\n")
    with pytest.raises(DamageError) as caught:
        list(read_journal(tmp_path))
    assert "line 1 " in caught.value.found
