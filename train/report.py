"""What a run says of itself: rows of metrics.jsonl and validation.jsonl, TensorBoard, the progress bar, the summary.

Only the first process writes. Under nohup or in a pipe there is no bar, only single lines.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from draftcache.common.errors import CheckpointError, UsageError, first_line
from draftcache.common.files import write_text
from draftcache.train.checkpoint import Progress

METRICS_NAME, VALIDATION_NAME = "metrics.jsonl", "validation.jsonl"
_SCALARS = ("loss", "accepted_length", "lr", "grad_norm", "tokens_s", "wait_share", "read_gb_s")

Row = dict[str, Any]


def metrics_row(
    step: int,  # that this row's update made, or failed to make
    sums: Mapping[str, float],  # by the names of `step.log_row_names`
    applied: bool,  # whether the update changed the weights
    tokens: int,  # real ones, over all processes
    block_size: int,
) -> Row:
    """One line of metrics.jsonl but for its speed. Ratios of sums over the window; what is not finite is None."""
    return {
        "step": step,
        "loss": _ratio(sums, "loss", "weight"),
        "lr": sums["lr"],
        "grad_norm": sums["grad_norm"] if math.isfinite(sums["grad_norm"]) else None,
        **quality(sums, block_size),
        "applied": applied,
        "skipped": int(sums["skipped"]),
        "tokens": tokens,
    }


def validation_row(progress: Progress, sums: Mapping[str, float], block_size: int) -> Row:
    """One line of validation.jsonl, from sums by the names of `step.sum_names`."""
    counts = {"step": progress.step, "skipped": progress.skipped}
    return counts | {"loss": _ratio(sums, "loss", "weight")} | quality(sums, block_size)


def quality(sums: Mapping[str, float], block_size: int) -> Row:
    """Accepted length (1 + the leading run of right tokens, mean over blocks) and accuracy of every slot."""
    slots = range(1, block_size)
    return {
        "accepted_length": _ratio(sums, "accepted", "blocks"),
        "accuracy": [_ratio(sums, f"right_{k}", f"counted_{k}") for k in slots],
        "blocks": int(sums["blocks"]),
        "supervised": int(sum(sums[f"counted_{k}"] for k in slots)),
    }


class RunLog:
    """A run's files, bar and TensorBoard from its beginning or resumption to its end. Use as a context manager."""

    def __init__(self, folder: Path | None, progress: Progress, total_steps: int, *, tensorboard: bool) -> None:
        """`folder` None: this process writes nothing. What was logged behind `progress` is cut off."""
        self._folder = folder
        self._files = {}
        self._board: Any = None
        if folder is not None:
            _cut(folder / METRICS_NAME, lambda row: _taken(row) <= progress.taken, progress.taken)
            _cut(folder / VALIDATION_NAME, lambda row: _taken(row) <= progress.validated, None)
            names = (METRICS_NAME, VALIDATION_NAME)
            self._files = {name: (folder / name).open("a", encoding="utf-8") for name in names}
            self._board = _tensorboard(folder, progress.step) if tensorboard else None
        self._bar = tqdm(
            total=total_steps, initial=progress.step, desc="train", unit=" steps", disable=None if folder else True
        )

    def steps(self, rows: list[Row]) -> None:
        """Write the rows of consecutive steps."""
        self._write(METRICS_NAME, rows)
        if self._board is not None:
            for row in rows:
                self._to_board("train", row)
        last = rows[-1]
        self._bar.n = last["step"]
        self._bar.set_postfix(
            loss=last["loss"],
            accepted=last["accepted_length"],
            tokens_s=f"{last['tokens_s']:,.0f}",
            waiting=f"{last['wait_share']:.0%}",
        )

    def validation(self, row: Row) -> None:
        """Write and say one validation."""
        self._write(VALIDATION_NAME, [row])
        if self._board is not None:
            self._to_board("validation", row)
        loss, accepted = row["loss"], row["accepted_length"]
        if loss is not None and accepted is not None:
            self.say(f"step {row['step']}: held-out loss {loss:.4f}, accepted length {accepted:.3f}")

    def say(self, line: str) -> None:
        """One line on stderr, above the bar."""
        if self._folder is not None:
            tqdm.write(line, file=sys.stderr)

    def sync(self) -> None:
        """Bring to disk what a checkpoint relies on."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.close()
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()

    def _write(self, name: str, rows: list[Row]) -> None:
        file = self._files.get(name)
        if file is not None:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()

    def _to_board(self, group: str, row: Row) -> None:
        for name in _SCALARS:
            if row.get(name) is not None:
                self._board.add_scalar(f"{group}/{name}", row[name], row["step"])


def read_rows(path: Path) -> list[Row]:
    """The whole lines of a log; a last one that a crash tore is left out."""
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        for row in rows:
            _taken(row)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: {type(error).__name__} {first_line(error)}",
            needed="one row of this run a line",
            do="restore or remove it",
        ) from None
    return rows


def _cut(path: Path, keep: Callable[[Row], bool], expected: int | None) -> None:
    """Remove the rows that a checkpoint knows nothing of."""
    rows = [row for row in read_rows(path) if keep(row)]
    if expected is not None and len(rows) != expected:
        print(f"{path} holds {len(rows)} of the {expected} rows before this point", file=sys.stderr)
    if path.exists():
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _taken(row: Row) -> int:
    """Steps taken up to and with a row's, skipped ones included; a skipped one bears the number it did not reach."""
    return int(row["step"]) + int(row["skipped"]) - int(row.get("applied") is False)


def check_tensorboard() -> None:
    """Raise UsageError if TensorBoard's package is missing."""
    if find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard without the package tensorboard", needed="it", do="pip install 'draftcache[tensorboard]'"
        )


def _tensorboard(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


def _ratio(sums: Mapping[str, float], numerator: str, denominator: str) -> float | None:
    value = sums[numerator] / sums[denominator] if sums[denominator] else math.nan
    return value if math.isfinite(value) else None
