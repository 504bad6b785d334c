"""The schedule against literal values, and an update against torch's own AdamW and clipping."""

import math

import pytest
import torch
from torch import Tensor, nn

from draftcache.common.errors import UsageError
from draftcache.train.optim import OptimConfig, Optimizer, learning_rate

STEPS = 20
WARMUP_LR = [0.00025, 0.0005, 0.00075, 0.001]
DECAY_LR = [
    0.001,
    0.00099039264,
    0.000961939766,
    0.000915734806,
    0.000853553391,
    0.000777785117,
    0.000691341716,
    0.000597545161,
]
CONFIG = OptimConfig(lr=1e-3, warmup=0.2, clip=1.0, weight_decay=0.1)


def parameters(seed: int = 0) -> list[nn.Parameter]:
    """A matrix, a vector and a scalar's worth of weights."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (6,), (1,))]


def loss_of(weights: list[nn.Parameter], seed: int, scale: float = 1.0) -> Tensor:
    """A loss whose gradient is random and depends on the weights."""
    generator = torch.Generator().manual_seed(seed)
    terms = [(w.sin() * torch.randn(w.shape, generator=generator)).sum() for w in weights]
    return scale * torch.stack(terms).sum()


def rate(step: int, config: OptimConfig = CONFIG) -> float:
    """The learning rate of a 0-based step."""
    return learning_rate(torch.tensor(float(step), dtype=torch.float64), config, STEPS).item()


def snapshot(weights: list[nn.Parameter], optimizer: Optimizer) -> list[Tensor]:
    """Copies of the weights and of all AdamW keeps: moments."""
    state = optimizer.state()
    kept = [state[name] for name in sorted(state) if name not in ("step", "skipped")]
    return [t.detach().clone() for t in [*weights, *kept]]


def test_schedule_values() -> None:
    assert [rate(step) for step in range(12)] == pytest.approx(WARMUP_LR + DECAY_LR, rel=1e-8)


def test_schedule_falls_to_zero_and_stays_there() -> None:
    rates = [rate(step) for step in range(4, 21)]
    assert rates == sorted(rates, reverse=True)
    assert rate(STEPS) == rate(STEPS + 5) == 0.0


def test_schedule_without_warmup_begins_at_the_full_rate() -> None:
    assert rate(0, OptimConfig(lr=0.5, warmup=0.0)) == 0.5


def test_the_rate_of_each_update_is_the_schedules() -> None:
    weights = parameters()
    optimizer = Optimizer(weights, CONFIG, STEPS)
    seen = []
    for step in range(6):
        loss_of(weights, step).backward()
        optimizer.update(torch.tensor(1.0))
        seen.append(optimizer.lr.item())
    assert seen == pytest.approx(WARMUP_LR + DECAY_LR[:2], rel=1e-6)


@pytest.mark.parametrize("clip", [0.05, 1e6], ids=["clipped", "unclipped"])
def test_updates_equal_adamw_on_the_clipped_mean_gradient(clip: float) -> None:
    config = OptimConfig(lr=0.05, beta1=0.8, beta2=0.9, eps=1e-6, warmup=0.2, clip=clip, weight_decay=0.1)
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours, config, STEPS)
    twin = torch.optim.AdamW(theirs, lr=config.lr, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, foreach=False)
    for step in range(8):
        weight = 3.0 + step
        for seed in (10 * step, 10 * step + 1):
            loss_of(ours, seed).backward()
            (loss_of(theirs, seed) / weight).backward()
        optimizer.update(torch.tensor(weight))
        norm = torch.nn.utils.clip_grad_norm_(theirs, clip)
        for group in twin.param_groups:
            group["lr"] = rate(step, config)
        twin.step()
        twin.zero_grad()
        assert (norm > clip) == (clip == 0.05)
        assert optimizer.gradient_norm.item() == pytest.approx(norm.item(), rel=1e-5)
        for found, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-6)
    assert optimizer.skipped.item() == 0
    assert optimizer.step.item() == 8


def test_a_hundred_updates_stay_with_adamw() -> None:
    """On gradients from 1e-6 to 1e6, without clipping, from the first correction to the last."""
    config = OptimConfig(lr=1e-2, clip=1e30, weight_decay=0.1)
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours, config, 100)
    twin = torch.optim.AdamW(theirs, lr=config.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for step in range(100):
        scale = 10.0 ** (step % 13 - 6)
        loss_of(ours, step, scale).backward()
        loss_of(theirs, step, scale).backward()
        optimizer.update(torch.tensor(1.0))
        now = torch.tensor(float(step), dtype=torch.float64)
        twin.param_groups[0]["lr"] = learning_rate(now, config, 100).item()
        twin.step()
        twin.zero_grad()
        for found, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert optimizer.step.item() == 100


def test_weight_decay_is_off_unless_asked_for() -> None:
    weights = parameters()
    before = [w.detach().clone() for w in weights]
    optimizer = Optimizer(weights, OptimConfig(lr=0.5), STEPS)
    optimizer.update(torch.tensor(1.0))
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))
    assert optimizer.skipped.item() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_changes_nothing_and_is_counted(value: float) -> None:
    weights = parameters()
    optimizer = Optimizer(weights, CONFIG, STEPS)
    loss_of(weights, 0).backward()
    optimizer.update(torch.tensor(1.0))
    before = snapshot(weights, optimizer)
    loss_of(weights, 1).backward()
    assert weights[1].grad is not None
    weights[1].grad[3] = value
    optimizer.update(torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(snapshot(weights, optimizer), before, strict=True))
    assert (optimizer.skipped.item(), optimizer.step.item()) == (1, 1)
    assert not math.isfinite(optimizer.gradient_norm.item())
    assert (optimizer.gradients == 0).all()


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_window_of_weight_zero_changes_nothing_and_is_counted(with_gradient: bool) -> None:
    weights = parameters()
    optimizer = Optimizer(weights, CONFIG, STEPS)
    loss_of(weights, 0).backward()
    optimizer.update(torch.tensor(1.0))
    before = snapshot(weights, optimizer)
    if with_gradient:
        loss_of(weights, 1).backward()
    optimizer.update(torch.tensor(0.0))
    assert all(torch.equal(a, b) for a, b in zip(snapshot(weights, optimizer), before, strict=True))
    assert (optimizer.skipped.item(), optimizer.step.item()) == (1, 1)
    assert (optimizer.gradients == 0).all()


def test_training_goes_on_after_a_skipped_update_as_if_it_had_not_been() -> None:
    config = OptimConfig(lr=0.05, warmup=0.0, clip=1e6)
    skipping, plain = parameters(), parameters()
    with_skip, without = Optimizer(skipping, config, 10**9), Optimizer(plain, config, 10**9)
    for step in range(4):
        for weights, optimizer in ((skipping, with_skip), (plain, without)):
            loss_of(weights, step).backward()
            optimizer.update(torch.tensor(2.0))
        if step == 1:
            loss_of(skipping, 77, scale=math.inf).backward()
            with_skip.update(torch.tensor(2.0))
    assert with_skip.skipped.item() == 1
    for found, wanted in zip(skipping, plain, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_new_optimizer_has_its_state_and_has_changed_nothing() -> None:
    weights = parameters()
    state = Optimizer(weights, CONFIG, STEPS).state()
    assert set(state) == {"step", "skipped"} | {f"{i}.{n}" for i in range(3) for n in ("exp_avg", "exp_avg_sq")}
    assert all((value == 0).all() for value in state.values())
    assert all(torch.equal(a, b) for a, b in zip(weights, parameters(), strict=True))


def test_gradients_are_views_of_the_flat_buffer_and_stay_so() -> None:
    weights = parameters()
    optimizer = Optimizer(weights, CONFIG, STEPS)
    assert optimizer.gradients.shape == (5 * 7 + 6 + 1,)
    addresses = [optimizer.gradients.data_ptr() + 4 * offset for offset in (0, 35, 41)]

    def check() -> None:
        for weight, address in zip(weights, addresses, strict=True):
            assert weight.grad is not None
            assert weight.grad.data_ptr() == address

    check()
    loss_of(weights, 0).backward()
    check()
    once = optimizer.gradients.clone()
    assert (once != 0).all()
    loss_of(weights, 0).backward()
    check()
    torch.testing.assert_close(optimizer.gradients, 2 * once)
    optimizer.update(torch.tensor(1.0))
    check()
    assert (optimizer.gradients == 0).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", math.nan),
        ("clip", 0.0),
        ("clip", math.nan),
        ("warmup", -0.1),
        ("warmup", 1.0),
        ("warmup", math.nan),
        ("weight_decay", -0.1),
    ],
)
def test_impossible_settings_are_refused(field: str, value: float) -> None:
    with pytest.raises(UsageError):
        OptimConfig(**{field: value})
