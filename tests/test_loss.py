"""Weights and metrics against golden values (specification 2.5 and 2.8); the chunked loss against its twins."""

import dataclasses
import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from draftcache.common.errors import UsageError
from draftcache.train.model import chunked_loss as chunks
from draftcache.train.model.chunked_loss import chunked_loss
from draftcache.train.model.head import Head
from draftcache.train.model.loss import (
    TEACHERS,
    WEIGHTINGS,
    LossConfig,
    LossInputs,
    LossSums,
    accepted_length,
    decay_weights,
    default_gamma,
    dpace_weights,
    last_teacher,
    plain_loss,
)

CPU = torch.device("cpu")
BLOCKS, SLOTS, TOKENS, WIDTH, VOCABULARY, TOP = 12, 3, 20, 16, 29, 6
CONFIGS = [
    LossConfig(teacher=t, weighting=w, gamma=2.5, alpha=0.3, chunk_slots=1000) for t, w in product(TEACHERS, WEIGHTINGS)
]
NAMES = [f"{c.teacher}-{c.weighting}" for c in CONFIGS]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=NAMES)


@pytest.mark.parametrize(
    ("block_size", "gamma", "total"), [(16, 7.0, 6.6306), (10, 5.0, 4.6048), (8, 4.0, 3.7352)], ids=str
)
def test_decay_sums_of_the_specification(block_size: int, gamma: float, total: float) -> None:
    weights = decay_weights(block_size, gamma, CPU)
    assert weights.shape == (block_size - 1,)
    assert weights.sum().item() == pytest.approx(total, abs=5e-5)
    assert torch.equal(decay_weights(block_size, None, CPU), weights)


def test_decay_begins_at_one_and_follows_gamma() -> None:
    assert decay_weights(4, 7.0, CPU).tolist() == pytest.approx([1.0, 0.8669, 0.7515], abs=5e-5)
    assert default_gamma(4) == 2.0


@pytest.mark.parametrize(
    ("valid", "weights"),
    [
        ([True, True, True, True], [2.831, 1.881, 1.026, 0.38475]),
        ([True, True, False, True], [2.318, 1.368, 0.0, 0.513]),
        ([True, False, False, False], [0.95, 0.0, 0.0, 0.0]),
        ([False] * 4, [0.0] * 4),
    ],
)
def test_dpace_weights_of_the_specification(valid: list[bool], weights: list[float]) -> None:
    confidence = torch.tensor([[0.9, 0.8, 0.5, 0.2]])
    found = dpace_weights(confidence, torch.tensor([valid]), alpha=0.5)
    assert found[0].tolist() == pytest.approx(weights, abs=5e-4)


def test_dpace_alpha_one_counts_the_valid_slots_from_here_on() -> None:
    found = dpace_weights(torch.rand(1, 5), torch.tensor([[True, True, False, True, True]]), alpha=1.0)
    assert found.tolist() == [[4.0, 3.0, 0.0, 2.0, 1.0]]


def test_accepted_length_of_the_specification_example() -> None:
    right = torch.tensor([[True, True, False], [False, True, True]])
    total, count = accepted_length(right, torch.ones(2, 3, dtype=torch.bool))
    assert (total / count).item() == 1 + 1.0


def test_accepted_length_counts_blocks_with_a_valid_slot_up_to_the_first_invalid_one() -> None:
    right = torch.tensor([[True, True, True], [True, True, True], [True, True, True], [True, False, True]])
    valid = torch.tensor([[True, True, True], [False, False, False], [True, False, True], [True, True, True]])
    total, count = accepted_length(right, valid)
    assert (total.item(), count.item()) == (4 + 2 + 2, 3)


def test_accepted_length_pools_over_micro_batches() -> None:
    right = torch.tensor([[True, True], [False, True], [True, False]])
    valid = torch.tensor([[True, True], [True, True], [True, False]])
    parts = [accepted_length(right[cut], valid[cut]) for cut in (slice(0, 1), slice(1, 3))]
    total, count = (torch.stack(values).sum() for values in zip(*parts, strict=True))
    assert (total.item(), count.item()) == (3 + 1 + 2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Random inputs of the loss; some slots and one whole block are invalid."""

    hidden: Tensor
    head: Tensor
    inputs: LossInputs

    def to(self, dtype: torch.dtype) -> "Case":
        """The same in another dtype."""
        teacher, log_probs = self.inputs.teacher_hidden, self.inputs.teacher_log_probs
        assert teacher is not None
        assert log_probs is not None
        inputs = dataclasses.replace(
            self.inputs, teacher_hidden=teacher.to(dtype), teacher_log_probs=log_probs.to(dtype)
        )
        return Case(hidden=self.hidden.to(dtype), head=self.head.to(dtype), inputs=inputs)


def random_case(seed: int = 0) -> Case:
    """Twelve blocks of three trained slots."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator)
    labels = torch.randint(0, VOCABULARY, (BLOCKS, SLOTS), generator=generator)
    noise = torch.randn(BLOCKS, SLOTS, WIDTH, generator=generator)
    hidden = 0.12 * head[labels] + 0.5 * noise  # so that about half of the tokens are right
    valid = torch.rand(BLOCKS, SLOTS, generator=generator) < 0.8
    valid[5] = False
    teacher = torch.randn(TOKENS, WIDTH, generator=generator)
    rows = torch.randint(0, TOKENS - SLOTS, (BLOCKS, 1), generator=generator) + torch.arange(SLOTS)
    top = (0.3 * teacher[rows] @ head.T).log_softmax(-1).topk(TOP)  # flat enough to leave a rest that counts
    inputs = LossInputs(
        labels=labels,
        valid=valid,
        teacher_hidden=teacher,
        teacher_rows=rows,
        teacher_ids=top.indices.int(),
        teacher_log_probs=top.values.bfloat16(),
    )
    return Case(hidden=hidden, head=head, inputs=inputs)


def top_kl(inputs: LossInputs, slot: tuple[int, int], log_q: Tensor) -> Tensor:
    """The KL divergence of two distributions over the stored tokens and everything else."""
    assert inputs.teacher_ids is not None
    assert inputs.teacher_log_probs is not None
    ids = inputs.teacher_ids[slot].long()
    p = inputs.teacher_log_probs[slot].double().exp()
    q = log_q.exp()[ids]
    rest_p, rest_q = 1 - p.sum(), 1 - q.sum()
    return (p * (p / q).log()).sum() + rest_p * (rest_p / rest_q).log()


def reference(case: Case, config: LossConfig) -> tuple[float, float, Tensor]:
    """Loss sum, denominator and gradient in float64 by autograd, slot by slot from the formulas."""
    hidden = case.hidden.double().requires_grad_()
    head, (stored, rows) = case.head.double(), last_teacher(case.inputs)
    teacher = stored[rows]
    assert config.gamma is not None
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for block in range(BLOCKS):
        valid = case.inputs.valid[block].tolist()
        log_q = [(hidden[block, k] @ head.T).log_softmax(0) for k in range(SLOTS)]
        log_p = [(teacher[block, k].double() @ head.T).log_softmax(0) for k in range(SLOTS)]
        label_log_q = [log_q[k][int(case.inputs.labels[block, k])] for k in range(SLOTS)]
        reach, alive = [], 1.0
        for k in range(SLOTS):
            alive *= (1 - config.alpha) * math.exp(label_log_q[k].item()) + config.alpha if valid[k] else 1.0
            reach.append(alive if valid[k] else 0.0)
        for k in range(SLOTS):
            if not valid[k]:
                continue
            w = math.exp(-k / config.gamma) if config.weighting == "decay" else sum(reach[k:])
            losses = {
                "tokens": -label_log_q[k],
                "last": (log_p[k].exp() * (log_p[k] - log_q[k])).sum(),
                "top": top_kl(case.inputs, (block, k), log_q[k]),
            }
            total = total + w * losses[str(config.teacher)]
            weight += w if config.weighting == "decay" else 1.0
    total.backward()
    assert hidden.grad is not None
    return total.item(), weight, hidden.grad


def sums_and_gradient(case: Case, config: LossConfig, *, chunked: bool, scale: float = 1.0) -> tuple[LossSums, Tensor]:
    """One of the two implementations, with its gradient of `scale` times the loss."""
    hidden = case.hidden.clone().requires_grad_()
    if chunked:
        sums = chunked_loss(hidden, Head(case.head), case.inputs, config)
    else:
        sums = plain_loss(hidden, case.head, case.inputs, config)
    (scale * sums.loss).backward()
    assert hidden.grad is not None
    return sums, hidden.grad


@every_config
@pytest.mark.parametrize("chunk_slots", [1, 4 * SLOTS, 5 * SLOTS + 1, BLOCKS * SLOTS, 1000])
def test_chunked_loss_equals_plain_loss(config: LossConfig, chunk_slots: int) -> None:
    case = random_case()
    config = dataclasses.replace(config, chunk_slots=chunk_slots)
    found, gradient = sums_and_gradient(case, config, chunked=True)
    wanted, wanted_gradient = sums_and_gradient(case, config, chunked=False)
    for field in dataclasses.fields(LossSums):
        torch.testing.assert_close(getattr(found, field.name), getattr(wanted, field.name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-5, atol=1e-6)
    assert 0 < found.right.sum() < found.counted.sum()


@pytest.mark.parametrize(
    ("chunk_slots", "rows"), [(1, [3] * 12), (12, [9] * 4), (19, [12] * 3), (20, [15, 15, 6]), (48, [36]), (1000, [36])]
)
def test_no_more_rows_of_logits_than_asked_for(
    chunk_slots: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    whole = chunks._chunk

    def recording(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        held.append(hidden.shape[0] * hidden.shape[1])
        return whole(hidden, *others)

    monkeypatch.setattr(chunks, "_chunk", recording)
    sums_and_gradient(random_case(), LossConfig(teacher="tokens", chunk_slots=chunk_slots), chunked=True)
    assert held == rows


@every_config
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_equal_a_float64_reference(config: LossConfig, chunked: bool, seed: int) -> None:
    case = random_case(seed)
    total, weight, gradient = reference(case, config)
    found, found_gradient = sums_and_gradient(case, dataclasses.replace(config, chunk_slots=7), chunked=chunked)
    assert found.loss.item() == pytest.approx(total, rel=1e-5)
    assert found.weight.item() == pytest.approx(weight, rel=1e-6)
    torch.testing.assert_close(found_gradient.double(), gradient, rtol=1e-4, atol=1e-5)


@every_config
def test_bfloat16_stays_near_the_float64_reference(config: LossConfig) -> None:
    case = random_case().to(torch.bfloat16)
    total, _, gradient = reference(case, config)
    found, found_gradient = sums_and_gradient(case, config, chunked=True)
    assert found_gradient.dtype == torch.bfloat16
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(total, rel=2e-2)
    assert ((found_gradient.double() - gradient).norm() / gradient.norm()).item() < 2e-2


@every_config
def test_metric_sums_count_valid_slots_alone(config: LossConfig) -> None:
    case = random_case()
    found, _ = sums_and_gradient(case, dataclasses.replace(config, chunk_slots=7), chunked=True)
    right = (case.hidden @ case.head.T).argmax(-1) == case.inputs.labels
    total, count = accepted_length(right, case.inputs.valid)
    assert found.counted.tolist() == case.inputs.valid.sum(0).tolist()
    assert found.right.tolist() == (right & case.inputs.valid).sum(0).tolist()
    assert (found.accepted.item(), found.blocks.item()) == (total.item(), count.item())


@every_config
@pytest.mark.parametrize("chunked", [True, False])
def test_invalid_slots_get_exactly_zero_gradient_and_change_nothing(config: LossConfig, chunked: bool) -> None:
    case = random_case()
    sums, gradient = sums_and_gradient(case, config, chunked=chunked)
    assert (gradient[~case.inputs.valid] == 0).all()
    assert (gradient[case.inputs.valid].abs().sum(-1) > 0).all()
    case.hidden[~case.inputs.valid] *= -3
    case.inputs.labels[~case.inputs.valid] = 0
    changed, changed_gradient = sums_and_gradient(case, config, chunked=chunked)
    for field in dataclasses.fields(LossSums):
        assert torch.equal(getattr(changed, field.name), getattr(sums, field.name))
    assert torch.equal(changed_gradient, gradient)


@every_config
def test_no_valid_slot_gives_zero_sums_and_zero_gradient(config: LossConfig) -> None:
    case = random_case()
    case.inputs.valid[:] = False
    sums, gradient = sums_and_gradient(case, config, chunked=True)
    assert all((getattr(sums, field.name) == 0).all() for field in dataclasses.fields(LossSums))
    assert (gradient == 0).all()


@every_config
def test_backward_scales_the_gradient(config: LossConfig) -> None:
    case = random_case()
    _, gradient = sums_and_gradient(case, config, chunked=True)
    _, scaled = sums_and_gradient(case, config, chunked=True, scale=-2.5)
    torch.testing.assert_close(scaled, -2.5 * gradient)


@every_config
def test_an_evaluation_has_the_same_sums_and_no_gradient(config: LossConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case()
    wanted, _ = sums_and_gradient(case, config, chunked=True)
    monkeypatch.delattr(Head, "hidden_gradient")
    with torch.no_grad():
        found = chunked_loss(case.hidden, Head(case.head), case.inputs, config)
    for field in dataclasses.fields(LossSums):
        assert torch.equal(getattr(found, field.name), getattr(wanted, field.name))


def test_a_drafter_equal_to_its_teacher_has_no_loss() -> None:
    case = random_case()
    rows = torch.arange(BLOCKS * SLOTS).view(BLOCKS, SLOTS)
    inputs = dataclasses.replace(case.inputs, teacher_hidden=case.hidden.flatten(0, 1), teacher_rows=rows)
    same = Case(hidden=case.hidden, head=case.head, inputs=inputs)
    sums, gradient = sums_and_gradient(same, LossConfig(teacher="last"), chunked=True)
    assert abs(sums.loss.item()) < 1e-5
    assert gradient.abs().max().item() < 1e-5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("teacher", "argmax"),
        ("weighting", "none"),
        ("gamma", 0.0),
        ("gamma", -1.0),
        ("gamma", math.inf),
        ("gamma", math.nan),
        ("alpha", 0.0),
        ("alpha", 1.01),
        ("alpha", math.nan),
    ],
)
def test_impossible_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(UsageError):
        LossConfig(**{field: value})  # type: ignore[arg-type]


def test_the_border_values_are_allowed() -> None:
    assert LossConfig(alpha=1.0, gamma=1e-3).alpha == 1.0
