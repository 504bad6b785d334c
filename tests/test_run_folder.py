"""A run's folder: what may become one, what mistakes leave there (nothing), and which damage in it is found (all)."""

import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from draftcache.common.errors import CheckpointError, DraftcacheError, StoreError
from draftcache.common.store import Store
from draftcache.tests.commands import run
from draftcache.tests.runs import outcome, small_run, steps_until
from draftcache.tests.stores import files_of, flip_bit
from draftcache.train.checkpoint import checkpoints, load_drafter, newest_checkpoint, read_progress
from draftcache.train.run import resume, train
from draftcache.train.serving.export import ExportConfig, export

Capture = pytest.CaptureFixture[str]
SMALL = ("--num-layers", 1, "--block-size", 4, "--token-budget", 256, "--steps", 2)
CHECKPOINT_FILES = ("drafter.safetensors", "optimizer.safetensors", "state.json")
DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": lambda path: flip_bit(path, path.stat().st_size // 2),
    "flipped-at-the-end": lambda path: flip_bit(path, -9),
    "missing": lambda path: path.unlink(),
    "null": lambda path: path.write_text("null"),
    "a-list": lambda path: path.write_text("[]"),
    "another-object": lambda path: path.write_text('{"step": 1}'),
    "a-folder": lambda path: path.rename(path.with_suffix(".file")).parent.joinpath(path.name).mkdir(),
}


@pytest.fixture(scope="module")
def trained(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(small_run(store, out, steps=4))
    return out


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [*CHECKPOINT_FILES, "run.json"])
def test_whatever_happened_to_a_file_of_a_checkpoint_is_found(
    trained: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """A flipped bit in weights or moments too, which no format would notice."""
    run_folder = shutil.copytree(trained, tmp_path / "run")
    checkpoint = newest_checkpoint(run_folder)
    DAMAGE[kind](run_folder / name if name == "run.json" else checkpoint / name)
    before = files_of(run_folder)
    with pytest.raises(DraftcacheError):
        resume(run_folder, {})
    assert files_of(run_folder) == before
    if name == "optimizer.safetensors":
        return  # nobody who serves a drafter reads it
    with pytest.raises(CheckpointError):
        export(ExportConfig(checkpoint=checkpoint, out=tmp_path / "exported"))
    assert not (tmp_path / "exported").exists()


def test_every_digit_of_a_state_counts(trained: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(trained, tmp_path / "run")
    path = newest_checkpoint(run_folder) / "state.json"
    path.write_text(path.read_text().replace('"batch": ', '"batch": 1'))
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        read_progress(path.parent)


def test_a_run_whose_geometry_was_edited_is_refused(trained: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(trained, tmp_path / "run")
    path = run_folder / "run.json"
    path.write_text(path.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 1000000.0'))
    with pytest.raises(CheckpointError, match=r"run\.json has changed"):
        load_drafter(run_folder, torch.device("cpu"))


def test_after_a_damaged_checkpoint_is_removed_the_one_before_it_counts(trained: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(trained, tmp_path / "run")
    flip_bit(newest_checkpoint(run_folder) / "optimizer.safetensors", -100)
    with pytest.raises(CheckpointError, match="remove this checkpoint"):
        resume(run_folder, {})
    shutil.rmtree(newest_checkpoint(run_folder))
    resume(run_folder, {})
    assert outcome(run_folder) == outcome(trained)


@pytest.mark.parametrize("name", ["metrics.jsonl", "validation.jsonl"])
@pytest.mark.parametrize("text", ['{"step": 1}\n', "null\n", "{\n", '"\udcff"\n'], ids=str)
def test_a_damaged_log_is_named(trained: Path, tmp_path: Path, name: str, text: str) -> None:
    run_folder = shutil.copytree(trained, tmp_path / "run")
    (run_folder / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=name):
        resume(run_folder, {})
    with pytest.raises(CheckpointError, match=name):
        export(ExportConfig(checkpoint=run_folder, out=tmp_path / "exported"))
    assert (run_folder / name).read_bytes() == text.encode(errors="surrogateescape")


def test_a_folder_that_holds_something_else_is_left_alone(store: Store, tmp_path: Path) -> None:
    """Pruning would take another tool's checkpoints for its own."""
    out = tmp_path / "other"
    (out / "checkpoint-500").mkdir(parents=True)
    (out / "checkpoint-500" / "weights").write_text("a week's work")
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match="holds checkpoint-500"):
        train(small_run(store, out, steps=1))
    assert files_of(tmp_path) == before


def test_a_store_is_no_folder_for_a_run(store: Store) -> None:
    before = files_of(store.path)
    with pytest.raises(CheckpointError, match="needed: a new folder"):
        train(small_run(store, store.path, steps=1))
    assert files_of(store.path) == before


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/draftcache"])
def test_what_cannot_be_a_folder_is_refused(store: Store, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="a folder to write into"):
        train(small_run(store, tmp_path / place, steps=1))
    assert (tmp_path / "file").read_text() == "mine"


MISTAKES = [
    ("--seed", 2**32, "--seed 4294967296"),
    ("--seed", -1, "--seed -1"),
    ("--heads", -4, "--heads -4"),
    ("--heads", 0, "--heads 0"),
    ("--kv-heads", 0, "--kv-heads 0"),
    ("--head-dim", -2, "--head-dim -2"),
    ("--intermediate", 0, "--intermediate 0"),
    ("--num-layers", 0, "--num-layers 0"),
    ("--sliding-window", 0, "--sliding-window 0"),
    ("--block-size", 5000, "--block-size 5000"),
    ("--patience", 1, "--patience with --validation-share 0.01"),
    ("--log-every", 10**12, "out of memory for the step's buffers"),
    ("--device", "cpu:0", "device 'cpu:0'"),
    ("--device", "meta", "device 'meta'"),
    ("--lr", "nan", "--lr nan"),
    ("--warmup", 1, "--warmup 1.0"),
    ("--weight-decay", "inf", "--weight-decay inf"),
]


@pytest.mark.parametrize(("flag", "value", "found"), MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    capsys: Capture, store: Store, tmp_path: Path, flag: str, value: object, found: str
) -> None:
    refused = run(capsys, "train", "--store", store.path, "--out", tmp_path / "run", *SMALL, flag, value)
    assert refused.code == 2
    assert refused.message.startswith(f"draftcache: {found}")
    assert refused.message.count("needed: ") == refused.message.count("do: ") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flag", "value"), [("--device", "cpu:0"), ("--log-every", 10**12), ("--store", "nowhere")])
def test_a_resumption_with_a_mistake_changes_nothing(
    capsys: Capture, trained: Path, tmp_path: Path, flag: str, value: object
) -> None:
    run_folder = shutil.copytree(trained, tmp_path / "run")
    before = files_of(run_folder)
    assert run(capsys, "train", "--resume", run_folder, flag, value).code == 2
    assert files_of(run_folder) == before
    assert run(capsys, "train", "--resume", run_folder).code == 0
    assert outcome(run_folder) == outcome(trained)


@pytest.mark.parametrize("flag", ["--bogus", "--steps=x", "--matmul=fp9"])
def test_an_unknown_flag_or_value_is_one_line_too(capsys: Capture, flag: str) -> None:
    refused = run(capsys, "train", flag)
    assert refused.code == 2
    assert refused.err.strip().splitlines() == [refused.message]
    assert refused.message.startswith("draftcache: ")


def test_a_decay_that_nobody_reads_is_refused(capsys: Capture, store: Store, tmp_path: Path) -> None:
    flags = ("--store", store.path, "--out", tmp_path / "run", "--weighting", "dpace", "--gamma", 3)
    refused = run(capsys, "train", *flags)
    assert refused.code == 2
    assert "--gamma 3.0 with --weighting dpace" in refused.message


def test_dry_run_and_resume_exclude_one_another(capsys: Capture, trained: Path) -> None:
    assert "--dry-run with --resume" in run(capsys, "train", "--resume", trained, "--dry-run").message


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: a disk that becomes full, as the writer sees it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_refuses_a_checkpoint_stops_the_run_and_loses_nothing(
    capsys: Capture, store: Store, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 3)
        train(small_run(store, out, steps=4))
    before = checkpoints(out)
    with files_up_to(50_000):
        refused = run(capsys, "train", "--resume", out)
    assert refused.code == 2
    assert "File too large" in refused.message
    assert "Traceback" not in refused.err
    assert [path for path in out.iterdir() if path.name.startswith("checkpoint")] == before
    resume(out, {})
    assert outcome(out) == outcome(trained)


def test_what_the_file_system_refuses_is_one_line(capsys: Capture, trained: Path) -> None:
    refused = run(capsys, "export", "--checkpoint", trained, "--out", "/proc/draftcache/x")
    assert refused.code == 2
    assert refused.err.strip().splitlines() == [refused.message]
