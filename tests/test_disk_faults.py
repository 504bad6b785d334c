"""Disks, paths and rights that fail: one line, exit code 2, nothing lost, and `--resume` mends what can be mended."""

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch

from draftcache.common import manifest as manifests
from draftcache.common import tensors
from draftcache.common.errors import DamageError, StoreError
from draftcache.common.journal import FOLDER
from draftcache.common.store import Store
from draftcache.common.verify import verify_store
from draftcache.extract.plan import ExtractConfig
from draftcache.extract.run import extract
from draftcache.tests.commands import run
from draftcache.tests.stores import files_of, flip_bit, tiny_config, tiny_data

Capture = pytest.CaptureFixture[str]
JOURNAL = Path(FOLDER) / "rank-0.jsonl"


@pytest.fixture
def config(tmp_path: Path, store: Store, target_folder: Path) -> ExtractConfig:
    """The extraction that made the tiny store, into the copy's folder, to be resumed."""
    data = tiny_data(store.path.parent / "data.jsonl")
    return dataclasses.replace(tiny_config(tmp_path / "store", target=target_folder, data=[data]), resume=True)


def written_files(path: Path) -> dict[str, bytes]:
    """Every file but the journal, whose lines stand in the order of writing."""
    return {name: data for name, data in files_of(path).items() if not name.startswith(f"{FOLDER}/")}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, int], None]:
    """Makes the nth call of a function of `os` or `shutil` fail."""

    def fail(name: str, nth: int, number: int) -> None:
        module = shutil if hasattr(shutil, name) else os
        real, calls = getattr(module, name), list[int]()

        def failed(*args: object, **named: object) -> object:
            calls.append(1)
            if len(calls) == nth:
                raise OSError(number, os.strerror(number))
            return real(*args, **named)

        monkeypatch.setattr(module, name, failed)

    return fail


@pytest.mark.parametrize(("name", "nth"), [("pwritev", 1), ("pwritev", 5), ("fsync", 1), ("fsync", 8), ("copyfile", 2)])
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_failing_disk_is_one_error_and_resuming_goes_on(
    config: ExtractConfig,
    store: Store,
    failing: Callable[[str, int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    nth: int,
    number: int,
) -> None:
    failing(name, nth, number)
    with pytest.raises(StoreError, match=os.strerror(number)):
        extract(config)
    monkeypatch.undo()
    extract(config)
    assert written_files(config.store) == written_files(store.path)


def test_a_full_disk_under_safetensors_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_named: object) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    path = tmp_path / "x.safetensors"
    tensors.save_tensors(path, {"a": torch.ones(3)})
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode  # other users may read it
    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        tensors.save_tensors(path, {"a": torch.ones(3)})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


@pytest.mark.parametrize(
    "name",
    [
        "zarr.json",
        "buckets/64/records/zarr.json",
        "buckets/128/input_ids/zarr.json",
        "buckets/64/length/c/0",
        "target/config.json",
        "target/tokenizer.json",
        "target/embedding_and_head.safetensors",
    ],
)
@pytest.mark.parametrize("damage", [Path.unlink, lambda p: flip_bit(p, 12), lambda p: os.truncate(p, 20)])
def test_resuming_makes_damaged_files_again(
    copied: Store, store: Store, config: ExtractConfig, name: str, damage: Callable[[Path], object], capsys: Capture
) -> None:
    damage(copied.path / name)
    assert any(f"{name} is not the file" in line for line in verify_store(copied.path).damage)
    extract(config)
    assert "1 damaged files made again" in capsys.readouterr().err
    assert written_files(copied.path) == written_files(store.path)
    assert verify_store(copied.path).damage == ()


def test_resuming_puts_back_whole_folders(copied: Store, store: Store, config: ExtractConfig) -> None:
    shutil.rmtree(copied.path / "target")
    shutil.rmtree(copied.path / "buckets" / "64")
    extract(config)
    assert written_files(copied.path) == written_files(store.path)


def test_a_file_that_comes_out_otherwise_is_not_put_back(
    copied: Store, config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied.path / "zarr.json").unlink()
    monkeypatch.setattr("draftcache.extract.repair.digest_file", lambda _path: "another")
    before = files_of(copied.path)
    with pytest.raises(DamageError, match=r"zarr\.json is damaged, and comes out otherwise"):
        extract(config)
    assert files_of(copied.path) == before


def test_shards_whose_manifest_is_lost_are_not_swept_away(copied: Store, config: ExtractConfig) -> None:
    (copied.path / "manifest.json").unlink()
    before = files_of(copied.path)
    with pytest.raises(DamageError, match=r"a journal, but no manifest\.json"):
        extract(config)
    assert files_of(copied.path) == before
    extract(dataclasses.replace(config, resume=False, overwrite=True))
    assert verify_store(copied.path).damage == ()


def test_what_a_killed_repair_left_is_swept(copied: Store, store: Store, config: ExtractConfig) -> None:
    (copied.path / "tmpx.partial" / "buckets").mkdir(parents=True)
    (copied.path / "tmpx.partial" / "buckets" / "y.partial").touch()
    extract(config)
    assert written_files(copied.path) == written_files(store.path)
    assert not (copied.path / "tmpx.partial").exists()


def test_a_file_that_may_not_be_read_is_named(copied: Store, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def forbidden(_path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(manifests, "digest_file", forbidden)
    outcome = run(capsys, "verify", "--store", copied.path)
    assert outcome.code == 1
    assert f"damaged: {copied.path}/zarr.json cannot be read: Permission denied" in outcome.err


@pytest.mark.parametrize("name", ["manifest.json", JOURNAL])
def test_a_folder_in_a_files_place_is_one_line(copied: Store, capsys: Capture, name: str) -> None:
    (copied.path / name).unlink()
    (copied.path / name).mkdir()
    for command in ("verify", "stats"):
        outcome = run(capsys, command, "--store", copied.path)
        assert outcome.code in (1, 2)
        assert f"{copied.path / name} cannot be read: Is a directory" in outcome.message


def test_a_pipe_in_a_shards_place_is_not_waited_for(copied: Store) -> None:
    path = copied.buckets[64].shard_path(0)
    path.unlink()
    os.mkfifo(path)
    (damage,) = verify_store(copied.path).damage
    assert f"{path} is 0 bytes long" in damage


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_text_is_not_shown_with_another_tokenizer(copied: Store, capsys: Capture, name: str) -> None:
    path = copied.path / "target" / name
    path.write_bytes(path.read_bytes() + b"\n")
    outcome = run(capsys, "stats", "--store", copied.path, "--show", 1)
    assert outcome.code == 2
    assert f"{path} is not the file that extraction wrote" in outcome.message


@pytest.mark.parametrize("place", ["file/store", "link", "n" * 300])
def test_a_store_that_cannot_be_there_is_one_line(
    capsys: Capture, tmp_path: Path, target_folder: Path, place: str
) -> None:
    data = tiny_data(tmp_path / "data.jsonl", count=2)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    for command in ("extract", "verify", "stats"):
        more = ("--target", target_folder, "--data", data, "--device", "cpu") if command == "extract" else ()
        outcome = run(capsys, command, "--store", tmp_path / place, *more)
        assert outcome.code == 2
        assert outcome.message.startswith("draftcache: ")
        assert str(tmp_path) in outcome.message


def test_no_memory_is_one_line(capsys: Capture, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise MemoryError("Unable to allocate 4.97 PiB")

    monkeypatch.setattr("draftcache.common.stats.store_stats", refuse)
    outcome = run(capsys, "stats", "--store", store.path)
    assert (outcome.code, outcome.message) == (2, "draftcache: out of memory (Unable to allocate 4.97 PiB)")
