"""Draws the curves of one or several runs, from their metrics.jsonl and validation.jsonl, as PNG or SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftcache.common.errors import UsageError
from draftcache.common.files import check_writable
from draftcache.train.checkpoint import read_run
from draftcache.train.report import METRICS_NAME, VALIDATION_NAME, Row, read_rows

SUFFIXES = (".png", ".svg")
SMOOTHED_SHARE = 50
"""A line is the mean over one part in so many of a run's steps, on both sides."""


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Write loss, accepted length, gradient norm, rate and speed of the runs into one picture.

    Thin lines are steps, thick ones their moving mean, dots validations. Raises UsageError for a run without steps,
    another file ending than SUFFIXES, or without matplotlib.
    """
    if out.suffix not in SUFFIXES:
        raise UsageError(f"--out {out}", needed=f"a file that ends in one of {list(SUFFIXES)}", do="correct --out")
    check_writable(out, "--out")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "plot without the package matplotlib", needed="it", do="pip install 'draftcache[plot]'"
        ) from None
    curves = {name: _rows(run) for name, run in zip(_names(runs), runs, strict=True)}
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for axes, (column, title, scale) in zip(panels, _PANELS, strict=False):
        for color, (name, (steps, validations)) in enumerate(curves.items()):
            _draw(axes, column, steps, validations, name, f"C{color}")
        axes.set(title=title, xlabel="step", yscale=scale)
        axes.grid(alpha=0.3)
    _draw_slots(panels[5], {name: validations for name, (_, validations) in curves.items()})
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    with rc_context({"svg.hashsalt": "draftcache"}):  # the same runs give the same bytes
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)


_PANELS = (
    ("loss", "loss", "log"),
    ("accepted_length", "accepted length", "linear"),
    ("grad_norm", "gradient norm before clipping", "log"),
    ("lr", "learning rate", "linear"),
    ("tokens_s", "tokens per second", "linear"),
)


def _rows(run: Path) -> tuple[list[Row], list[Row]]:
    read_run(run)
    steps = [row for row in read_rows(run / METRICS_NAME) if row["applied"]]
    if not steps:
        raise UsageError(f"{run} has no steps yet", needed="a run that was trained", do="plot it later")
    return steps, read_rows(run / VALIDATION_NAME)


def _names(runs: Sequence[Path]) -> list[str]:
    """The runs' folder names, or their paths where names are equal."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _draw(axes: Any, column: str, steps: list[Row], validations: list[Row], name: str, color: str) -> None:
    points = [(row["step"], row[column]) for row in steps if row[column] is not None]
    if points:
        at, values = zip(*points, strict=True)
        axes.plot(at, values, color=color, alpha=0.25, linewidth=0.7)
        axes.plot(at, values if column == "lr" else _smooth(values), color=color, label=name)
    held_out = [(row["step"], row[column]) for row in validations if row.get(column) is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o", color=color, markersize=5, label=f"{name}, held out")


def _draw_slots(axes: Any, validations: dict[str, list[Row]]) -> None:
    """Accuracy of every slot at the last validation."""
    for color, (name, rows) in enumerate(validations.items()):
        accuracy = rows[-1]["accuracy"] if rows else []
        axes.plot(range(1, len(accuracy) + 1), accuracy, "o-", color=f"C{color}", markersize=3, label=name)
    axes.set(title="held-out accuracy by slot", xlabel="slot")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def _smooth(values: Sequence[float]) -> list[float]:
    """Moving mean whose window shrinks at the ends."""
    reach = len(values) // SMOOTHED_SHARE
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    spans = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]
