"""Curves of runs as pictures, and TensorBoard; both need their extras."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from draftcache.common.errors import CheckpointError, UsageError
from draftcache.common.store import Store
from draftcache.tests.commands import run
from draftcache.tests.runs import metrics, small_run, steps_until
from draftcache.train.plot import _smooth, plot_runs
from draftcache.train.run import resume, train


@pytest.fixture(scope="module")
def runs(store: Store, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A validated run, and one without validation."""
    folder = tmp_path_factory.mktemp("runs")
    train(small_run(store, folder / "first"))
    train(small_run(store, folder / "second", share=0.0, steps=5))
    return [folder / "first", folder / "second"]


def test_several_runs_are_drawn_over_one_another(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert run(capsys, "plot", *runs, "--out", tmp_path / "curves.svg").code == 0
    text = (tmp_path / "curves.svg").read_text()
    for word in ("accepted length", "first", "first, held out", "second", "learning rate", "tokens per second"):
        assert f"<!-- {word} -->" in text
    assert "<!-- second, held out -->" not in text
    plot_runs(runs[:1], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_runs_give_the_same_picture(runs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in "ab":
        plot_runs(runs, tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_runs_of_one_name_are_told_apart_by_their_paths(runs: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shutil.copytree(runs[0], tmp_path / "first")
    plot_runs([runs[0], tmp_path / "first"], tmp_path / "curves.svg")
    assert f"<!-- {tmp_path / 'first'} -->" in (tmp_path / "curves.svg").read_text()


def test_what_cannot_be_drawn_is_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.png"):
        plot_runs(runs, tmp_path / "curves.gif")
    pytest.importorskip("matplotlib")
    with pytest.raises(CheckpointError, match=r"run\.json"):
        plot_runs([tmp_path], tmp_path / "curves.png")
    shutil.copytree(runs[0], tmp_path / "empty")
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="no steps yet"):
        plot_runs([tmp_path / "empty"], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_a_moving_mean_follows_the_line_to_its_ends() -> None:
    line = [float(i) for i in range(200)]
    smooth = _smooth(line)
    assert smooth[4:-4] == pytest.approx(line[4:-4])
    assert all(a < b for a, b in pairwise(smooth))
    assert _smooth([3.0]) == [3.0]


def test_tensorboard_holds_every_step_once_after_a_resumption(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = small_run(store, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        steps_until(patch, 5)
        train(config)
    resume(tmp_path / "run", {"tensorboard": True})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [6, 7, 8, 9]
    assert [event.step for event in events.Scalars("validation/accepted_length")] == [8, 9]
    rows = {row["step"]: row for row in metrics(tmp_path / "run")}
    assert [event.value for event in events.Scalars("train/lr")] == pytest.approx([rows[i]["lr"] for i in (6, 7, 8, 9)])
