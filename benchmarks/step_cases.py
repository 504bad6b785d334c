"""Training steps at named geometries on random data that lies on the device: what bench_step measures.

Legend: T context tokens, A anchors, B block size, Q = A * B, H width, I inner width, K taps, V vocabulary.
"""

from dataclasses import dataclass

import torch

from draftcache.common.layout import CHUNK_TOKENS
from draftcache.common.record import RecordSpec, record_spec
from draftcache.common.target import TargetParts
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.model.anchors import Blocks, draw_anchors, lay_out_blocks
from draftcache.train.model.drafter import FULL, SLIDING, Drafter, DrafterConfig
from draftcache.train.model.loss import LossConfig
from draftcache.train.optim import OptimConfig, Optimizer
from draftcache.train.step import EagerStep, StepConfig

DEVICE = torch.device("cuda")
SUPERVISED_FROM = 0.3
"""The first share of each document is prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A target's class, a drafter for it, and the size of a micro-batch."""

    tokens: int  # T
    anchors: int  # A
    block_size: int  # B
    layer_type: str
    hidden: int  # H
    inner: int  # I
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int
    layers: int = 5
    taps: int = 5
    document: int  # tokens per document
    stride: int  # tokens from one document to the next

    @property
    def slots(self) -> int:
        """Q."""
        return self.anchors * self.block_size

    @property
    def drafter(self) -> DrafterConfig:
        """The drafter's configuration."""
        return DrafterConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            layer_types=(self.layer_type,) * self.layers,
            sliding_window=2048,
            sliding_causal=True,
            block_size=self.block_size,
            layer_ids=tuple(range(1, 1 + self.taps)),
            mask_token_id=self.vocabulary - 1,
            vocab_size=self.vocabulary,
            rope_theta=1e7,
            rms_norm_eps=1e-6,
            attention_bias=False,
        )


FULL_SCALE = Geometry(
    tokens=49_152,
    anchors=1024,
    block_size=32,
    layer_type=SLIDING,
    hidden=5120,
    inner=17_408,
    vocabulary=248_320,
    document=1650,
    stride=1728,
)
GEOMETRIES = {
    "full": FULL_SCALE,
    "qwen3-8b": Geometry(
        tokens=12_288,
        anchors=2048,
        block_size=16,
        layer_type=FULL,
        hidden=4096,
        inner=12_288,
        vocabulary=151_936,
        document=2900,
        stride=3072,
    ),
    "qwen3-0.6b": Geometry(
        tokens=8192,
        anchors=256,
        block_size=16,
        layer_type=FULL,
        hidden=1024,
        inner=3072,
        heads=16,
        vocabulary=151_936,
        document=1900,
        stride=2048,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A step ready to run, and what it runs on."""

    step: EagerStep
    drafter: Drafter
    optimizer: Optimizer
    parts: TargetParts
    spec: RecordSpec


def build(
    geometry: Geometry, codec: str, teacher: str, matmul: str, steps: int = 1000, device: torch.device = DEVICE
) -> Built:
    """A randomly initialised drafter's step; `teacher` is what the store would hold: last, top or none.

    Without CUDA it computes in float32.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        drafter = Drafter(geometry.drafter)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02)
    shape = geometry.vocabulary, geometry.hidden
    embedding, head = (torch.randn(shape, device=device, dtype=dtype).mul_(0.02) for _ in range(2))
    parts = TargetParts(embedding=embedding, head=head)
    optimizer = Optimizer(drafter.parameters(), OptimConfig(), steps)
    spec = record_spec(geometry.taps, geometry.hidden, codec, teacher)
    loss = LossConfig(teacher="tokens" if teacher == "none" else teacher)
    config = StepConfig(anchors=geometry.anchors, seed=0, log_rows=steps, dtype=dtype, matmul=matmul)
    return Built(
        step=EagerStep(drafter, optimizer, parts, spec, loss, config),
        drafter=drafter,
        optimizer=optimizer,
        parts=parts,
        spec=spec,
    )


def random_batch(geometry: Geometry, spec: RecordSpec, tokens: int, stride: int, seed: int = 0) -> FlatBatch:
    """Documents of the geometry's share of `stride`, with random states, in device memory."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    batch = view_batch(
        torch.zeros(batch_bytes(tokens, spec.record_bytes), dtype=torch.uint8, device=DEVICE),
        tokens,
        spec.record_bytes,
    )
    batch.documents.fill_(-1)
    length = stride * geometry.document // geometry.stride
    for number in range(tokens // stride):
        here = slice(number * stride, number * stride + length)
        batch.input_ids[here] = torch.randint(0, geometry.vocabulary - 1, (length,), device=DEVICE, generator=generator)
        batch.positions[here] = torch.arange(length, dtype=torch.int32, device=DEVICE)
        batch.documents[here] = number
        batch.samples[here] = number
        batch.loss_mask[here.start + int(SUPERVISED_FROM * length) : here.stop] = 1
    _fill_records(batch, spec, generator)
    return batch


def drawn_blocks(geometry: Geometry, batch: FlatBatch) -> Blocks:
    """Blocks at the geometry's number of anchors."""
    anchors, keep = draw_anchors(batch, 0, geometry.anchors)
    return lay_out_blocks(batch, anchors, keep, geometry.block_size, geometry.vocabulary - 1)


def _fill_records(batch: FlatBatch, spec: RecordSpec, generator: torch.Generator) -> None:
    """Values that decode to roughly normal numbers, chunk by chunk, so that no copy of the records exists."""
    for begin in range(0, batch.tokens, CHUNK_TOKENS * 64):
        part = batch.records[begin : begin + CHUNK_TOKENS * 64]
        for field in spec.fields:
            view = part[:, field.offset : field.offset + field.nbytes]
            shape = (len(part), field.nbytes)
            if field.name == "tap_scales":
                view.fill_(127)
            elif field.name == "top_ids":
                ids = torch.arange(field.nbytes // 4, dtype=torch.int32, device=DEVICE)
                view.copy_(ids.view(torch.uint8).expand(shape))
            elif field.name == "top_log_probs":
                flat = torch.full((len(part), field.nbytes // 2), -4.5, dtype=torch.bfloat16, device=DEVICE)
                view.copy_(flat.view(torch.uint8))
            elif field.dtype == "uint8":
                view.copy_(torch.randint(0, 120, shape, dtype=torch.uint8, device=DEVICE, generator=generator))
            else:
                size = (len(part), field.nbytes // 2)
                view.copy_(torch.randn(size, device=DEVICE, generator=generator).bfloat16().view(torch.uint8))
