"""Which drafted tokens the target accepts, and what it says itself after them.

Greedy: every drafted token that equals the target's own choice. Sampled: the lossless rejection rule (arXiv 2211.17192)
for proposals that are certain of themselves, as servers make them with DFlash: a drafted token x is accepted with the
target's probability p(x), and a rejected one is replaced by a draw from p without x. So P(x) = p(x), and every other
token y comes out with (1 - p(x)) p(y) / (1 - p(x)) = p(y): the text is distributed as if the target had sampled alone.

Legend: B block size, V vocabulary. Row k of the logits follows slot k's token: rows 0..B-2 judge drafted tokens 1..B-1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftcache.common.errors import UsageError
from draftcache.train.model.anchors import check_seed

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the target chooses tokens. Temperature 0: the most probable one."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < MAX_TEMPERATURE:
            raise UsageError(
                f"--temperature {self.temperature}",
                needed=f"0, or within [{MIN_TEMPERATURE}, {MAX_TEMPERATURE})",
                do="correct it",
            )
        check_seed(self.seed)

    @property
    def greedy(self) -> bool:
        """Whether there is nothing random."""
        return self.temperature == 0


class Chooser:
    """Chooses and verifies tokens; holds the random generator of one text."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device).manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> int:
        """One token from logits [V]."""
        if self._sampling.greedy:
            return int(logits.argmax())
        return self._draw((logits / self._sampling.temperature).softmax(-1))

    def verify(
        self,
        logits: Tensor,  # [B, V] float32
        drafted: Tensor,  # [B - 1] int64
    ) -> list[int]:
        """The accepted run of drafted tokens and the target's own token after it: 1 to B tokens."""
        if self._sampling.greedy:
            chosen = logits.argmax(-1)
            return chosen[: _leading(chosen[:-1] == drafted) + 1].tolist()
        probs = (logits / self._sampling.temperature).softmax(-1)
        certain = probs[:-1].gather(-1, drafted[:, None]).squeeze(-1)
        luck = torch.rand(certain.shape, generator=self._generator, device=certain.device)
        run = _leading(luck < certain)
        rest = probs[run].clone()
        if run < len(drafted):
            rest[drafted[run]] = 0
        return [*drafted[:run].tolist(), self._draw(rest)]

    def _draw(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self._generator))


def _leading(flags: Tensor) -> int:
    """How many flags hold before the first that does not."""
    return int(flags.long().cumprod(0).sum())
