"""The quality study end to end on the tiny target: its arms train, are measured, and are not run twice."""

import json
from pathlib import Path

import pytest

from draftcache.benchmarks import quality_peer, quality_study
from draftcache.tests.stores import tiny_data

ARMS = ["default", "batching-packed"]


def study(work: Path, target: Path, data: Path, arms: list[str]) -> None:
    args = ["--target", target, "--data", data, "--work", work, "--arms", ",".join(arms), "--seeds", "0"]
    args += ["--steps", 2, "--layers", 1, "--anchors", 16, "--token-budget", 256, "--decode", 1, "--dtype", "float32"]
    quality_study.main([*map(str, args), "--device", "cpu"])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    monkeypatch.setattr(quality_study, "append_row", lambda _bench, case, metrics: found.update({case: metrics}))
    return found


def test_arms_train_are_measured_and_are_not_run_twice(
    tmp_path: Path, target_folder: Path, rows: dict[str, dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    data = tiny_data(tmp_path / "data.jsonl", count=42)
    study(tmp_path / "work", target_folder, data, ARMS)
    assert sorted(rows) == sorted(ARMS)
    for metrics in rows.values():
        assert 1 <= metrics["accepted_length"] <= 16
        assert 1 <= metrics["any_anchor"] <= 16
        assert metrics["trained_metric"] >= 1
    assert rows["default"]["unexplained"] == 0
    assert rows["default"]["equal"] == 1
    assert "decoded" not in rows["batching-packed"]
    held_out = (tmp_path / "work" / "heldout.jsonl").read_text().splitlines()
    trained = (tmp_path / "work" / "train.jsonl").read_text().splitlines()
    assert (len(held_out), len(trained)) == (3, 39)
    assert not set(held_out) & set(trained)
    rows.clear()
    study(tmp_path / "work", target_folder, data, ARMS)
    assert not rows
    assert "batching-packed" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.skipif(not quality_peer.installed(), reason="the speculators package is not installed")
@pytest.mark.filterwarnings("default")
def test_the_peer_trains_on_the_same_data(
    tmp_path: Path, target_folder: Path, rows: dict[str, dict[str, float]]
) -> None:
    study(tmp_path / "work", target_folder, tiny_data(tmp_path / "data.jsonl", count=42), ["speculators"])
    (metrics,) = rows.values()
    assert metrics["accepted_length"] >= 1
    assert json.loads((tmp_path / "work" / "result-speculators-seed0-steps2.json").read_text()) == metrics
