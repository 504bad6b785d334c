"""Runs the shared cases, where they lie beside the checkout, through `adapter.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = ROOT.parent / "shared" / "cases"

CHECKED = (
    "01-multiturn-loss-mask",
    "02-truncation-no-trainable-tokens",
    "03-layer-offset-and-final-norm",
    "04-accept-length-metric",
    "05-tied-single-file-target",
    "06-padded-vocab-no-mask-no-pad-token",
    "07-damaged-store",
)


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not beside this checkout")
@pytest.mark.parametrize("case", CHECKED)
def test_case(case: str) -> None:
    environment = os.environ | {"DRAFTCACHE_ADAPTER": str(ROOT / "tests" / "adapter.py")}
    result = subprocess.run(
        [sys.executable, "check.py"], cwd=CASES / case, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
