"""Runs the shared cases, where they lie beside the checkout, through `adapter.py`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftcache.tests import adapter

ROOT = Path(__file__).parents[1]
CASES = ROOT.parent / "shared" / "cases"
ENVIRONMENT = os.environ | {
    "DRAFTCACHE_ADAPTER": str(ROOT / "tests" / "adapter.py"),
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}

CHECKED = (
    "01-multiturn-loss-mask",
    "02-truncation-no-trainable-tokens",
    "03-layer-offset-and-final-norm",
    "04-accept-length-metric",
    "05-tied-single-file-target",
    "06-padded-vocab-no-mask-no-pad-token",
    "07-damaged-store",
)
KILLED = CASES / "08-kill-and-resume-extract"
RESUMED = CASES / "09-exact-resume-train"
RESUMED_FLAGS = (
    *(
        "--teacher",
        "tokens",
        "--head-dim",
        16,
        "--block-size",
        4,
        "--num-layers",
        2,
        "--log-every",
        1,
        "--device",
        "cpu",
    ),
    *("--seed", 3, "--rows", 2, "--accumulate", 2, "--warmup", 0.125, "--clip", 1.0, "--save-every", 7, "--steps", 40),
)
ESTIMATED = CASES / "12-disk-estimate-before-writing"
ESTIMATED_FLAGS = ("--buckets", "64,128,256", "--layers", "1,3,5")

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not beside this checkout")


def run(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a case's folder."""
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def extract(case: Path, store: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    """`draftcache extract` on a case's target and data."""
    return run(case, "draftcache", "extract", "--target", "target", "--data", "data.jsonl", "--store", store, *flags)


@pytest.mark.parametrize("case", CHECKED)
def test_case(case: str) -> None:
    result = run(CASES / case, sys.executable, "check.py")
    assert result.returncode == 0, result.stdout + result.stderr


def test_case_of_a_training_killed_stopped_and_resumed(tmp_path: Path) -> None:
    made = extract(RESUMED, tmp_path / "store", "--layers", "1,3,5", "--device", "cpu")
    assert made.returncode == 0, made.stderr
    outs = {name: tmp_path / name for name in "abc"}
    for name in "ac":
        whole = run(RESUMED, *training(tmp_path, outs[name]))
        assert whole.returncode == 0, whole.stderr
    for after, number, code in ((23, signal.SIGKILL, -9), (33, signal.SIGTERM, 128 + 15)):
        command = [str(word) for word in (*training(tmp_path, outs["b"]), "--resume")]
        with subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as stopped:
            while stopped.poll() is None and steps_of(outs["b"]) < after:
                time.sleep(0.01)
            stopped.send_signal(number)
        assert stopped.returncode == code
    resumed = run(RESUMED, "draftcache", "train", "--resume", outs["b"])
    assert resumed.returncode == 0, resumed.stderr
    result = run(RESUMED, sys.executable, "check.py", *outs.values())
    assert result.returncode == 0, result.stdout + result.stderr


def training(folder: Path, out: Path) -> tuple[object, ...]:
    """`draftcache train` as the case wants it."""
    return ("draftcache", "train", "--store", folder / "store", "--out", out, *RESUMED_FLAGS)


def steps_of(run: Path) -> int:
    """Steps that a run has written down."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_case_of_an_extraction_killed_again_and_again(tmp_path: Path) -> None:
    reference = extract(KILLED, tmp_path / "reference")
    assert reference.returncode == 0, reference.stderr
    killed = run(KILLED, "bash", "kill_resume.sh", tmp_path / "killed")
    assert killed.returncode == 0, killed.stderr
    result = run(KILLED, sys.executable, "check.py", tmp_path / "reference", tmp_path / "killed")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("teacher", "planes"), [("none", "3_planes"), ("last", "4_planes")])
def test_case_of_an_estimate_before_writing(tmp_path: Path, teacher: str, planes: str) -> None:
    expected = json.loads((ESTIMATED / "expected.json").read_text())
    flags = (*ESTIMATED_FLAGS, "--teacher", teacher)
    dry = extract(ESTIMATED, tmp_path / "store", *flags, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "store").exists()
    logical = expected["hidden_bytes"][planes]
    assert f"{logical // expected['padded_tokens']} bytes per token, {logical} logical bytes" in dry.stdout
    rows = [line.split() for line in dry.stdout.splitlines() if re.fullmatch(r"[\d. ]+", line)]
    assert [int(row[0]) for row in rows] == expected["buckets"]
    assert sum(int(row[2]) for row in rows) == expected["tokens"]
    assert sum(int(row[3]) for row in rows) == expected["padded_tokens"]
    estimated, free = map(int, re.findall(r"(\d+) bytes on disk, (\d+) bytes free", dry.stdout)[0])
    assert extract(ESTIMATED, tmp_path / "store", *flags).returncode == 0
    real = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert real <= estimated <= 1.02 * real < free


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of its own; skips the test where none may be mounted."""
    path.mkdir()
    if run(path, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path).returncode:
        pytest.skip("mounting a small file system needs rights")
    try:
        yield
    finally:
        run(path.parent, "umount", path)


def test_case_of_a_disk_that_is_too_small(tmp_path: Path) -> None:
    store = tmp_path / "small" / "store"
    with small_disk(tmp_path / "small", "128k"):
        refused = extract(ESTIMATED, store, *ESTIMATED_FLAGS)
        assert refused.returncode == 2
        assert re.search(r"has \d+ bytes free; needed: \d+ bytes", refused.stderr)
        assert not store.exists()


def test_case_of_a_disk_that_becomes_full(tmp_path: Path) -> None:
    small, store = tmp_path / "small", tmp_path / "small" / "store"
    with small_disk(small, "300k"):
        full = extract(ESTIMATED, store, *ESTIMATED_FLAGS, "--force")
        assert full.returncode == 2
        assert "No space left" in full.stderr
        assert "Traceback" not in full.stderr
        assert run(small, "mount", "-o", "remount,size=4m", small).returncode == 0
        assert extract(ESTIMATED, store, *ESTIMATED_FLAGS, "--resume").returncode == 0
        assert run(small, "draftcache", "verify", "--store", store).returncode == 0


def test_case_of_an_export_that_servers_load(tmp_path: Path) -> None:
    case = CASES / "11-export-loads-in-vllm-and-sglang"
    store, trained, folders = tmp_path / "store", tmp_path / "run", [tmp_path / "x", tmp_path / "y"]
    steps = [
        adapter.extract(case / "target", case / "data.jsonl", str(store), layers=[1, 3, 5]),
        adapter.train(str(store), case / "target", str(trained), steps=2, extra=["--layer-types", "sliding-last-full"]),
        *(adapter.cli("export", "--checkpoint", trained, "--out", folder, "--store", store) for folder in folders),
    ]
    for code, out, err in steps:
        assert code == 0, out + err
    result = run(case, sys.executable, "check_export.py", folders[0], "target")
    assert result.returncode == 0, result.stdout
    assert "FAIL" not in result.stdout
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()
