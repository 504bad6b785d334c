"""AdamW and its schedule, every scalar of them a device tensor, so that one captured update serves every step.

An update divides the summed gradients by the window's weight, clips, steps and clears, without a host read. A
non-finite gradient or a window of weight zero skips the update on the device and is counted; only an update that
changed the weights counts as a step.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftcache.common.errors import CheckpointError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay to zero, and clipping of the global norm."""

    lr: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: float = 0.04  # share of all steps
    clip: float = 1.0

    def __post_init__(self) -> None:
        positive = all(0 < value < math.inf for value in (self.lr, self.clip, self.eps))
        shares = all(0 <= value < 1 for value in (self.beta1, self.beta2, self.warmup))
        if not (positive and shares and 0 <= self.weight_decay < math.inf):
            raise UsageError(
                f"the optimizer settings {self}",
                needed="finite lr, clip and eps above 0, betas and warm-up within [0, 1), weight decay of at least 0",
                do="correct the flag",
            )


def learning_rate(step: Tensor, config: OptimConfig, total_steps: int) -> Tensor:
    """The rate of 0-based `step` ([] float64): lr (s + 1) / w over w warm-up steps, then half a cosine to zero."""
    warmup = max(1, round(config.warmup * total_steps))
    rising = (step + 1) / warmup
    progress = ((step - warmup) / max(1, total_steps - warmup)).clamp(0, 1)
    return config.lr * torch.minimum(rising, 0.5 * (1 + torch.cos(math.pi * progress)))


class Optimizer:
    """Moments, gradient buffer and scalars of one training run. Everything in it keeps its address."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimConfig, total_steps: int) -> None:
        self.parameters = sorted(parameters, key=lambda p: -p.dim())
        """Matrices before vectors, so that neighbouring layers' matrices are neighbours in the gradient buffer."""
        self._config = config
        self._total_steps = total_steps
        device = self.parameters[0].device
        self.gradients = torch.zeros(sum(p.numel() for p in self.parameters), device=device)
        """Flat float32 sums of the window's gradients; every parameter's `.grad` is a view of it."""
        self.step = torch.zeros((), dtype=torch.float64, device=device)
        """Updates that changed the weights: the schedule's step."""
        self.skipped = torch.zeros((), dtype=torch.float64, device=device)
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.gradient_norm = torch.zeros((), dtype=torch.float32, device=device)
        offset = 0
        for parameter in self.parameters:
            parameter.grad = self.gradients[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self._adamw = torch.optim.AdamW(
            self.parameters,
            lr=self.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
            capturable=self.gradients.is_cuda,
        )
        self._divisor = torch.ones((), device=device)
        self._found_inf = torch.zeros((), device=device)
        # Fused AdamW reads these two: it divides gradients by the one and leaves everything alone if the other is 1.
        self._adamw.grad_scale = self._divisor  # type: ignore[attr-defined]
        self._adamw.found_inf = self._found_inf  # type: ignore[attr-defined]
        self._make_state()

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """One step with the mean gradient `gradients / weight` ([] float32), clipped; then clear the gradients."""
        self.lr.copy_(learning_rate(self.step, self._config, self._total_steps))
        norm = torch.linalg.vector_norm(self.gradients) / weight
        self.gradient_norm.copy_(norm)
        self._found_inf.copy_(~torch.isfinite(norm))
        self._divisor.copy_(weight * (norm / self._config.clip).clamp_min(1.0))
        self._adamw.step()
        self.skipped += self._found_inf
        self.step += 1 - self._found_inf
        self.gradients.zero_()

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint must hold, by name; the tensors themselves, not copies."""
        tensors = {"step": self.step, "skipped": self.skipped}
        for index, parameter in enumerate(self.parameters):
            for name, value in self._adamw.state[parameter].items():
                tensors[f"{index}.{name}"] = value
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy a checkpoint's tensors over the current ones, in place: captured graphs go on using these addresses.

        Raises CheckpointError unless names and shapes are those of `state`.
        """
        state = self.state()
        found, wanted = ({n: tuple(t.shape) for n, t in held.items()} for held in (tensors, state))
        if found != wanted:
            wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            raise CheckpointError(
                f"the optimizer's state differs in {wrong[:4]}",
                needed=f"{len(wanted)} tensors of the drafter's shapes",
                do="resume from another checkpoint",
            )
        for name, value in state.items():
            value.copy_(tensors[name])

    def _make_state(self) -> None:
        """Let AdamW allocate its moments now, outside any capture, by a step that `found_inf` turns into nothing."""
        self._found_inf.fill_(1)
        self._adamw.step()
        self._found_inf.zero_()
