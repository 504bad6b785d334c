"""Stage two's table of contents: open, resolve, build, capture, loop, checkpoint."""

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from draftcache.common.errors import TrainingError
from draftcache.common.store import Store, open_store
from draftcache.common.target import load_parts
from draftcache.train.checkpoint import Run, append_metrics, save_checkpoint, write_run
from draftcache.train.drafter import Drafter
from draftcache.train.optim import Optimizer
from draftcache.train.order import MicroBatch, context_shapes, training_steps
from draftcache.train.ring import Ring
from draftcache.train.setup import TrainConfig, bucket_index, resolve
from draftcache.train.slots import DeviceSlots, HostSlots, Slots
from draftcache.train.step import CapturedStep, EagerStep, StepConfig, Stepper, log_row_names

MAX_SKIPPED_IN_A_ROW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended: its last metrics row and its last checkpoint."""

    metrics: dict[str, Any]
    checkpoint: Path


def train(config: TrainConfig) -> TrainResult:
    """Train a drafter on a store. Raises DraftcacheError for anything wrong in flags, store or numbers."""
    store = open_store(config.store)
    run = resolve(config, store)
    device = torch.device(config.device)
    parts = load_parts(store.path, store.manifest, device)
    drafter = Drafter(run.drafter)
    drafter.initialise(run.seed)
    drafter.to(device)
    optimizer = Optimizer(drafter.parameters(), run.optim, run.steps)
    step_config = StepConfig(
        anchors=run.anchors, seed=run.seed, log_rows=config.log_every, dtype=getattr(torch, run.dtype)
    )
    eager = EagerStep(drafter, optimizer, parts, store.manifest.record, run.loss, step_config)
    write_run(config.out, run)
    _announce(run, store)
    stepper = _stepper(config, run, eager, store, device)
    loop = _Loop(config, run, stepper, eager, drafter, optimizer)
    return loop.run(store, device)


class _Loop:
    """The training loop and its bookkeeping on the host."""

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        stepper: Stepper,
        eager: EagerStep,
        drafter: Drafter,
        optimizer: Optimizer,
    ) -> None:
        self._config, self._run = config, run
        self._stepper, self._eager = stepper, eager
        self._drafter, self._optimizer = drafter, optimizer
        self._names = log_row_names(run.drafter.block_size)
        self._since_fetch: list[int] = []  # real tokens of the steps that the host has not read yet
        self._fetched_at = time.perf_counter()
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._last: dict[str, Any] = {}

    def run(self, store: Store, device: torch.device) -> TrainResult:
        """All steps, then the last checkpoint."""
        run = self._run
        max_tokens = max(context_shapes(bucket_index(store), run.batching))
        with (
            Ring(store, _micro_batches(run, store), max_tokens, pinned=device.type == "cuda") as ring,
            tqdm(total=run.steps, desc="train", unit=" steps", disable=None) as bar,
            torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        ):
            slots: Slots = HostSlots(ring)
            if device.type == "cuda":
                slots = DeviceSlots(ring, max_tokens, store.manifest.record.record_bytes, device)
            for step in range(1, run.steps + 1):
                self._since_fetch.append(self._one_step(slots))
                if len(self._since_fetch) == self._config.log_every or step == run.steps:
                    self._fetch(step)
                    bar.set_postfix(loss=self._last["loss"], accepted=self._last["accepted_length"])
                bar.update()
                if self._config.save_every and step % self._config.save_every == 0 and step < run.steps:
                    self._save(step)
        return TrainResult(metrics=self._last, checkpoint=self._save(run.steps))

    def _one_step(self, slots: Slots) -> int:
        tokens = 0
        for _ in range(self._run.accumulate):
            micro_batch, batch = slots.take()
            self._stepper.micro_step(batch)
            tokens += micro_batch.real_tokens
        self._stepper.update()
        return tokens

    def _fetch(self, step: int) -> None:
        """Read the log rows since the last fetch, in one copy, and write them down."""
        count = len(self._since_fetch)
        first = step - count
        log = self._eager.log.cpu()
        seconds = (time.perf_counter() - self._fetched_at) / count
        rows = []
        for offset, tokens in enumerate(self._since_fetch):
            values = dict(zip(self._names, log[(first + offset) % len(log)].tolist(), strict=True))
            rows.append(_metrics_row(first + offset + 1, values, tokens, seconds, self._run.drafter.block_size))
        append_metrics(self._config.out, rows)
        self._last = rows[-1]
        self._since_fetch.clear()
        self._fetched_at = time.perf_counter()
        self._stop_if_stuck(rows)

    def _stop_if_stuck(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if row["skipped"] > self._skipped else 0
            self._skipped = row["skipped"]
            if self._skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise TrainingError(
                    f"the last {MAX_SKIPPED_IN_A_ROW} updates up to step {row['step']} had non-finite gradients or no "
                    "trained slot and changed nothing",
                    needed="finite gradients",
                    do="lower --lr, and look at the store with `draftcache stats`",
                )

    def _save(self, step: int) -> Path:
        return save_checkpoint(self._config.out, step, self._drafter.state_dict(), self._optimizer.state())


def _stepper(config: TrainConfig, run: Run, eager: EagerStep, store: Store, device: torch.device) -> Stepper:
    if device.type != "cuda":
        print("the step runs eagerly: CUDA graphs need a CUDA device", file=sys.stderr)
        return eager
    if config.graph is False:
        return eager
    shapes = context_shapes(bucket_index(store), run.batching)
    captured = CapturedStep(eager, store.manifest.record.record_bytes, shapes, device)
    print(f"captured {captured.graphs} graphs: contexts of {sorted(shapes)} tokens and the update", file=sys.stderr)
    return captured


def _micro_batches(run: Run, store: Store) -> Iterator[MicroBatch]:
    steps = training_steps(bucket_index(store), run.batching, run.seed, run.accumulate)
    return chain.from_iterable(islice(steps, run.steps))


def _announce(run: Run, store: Store) -> None:
    samples = sum(len(b.samples.samples) for b in store.buckets.values())
    print(
        f"{samples} samples in {len(store.buckets)} buckets; drafter of {len(run.drafter.layer_types)} layers, "
        f"block {run.drafter.block_size}, mask token {run.drafter.mask_token_id}; "
        f"{run.anchors} anchors per micro-batch; {run.steps} steps",
        file=sys.stderr,
    )


def _metrics_row(step: int, values: dict[str, float], tokens: int, seconds: float, block_size: int) -> dict[str, Any]:
    """One line of metrics.jsonl. Ratios of sums over the step's window; a window without a trained slot gives None."""

    def ratio(numerator: str, denominator: str) -> float | None:
        return values[numerator] / values[denominator] if values[denominator] else None

    return {
        "step": step,
        "loss": ratio("loss", "weight"),
        "lr": values["lr"],
        "grad_norm": values["grad_norm"],
        "accepted_length": ratio("accepted", "blocks"),
        "accuracy": [ratio(f"right_{k}", f"counted_{k}") for k in range(1, block_size)],
        "blocks": int(values["blocks"]),
        "supervised": int(sum(values[f"counted_{k}"] for k in range(1, block_size))),
        "skipped": int(values["skipped"]),
        "tokens": tokens,
        "seconds": round(seconds, 6),
    }
