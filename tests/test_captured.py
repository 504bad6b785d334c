"""The captured step against the eager one, on CUDA: same anchors, same losses, no host read, no allocation."""

import pytest
import torch

from draftcache.tests.helpers import VOCABULARY, gpu, on_device, tiny_record
from draftcache.tests.test_step import TEACHERS, Training, recorded, sentences, training
from draftcache.train.batch import FlatBatch
from draftcache.train.kernels.float8 import WIDTH_MULTIPLE
from draftcache.train.step import CapturedStep, log_row_names

STEPS = 200


def device_batches() -> list[FlatBatch]:
    """Micro-batches of three shapes, one of them empty, on the device."""
    layouts = [
        recorded(sentences(0, 3)),
        recorded(sentences(10, 1)),
        recorded(sentences(20, 3), tokens=512),
        recorded([], tokens=256),
        recorded(sentences(30, 2), epoch=1),
        recorded(sentences(40, 2), tokens=512),
    ]
    return [on_device(batch, "cuda") for batch in layouts]


def shuffled(count: int) -> list[int]:
    """Indices of `device_batches` in random order, none of them the empty one twice in a row."""
    generator = torch.Generator().manual_seed(7)
    order: list[int] = torch.randint(0, 6, (count,), generator=generator).tolist()
    return [0 if i and order[i] == order[i - 1] == 3 else order[i] for i in range(count)]


def twins(teacher: str) -> tuple[Training, Training, CapturedStep]:
    """Two equal trainings, and the second one captured."""
    eager, captured = (
        training(teacher=teacher, anchors=64, log_rows=STEPS, lr=1e-3, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    shapes = {batch.tokens for batch in device_batches()}
    graphs = CapturedStep(captured.step, tiny_record().record_bytes, shapes, torch.device("cuda"))
    return eager, captured, graphs


def columns(log: torch.Tensor, *names: str) -> torch.Tensor:
    """Some columns of a log."""
    return log[:, [log_row_names(4).index(name) for name in names]].cpu()


@gpu
def test_capturing_changes_nothing() -> None:
    eager, captured, _ = twins("last")
    assert all(torch.equal(a, b) for a, b in zip(captured.changing(), eager.changing(), strict=True))
    assert captured.optimizer.step.item() == 0
    assert (captured.step.log == 0).all()


@gpu
@pytest.mark.parametrize("teacher", TEACHERS)
def test_two_hundred_steps_over_mixed_shapes_equal_the_eager_ones(teacher: str) -> None:
    eager, captured, graphs = twins(teacher)
    batches = device_batches()
    for index in shuffled(STEPS):
        for micro_batch in (batches[index], batches[(index + 1) % len(batches)]):
            eager.step.micro_step(micro_batch)
            graphs.micro_step(micro_batch)
        eager.step.update()
        graphs.update()
    exact = ("skipped", "weight", "blocks", "counted_1", "counted_2", "counted_3")
    assert torch.equal(columns(captured.step.log, *exact), columns(eager.step.log, *exact))
    torch.testing.assert_close(columns(captured.step.log, "loss"), columns(eager.step.log, "loss"), rtol=3e-2, atol=0.0)
    loss, weight = columns(captured.step.log, "loss", "weight").T
    assert (loss / weight)[-20:].mean() < (loss / weight)[:20].mean()


@gpu
def test_a_replay_reads_nothing_on_the_host_and_allocates_nothing() -> None:
    _, _, graphs = twins("tokens")
    batches = device_batches()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in shuffled(20):
            graphs.micro_step(batches[index])
            graphs.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for name in ("num_device_alloc", "num_device_free", "allocation.all.allocated", "allocated_bytes.all.current"):
        assert after[name] == before[name], name


@gpu
def test_a_shape_that_was_not_captured_is_refused() -> None:
    _, _, graphs = twins("tokens")
    with pytest.raises(AssertionError, match="captured are"):
        graphs.micro_step(on_device(recorded([], tokens=1024), "cuda"))


@gpu
@pytest.mark.parametrize("teacher", TEACHERS)
def test_fp8_products_follow_the_loss(teacher: str) -> None:
    plain, coded = (
        training(
            teacher=teacher,
            anchors=64,
            log_rows=30,
            lr=1e-3,
            device="cuda",
            dtype=torch.bfloat16,
            matmul=matmul,
            vocabulary=-(-VOCABULARY // WIDTH_MULTIPLE) * WIDTH_MULTIPLE,
        )
        for matmul in ("bf16", "fp8")
    )
    batch = device_batches()[2]
    for _ in range(30):
        for run in (plain, coded):
            run.step.micro_step(batch)
            run.step.update()
    losses = [columns(run.step.log, "loss").squeeze(1) for run in (plain, coded)]
    assert losses[0][-1] < 0.9 * losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=5e-2, atol=0.0)
