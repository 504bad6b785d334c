"""What a run will take, from its settings and its store's manifest alone: memory by part, bytes, and time.

Memory follows the buffers that the step allocates; activations are those that the backward pass keeps. Rates are those
of an H200 (benchmarks/results.jsonl); another GPU's time scales with its own.

Legend as in work.py.
"""

from dataclasses import dataclass

import torch

from draftcache.common.store import Store, open_store
from draftcache.train.batch import batch_bytes
from draftcache.train.checkpoint import Run
from draftcache.train.model.drafter import Drafter
from draftcache.train.order import context_shapes
from draftcache.train.ring import BUFFERS
from draftcache.train.settings import TrainConfig
from draftcache.train.setup import resolve, split_samples
from draftcache.train.work import attention_operations, products

BF16_RATE, FP8_RATE = 690e12, 1190e12
"""Operations per second of the step's own products on an H200 that runs on and on."""
ATTENTION_RATE = 230e12
DEVICE_RATE = 4.2e12
"""Bytes per second of an H200's memory, read and written."""
SNAPSHOT_BYTES = 12
"""Per weight: master and two moments, as the first process copies them for a checkpoint."""
UPDATE_BYTES = 34
"""Per weight: gradient, two moments and master read and written, and the copy in bfloat16."""
POINTWISE_BYTES = 60
"""Per slot, layer and element of the width, over norms, gate, rotation and copies, forward and backward."""
NVLINK_RATE = 300e9
"""Bytes per second of an all-reduce, as NCCL counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Figures of one process. Bytes and seconds."""

    parameters: int
    memory: dict[str, int]
    device_memory: int | None  # None: no CUDA device here
    host_memory: int  # pinned
    step_bytes: int  # read from the store
    step_seconds: float
    reduce_seconds: float  # of it, between processes

    @property
    def total_memory(self) -> int:
        """Of all parts."""
        return sum(self.memory.values())

    @property
    def disk_rate(self) -> float:
        """Bytes per second that keep the step fed."""
        return self.step_bytes / self.step_seconds

    @property
    def fits(self) -> bool:
        """Whether the device holds it; True where that is not known."""
        return self.device_memory is None or self.total_memory <= self.device_memory


def estimate(config: TrainConfig, world_size: int = 1) -> tuple[Run, Estimate]:
    """The run that `config` describes, and what it takes. Loads nothing."""
    store = open_store(config.store)
    run = resolve(config, store, world_size)
    trained, _ = split_samples(store, run.validation_share)
    tokens = max(context_shapes(trained, run.batching))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Drafter(run.drafter).parameters())
    record_bytes = store.manifest.record.record_bytes
    lengths = [int(n) for index in trained.values() for n in index.lengths]
    own = run.micro_batches // world_size
    reduce_seconds = _reduce_seconds(parameters, config.reduce_dtype, world_size)
    on_cuda = config.device.startswith("cuda") and torch.cuda.is_available()
    return run, Estimate(
        parameters=parameters,
        memory=_memory(run, config, store, tokens, parameters),
        device_memory=torch.cuda.get_device_properties(config.device).total_memory if on_cuda else None,
        host_memory=BUFFERS * batch_bytes(tokens, record_bytes) + SNAPSHOT_BYTES * parameters,
        step_bytes=own * tokens * record_bytes,
        step_seconds=own * _micro_step_seconds(run, config, tokens, sum(lengths) / len(lengths))
        + UPDATE_BYTES * parameters / DEVICE_RATE
        + reduce_seconds,
        reduce_seconds=reduce_seconds,
    )


def _memory(run: Run, config: TrainConfig, store: Store, tokens: int, parameters: int) -> dict[str, int]:
    d, manifest, size = run.drafter, store.manifest, 2 if run.dtype == "bfloat16" else 4
    slots, layers = run.anchors * d.block_size, len(d.layer_types)
    query, key = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
    table = d.vocab_size * d.hidden_size
    float8 = config.matmul == "fp8"
    batch = batch_bytes(tokens, manifest.record.record_bytes)
    kept_by_slot = 2 * d.hidden_size + 3 * query + 7 * key + 2 * d.intermediate_size
    activations = size * (
        layers * (slots * kept_by_slot + tokens * 6 * key)
        + 2 * tokens * d.hidden_size
        + 3 * slots * d.hidden_size
        + (0 if manifest.record.codec == "bf16" else tokens * len(d.layer_ids) * d.hidden_size)
    )
    chunk = min(slots, run.loss.chunk_slots) * d.vocab_size
    loss = chunk * size * (2 if run.loss.teacher == "last" else 1) + (chunk if float8 else 0)
    backward = size * slots * (d.intermediate_size + 3 * d.hidden_size)
    return {
        "weights, float32": 4 * parameters,
        "weights, compute dtype": size * parameters,
        "weights, 8 bits": 2 * (3 * layers * d.hidden_size * d.intermediate_size + table) if float8 else 0,
        "moments": 8 * parameters,
        "gradients": 4 * parameters,
        "embedding and head": size * table * (1 if manifest.target.tied_head else 2),
        "slot and static input": 2 * batch,
        "activations": activations,
        "loss or backward scratch": max(loss, backward),
    }


def _micro_step_seconds(run: Run, config: TrainConfig, tokens: int, mean_length: float) -> float:
    d = run.drafter
    found = products(d, tokens, run.anchors, run.loss.teacher or "tokens", config.matmul, run.loss.chunk_slots)
    seconds = sum(p.operations / (FP8_RATE if p.float8 else BF16_RATE) for p in found)
    seconds += attention_operations(d, run.anchors, mean_length / 2) / ATTENTION_RATE
    slots = run.anchors * d.block_size
    passes = len(d.layer_types) * slots * d.hidden_size * POINTWISE_BYTES
    passes += slots * d.vocab_size * (12 if run.loss.teacher == "last" else 6)
    return seconds + passes / DEVICE_RATE


def _reduce_seconds(parameters: int, dtype: str, world_size: int) -> float:
    """A ring all-reduce moves 2 (n - 1) / n of the gradients through every link."""
    size = 2 if dtype == "bfloat16" else 4
    return parameters * size * 2 * (world_size - 1) / world_size / NVLINK_RATE
