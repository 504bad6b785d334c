"""Stage two's table of contents: meet the other processes, resolve, build, load, capture, loop."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftcache.common import config as configs
from draftcache.common.errors import CheckpointError, MismatchError
from draftcache.common.files import write_json
from draftcache.common.store import Store, lock_store, open_store
from draftcache.common.target import check_device, load_parts
from draftcache.train.checkpoint import (
    OPTIMIZER,
    RUN_NAME,
    SETTINGS_NAME,
    WEIGHTS,
    Progress,
    Run,
    check_file,
    check_new,
    checkpoint_path,
    checkpoints,
    holds_run,
    load_tensors,
    load_weights,
    read_progress,
    read_run,
    read_settings,
    write_run,
)
from draftcache.train.guards import naming_memory
from draftcache.train.loop import End, Loop, Schedule
from draftcache.train.meter import Meter
from draftcache.train.model.drafter import Drafter
from draftcache.train.optim import Optimizer
from draftcache.train.order import BucketIndex, context_shapes, held_out_batches, training_steps
from draftcache.train.report import METRICS_NAME, Row, RunLog, check_tensorboard, read_rows
from draftcache.train.ring import Ring
from draftcache.train.saver import Saver
from draftcache.train.settings import TrainConfig, build_config, resumed_config
from draftcache.train.setup import resolve, settled, split_samples, versions
from draftcache.train.slots import DeviceSlots, HostSlots, Slots
from draftcache.train.step import CapturedStep, EagerStep, StepConfig, Stepper
from draftcache.train.warm_start import load_start
from draftcache.train.world import World, join_world, local_device


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended, its last step's row, and the folder of its newest checkpoint.

    `first`: whether this process speaks for the run.
    """

    first: bool
    end: End
    metrics: Row
    checkpoint: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What every process works on: the run, its settings, its store, and where it begins."""

    run: Run
    config: TrainConfig
    store: Store
    progress: Progress
    checkpoint: Path | None  # to begin from
    began: float  # time.perf_counter() when the run was asked for
    new: bool  # its folder is still empty


def train(config: TrainConfig) -> TrainResult:
    """Train a drafter on a store. Raises DraftcacheError for anything wrong in flags, store or numbers."""
    with join_world() as world, ExitStack() as stack:
        world.from_first(lambda: stack.enter_context(lock_store(config.out)))
        return _work(_new_job(config, world), world)


def resume(folder: Path, given: Mapping[str, Any]) -> TrainResult:
    """Go on with a run from its newest checkpoint, or begin it if nothing is there and `given`, the flags, say how.

    Raises CheckpointError for flags that contradict the run.
    """
    if not holds_run(folder):
        if "store" not in given:
            raise CheckpointError(
                f"{folder} holds no run",
                needed="one to go on with",
                do="check --resume, or pass the flags of a new run",
            )
        return train(build_config({**given, "out": folder}))
    with join_world() as world, ExitStack() as stack:
        world.from_first(lambda: stack.enter_context(lock_store(folder)))
        return _work(_old_job(folder, given, world), world)


def _new_job(config: TrainConfig, world: World) -> _Job:
    began = time.perf_counter()
    world.from_first(lambda: check_new(config.out))
    store = world.together(lambda: open_store(config.store))
    run = world.together(lambda: resolve(config, store, world.size))
    config = settled(config, run)
    first = world.from_first(lambda: configs.to_dict(run))
    world.together(lambda: _check_same(configs.to_dict(run), first))
    return _Job(run=run, config=config, store=store, progress=Progress(), checkpoint=None, began=began, new=True)


def _old_job(folder: Path, given: Mapping[str, Any], world: World) -> _Job:
    """A run as its folder tells it; only the first process needs to see that folder."""
    began = time.perf_counter()
    run = configs.from_dict(Run, world.from_first(lambda: configs.to_dict(read_run(folder))), str(folder))
    held = world.from_first(lambda: configs.to_dict(read_settings(folder)))
    saved = configs.from_dict(TrainConfig, held, str(folder))
    config = world.together(lambda: resumed_config(saved, {**given, "out": folder.resolve()}))
    world.together(lambda: check_device(config.device))
    store = world.together(lambda: open_store(config.store))
    world.together(lambda: _check_store(store, run))
    newest = checkpoints(folder)[-1] if world.first and checkpoints(folder) else None
    plain = world.from_first(lambda: configs.to_dict(_progress_at(newest)))
    progress = configs.from_dict(Progress, plain, str(newest))
    _say(world, f"{folder} goes on after step {progress.step}" + (f", from {newest.name}" if newest else ""))
    changed = configs.differences(versions(), run.versions)
    if changed:
        _say(world, f"the run began with other versions, so numbers may differ in rounding: {'; '.join(changed)}")
    return _Job(run=run, config=config, store=store, progress=progress, checkpoint=newest, began=began, new=False)


def _progress_at(checkpoint: Path | None) -> Progress:
    """Where to go on: at the beginning if there is no checkpoint."""
    if checkpoint is None:
        return Progress()
    check_file(checkpoint, RUN_NAME)
    return read_progress(checkpoint)


def _write_down(job: _Job) -> None:
    """The run and its settings into its folder, once nothing is left that a user could have got wrong."""
    if job.new:
        write_run(job.config.out, job.run, job.config)
    else:
        write_json(job.config.out / SETTINGS_NAME, configs.to_dict(job.config))


def _work(job: _Job, world: World) -> TrainResult:
    run, config, store = job.run, job.config, job.store
    if config.tensorboard:
        world.from_first(check_tensorboard)
    if config.deterministic:
        _make_deterministic()
    device = torch.device(local_device(config.device))
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        drafter, optimizer, eager = _build(job, device, world)
        trained, held_out = split_samples(store, run.validation_share)
        _announce(job, trained, held_out, world)
        schedule = Schedule(
            training_steps(trained, run.batching, run.seed, run.micro_batches, job.progress.cursor),
            held_out_batches(held_out, run.batching),
            run,
            config,
            world,
        )
        shapes = context_shapes(trained, run.batching)
        stepper = _stepper(job, world, eager, device, shapes, schedule)
        folder = config.out if world.first else None
        files = {WEIGHTS: drafter.state_dict(), OPTIMIZER: optimizer.state()}
        slots = stack.enter_context(_slots(job, schedule, max(shapes), device))
        world.from_first(lambda: _write_down(job))
        log = stack.enter_context(RunLog(folder, job.progress, run.steps, tensorboard=config.tensorboard))
        saver = stack.enter_context(Saver(folder, files, config.keep))
        meter = Meter(job.began)
        end = Loop(run, config, world, eager, stepper, schedule, saver, log, job.progress, slots, meter).run()
    metrics = end.metrics or (read_rows(config.out / METRICS_NAME) or [{}])[-1]
    return TrainResult(
        first=world.first, end=end, metrics=metrics, checkpoint=checkpoint_path(config.out, end.progress.step)
    )


def _build(job: _Job, device: torch.device, world: World) -> tuple[Drafter, Optimizer, EagerStep]:
    """Drafter, optimizer and step with their weights and moments; the same in every process."""
    run, config, store = job.run, job.config, job.store
    began = time.perf_counter()
    with naming_memory("the target's embedding and head", "nothing here: take a device with more"):
        parts = world.together(lambda: load_parts(store.path, store.manifest, device))
    _say(world, f"embedding and head loaded in {time.perf_counter() - began:.1f} s")
    with naming_memory("the drafter and its optimizer", "--num-layers or --intermediate"):
        drafter = Drafter(run.drafter)
        drafter.initialise(run.seed)
        drafter.to(device)
        optimizer = Optimizer(drafter.parameters(), run.optim, run.steps)
    world.from_first(lambda: _load(job, drafter, optimizer, device))
    world.copy_from_first([p.detach() for p in drafter.parameters()] + list(optimizer.state().values()))
    step_config = StepConfig(
        anchors=run.anchors,
        seed=run.seed,
        log_rows=config.log_every,
        dtype=getattr(torch, run.dtype),
        matmul=config.matmul,
        reduce_dtype=getattr(torch, config.reduce_dtype),
    )
    with naming_memory("the step's buffers", "--log-every or --num-layers"):
        eager = EagerStep(drafter, optimizer, parts, store.manifest.record, run.loss, step_config, world)
    return drafter, optimizer, eager


def _load(job: _Job, drafter: Drafter, optimizer: Optimizer, device: torch.device) -> None:
    """Weights and moments to begin with, into the tensors that are there: a checkpoint's, or a released drafter's."""
    if job.checkpoint is not None:
        load_weights(drafter, load_tensors(job.checkpoint, WEIGHTS, device), job.checkpoint)
        optimizer.load(load_tensors(job.checkpoint, OPTIMIZER, device))
    elif job.config.init_from is not None:
        load_start(job.config.init_from, drafter, device)


def _stepper(
    job: _Job, world: World, eager: EagerStep, device: torch.device, shapes: set[int], schedule: Schedule
) -> Stepper:
    if device.type != "cuda":
        _say(world, "the step runs eagerly: CUDA graphs need a CUDA device")
        return eager
    if job.config.graph is False:
        return eager
    with naming_memory("capturing the step", "--token-budget, --anchors or --num-layers"):
        captured = CapturedStep(
            eager,
            job.store.manifest.record.record_bytes,
            shapes,
            device,
            held_out_shapes=frozenset(batch.tokens for batch in schedule.held_out),
        )
    _say(world, f"captured {captured.graphs} graphs: contexts of {sorted(shapes)} tokens and the update")
    return captured


@contextmanager
def _slots(job: _Job, schedule: Schedule, max_tokens: int, device: torch.device) -> Iterator[Slots]:
    """The ring and the slots that it feeds."""
    on_cuda = device.type == "cuda"
    with naming_memory("the ring's host buffers and the device's slots", "--token-budget"):
        ring = Ring(job.store, schedule.micro_batches(job.progress), max_tokens, pinned=on_cuda)
    with ring:
        with naming_memory("the device's slots", "--token-budget"):
            record_bytes = job.store.manifest.record.record_bytes
            slots = DeviceSlots(ring, max_tokens, record_bytes, device) if on_cuda else HostSlots(ring)
        yield slots


def _make_deterministic() -> None:
    """Kernels chosen without timing them, and cuBLAS without its choice of workspaces."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    torch._inductor.config.deterministic = True


def _check_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    lines = configs.differences(found, wanted)
    if lines:
        raise MismatchError(
            f"this process resolves another run than the first one: {'; '.join(lines[:4])}",
            needed="the same flags, and copies of the same store, in every process",
            do="start all of them with the same command",
        )


def _check_store(store: Store, run: Run) -> None:
    if store.manifest.identity != run.store_identity:
        raise MismatchError(
            f"{store.path} is not the store that this run is trained on",
            needed="that store, or a copy of it",
            do="pass it with --store, or begin a new run",
        )


def _announce(job: _Job, trained: Mapping[int, BucketIndex], held_out: Mapping[int, BucketIndex], world: World) -> None:
    run = job.run
    count, kept_out = (sum(len(index.samples) for index in part.values()) for part in (trained, held_out))
    processes = f" in {world.size} processes" if world.size > 1 else ""
    _say(
        world,
        f"{count} samples in {len(trained)} buckets to train on, {kept_out} held out; "
        f"drafter of {len(run.drafter.layer_types)} layers, block {run.drafter.block_size}, "
        f"mask token {run.drafter.mask_token_id}; {run.anchors} anchors per micro-batch, "
        f"{run.micro_batches} micro-batches a step{processes}; {run.steps} steps",
    )
    if not kept_out:
        _say(world, "no sample is held out, so nothing is validated and no checkpoint is the best one")


def _say(world: World, line: str) -> None:
    if world.first:
        print(line, file=sys.stderr)
