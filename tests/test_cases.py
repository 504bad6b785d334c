"""Runs the shared cases, where they lie beside the checkout, through `adapter.py`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
