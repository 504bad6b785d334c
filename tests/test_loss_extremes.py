"""The losses where numbers are large, equal, or all there are: logits of 1e4, ties, K tokens = the vocabulary."""

import dataclasses

import pytest
import torch
from torch import Tensor

from draftcache.tests.test_loss import VOCABULARY, Case, every_config, random_case, sums_and_gradient
from draftcache.train.model.chunked_loss import chunked_loss
from draftcache.train.model.head import Head
from draftcache.train.model.loss import LossConfig, LossInputs, LossSums, decay_weights, last_teacher

ROWS = 5


def scaled(case: Case, scale: float) -> Case:
    """The same with all logits, the teacher's too, multiplied."""
    assert case.inputs.teacher_hidden is not None
    inputs = dataclasses.replace(case.inputs, teacher_hidden=case.inputs.teacher_hidden * scale)
    return Case(hidden=case.hidden * scale, head=case.head, inputs=inputs)


@every_config
@pytest.mark.parametrize("scale", [1e-6, 1e2, 1e4])
def test_huge_and_tiny_logits(config: LossConfig, scale: float) -> None:
    case = scaled(random_case(), scale)
    found, gradient = sums_and_gradient(case, config, chunked=True)
    wanted, wanted_gradient = sums_and_gradient(case, config, chunked=False)
    for field in dataclasses.fields(LossSums):
        torch.testing.assert_close(getattr(found, field.name), getattr(wanted, field.name), rtol=1e-4, atol=1e-5)
    assert gradient.isfinite().all()
    if config.teacher != "top" or scale < 1:  # else see the test below
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-4)


def test_a_drafter_sure_of_stored_tokens_still_learns_them_as_the_true_divergence_says() -> None:
    """Where q_R is below MIN_REST the loss is capped, but its gradient at the stored tokens is not."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, 1, VOCABULARY, generator=generator)
    ids = torch.arange(4).expand(ROWS, 1, 4)
    logits[..., :4] += 40
    probs = torch.tensor([0.4, 0.2, 0.1, 0.1]).expand(ROWS, 1, 4)

    exact = logits.double().requires_grad_()
    log_q = exact.log_softmax(-1)
    rest = log_q[..., 4:].logsumexp(-1)
    (probs.double() * -log_q[..., :4]).sum().sub((0.2 * rest).sum()).backward()
    assert exact.grad is not None
    assert rest.max().exp() < 1e-6

    hidden = logits.clone().requires_grad_()
    inputs = LossInputs(
        labels=torch.zeros(ROWS, 1, dtype=torch.int64),
        valid=torch.ones(ROWS, 1, dtype=torch.bool),
        teacher_ids=ids.int(),
        teacher_log_probs=probs.log(),
    )
    chunked_loss(hidden, Head(torch.eye(VOCABULARY)), inputs, LossConfig(teacher="top")).loss.backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad[..., :4].double(), exact.grad[..., :4], rtol=1e-5, atol=1e-6)
    others, true_others = hidden.grad[..., 4:].double(), exact.grad[..., 4:]
    assert (others <= 0).all()
    assert (others >= true_others - 1e-9).all()


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_k_tokens_that_are_the_whole_vocabulary_give_the_full_divergence(weighting: str) -> None:
    case = random_case()
    states, rows = last_teacher(case.inputs)
    stored = (states[rows] @ case.head.T).log_softmax(-1).topk(VOCABULARY)
    inputs = dataclasses.replace(case.inputs, teacher_ids=stored.indices.int(), teacher_log_probs=stored.values)
    whole = Case(hidden=case.hidden, head=case.head, inputs=inputs)
    top, last = (LossConfig(teacher=teacher, weighting=weighting) for teacher in ("top", "last"))
    found, gradient = sums_and_gradient(whole, top, chunked=True)
    wanted, wanted_gradient = sums_and_gradient(case, last, chunked=True)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-4, atol=1e-5)


@every_config
def test_of_equal_logits_the_first_token_counts_as_proposed(config: LossConfig) -> None:
    case = random_case()
    labels = torch.zeros_like(case.inputs.labels)
    labels[::2] = 1
    tied = Case(
        hidden=torch.zeros_like(case.hidden), head=case.head, inputs=dataclasses.replace(case.inputs, labels=labels)
    )
    wanted = ((labels == 0) & case.inputs.valid).sum(0).float()
    for chunked in (True, False):
        sums, gradient = sums_and_gradient(tied, config, chunked=chunked)
        assert torch.equal(sums.right, wanted)
        assert gradient.isfinite().all()


@pytest.mark.parametrize(("gamma", "wanted"), [(1e-300, [1.0, 0.0, 0.0]), (1e300, [1.0, 1.0, 1.0])])
def test_the_sharpest_and_the_flattest_decay(gamma: float, wanted: list[float]) -> None:
    weights: Tensor = decay_weights(4, gamma, torch.device("cpu"))
    assert weights.tolist() == wanted
