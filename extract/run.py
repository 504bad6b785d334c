"""Stage one's table of contents: plan, lock, look what is there, load the target, run it, write.

Everything that can be wrong with flags, data or target folder is found before the store's folder is touched. Under
torchrun rank 0 does all that; the other ranks load the target meanwhile, then read the plan from the store.
"""

import dataclasses
import errno
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from draftcache.common.errors import DamageError, StoreError, TargetError, UsageError, first_line
from draftcache.common.journal import Journal, journal_files, merge_journals
from draftcache.common.manifest import MANIFEST_NAME, check_same, read_manifest, write_manifest
from draftcache.common.store import Store, clear_store, committed_files, create_store, is_store, lock_store
from draftcache.common.target import Target, check_device, identify, load_target, load_tokenizer, save_parts
from draftcache.common.verify import check_shards, leftovers
from draftcache.extract.buckets import Batch, plan_batches
from draftcache.extract.estimate import Estimate, check_space, estimate, free_bytes
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.plan import ExtractConfig, Plan, make_plan
from draftcache.extract.proof import prove_batch
from draftcache.extract.ranks import Ranks, joined_ranks, world_size
from draftcache.extract.repair import repair_files
from draftcache.extract.speed import ForwardClock, Speed
from draftcache.extract.writer import Writer

PROVE_EVERY = 64
"""Batches from one proof to the next."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def extract(config: ExtractConfig) -> Store:
    """Make a store, or finish one with `resume`; alone, or as one rank of several.

    Raises DraftcacheError, before the folder is touched, for anything wrong in flags, data, target or free space.
    """
    if config.device_map is not None and world_size() > 1:
        raise UsageError("--device-map under torchrun", needed="one process", do="start draftcache without torchrun")
    with joined_ranks() as ranks:
        name = ranks.device_name(config.device)
        check_device(name)
        device = torch.device(name)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        try:
            store = _lead(config, ranks, device) if ranks.rank == 0 else _follow(config, ranks, device)
        except OSError as error:
            raise _disk_error(config.store, error) from None
    store.read_journal()
    _check_void(store.void_samples, store.manifest.report.kept, config.max_void)
    return store


def dry_run(config: ExtractConfig) -> tuple[Estimate, int]:
    """What the store would take, and the free bytes of its disk. Needs no weights and writes nothing there."""
    return estimate(make_plan(config), config.target), free_bytes(config.store)


def write_all(
    plan: Plan,
    todo: Sequence[Batch],
    store: Store,
    forward: Forward,
    target: Target,
    max_void: float,
    ranks: Ranks,
) -> Speed | None:
    """Run these batches and commit each as a shard of the store; how fast that went, None if there were none.

    Raises TargetError if a later proof fails, or if more than `max_void` of the samples are void.
    """
    samples, tokens = sum(batch.count for batch in todo), 0
    device, clock = forward.device, ForwardClock(forward.device)
    with (
        Journal(store.path, ranks.rank) as journal,
        Writer(journal, plan.max_tokens * store.manifest.record.record_bytes, device) as writer,
        tqdm(total=samples, desc="extract", unit=" samples", disable=None if ranks.rank == 0 else True) as bar,
    ):
        begin = time.perf_counter()  # the buffers stand
        for number, batch in enumerate(todo):
            bucket = plan.bucket(batch)
            input_ids, lengths = batch_inputs(bucket, batch, device)
            with clock.running():
                records = forward(input_ids, lengths)
            if number % PROVE_EVERY == 0 and (number or ranks.rank):  # rank 0's first was proven before
                _prove(plan, target, forward, input_ids, lengths, records)
            real, _ = bucket.rows(range(batch.first, batch.first + batch.count))
            copied = writer.submit(batch, store.buckets[batch.ceiling], records, real, forward.void)
            forward.being_read_until(copied)
            tokens += sum(real)
            _check_void(writer.void_samples, samples, max_void)
            bar.update(batch.count)
        writer.finish()
        wall, forward_seconds = time.perf_counter() - begin, clock.seconds()
    if not todo:
        return None
    return Speed(forward=tokens / forward_seconds, writing=tokens / writer.seconds, overall=tokens / wall)


def _lead(config: ExtractConfig, ranks: Ranks, device: torch.device) -> Store:
    """Rank 0: everything but the other ranks' share of the batches."""
    _check_folder(config)
    plan = make_plan(config)

    def load() -> Target:
        return load_target(config.target, device, plan.manifest.target.dtype, config.device_map)

    with lock_store(config.store):
        found = _existing(config, plan)
        repaired = 0 if found is None else repair_files(found, plan, config.target, load)
        todo = list(range(len(plan.batches))) if found is None else _unfinished(found, plan)
        if found is not None:
            if repaired:
                print(f"{repaired} damaged files made again", file=sys.stderr)
            print(f"{len(plan.batches) - len(todo)} of {len(plan.batches)} shards already done", file=sys.stderr)
            if not todo:
                ranks.from_first([])
                return found
        batches = [plan.batches[i] for i in todo]
        if not config.force:
            check_space(estimate(plan, config.target), config.store, batches)
        target = load()
        with _forward(plan, target, device) as forward:
            _prove_first(plan, batches[0], target, forward, device)
            store = found or _begin_store(config, plan, target)
            ranks.from_first(todo)
            _say(write_all(plan, batches[:: ranks.size], store, forward, target, config.max_void, ranks), ranks)
        ranks.meet()
    return store


def _follow(config: ExtractConfig, ranks: Ranks, device: torch.device) -> Store:
    """Any other rank: its share of the batches, as rank 0 planned them."""
    dtype = identify(config.target, load_tokenizer(config.target), config.dtype).dtype
    target = load_target(config.target, device, dtype)
    todo = ranks.from_first([])
    store = Store(config.store, read_manifest(config.store))
    if not todo:
        return store
    plan = _stored_plan(store)
    batches = [plan.batches[i] for i in todo]
    with _forward(plan, target, device) as forward:
        share = batches[ranks.rank :: ranks.size]
        _say(write_all(plan, share, store, forward, target, config.max_void, ranks), ranks)
    ranks.meet()
    return store


def _disk_error(store: Path, error: OSError) -> StoreError:
    reason = error.strerror or first_line(error)
    if error.errno in _NO_SPACE:
        return StoreError(f"{store}: {reason}", needed="more free space", do="make room, then extract --resume")
    return StoreError(
        f"{error.filename or store}: {reason}",
        needed="a disk and a folder that can be read and written",
        do="check path, rights and disk, then extract --resume",
    )


def _check_folder(config: ExtractConfig) -> None:
    if is_store(config.store) and not (config.overwrite or config.resume):
        raise StoreError(
            f"{config.store} exists", needed="a new folder", do="choose another, or pass --resume or --overwrite"
        )
    if config.store.exists() and not is_store(config.store) and _holds_something(config.store):
        raise StoreError(f"{config.store} exists and is no store", needed="a new folder", do="choose another --store")


def _holds_something(path: Path) -> bool:
    return not path.is_dir() or any(path.iterdir())


def _existing(config: ExtractConfig, plan: Plan) -> Store | None:
    """The store to go on with, cleared of what a killed run left unfinished; None if there is nothing to keep."""
    if not config.resume:
        return None
    if not (config.store / MANIFEST_NAME).exists():
        if journal_files(config.store):
            raise DamageError(
                f"{config.store} has a journal, but no {MANIFEST_NAME}",
                needed="the manifest that its shards belong to",
                do="restore it, or pass --overwrite to write everything again",
            )
        return None
    manifest = read_manifest(config.store)
    check_same(manifest, plan.manifest, str(config.store))
    for path in leftovers(config.store):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return Store(config.store, manifest)


def _unfinished(store: Store, plan: Plan) -> list[int]:
    """The batches whose shards are missing or damaged; every byte of the others is read and checked."""
    intact = {(s.bucket, s.shard) for s in check_shards(store, "check") if s.damage is None}
    if len(journal_files(store.path)) > 1:
        merge_journals(store.path, (store.buckets[ceiling].committed[shard] for ceiling, shard in sorted(intact)))
    return [i for i, batch in enumerate(plan.batches) if (batch.ceiling, batch.shard) not in intact]


def _stored_plan(store: Store) -> Plan:
    """The plan that rank 0 made, as the store tells it."""
    buckets = tuple(bucket.samples for bucket in store.buckets.values())
    batches = tuple(plan_batches(buckets, store.manifest.settings.token_budget))
    return Plan(manifest=store.manifest, buckets=buckets, batches=batches, chat_template=None)


def _forward(plan: Plan, target: Target, device: torch.device) -> Forward:
    return Forward(target, plan.manifest.settings.layer_ids, plan.manifest.record, plan.max_tokens, device)


def _prove_first(plan: Plan, batch: Batch, target: Target, forward: Forward, device: torch.device) -> None:
    """Run a batch once before anything is written, and compare it with what transformers says."""
    input_ids, lengths = batch_inputs(plan.bucket(batch), batch, device)
    records = forward(input_ids, lengths)
    if not _prove(plan, target, forward, input_ids, lengths, records):
        raise TargetError(
            f"all {batch.count} samples of the first batch have states that are not finite or all zero",
            needed="states to learn from",
            do="check the weights, or try another --dtype",
        )


def _prove(
    plan: Plan,
    target: Target,
    forward: Forward,
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    records: torch.Tensor,
) -> bool:
    """Compare a sound sample of the last batch with transformers' own; False if there is none."""
    sound = ~forward.void
    if not bool(sound.any()):
        return False
    layer_ids, record = plan.manifest.settings.layer_ids, plan.manifest.record
    row = lengths.where(sound, lengths.max() + 1).argmin()[None]
    prove_batch(target, layer_ids, record, input_ids[row], lengths[row], records[row])
    return True


def _begin_store(config: ExtractConfig, plan: Plan, target: Target) -> Store:
    """Commit everything but the records: from the manifest's rename on, the folder is a store."""
    if is_store(config.store):
        clear_store(config.store)
    create_store(config.store, plan.manifest.record, {s.ceiling: s.rows for s in plan.manifest.buckets}, plan.buckets)
    save_parts(target, config.target, config.store, plan.chat_template)
    manifest = dataclasses.replace(plan.manifest, ends=target.ends, files=committed_files(config.store))
    write_manifest(config.store, manifest)
    return Store(config.store, manifest)


def _check_void(void: int, samples: int, max_void: float) -> None:
    if void > max_void * samples:
        raise TargetError(
            f"{void} of {samples} samples have states that are not finite or all zero",
            needed=f"at most {max_void:.0%} of them, as --max-void says",
            do="check the weights, or try another --dtype; what was written stays, and such rows are never trained on",
        )


def _say(speed: Speed | None, ranks: Ranks) -> None:
    if speed is not None:
        print(f"rank {ranks.rank}: {speed}" if ranks.size > 1 else speed, file=sys.stderr)
