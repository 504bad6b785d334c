"""One of the two processes of test_world.py, which starts `python -m draftcache.tests.world_worker FOLDER` twice.

Does every scenario in turn, each with a rendezvous of its own, and writes how it ended to FOLDER/ended-RANK.json.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftcache.common.errors import DraftcacheError
from draftcache.common.store import open_store
from draftcache.tests.runs import small_run, steps_until
from draftcache.train.run import TrainResult, resume, train

RANK = int(os.environ.get("RANK", "0"))


def fresh(folder: Path) -> TrainResult:
    """Two micro-batches a step in each process."""
    return train(small_run(open_store(folder / "store"), folder / "fresh", accumulate=2))


def narrow(folder: Path) -> TrainResult:
    """The same, gradients reduced in bfloat16."""
    config = small_run(open_store(folder / "store"), folder / "narrow", accumulate=2)
    return train(dataclasses.replace(config, reduce_dtype="bfloat16"))


def resumed(folder: Path) -> TrainResult:
    """A run that one process began and stopped."""
    return resume(folder / "resumed", {})


def uneven(folder: Path) -> TrainResult:
    """A run with an odd number of micro-batches a step."""
    return resume(folder / "uneven", {})


def one_sample(folder: Path) -> TrainResult:
    """Fewer samples than processes."""
    return train(small_run(open_store(folder / "one-sample" / "store"), folder / "lonely", steps=3))


def stopped(folder: Path) -> TrainResult:
    """Only the second process is asked to stop."""
    with pytest.MonkeyPatch.context() as patch:
        if RANK == 1:
            steps_until(patch, 5)
        return train(small_run(open_store(folder / "store"), folder / "stopped", log_every=7))


def other_flags(folder: Path) -> TrainResult:
    """The second process was started with another seed."""
    config = small_run(open_store(folder / "store"), folder / "other-flags")
    return train(dataclasses.replace(config, seed=RANK))


def no_store(folder: Path) -> TrainResult:
    """The second process has no store where the first one has it."""
    config = small_run(open_store(folder / "store"), folder / "no-store")
    return train(dataclasses.replace(config, store=folder / f"store{'' if RANK == 0 else '-missing'}"))


def deserted(folder: Path) -> TrainResult:
    """The second process dies on the way. The last scenario, for it does not come back."""
    with pytest.MonkeyPatch.context() as patch:
        if RANK == 1:
            patch.setattr("os.kill", lambda *_: os._exit(0))
            steps_until(patch, 5)
        return train(small_run(open_store(folder / "store"), folder / "deserted"))


SCENARIOS: tuple[Callable[[Path], TrainResult], ...] = (
    *(fresh, narrow, resumed, uneven, one_sample, stopped, other_flags, no_store, deserted),
)


def main(folder: Path) -> None:
    """All scenarios."""
    torch.set_num_threads(1)
    ports = json.loads((folder / "ports.json").read_text())
    ended: dict[str, Any] = {}
    for scenario, port in zip(SCENARIOS, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        try:
            end = scenario(folder).end
            ended[scenario.__name__] = {"reason": end.reason, "taken": end.progress.taken}
        except DraftcacheError as error:
            ended[scenario.__name__] = {"error": str(error)}
        (folder / f"ended-{RANK}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
