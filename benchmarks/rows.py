"""Benchmark rows: one JSON object a line, appended to results.jsonl with everything needed to compare it later."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results.jsonl"


def append_row(bench: str, case: str, metrics: Mapping[str, float], *, keep: bool = True) -> None:
    """Print one row and, if it is to be kept, append it. `metrics` is flat and holds numbers only."""
    row = {
        "bench": bench,
        "case": case,
        "metrics": {name: float(f"{value:.6g}") for name, value in metrics.items()},
        "hardware": hardware(),
        "versions": {name: _version(name) for name in ("torch", "zarr", "transformers", "draftcache")},
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
    }
    line = json.dumps(row)
    print(line)
    if keep:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def hardware() -> str:
    """The processor, its cores, and the GPU if torch was loaded and sees one."""
    torch = sys.modules.get("torch")
    gpu = f", {torch.cuda.get_device_name()}" if torch is not None and torch.cuda.is_available() else ""
    model = next((x.split(":")[1].strip() for x in _cpuinfo() if x.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores{gpu}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "checkout"


def _commit() -> str:
    folder = Path(__file__).parents[1]
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"
