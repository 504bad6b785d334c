"""Stage one's table of contents: plan, lock, look what is there, load the target, run it, write.

Everything that can be wrong with flags, data or target folder is found before the store's folder is touched.
"""

import dataclasses
import errno
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from draftcache.common.errors import StoreError
from draftcache.common.journal import Journal
from draftcache.common.manifest import MANIFEST_NAME, check_same, read_manifest, write_manifest
from draftcache.common.store import Store, clear_store, committed_files, create_store, is_store, lock_store
from draftcache.common.target import Target, check_device, load_target, save_parts
from draftcache.common.verify import check_shards, leftovers
from draftcache.extract.buckets import Batch
from draftcache.extract.estimate import Estimate, check_space, estimate, free_bytes
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.plan import ExtractConfig, Plan, make_plan
from draftcache.extract.proof import prove_first_batch
from draftcache.extract.writer import Writer

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def extract(config: ExtractConfig) -> Store:
    """Make a store, or finish one with `resume`.

    Raises DraftcacheError, before the folder is touched, for anything wrong in flags, data, target or free space.
    """
    if is_store(config.store) and not (config.overwrite or config.resume):
        raise StoreError(
            f"{config.store} exists", needed="a new folder", do="choose another, or pass --resume or --overwrite"
        )
    if config.store.exists() and not is_store(config.store) and _holds_something(config.store):
        raise StoreError(f"{config.store} exists and is no store", needed="a new folder", do="choose another --store")
    check_device(config.device)
    plan = make_plan(config)
    with lock_store(config.store):
        found = _existing(config, plan)
        todo = list(plan.batches) if found is None else _unfinished(found, plan)
        if found is not None:
            print(f"{len(plan.batches) - len(todo)} of {len(plan.batches)} shards already done", file=sys.stderr)
            if not todo:
                return found
        if not config.force:
            check_space(estimate(plan, config.target), config.store, todo)
        try:
            return _run(config, plan, found, todo)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            raise StoreError(
                f"{config.store}: {error.strerror}", needed="more free space", do="make room, then extract --resume"
            ) from None


def _holds_something(path: Path) -> bool:
    return not path.is_dir() or any(path.iterdir())


def dry_run(config: ExtractConfig) -> tuple[Estimate, int]:
    """What the store would take, and the free bytes of its disk. Needs no weights and writes nothing there."""
    return estimate(make_plan(config), config.target), free_bytes(config.store)


def _existing(config: ExtractConfig, plan: Plan) -> Store | None:
    """The store to go on with, cleared of what a killed run left unfinished; None if there is nothing to keep."""
    if not config.resume or not (config.store / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(config.store)
    check_same(manifest, plan.manifest, str(config.store))
    for path in leftovers(config.store):
        path.unlink()
    return Store(config.store, manifest)


def _unfinished(store: Store, plan: Plan) -> list[Batch]:
    """The batches whose shards are missing or damaged; every byte of the others is read and checked."""
    intact = {(s.bucket, s.shard) for s in check_shards(store, "check") if s.damage is None}
    return [batch for batch in plan.batches if (batch.ceiling, batch.shard) not in intact]


def _run(config: ExtractConfig, plan: Plan, found: Store | None, todo: Sequence[Batch]) -> Store:
    device = torch.device(config.device)
    manifest = plan.manifest
    target = load_target(config.target, device, manifest.target.dtype)
    with Forward(target, manifest.settings.layer_ids, manifest.record, plan.max_tokens, device) as forward:
        _prove(plan, todo[0], target, forward, device)
        store = found or _begin_store(config, plan, target)
        _write_all(plan, todo, store, forward, device)
    store.read_journal()
    return store


def _prove(plan: Plan, batch: Batch, target: Target, forward: Forward, device: torch.device) -> None:
    """Run a batch once before anything is written, and compare it with what transformers says."""
    input_ids, lengths = batch_inputs(plan.bucket(batch), batch, device)
    records = forward(input_ids, lengths)
    prove_first_batch(target, plan.manifest.settings.layer_ids, plan.manifest.record, input_ids, lengths, records)


def _begin_store(config: ExtractConfig, plan: Plan, target: Target) -> Store:
    """Commit everything but the records: from the manifest's rename on, the folder is a store."""
    if is_store(config.store):
        clear_store(config.store)
    create_store(config.store, plan.manifest.record, {s.ceiling: s.rows for s in plan.manifest.buckets}, plan.buckets)
    save_parts(target, config.target, config.store)
    manifest = dataclasses.replace(plan.manifest, files=committed_files(config.store))
    write_manifest(config.store, manifest)
    return Store(config.store, manifest)


def _write_all(plan: Plan, todo: Sequence[Batch], store: Store, forward: Forward, device: torch.device) -> None:
    with (
        Journal(store.path) as journal,
        Writer(journal, plan.max_tokens * store.manifest.record.record_bytes) as writer,
        tqdm(total=sum(batch.count for batch in todo), desc="extract", unit=" samples", disable=None) as bar,
    ):
        for batch in todo:
            input_ids, lengths = batch_inputs(plan.bucket(batch), batch, device)
            records = forward(input_ids, lengths)
            writer.submit(batch, store.buckets[batch.ceiling], records, lengths.tolist())
            bar.update(batch.count)
