"""What tests of decoding share: a drafter beside a tiny target, and one whose proposals are known."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftcache.common.target import Target
from draftcache.train.model.drafter import FULL, SLIDING, ContextKeys, Drafter, DrafterConfig
from draftcache.train.serving.decode import DrafterRunner
from draftcache.train.serving.verify_block import Sampling

CPU = torch.device("cpu")
PROMPT = [104, 105, 10, 65]
GREEDY = Sampling()


def tiny_runner(target: Target, layer_ids: tuple[int, ...]) -> DrafterRunner:
    """An untrained drafter of blocks of 5 slots for a target of width 32 and vocabulary 320."""
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        layer_types=(SLIDING, FULL),
        sliding_window=12,
        sliding_causal=True,
        block_size=5,
        layer_ids=layer_ids,
        mask_token_id=318,
        vocab_size=320,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        attention_bias=False,
    )
    drafter = Drafter(config)
    drafter.initialise(0)
    return DrafterRunner("drafter", drafter, target)


class Oracle:
    """Stands in for a drafter's proposals: at each anchor right for so many slots as `right` says for its position."""

    def __init__(
        self, runner: DrafterRunner, plain: list[int], right: Sequence[int], prompt: int = len(PROMPT)
    ) -> None:
        self._plain, self._right, self._prompt = plain, right, prompt
        self._slots = runner.config.block_size - 1

    def __call__(self, tokens: Tensor, anchors: Tensor, context: list[ContextKeys]) -> Tensor:
        assert context[0].key.shape[0] >= int(anchors[-1]), "the drafter sees every token before the anchor"
        return torch.tensor([self._row(int(a) - self._prompt, int(t)) for a, t in zip(anchors, tokens, strict=True)])

    def _row(self, at: int, token: int) -> list[int]:
        assert self._plain[at] == token
        right = self._right[at % len(self._right)]
        following = [self._plain[i] if i < len(self._plain) else 0 for i in range(at + 1, at + 1 + self._slots)]
        return [t if k < right else (t + 1) % 300 for k, t in enumerate(following)]
