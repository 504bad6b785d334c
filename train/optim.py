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
from draftcache.train.kernels.adamw import FlatState, Scalars, adamw

_ABOVE_ZERO, _SHARES = ("lr", "clip", "eps"), ("beta1", "beta2", "warmup")


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
        allowed = {name: ("a finite number above 0", 0 < getattr(self, name) < math.inf) for name in _ABOVE_ZERO}
        allowed |= {name: ("within [0, 1)", 0 <= getattr(self, name) < 1) for name in _SHARES}
        allowed["weight_decay"] = ("a finite number of at least 0", 0 <= self.weight_decay < math.inf)
        for name, (needed, holds) in allowed.items():
            if not holds:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} {getattr(self, name)}", needed=needed, do="correct it")


def learning_rate(step: Tensor, config: OptimConfig, total_steps: int) -> Tensor:
    """The rate of 0-based `step` ([] float64): lr (s + 1) / w over w warm-up steps, then half a cosine to zero."""
    warmup = max(1, round(config.warmup * total_steps))
    rising = (step + 1) / warmup
    progress = ((step - warmup) / max(1, total_steps - warmup)).clamp(0, 1)
    return config.lr * torch.minimum(rising, 0.5 * (1 + torch.cos(math.pi * progress)))


class Optimizer:
    """Masters, moments, gradients and scalars of one training run, in flat buffers that keep their addresses."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimConfig, total_steps: int) -> None:
        """Moves the parameters into one flat buffer: each becomes a view of it, as its gradient does of another."""
        self.parameters = sorted(parameters, key=lambda p: -p.dim())
        """Matrices before vectors, so that neighbouring layers' matrices are neighbours in the buffers."""
        self._config = config
        self._total_steps = total_steps
        masters = torch.cat([p.detach().flatten() for p in self.parameters])
        gradients, first, second = (torch.zeros_like(masters) for _ in range(3))
        self._flat = FlatState(masters=masters, gradients=gradients, first=first, second=second)
        self._moments: list[tuple[Tensor, Tensor]] = []
        offset = 0
        for parameter in self.parameters:
            here = slice(offset, offset + parameter.numel())
            parameter.data = masters[here].view_as(parameter)
            parameter.grad = gradients[here].view_as(parameter)
            self._moments.append((first[here].view_as(parameter), second[here].view_as(parameter)))
            offset = here.stop
        self.step = torch.zeros((), dtype=torch.float64, device=masters.device)
        """Updates that changed the weights: the schedule's step."""
        self.skipped = torch.zeros_like(self.step)
        self.lr, self.gradient_norm, divisor, skip, *corrections = (
            torch.zeros((), device=masters.device) for _ in range(6)
        )
        self._scalars = Scalars(
            lr=self.lr,
            divisor=divisor,
            skip=skip,
            first_correction=corrections[0],
            second_correction=corrections[1],
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    @property
    def gradients(self) -> Tensor:
        """Flat float32 sums of the window's gradients; every parameter's `.grad` is a view of it."""
        return self._flat.gradients

    @property
    def masters(self) -> Tensor:
        """Flat float32 weights; every parameter is a view of it."""
        return self._flat.masters

    @torch.no_grad()
    def update(self, weight: Tensor, copies: Tensor | None = None) -> None:
        """One step with the mean gradient `gradients / weight` ([] float32), clipped; then clear the gradients.

        `copies`, flat in the compute dtype, are the masters' and follow them.
        """
        config, scalars = self._config, self._scalars
        self.lr.copy_(learning_rate(self.step, config, self._total_steps))
        norm = torch.linalg.vector_norm(self.gradients) / weight
        self.gradient_norm.copy_(norm)
        scalars.skip.copy_(~torch.isfinite(norm))
        scalars.divisor.copy_(weight * (norm / config.clip).clamp_min(1.0))
        scalars.first_correction.copy_(1 - config.beta1 ** (self.step + 1))
        scalars.second_correction.copy_(1 - config.beta2 ** (self.step + 1))
        adamw(self._flat, scalars, copies)
        self.skipped += scalars.skip
        self.step += 1 - scalars.skip

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint must hold, by name; the tensors themselves, not copies."""
        tensors = {"step": self.step, "skipped": self.skipped}
        for index, (first, second) in enumerate(self._moments):
            tensors |= {f"{index}.exp_avg": first, f"{index}.exp_avg_sq": second}
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
