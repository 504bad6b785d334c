"""The training step as ordinary functions of static shapes, and its twin captured as CUDA graphs.

A micro-step draws anchors, runs the drafter and adds gradients and metric sums to tensors that outlive it. After
`accumulate` micro-steps an update sums over all processes, divides, clips and steps. Nothing in either reads the device
from the host. An evaluation is a micro-step without gradients, with sums of its own.

The captured twin holds one micro-step graph per shape, its evaluation twin, and one update graph, all in one memory
pool. What a graph writes that somebody reads later (gradients, sums, log rows, moments) is allocated outside the pool
before the first capture; everything inside a pool is overwritten by the next replay of any graph.

Legend: T context tokens, A anchors, B block size, Q = A * B, K taps, H target width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftcache.common.codec import field_tensor, read_taps
from draftcache.common.record import RecordSpec
from draftcache.common.target import TargetParts
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.model.anchors import Blocks, draw_anchors, lay_out_blocks
from draftcache.train.model.attention import GroupedAttention, PrefixAttention
from draftcache.train.model.backbone import Backbone
from draftcache.train.model.chunked_loss import chunked_loss
from draftcache.train.model.drafter import Drafter
from draftcache.train.model.head import Fp8Head, FrozenHead, Head
from draftcache.train.model.loss import LossConfig, LossInputs, LossSums
from draftcache.train.model.weights import ComputeWeights
from draftcache.train.optim import Optimizer
from draftcache.train.world import ALONE, World

Work = Callable[[], None]
"""Device work without arguments or result, launched by the call."""
_HEAD_SUMS = ("loss", "weight", "accepted", "blocks")
_WARMUP_RUNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """What the step needs besides the drafter's own configuration."""

    anchors: int  # per micro-batch
    seed: int
    log_rows: int  # steps whose metrics the device holds before the host fetches them
    dtype: torch.dtype  # of activations
    matmul: str = "bf16"  # "fp8": products with the head and in the MLPs in 8 bits
    reduce_dtype: torch.dtype = torch.float32  # in which gradients travel between processes


class Stepper(Protocol):
    """What the loop calls: `micro_step` for every micro-batch, `update` after each window of them, or `evaluate`."""

    def micro_step(self, batch: FlatBatch, loaded: Work | None = None) -> None:
        """Add one micro-batch's gradients and metric sums.

        `loaded` is called when all has been launched that reads the batch.
        """
        ...

    def update(self) -> None:
        """Step the optimizer with the window's mean gradient over all processes, write a log row, clear the window."""
        ...

    def evaluate(self, batch: FlatBatch, loaded: Work | None = None) -> None:
        """Add one held-out micro-batch's metric sums to `EagerStep.held_out_sums`, and nothing else; see micro_step."""
        ...


class EagerStep:
    """The step as it stands, launched operation by operation; runs on any device."""

    def __init__(
        self,
        drafter: Drafter,
        optimizer: Optimizer,
        parts: TargetParts,
        record: RecordSpec,
        loss: LossConfig,
        config: StepConfig,
        world: World = ALONE,
    ) -> None:
        self._drafter = drafter.config
        self._optimizer = optimizer
        self._weights = ComputeWeights(optimizer, config.dtype)
        self._backbone = Backbone(drafter, self._weights, config.matmul)
        self._embedding = parts.embedding.to(config.dtype)
        tied = parts.head is parts.embedding
        head = self._embedding if tied else parts.head.to(config.dtype)
        self._head: FrozenHead = Fp8Head(head) if config.matmul == "fp8" else Head(head)
        self._record = record
        self._loss = loss
        self._config = config
        self._world = world
        device = parts.embedding.device
        self._mask_token = torch.full((1,), drafter.config.mask_token_id, device=device)
        slots = drafter.config.block_size - 1
        self._sums = torch.zeros(len(_HEAD_SUMS) + 2 * slots, dtype=torch.float64, device=device)
        self.held_out_sums = torch.zeros_like(self._sums)
        """Sums of `evaluate`, of this process alone; columns as in `sum_names`. Whoever reads them clears them."""
        self.log = torch.zeros(config.log_rows, 3 + self._sums.numel(), dtype=torch.float64, device=device)
        """[log_rows, columns]: one row per step, columns as in `log_row_names`, reused in turn."""
        self._log_index = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def counters(self) -> list[Tensor]:
        """What even a step of weight zero changes: step and skip counts, sums and log."""
        counts = [self._optimizer.step, self._optimizer.skipped]
        return [*counts, self._sums, self.held_out_sums, self.log, self._log_index]

    def micro_step(self, batch: FlatBatch, loaded: Work | None = None) -> None:
        """See Stepper."""
        sums = self._forward(batch, self._draw_blocks(batch))
        sums.loss.backward()
        self._sums += _flat(sums)
        if loaded:
            loaded()

    @torch.no_grad()
    def evaluate(self, batch: FlatBatch, loaded: Work | None = None) -> None:
        """See Stepper."""
        self.held_out_sums += _flat(self._forward(batch, self._draw_blocks(batch)))
        if loaded:
            loaded()

    def update(self) -> None:
        """See Stepper."""
        self._world.sum(self._optimizer.gradients, self._config.reduce_dtype)
        self._world.sum(self._sums)
        self._optimizer.update(self._sums[1].float(), self._weights.values)
        self._backbone.refresh_float8()
        row = torch.stack([t.double() for t in self._scalars()])
        self.log.index_copy_(0, self._log_index, torch.cat([row, self._sums])[None])
        self._log_index.copy_((self._log_index + 1) % self._config.log_rows)
        self._sums.zero_()

    def clear_gradients(self) -> None:
        """Forget what the window has summed so far."""
        self._optimizer.gradients.zero_()

    def _scalars(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._optimizer.lr, self._optimizer.gradient_norm, self._optimizer.skipped

    def _draw_blocks(self, batch: FlatBatch) -> Blocks:
        anchors, keep = draw_anchors(batch, self._config.seed, self._config.anchors)
        return lay_out_blocks(batch, anchors, keep, self._drafter.block_size, self._drafter.mask_token_id)

    def _forward(self, batch: FlatBatch, blocks: Blocks) -> LossSums:
        taps = read_taps(batch.records, self._record, self._config.dtype)
        kind = PrefixAttention if taps.is_cuda else GroupedAttention
        attention = kind(blocks, batch.tokens, self._drafter.rules)
        distinct = self._embedding[torch.cat([self._mask_token, blocks.input_ids[:, 0]])]
        trained = self._backbone(distinct, blocks.positions, taps, batch.positions, attention)
        rows = blocks.teacher_rows[:, 1:]
        inputs = LossInputs(
            labels=blocks.labels[:, 1:],
            valid=blocks.valid[:, 1:],
            teacher_hidden=self._field(batch, "last") if self._loss.teacher == "last" else None,
            teacher_rows=rows,
            teacher_ids=self._field(batch, "top_ids")[rows] if self._loss.teacher == "top" else None,
            teacher_log_probs=self._field(batch, "top_log_probs")[rows] if self._loss.teacher == "top" else None,
        )
        return chunked_loss(trained, self._head, inputs, self._loss)

    def _field(self, batch: FlatBatch, name: str) -> Tensor:
        """[T, ...]: a field of all tokens."""
        return field_tensor(batch.records, self._record.field(name))


class CapturedStep:
    """The same step, replayed from CUDA graphs. Capture every shape before the first step."""

    def __init__(
        self,
        eager: EagerStep,
        record_bytes: int,
        shapes: set[int],
        device: torch.device,
        held_out_shapes: frozenset[int] = frozenset(),
    ) -> None:
        """`shapes` are the context lengths T in tokens, of which `held_out_shapes` are evaluated too.

        The largest is captured first and sizes the pool.
        """
        self._eager = eager
        self._static = torch.zeros(batch_bytes(max(shapes), record_bytes), dtype=torch.uint8, device=device)
        self._inputs = {tokens: view_batch(self._static, tokens, record_bytes) for tokens in shapes}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        for tokens in sorted(shapes, reverse=True):
            self._graphs[tokens] = self._capture_over(tokens, eager.micro_step)
        self._evaluations = {tokens: self._capture_over(tokens, eager.evaluate) for tokens in held_out_shapes}
        self._update_graph = self._capture(eager.update)

    @property
    def graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs) + len(self._evaluations) + 1

    def micro_step(self, batch: FlatBatch, loaded: Work | None = None) -> None:
        """Copy the batch into the static input, then replay its shape's graph."""
        self._load(batch, loaded)
        self._graphs[batch.tokens].replay()

    def update(self) -> None:
        """See Stepper."""
        self._update_graph.replay()

    def evaluate(self, batch: FlatBatch, loaded: Work | None = None) -> None:
        """Copy the batch into the static input, then replay its shape's evaluation graph."""
        self._load(batch, loaded)
        self._evaluations[batch.tokens].replay()

    def _load(self, batch: FlatBatch, loaded: Work | None) -> None:
        """Bring a batch to the address that the graphs read, if it keeps the input contract.

        The contract: the shape, dtype and device that a graph was captured for.
        """
        inputs = self._inputs.get(batch.tokens)
        assert inputs is not None, f"a batch of {batch.tokens} tokens, but captured are {sorted(self._inputs)}"
        found, wanted = batch.block, inputs.block
        same = (found.shape, found.dtype, found.device) == (wanted.shape, wanted.dtype, wanted.device)
        assert same, (
            f"a batch block of {tuple(found.shape)} {found.dtype} on {found.device}, "
            f"captured for {tuple(wanted.shape)} {wanted.dtype} on {wanted.device}"
        )
        wanted.copy_(found)
        if loaded:
            loaded()

    def _capture_over(self, tokens: int, work: Callable[[FlatBatch], None]) -> torch.cuda.CUDAGraph:
        inputs = self._inputs[tokens]
        inputs.block.zero_()
        inputs.documents.fill_(-1)
        return self._capture(lambda: work(inputs))

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """Warm up and capture on a side stream, leaving the training state as it was.

        Warm-up batches are empty: their window weighs zero, so an update skips itself on the device and only the
        counters must be put back.
        """
        kept = [(tensor, tensor.clone()) for tensor in self._eager.counters]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARMUP_RUNS):
                work()
        self._stream.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        torch.cuda.synchronize()
        for tensor, value in kept:
            tensor.copy_(value)
        self._eager.clear_gradients()
        return graph


def log_row_names(block_size: int) -> list[str]:
    """Column names of `EagerStep.log`. Sums are over the window and all processes."""
    return ["lr", "grad_norm", "skipped", *sum_names(block_size)]


def sum_names(block_size: int) -> list[str]:
    """Names of the metric sums; slot k's are `right_k` and `counted_k`."""
    slots = range(1, block_size)
    return [*_HEAD_SUMS, *(f"right_{k}" for k in slots), *(f"counted_{k}" for k in slots)]


def _flat(sums: LossSums) -> Tensor:
    """A micro-batch's metric sums in the order of `sum_names`."""
    heads = torch.stack([sums.loss.detach(), sums.weight, sums.accepted, sums.blocks])
    return torch.cat([heads, sums.right, sums.counted])
