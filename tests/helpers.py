"""Small builders shared by tests: flat batches laid out as training does, a tiny drafter, random target parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from draftcache.common.codec import field_tensor
from draftcache.common.layout import CHUNK_TOKENS, round_up
from draftcache.common.record import RecordSpec, record_spec
from draftcache.common.target import TargetParts
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.model.anchors import Blocks, lay_out_blocks
from draftcache.train.model.attention import Attention
from draftcache.train.model.drafter import FULL, Drafter, DrafterConfig
from draftcache.train.order import CONTEXT_MULTIPLE

Test = TypeVar("Test", bound=Callable[..., object])

WIDTH = 32
VOCABULARY = 97
MASK_TOKEN = 96
LAYER_IDS = (1, 3)


@dataclass(frozen=True, slots=True)
class Document:
    """One sample's token ids and loss mask, and its sample number."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    sample: int


def gpu(test: Test) -> Test:
    """Mark a test as needing a CUDA device, and skip it where there is none."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    marked: Test = pytest.mark.gpu(skip(test))
    return marked


def document(mask: Sequence[int], sample: int = 0) -> Document:
    """A document with this loss mask; its ids follow from the sample number alone and never are the mask token."""
    generator = torch.Generator().manual_seed(sample)
    ids = torch.randint(0, MASK_TOKEN, (len(mask),), generator=generator)
    return Document(tuple(ids.tolist()), tuple(mask), sample)


def supervised(length: int, prompt: int, sample: int = 0) -> Document:
    """A document whose first `prompt` tokens are not supervised and whose others are."""
    return document([0] * prompt + [1] * (length - prompt), sample)


def flat_batch(
    documents: Sequence[Document],
    *,
    epoch: int = 0,
    stride: int = 0,  # at least so many tokens per row: a bucket's row stride
    tokens: int = 0,  # at least so many in all
    spec: RecordSpec | None = None,  # None: records of 64 bytes that nobody reads
) -> FlatBatch:
    """The documents as training lays them out: rows from multiples of 64, T a multiple of 128, document -1 between.

    Records are random, but depend on the sample number alone, so that one sample is the same wherever it lies.
    """
    spans = [max(stride, round_up(len(d.ids), CHUNK_TOKENS)) for d in documents]
    total = round_up(max(sum(spans), tokens, 1), CONTEXT_MULTIPLE)
    record_bytes = spec.record_bytes if spec else 64
    batch = view_batch(torch.zeros(batch_bytes(total, record_bytes), dtype=torch.uint8), total, record_bytes)
    batch.documents.fill_(-1)
    batch.epoch.fill_(epoch)
    first = 0
    for number, (one, span) in enumerate(zip(documents, spans, strict=True)):
        here = slice(first, first + len(one.ids))
        batch.input_ids[here] = torch.tensor(one.ids)
        batch.loss_mask[here] = torch.tensor(one.mask, dtype=torch.uint8)
        batch.samples[here] = one.sample
        batch.positions[here] = torch.arange(len(one.ids), dtype=torch.int32)
        batch.documents[here] = number
        if spec:
            batch.records[here] = _random_records(spec, len(one.ids), one.sample)
        first += span
    return batch


def on_device(batch: FlatBatch, device: str) -> FlatBatch:
    """A copy of the batch in a device's memory."""
    return view_batch(batch.block.to(device), batch.tokens, batch.records.shape[1])


def blocks_at(batch: FlatBatch, anchors: Sequence[int], keep: Sequence[bool] | None = None, size: int = 4) -> Blocks:
    """Blocks of `size` slots at these flat positions, all kept unless told."""
    flags = torch.tensor(keep if keep is not None else [True] * len(anchors))
    return lay_out_blocks(batch, torch.tensor(anchors), flags, size, MASK_TOKEN)


def tiny_config(layer_types: tuple[str, ...] = (FULL, FULL), window: int = 4, block_size: int = 4) -> DrafterConfig:
    """A drafter of width 32 with 2 heads, 1 kv head, head_dim 16 and 2 taps, for a vocabulary of 97."""
    return DrafterConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        layer_types=layer_types,
        sliding_window=window,
        sliding_causal=True,
        block_size=block_size,
        layer_ids=LAYER_IDS,
        mask_token_id=MASK_TOKEN,
        vocab_size=VOCABULARY,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        attention_bias=False,
    )


def tiny_drafter(config: DrafterConfig, seed: int = 0, scale: float = 5.0) -> Drafter:
    """An initialised drafter with its matrices scaled up, so that attention is far from uniform."""
    drafter = Drafter(config)
    drafter.initialise(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return drafter


def tiny_record(teacher: str = "last") -> RecordSpec:
    """The record of the tiny drafter's target."""
    return record_spec(len(LAYER_IDS), WIDTH, "bf16", teacher)


def random_parts(
    seed: int = 0, *, tied: bool = False, device: str = "cpu", vocabulary: int = VOCABULARY
) -> TargetParts:
    """A random embedding and head, [vocabulary, 32] float32 each; one tensor if tied."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocabulary, WIDTH, generator=generator).to(device)
    head = embedding if tied else torch.randn(vocabulary, WIDTH, generator=generator).to(device)
    return TargetParts(embedding=embedding, head=head)


def taps_of(batch: FlatBatch, spec: RecordSpec) -> Tensor:
    """[T, K * H] float32: a batch's taps, a copy."""
    return record_field(batch.records, spec, "taps").float()


def run_drafter(
    drafter: Drafter,
    parts: TargetParts,
    taps: Tensor,  # [T, K * H]
    batch: FlatBatch,
    blocks: Blocks,
    attention: Attention,
) -> Tensor:  # [A, B, H]
    """The drafter's hidden states of every block slot."""
    context = drafter.context_keys(taps, batch.positions)
    embedded = parts.embedding[blocks.input_ids.flatten()]
    hidden: Tensor = drafter(embedded, blocks.positions.flatten(), context, attention)
    return hidden.view(*blocks.input_ids.shape, -1)


def _random_records(spec: RecordSpec, length: int, sample: int) -> Tensor:
    """[length, R] uint8 records whose every field is normally distributed."""
    generator = torch.Generator().manual_seed(1000 + sample)
    values = torch.randn(length, spec.record_bytes // 2, generator=generator).to(torch.bfloat16)
    return values.view(torch.uint8)


def record_field(records: Tensor, spec: RecordSpec, name: str) -> Tensor:
    """[T, R] uint8 records as one field, flattened: [T, prod(shape)], a view."""
    return field_tensor(records, spec.field(name)).flatten(1)
