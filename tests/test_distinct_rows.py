"""A chunk's slots share teacher rows: which are distinct, and that only those are computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftcache.tests.helpers import gpu
from draftcache.tests.kernel_device import DEVICE, kernels
from draftcache.tests.test_loss import random_case
from draftcache.train.kernels.loss_rows import plain_row_statistics
from draftcache.train.model.chunked_loss import chunked_loss, distinct_rows
from draftcache.train.model.head import Head
from draftcache.train.model.loss import LossConfig, last_teacher


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 19), min_size=1, max_size=40))
def test_distinct_rows_are_the_set_of_rows(rows: list[int]) -> None:
    found = distinct_rows(torch.tensor(rows), tokens=20)
    count = int(found.count)
    assert found.rows[:count].tolist() == sorted(set(rows))
    assert found.rows[count:].tolist() == [0] * (len(rows) - count)
    assert found.rows[found.place].tolist() == rows


class CountingHead(Head):
    """Keeps how many rows its products had."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.rows: list[int] = []

    def logits(self, hidden: Tensor) -> Tensor:
        """See FrozenHead."""
        self.rows.append(len(hidden))
        return super().logits(hidden)


def test_a_chunk_computes_each_teacher_row_once() -> None:
    case = random_case()
    head = CountingHead(case.head)
    chunked_loss(case.hidden, head, case.inputs, LossConfig(teacher="last"))
    _, rows = last_teacher(case.inputs)
    assert head.rows == [rows.numel(), len(rows.unique())]
    assert len(rows.unique()) < rows.numel()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked columns too
def test_rows_behind_the_count_get_no_statistics_and_change_none() -> None:
    logits = torch.randn(5, 3000, device=DEVICE)
    logits[3:] = float("nan")
    count = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    found = kernels("train.kernels.loss_kernels").row_statistics(logits, count)
    wanted = plain_row_statistics(logits[:3])
    torch.testing.assert_close(found.log_normaliser[:3], wanted.log_normaliser)
    assert torch.equal(found.best[:3], wanted.best)


@gpu
@pytest.mark.parametrize("count", [1, 100, 128])
def test_a_counted_product_is_the_whole_one_where_it_counts(count: int) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    weight = torch.randn(4096, 256, device=DEVICE, generator=generator).bfloat16()
    hidden = torch.randn(128, 256, device=DEVICE, generator=generator).bfloat16()
    head = Head(weight)
    found = head.leading_logits(hidden, torch.tensor([count], dtype=torch.int32, device=DEVICE))
    torch.testing.assert_close(found[:count], head.logits(hidden)[:count], rtol=2**-7, atol=2**-5)
