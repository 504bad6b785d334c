"""The training step: accumulation, empty micro-batches, the log, and that it learns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from draftcache.common.record import RecordSpec
from draftcache.common.target import TargetParts
from draftcache.tests.helpers import (
    VOCABULARY,
    Document,
    blocks_at,
    document,
    flat_batch,
    random_parts,
    record_field,
    run_drafter,
    supervised,
    taps_of,
    tiny_config,
    tiny_drafter,
    tiny_record,
)
from draftcache.train.batch import FlatBatch
from draftcache.train.model.anchors import draw_anchors
from draftcache.train.model.attention import DenseAttention
from draftcache.train.model.drafter import FULL, SLIDING, Drafter
from draftcache.train.model.loss import LossConfig, LossInputs, LossSums, plain_loss
from draftcache.train.optim import OptimConfig, Optimizer
from draftcache.train.step import EagerStep, StepConfig, log_row_names

TOTAL_STEPS = 40
TEACHERS = ["tokens", "last"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A step and everything that it changes."""

    step: EagerStep
    drafter: Drafter
    optimizer: Optimizer
    parts: TargetParts

    def take(self, *batches: FlatBatch) -> dict[str, float]:
        """One step over these micro-batches; returns its log row."""
        index = int(self.optimizer.step.item() + self.optimizer.skipped.item()) % len(self.step.log)
        for batch in batches:
            self.step.micro_step(batch)
        self.step.update()
        return self.row(index)

    def row(self, index: int) -> dict[str, float]:
        """One row of the log, by name."""
        return dict(zip(log_row_names(4), self.step.log[index].tolist(), strict=True))

    def changing(self) -> list[torch.Tensor]:
        """Copies of weights and moments."""
        state = [value for name, value in sorted(self.optimizer.state().items()) if name not in ("step", "skipped")]
        return [t.detach().clone() for t in [*self.drafter.parameters(), *state]]


def training(
    *,
    teacher: str = "tokens",
    anchors: int = 128,
    seed: int = 5,
    log_rows: int = 3,
    lr: float = 1e-2,
    layer_types: tuple[str, ...] = (SLIDING, FULL),
    tied: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    matmul: str = "bf16",
    vocabulary: int = VOCABULARY,
) -> Training:
    """A tiny drafter's training; the same every time."""
    drafter = tiny_drafter(tiny_config(layer_types, window=8), scale=3.0).to(device)
    optimizer = Optimizer(drafter.parameters(), OptimConfig(lr=lr, warmup=0.0), TOTAL_STEPS)
    parts = random_parts(seed=2, tied=tied, device=device, vocabulary=vocabulary)
    config = StepConfig(anchors=anchors, seed=seed, log_rows=log_rows, dtype=dtype, matmul=matmul)
    loss = LossConfig(teacher=teacher, chunk_slots=40)
    step = EagerStep(drafter, optimizer, parts, tiny_record(), loss, config)
    return Training(step=step, drafter=drafter, optimizer=optimizer, parts=parts)


def recorded(documents: Sequence[Document], **layout: int) -> FlatBatch:
    """The documents with random taps and last hidden states."""
    return flat_batch(documents, spec=tiny_record(), **layout)


def sentences(first_sample: int, count: int) -> list[Document]:
    """Documents of different lengths, most of them supervised after a prompt."""
    return [supervised(17 + 13 * i, 3 + i, first_sample + i) for i in range(count)]


def test_log_row_names_are_the_columns() -> None:
    names = log_row_names(4)
    assert names[:7] == ["lr", "grad_norm", "skipped", "loss", "weight", "accepted", "blocks"]
    assert names[7:] == ["right_1", "right_2", "right_3", "counted_1", "counted_2", "counted_3"]
    assert training().step.log.shape == (3, len(names))


def plain_sums(run: Training, batch: FlatBatch, anchors: Sequence[int], teacher: str) -> LossSums:
    """What a micro-step over these anchors must sum, by the plain twins."""
    blocks = blocks_at(batch, anchors)
    attention = DenseAttention(blocks, batch.tokens, run.drafter.config.rules)
    hidden = run_drafter(run.drafter, run.parts, taps_of(batch, tiny_record()), batch, blocks, attention)[:, 1:]
    inputs = LossInputs(
        labels=blocks.labels[:, 1:],
        valid=blocks.valid[:, 1:],
        teacher_hidden=record_field(batch.records, tiny_record(), "last"),
        teacher_rows=blocks.teacher_rows[:, 1:],
    )
    return plain_loss(hidden, run.parts.head, inputs, LossConfig(teacher=teacher))


@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_log_row_holds_what_its_names_say(teacher: str) -> None:
    run = training(teacher=teacher)
    batch = recorded([document([0, 1, 1, 1, 1, 0, 1, 1], 1), supervised(12, 4, 2)])
    wanted = plain_sums(run, batch, [1, 2, 3, 6, *range(64 + 4, 64 + 11)], teacher)
    gradients = torch.autograd.grad(wanted.loss / wanted.weight, list(run.drafter.parameters()))
    run.step.micro_step(batch)
    for parameter, gradient in zip(run.drafter.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad / wanted.weight, gradient, rtol=1e-3, atol=1e-5)
    row = run.take()
    assert row["lr"] == pytest.approx(1e-2)
    assert row["grad_norm"] == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-4)
    assert row["skipped"] == 0
    assert row["loss"] == pytest.approx(wanted.loss.item(), rel=1e-5)
    assert row["weight"] == pytest.approx(wanted.weight.item(), rel=1e-6)
    assert row["accepted"] == wanted.accepted.item()
    assert row["blocks"] == wanted.blocks.item() == 11
    assert [row[f"right_{k}"] for k in (1, 2, 3)] == wanted.right.tolist()
    assert [row[f"counted_{k}"] for k in (1, 2, 3)] == wanted.counted.tolist() == [4 + 7, 2 + 6, 2 + 5]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_two_micro_batches_update_like_one_that_holds_both(teacher: str, tied: bool) -> None:
    first, second = sentences(0, 3), sentences(10, 2)
    apart, together = training(teacher=teacher, tied=tied), training(teacher=teacher, tied=tied)
    for _ in range(3):
        rows = apart.take(recorded(first), recorded(second)), together.take(recorded([*first, *second]))
        assert rows[0] == pytest.approx(rows[1], rel=1e-5)
        assert rows[0]["blocks"] > 60
    for found, wanted in zip(apart.changing(), together.changing(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_an_empty_micro_batch_within_a_step_changes_nothing() -> None:
    batch, empty = recorded(sentences(0, 2)), recorded([])
    without, with_empty = training(), training()
    for _ in range(2):
        assert with_empty.take(empty, batch, empty) == without.take(batch)
    for found, wanted in zip(with_empty.changing(), without.changing(), strict=True):
        assert torch.equal(found, wanted)


def test_a_step_of_empty_micro_batches_changes_nothing_but_counts() -> None:
    run = training()
    run.take(recorded(sentences(0, 2)))
    before = run.changing()
    row = run.take(recorded([]), recorded([supervised(20, 20)]))
    assert all(torch.equal(a, b) for a, b in zip(run.changing(), before, strict=True))
    assert row["skipped"] == 1
    assert run.optimizer.step.item() == 1
    assert [value for name, value in row.items() if name not in ("lr", "grad_norm", "skipped")] == [0.0] * 10
    assert run.take(recorded(sentences(0, 2)))["skipped"] == 1
    assert not torch.equal(run.changing()[0], before[0])


def test_non_finite_states_change_nothing_but_counts() -> None:
    run = training()
    before = run.changing()
    batch = recorded(sentences(0, 2))
    record_field(batch.records, tiny_record(), "taps")[4] = math.nan
    assert run.take(batch)["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(run.changing(), before, strict=True))
    assert math.isfinite(run.take(recorded(sentences(0, 2)))["grad_norm"])


def test_log_rows_are_reused_in_turn() -> None:
    run = training(log_rows=3)
    batches = [recorded(sentences(10 * i, 1 + i % 3)) for i in range(5)]
    rows = [run.take(batch) for batch in batches]
    assert len({row["loss"] for row in rows}) == 5
    assert [run.row(i) for i in range(3)] == [rows[3], rows[4], rows[2]]


@pytest.mark.parametrize(("seed", "epoch"), [(5, 0), (5, 1), (6, 0)])
def test_a_step_trains_the_anchors_drawn_for_its_seed_and_epoch(seed: int, epoch: int) -> None:
    batch = recorded(sentences(0, 3), epoch=epoch)
    run = training(anchors=8, seed=seed)
    anchors, keep = draw_anchors(batch, seed, 8)
    wanted = plain_sums(run, batch, anchors.tolist(), "tokens")
    row = run.take(batch)
    assert keep.all()
    assert row["blocks"] == 8
    assert row["loss"] == pytest.approx(wanted.loss.item(), rel=1e-5)


def test_layout_does_not_change_a_step() -> None:
    documents = sentences(0, 2)
    rows = [training(anchors=10).take(recorded(documents, stride=stride)) for stride in (64, 192)]
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)


@pytest.mark.parametrize("teacher", TEACHERS)
def test_a_learnable_pattern_is_learnt(teacher: str) -> None:
    run = training(teacher=teacher, anchors=40, lr=5e-3)
    documents = [Document(tuple((7 * t + i) % 5 for t in range(60)), (1,) * 60, i) for i in range(3)]
    batch = recorded(documents)
    record_field(batch.records, tiny_record(), "last")[:-1] = 0.2 * run.parts.head[batch.input_ids[1:]].bfloat16()
    rows = [run.take(batch) for _ in range(20)]
    losses = [row["loss"] / row["weight"] for row in rows]
    accepted = [row["accepted"] / row["blocks"] for row in rows]
    assert losses[-1] < 0.3 * losses[0]
    assert accepted[-1] > 1.25 > accepted[0]


def test_records_of_bfloat16_are_read_field_by_field() -> None:
    spec: RecordSpec = tiny_record()
    batch = recorded([supervised(5, 1)])
    raw = batch.records[:5].contiguous().view(torch.bfloat16)
    assert torch.equal(record_field(batch.records, spec, "taps")[:5], raw[:, :64])
    assert torch.equal(record_field(batch.records, spec, "last")[:5], raw[:, 64:96])
    record_field(batch.records, spec, "last")[2] = 3.0
    assert batch.records[2].view(torch.bfloat16)[64:].tolist() == [3.0] * 32
