"""Runs two drafters over stored samples and compares their logits: the proof of an export without a server."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from draftcache.common.codec import read_taps
from draftcache.common.errors import CheckpointError
from draftcache.common.shard import RowReader
from draftcache.common.store import Store, open_store
from draftcache.common.target import TargetParts, load_parts
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.checkpoint import Run
from draftcache.train.model.anchors import Blocks, draw_anchors, lay_out_blocks
from draftcache.train.model.attention import DenseAttention
from draftcache.train.model.drafter import Drafter
from draftcache.train.order import Batching, epoch_batches
from draftcache.train.ring import fill_batch
from draftcache.train.setup import bucket_index

SAMPLES = 4
ANCHORS = 16
MAX_ERROR = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How the exported drafter's logits compare with the trainer's, over the trained slots of some stored samples."""

    samples: int
    slots: int
    same_token: float  # share of slots where both propose the same token
    relative_error: float  # of the exported logits, against the spread of the trainer's


def compare_on_store(run: Run, trained: Drafter, exported: Drafter, store: Path) -> Parity:
    """Compare on the first samples of an epoch, in float32.

    The exported weights are the trainer's rounded to bfloat16, which moves logits by about a percent of their spread.
    Raises CheckpointError for more than MAX_ERROR: then the two are not the same network.
    """
    opened = open_store(store)
    parts = load_parts(store, opened.manifest, torch.device("cpu"))
    same = slots = samples = 0
    error = spread = 0.0
    for batch in _single_samples(opened, run.seed, SAMPLES):
        anchors, keep = draw_anchors(batch, run.seed, ANCHORS)
        blocks = lay_out_blocks(batch, anchors, keep, run.drafter.block_size, run.drafter.mask_token_id)
        taps = read_taps(batch.records, opened.manifest.record, torch.float32)
        a, b = (slot_logits(drafter, parts, taps, batch, blocks)[blocks.valid] for drafter in (trained, exported))
        samples += 1
        slots += len(a)
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        error += float((a - b).square().sum())
        spread += float((a - a.mean(-1, keepdim=True)).square().sum())
    relative = (error / max(spread, 1e-30)) ** 0.5
    if relative > MAX_ERROR:
        raise CheckpointError(
            f"the exported drafter's logits are {relative:.0%} off the trainer's on {samples} stored samples",
            needed=f"at most {MAX_ERROR:.0%}, which is more than rounding to bfloat16 explains",
            do="report this: what was written does not mean what was trained",
        )
    return Parity(samples=samples, slots=slots, same_token=same / slots, relative_error=relative)


@torch.inference_mode()
def slot_logits(
    drafter: Drafter,
    parts: TargetParts,
    taps: Tensor,  # [T, K * H]
    batch: FlatBatch,
    blocks: Blocks,
) -> Tensor:  # [A, B, V] float32
    """The drafter's logits at every slot, by the plain attention."""
    context = drafter.context_keys(taps, batch.positions)
    embedded = parts.embedding.to(taps.dtype)[blocks.input_ids.flatten()]
    attention = DenseAttention(blocks, batch.tokens, drafter.config.rules)
    hidden = drafter(embedded, blocks.positions.flatten(), context, attention)
    logits: Tensor = functional.linear(hidden, parts.head.to(taps.dtype)).float().unflatten(0, blocks.labels.shape)
    return logits


def _single_samples(store: Store, seed: int, count: int) -> list[FlatBatch]:
    """The first samples of epoch 0, each as a micro-batch of its own."""
    batches = epoch_batches(bucket_index(store), Batching(kind="bucket", token_budget=1), seed, 0)
    reader, found = RowReader(), []
    for micro_batch in batches[:count]:
        record_bytes = store.manifest.record.record_bytes
        block = torch.zeros(batch_bytes(micro_batch.tokens, record_bytes), dtype=torch.uint8)
        batch = view_batch(block, micro_batch.tokens, record_bytes)
        fill_batch(store, reader, micro_batch, batch)
        found.append(batch)
    return found
