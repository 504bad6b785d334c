"""Decodes with the real target, plainly and with a drafter. One sequence at a time.

The target verifies a block in one forward: it sees the last sampled token and the B - 1 drafted ones. Accepted length
is the tokens that one such forward yields, which is what serving logs call mean acceptance length; a block ends where
the text ends by itself.

A target whose layers keep a running state (hybrid ones) cannot be cut back. There the state is copied before the block
and put back after it, and the accepted tokens are run again.

Legend: B block size, K taps, H target width, V vocabulary, n tokens of a forward.
"""

import copy
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from draftcache.common.errors import TargetError, first_line
from draftcache.common.target import Target, TargetParts, tap_layers
from draftcache.train.model.anchors import Blocks
from draftcache.train.model.attention import DenseAttention
from draftcache.train.model.drafter import ContextKeys, Drafter
from draftcache.train.serving.verify_block import Chooser, Sampling

_CROPPABLE_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A text by plain decoding, the relative gap of the two best logits at each token, and how long it took."""

    tokens: list[int]
    gaps: list[float]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """A text by speculative decoding, the position of every block's anchor, its accepted length, and the time."""

    tokens: list[int]
    starts: list[int]
    lengths: list[int]
    seconds: float


class TargetDecoder:
    """The target with its taps hooked. Close it to remove the hooks."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        self.target = target
        self.device = target.head.device
        arguments = inspect.signature(target.decoder.forward).parameters
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"  # renamed in transformers 5.24
        eos = target.model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self._taps: dict[int, Tensor] = {}
        ids = sorted(set(layer_ids))
        self._hooks = tap_layers(target, ids, lambda position, output: self._taps.__setitem__(ids[position], output))
        kinds = set(getattr(target.model.config.get_text_config(), "layer_types", None) or ())
        self._hybrid = bool(kinds - _CROPPABLE_KINDS)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def new_cache(self) -> DynamicCache:
        """An empty cache. Only hybrid targets need their own kinds of layers; others are easier to cut back without."""
        return DynamicCache(config=self.target.model.config) if self._hybrid else DynamicCache()

    def forward(self, ids: Sequence[int], cache: DynamicCache) -> Tensor:
        """Logits [n, V] float32 of `ids`, which follow what the cache holds; their taps are kept."""
        batch = torch.tensor([list(ids)], device=self.device)
        hidden = self.target.decoder(input_ids=batch, **{self._cache_name: cache}, use_cache=True).last_hidden_state
        return functional.linear(hidden[0], self.target.head).float()

    def taps(self, layer_ids: Sequence[int], count: int | None = None) -> Tensor:
        """[n, K * H]: the taps of the first `count` tokens of the latest forward, side by side."""
        return torch.cat([self._taps[i][0, :count] for i in layer_ids], dim=-1)

    def until_end(self, tokens: list[int]) -> list[int]:
        """The tokens up to and including the first that ends the text."""
        end = next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        return tokens[: end + 1]

    def is_end(self, token: int) -> bool:
        """Whether the token ends the text."""
        return token in self._eos

    def over(self, tokens: list[int], limit: int) -> bool:
        """Whether the text is over."""
        return tokens[-1] in self._eos or len(tokens) >= limit

    @torch.inference_mode()
    def plain(self, prompt: Sequence[int], limit: int, sampling: Sampling) -> Plain:
        """At most `limit` tokens, one forward each."""
        started = time.perf_counter()
        chooser, cache = Chooser(sampling, self.device), self.new_cache()
        logits = self.forward(prompt, cache)[-1]
        tokens: list[int] = []
        gaps: list[Tensor] = []
        while not tokens or not self.over(tokens, limit):
            if tokens:
                logits = self.forward(tokens[-1:], cache)[-1]
            tokens.append(chooser.choose(logits))
            best = logits.topk(2).values
            gaps.append((best[0] - best[1]) / best[0].abs().clamp_min(1e-6))
        found = torch.stack(gaps).tolist()
        return Plain(tokens=tokens, gaps=found, seconds=time.perf_counter() - started)

    def state(self, cache: DynamicCache) -> dict[int, Any]:
        """Copies of the layers that cannot be cut back, by number; none where there are only keys and values."""
        if not self._hybrid:
            return {}
        return {i: copy.deepcopy(layer) for i, layer in enumerate(cache.layers) if type(layer) is not DynamicLayer}

    def keep(self, cache: DynamicCache, state: dict[int, Any], ids: Sequence[int], kept: int) -> None:
        """Of `ids`, which the latest forward ran, keep only the first `kept` in the cache. May run those again."""
        if kept == len(ids):
            return
        if not state:
            _crop(cache, len(ids) - kept)
            return
        for i, layer in enumerate(cache.layers):
            if i in state:
                cache.layers[i] = state[i]
            else:
                assert isinstance(layer, DynamicLayer), "whatever is no plain layer was copied"
                layer.crop(-len(ids))
        self.forward(ids[:kept], cache)


class DrafterRunner:
    """A drafter beside its target's embedding and head, in the dtype that servers run it in."""

    def __init__(self, name: str, drafter: Drafter, parts: Target | TargetParts) -> None:
        """`drafter` is converted to that dtype."""
        self.name = name
        self.config = drafter.config
        self.dtype = torch.bfloat16 if parts.head.is_cuda else torch.float32
        self._drafter = drafter.to(self.dtype)
        self._embedding, self._head = parts.embedding.to(self.dtype), parts.head.to(self.dtype)

    def context(self, taps: Tensor, start: int) -> list[ContextKeys]:
        """Every layer's keys of context tokens from position `start` on; taps are [n, K * H]."""
        positions = torch.arange(start, start + len(taps), device=taps.device)
        return self._drafter.context_keys(taps.to(self.dtype), positions)

    def draft(self, tokens: Tensor, anchors: Tensor, context: list[ContextKeys]) -> Tensor:
        """[A, B - 1] int64: what is proposed to follow `tokens` [A], which stand at positions `anchors` [A].

        The context may reach beyond an anchor; its block sees only what lies before it.
        """
        config = self.config
        ids = torch.full((len(tokens), config.block_size), config.mask_token_id, device=tokens.device)
        ids[:, 0] = tokens
        unused = torch.zeros_like(ids)
        blocks = Blocks(
            anchors=anchors,
            keep=torch.ones_like(anchors, dtype=torch.bool),
            first=torch.zeros_like(anchors),
            input_ids=ids,
            positions=anchors[:, None] + torch.arange(config.block_size, device=tokens.device),
            labels=unused,
            teacher_rows=unused,
            valid=unused.bool(),
        )
        attention = DenseAttention(blocks, context[0].key.shape[0], config.rules)
        hidden = self._drafter(self._embedding[ids.flatten()], blocks.positions.flatten(), context, attention)
        trained = hidden.unflatten(0, ids.shape)[:, 1:]
        drafted: Tensor = functional.linear(trained, self._head).argmax(-1)
        return drafted


@torch.inference_mode()
def speculate(
    decoder: TargetDecoder, runner: DrafterRunner, prompt: Sequence[int], limit: int, sampling: Sampling
) -> Speculative:
    """At most `limit` tokens of the target's text, block by block."""
    started = time.perf_counter()
    chooser, cache, layer_ids = Chooser(sampling, decoder.device), decoder.new_cache(), runner.config.layer_ids
    tokens = [chooser.choose(decoder.forward(prompt, cache)[-1])]
    context = runner.context(decoder.taps(layer_ids), 0)
    starts: list[int] = []
    lengths: list[int] = []
    while not decoder.over(tokens, limit):
        start = len(prompt) + len(tokens) - 1  # position of the last sampled, not yet verified token
        last, at = (torch.tensor([value], device=decoder.device) for value in (tokens[-1], start))
        drafted = runner.draft(last, at, context)[0]
        ids = [tokens[-1], *drafted.tolist()]
        state = decoder.state(cache)
        accepted = chooser.verify(decoder.forward(ids, cache), drafted)
        decoder.keep(cache, state, ids, len(accepted))
        context = _joined(context, runner.context(decoder.taps(layer_ids, len(accepted)), start))
        accepted = decoder.until_end(accepted)
        starts.append(start)
        lengths.append(len(accepted))
        tokens += accepted
    return Speculative(tokens=tokens[:limit], starts=starts, lengths=lengths, seconds=time.perf_counter() - started)


def _crop(cache: DynamicCache, tokens: int) -> None:
    """Drop the target's last `tokens` tokens from its cache."""
    try:
        cache.crop(-tokens)
    except (NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
        raise TargetError(
            f"the target's cache cannot be cut back ({first_line(error)})",
            needed="layers that keep keys and values, or a running state that can be copied",
            do="evaluate in a server that supports this target",
        ) from None


def _joined(a: list[ContextKeys], b: list[ContextKeys]) -> list[ContextKeys]:
    return [ContextKeys(torch.cat([x.key, y.key]), torch.cat([x.value, y.value])) for x, y in zip(a, b, strict=True)]
