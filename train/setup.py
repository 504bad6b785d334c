"""Turns flags and a store into a fully resolved run: geometry, mask token, shapes, number of steps.

Nothing here touches a device. Everything a user can get wrong is found here, before anything is loaded or built.
"""

import dataclasses
from importlib.metadata import version
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from crc32c import crc32c

from draftcache.common.errors import UsageError
from draftcache.common.manifest import PLAIN_ENDS, TargetEnds, TargetIdentity
from draftcache.common.store import BucketSamples, Store
from draftcache.common.target import check_device
from draftcache.common.version import VERSION
from draftcache.train.checkpoint import Run
from draftcache.train.kernels.float8 import WIDTH_MULTIPLE
from draftcache.train.kernels.prefix_attention import MAX_BLOCK_SIZE
from draftcache.train.model.anchors import MAX_CONTEXT_TOKENS
from draftcache.train.model.drafter import FULL, SLIDING, DrafterConfig
from draftcache.train.order import Batching, BucketIndex, check_fits, context_shapes, split, steps_per_epoch
from draftcache.train.settings import GeometryOptions, TrainConfig
from draftcache.train.warm_start import check_start

LAYER_PATTERNS = ("full", "sliding", "sliding-last-full")
FLOAT8_CAPABILITY = (8, 9)


def resolve(config: TrainConfig, store: Store, world_size: int = 1) -> Run:
    """The run that `config` describes on this store. Raises UsageError for what cannot work."""
    check_device(config.device)
    manifest = store.manifest
    _check_ends(manifest.ends)
    loss = dataclasses.replace(config.loss, teacher=_teacher(config.loss.teacher, manifest.settings.teacher))
    drafter = _drafter_config(config.geometry, manifest.target, manifest.settings.layer_ids)
    if config.init_from is not None:
        check_start(config.init_from, drafter)
    _check_mask_token(drafter.mask_token_id, manifest.target, store)
    on_cuda = config.device.startswith("cuda")
    if on_cuda and drafter.block_size > MAX_BLOCK_SIZE:
        raise UsageError(
            f"--block-size {drafter.block_size} on CUDA", needed=f"at most {MAX_BLOCK_SIZE}", do="lower --block-size"
        )
    if config.matmul == "fp8":
        _check_float8(config.device, drafter)
    batching = Batching(kind=config.batching, token_budget=config.token_budget, rows=config.rows)
    trained, held_out = split_samples(store, config.validation.validation_share)
    if not trained:
        raise UsageError(f"every row of {store.path} is void", needed="samples to train on", do="extract again")
    if config.validation.patience is not None and not held_out:
        raise UsageError(
            f"--patience with --validation-share {config.validation.validation_share}, which holds out no sample here",
            needed="held-out samples, by which to stop",
            do="raise --validation-share, or leave --patience away",
        )
    if drafter.block_size > max(trained):
        raise UsageError(
            f"--block-size {drafter.block_size} on samples of at most {max(trained)} tokens",
            needed="blocks that a sample can fill",
            do="lower --block-size",
        )
    largest = max(context_shapes(trained, batching))
    if largest >= MAX_CONTEXT_TOKENS:
        raise UsageError(f"a context of {largest} tokens", needed=f"below {MAX_CONTEXT_TOKENS}", do="lower the budget")
    check_fits(bucket_index(store), batching)
    micro_batches = config.accumulate * world_size
    return Run(
        drafter=drafter,
        target=manifest.target,
        store_identity=manifest.identity,
        loss=loss,
        optim=config.optim,
        batching=batching,
        validation_share=config.validation.validation_share,
        anchors=_anchor_count(config, store, batching),
        micro_batches=micro_batches,
        steps=config.steps or config.epochs * steps_per_epoch(trained, batching, micro_batches),
        seed=config.seed,
        dtype="bfloat16" if on_cuda else "float32",
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """What a run is made with."""
    return {"draftcache": VERSION} | {name: version(name) for name in ("torch", "zarr")}


def settled(config: TrainConfig, run: Run) -> TrainConfig:
    """The settings with everything filled in that the store, the target or the machine decided."""
    drafter = run.drafter
    names = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "mask_token_id")
    return dataclasses.replace(
        config,
        store=config.store.resolve(),
        out=config.out.resolve(),
        init_from=config.init_from and config.init_from.resolve(),
        geometry=dataclasses.replace(config.geometry, **{name: getattr(drafter, name) for name in names}),
        loss=run.loss,
        steps=run.steps,
    )


def _check_ends(ends: TargetEnds) -> None:
    if ends != PLAIN_ENDS:
        raise UsageError(
            f"the target scales its embedding by {ends.embedding_scale:g} and its logits by {ends.logit_scale:g}, and "
            f"caps them at {ends.logit_softcap}",
            needed="a target whose embedding and head are used as they are: servers differ in what a drafter gets",
            do="train on another target; the store itself is right",
        )


def _check_float8(device: str, drafter: DrafterConfig) -> None:
    found = torch.cuda.get_device_capability(device)
    if found < FLOAT8_CAPABILITY:
        raise UsageError(
            f"--matmul fp8 on a device of compute capability {found}",
            needed=f"{FLOAT8_CAPABILITY} or later",
            do="use --matmul bf16",
        )
    widths = (drafter.hidden_size, drafter.intermediate_size, drafter.vocab_size)
    if any(width % WIDTH_MULTIPLE for width in widths):
        raise UsageError(
            f"--matmul fp8 with widths {widths} of hidden states, MLP and vocabulary",
            needed=f"multiples of {WIDTH_MULTIPLE}",
            do="use --matmul bf16, or correct --intermediate",
        )


def bucket_index(store: Store) -> dict[int, BucketIndex]:
    """What ordering needs to know of a store: every sample but those that the journal calls void."""
    found = {}
    for ceiling, bucket in store.buckets.items():
        samples = bucket.samples
        count = len(samples.samples)
        rows = np.setdiff1d(np.arange(count, dtype=np.int64), np.array(sorted(bucket.void_rows), dtype=np.int64))
        if len(rows):
            found[ceiling] = BucketIndex(rows, samples.samples[rows], samples.lengths[rows], count)
    return found


def split_samples(store: Store, share: float) -> tuple[dict[int, BucketIndex], dict[int, BucketIndex]]:
    """The samples to train on and the samples held out, see `order.split`."""
    index = bucket_index(store)
    if not share:
        return index, {}
    return split(index, {c: _token_digests(store.buckets[c].samples, held.rows) for c, held in index.items()}, share)


def _token_digests(samples: BucketSamples, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[N] a hash of each row's tokens."""
    ids, bounds = samples.input_ids.data, samples.offsets.tolist()  # plain: there may be a million rows
    return np.array([crc32c(ids[bounds[row] : bounds[row + 1]]) for row in rows.tolist()], dtype=np.int64)


def _teacher(asked: str | None, stored: str) -> str:
    """What the loss compares with: as asked, or the best that the store holds."""
    if asked not in (None, "tokens", stored):
        raise UsageError(
            f"teacher {asked!r} on a store extracted with teacher {stored!r}",
            needed=f"a store that holds it; this one allows {sorted({'tokens', stored} - {'none'})}",
            do=f"extract with --teacher {asked}",
        )
    return asked or ("tokens" if stored == "none" else stored)


def _drafter_config(options: GeometryOptions, target: TargetIdentity, layer_ids: tuple[int, ...]) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_heads=options.num_heads or target.num_heads,
        num_kv_heads=options.num_kv_heads or target.num_kv_heads,
        head_dim=options.head_dim or target.head_dim,
        layer_types=_layer_types(options.layer_types, options.num_layers),
        sliding_window=options.sliding_window,
        sliding_causal=True,
        block_size=options.block_size,
        layer_ids=layer_ids,
        mask_token_id=_mask_token_id(options.mask_token_id, target),
        vocab_size=target.vocab_size,
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        attention_bias=target.attention_bias,
    )


def _layer_types(pattern: str, layers: int) -> tuple[str, ...]:
    if layers < 1:
        raise UsageError(f"--num-layers {layers}", needed="at least 1", do="correct it")
    if pattern == "full":
        return (FULL,) * layers
    if pattern == "sliding":
        return (SLIDING,) * layers
    if pattern == "sliding-last-full":
        return (SLIDING,) * (layers - 1) + (FULL,)
    names = {"full": FULL, "sliding": SLIDING, FULL: FULL, SLIDING: SLIDING}
    parts = pattern.split(",")
    if len(parts) != layers or any(part not in names for part in parts):
        raise UsageError(
            f"--layer-types {pattern} for {layers} layers",
            needed=f"one of {list(LAYER_PATTERNS)}, or a list of {layers} times full or sliding",
            do="correct --layer-types or --num-layers",
        )
    return tuple(names[part] for part in parts)


def _mask_token_id(asked: int | None, target: TargetIdentity) -> int:
    if asked is not None:
        return asked
    if target.tokenizer_size < target.vocab_size:
        return target.tokenizer_size
    raise UsageError(
        f"the tokenizer uses all {target.vocab_size} rows of the target's embedding",
        needed="a mask token that occurs nowhere in the data",
        do="choose one with --mask-token-id",
    )


def _check_mask_token(mask_token_id: int, target: TargetIdentity, store: Store) -> None:
    if mask_token_id in target.special_token_ids:
        raise UsageError(
            f"mask token id {mask_token_id} is one of the target's special tokens {list(target.special_token_ids)}",
            needed="a token with no other meaning",
            do="choose another with --mask-token-id",
        )
    uses = sum(int(np.count_nonzero(b.samples.input_ids == mask_token_id)) for b in store.buckets.values())
    if uses:
        raise UsageError(
            f"mask token id {mask_token_id} occurs {uses} times in the data",
            needed="a token that the data does not use",
            do="choose another with --mask-token-id",
        )


def _anchor_count(config: TrainConfig, store: Store, batching: Batching) -> int:
    """Anchors per micro-batch: as asked, but no more than any micro-batch can have."""
    possible = 0
    for ceiling, bucket in store.buckets.items():
        samples = bucket.samples
        pairs = samples.loss_mask[:-1] & samples.loss_mask[1:]
        per_sample = [np.count_nonzero(pairs[begin:end]) for begin, end in pairwise(samples.offsets.tolist())]
        rows = batching.bucket_rows(ceiling, len(per_sample)) if batching.kind == "bucket" else len(per_sample)
        most = int(sum(sorted(per_sample)[-rows:]))
        possible = max(possible, most) if batching.kind == "bucket" else possible + most
    if batching.kind == "packed":
        possible = min(possible, batching.token_budget)
    return max(1, min(config.anchors, possible))
