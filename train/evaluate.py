"""Greedy speculative decoding with the real target: accepted length, and equality with plain decoding.

One sequence at a time. The target verifies a block in one forward: it sees the last sampled token and the B - 1 drafted
ones, and every drafted token equal to its own choice is accepted, then its next choice comes for free. Accepted length
is the tokens that one such forward yields, which is what serving logs call mean acceptance length.

Legend: B block size, K taps, H target width, V vocabulary, n tokens of a forward.
"""

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import DynamicCache

from draftcache.common import config as configs
from draftcache.common.data import Line, read_lines
from draftcache.common.errors import DataError, MismatchError, TargetError, UsageError
from draftcache.common.manifest import TargetIdentity
from draftcache.common.target import Target, check_device, identify, load_target, load_tokenizer, tap_layers
from draftcache.train.anchors import Blocks
from draftcache.train.attention import DenseAttention
from draftcache.train.checkpoint import load_drafter
from draftcache.train.drafter import ContextKeys, Drafter

TIE_ULPS = 8
"""A difference from plain decoding counts as a tie if the target's two best logits lie within so many roundings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """What `draftcache evaluate` was asked to do. `dtype` None: the target's own."""

    checkpoint: Path
    target: Path
    data: tuple[Path, ...]
    max_new_tokens: int = 128
    limit: int | None = None
    dtype: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens}", needed="at least 1", do="correct it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where speculative text left plain text: prompt, token position, and the gap of the target's two best logits."""

    prompt: str
    position: int
    gap: float
    tie: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReport:
    """Figures of one prompt file."""

    name: str
    prompts: int
    tokens: int
    blocks: int
    accepted_length: float
    slot_rates: tuple[float, ...]  # share of blocks that accept at least k drafted tokens, k = 1..B-1
    plain_tokens_s: float
    speculative_tokens_s: float
    equal: int
    differences: tuple[Difference, ...]

    @property
    def unexplained(self) -> int:
        """Differences that are no ties: a defect."""
        return sum(not d.tie for d in self.differences)


def evaluate(config: EvaluateConfig) -> list[SetReport]:
    """Decode every prompt twice, plainly and with the drafter; one report per prompt file."""
    check_device(config.device)
    device = torch.device(config.device)
    run, drafter = load_drafter(config.checkpoint, device)
    tokenizer = load_tokenizer(config.target)
    _check_target(run.target, identify(config.target, tokenizer))
    prompts = {path: _prompts(path, tokenizer, config.limit) for path in config.data}
    target = load_target(config.target, device, config.dtype)
    decoder = _Decoder(target, drafter, config.max_new_tokens)
    try:
        return [_evaluate_set(path.name, held, decoder) for path, held in prompts.items()]
    finally:
        decoder.close()


def _check_target(trained: TargetIdentity, given: TargetIdentity) -> None:
    wanted, found = configs.to_dict(trained), configs.to_dict(given)
    for plain in (wanted, found):
        del plain["name"], plain["dtype"]  # where the folder lies says nothing, and a drafter serves any precision
    lines = configs.differences(found, wanted)
    if lines:
        raise MismatchError(
            f"--target is not the target this drafter was trained for: {'; '.join(lines[:4])}",
            needed=f"{trained.name} as it was extracted",
            do="pass that target",
        )


def _prompts(path: Path, tokenizer: Any, limit: int | None) -> list[tuple[str, list[int]]]:
    """Every line's prompt: what stands before its last assistant turn, or before its first supervised token."""
    prompts = [(line.where, _prompt_ids(line, tokenizer)) for line in read_lines([path], limit)]
    if not prompts:
        raise DataError(f"{path} holds no prompts", needed="at least one line", do="check --data")
    return prompts


def _prompt_ids(line: Line, tokenizer: Any) -> list[int]:
    if line.input_ids is not None:
        ids = list(line.input_ids[: line.loss_mask.index(1)] if 1 in line.loss_mask else line.input_ids)
    else:
        turns = list(line.messages)
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) if turns else ""
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise DataError(f"{line.where}: nothing stands before the answer", needed="a prompt", do="remove the line")
    return ids


def _evaluate_set(name: str, prompts: list[tuple[str, list[int]]], decoder: "_Decoder") -> SetReport:
    slots = decoder.block_size - 1
    reached = [0] * slots
    blocks = emitted = tokens = equal = 0
    plain_seconds = speculative_seconds = 0.0
    differences: list[Difference] = []
    for where, prompt in tqdm(prompts, desc=f"evaluate {name}", unit=" prompts", disable=None):
        start = time.perf_counter()
        plain, gaps = decoder.plain(prompt)
        middle = time.perf_counter()
        text, lengths = decoder.speculative(prompt)
        speculative_seconds += time.perf_counter() - middle
        plain_seconds += middle - start
        tokens += len(text)
        blocks += len(lengths)
        emitted += sum(lengths)
        for k in range(slots):
            reached[k] += sum(length > k + 1 for length in lengths)
        split = _first_difference(plain, text)
        if split is None:
            equal += 1
        else:
            gap = gaps[min(split, len(gaps) - 1)]
            differences.append(Difference(prompt=where, position=split, gap=gap, tie=gap <= decoder.tie))
    return SetReport(
        name=name,
        prompts=len(prompts),
        tokens=tokens,
        blocks=blocks,
        accepted_length=emitted / blocks if blocks else 1.0,
        slot_rates=tuple(count / blocks if blocks else 0.0 for count in reached),
        plain_tokens_s=tokens / plain_seconds,
        speculative_tokens_s=tokens / speculative_seconds,
        equal=equal,
        differences=tuple(differences),
    )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


class _Decoder:
    """The target with its taps hooked, and the drafter beside it."""

    def __init__(self, target: Target, drafter: Drafter, max_new_tokens: int) -> None:
        self._target, self._drafter = target, drafter
        self._max_new_tokens = max_new_tokens
        self.block_size = drafter.config.block_size
        self.tie = TIE_ULPS * torch.finfo(target.head.dtype).eps
        self._device = target.head.device
        arguments = inspect.signature(target.decoder.forward).parameters
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"  # renamed in transformers 5.24
        eos = target.model.generation_config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self._taps: dict[int, Tensor] = {}
        self._hooks = tap_layers(target, drafter.config.layer_ids, self._taps.__setitem__)
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._embedding, self._head = target.embedding.to(self._dtype), target.head.to(self._dtype)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def plain(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Plain greedy decoding: the tokens, and the relative gap of the two best logits at each."""
        cache = DynamicCache()
        logits = self._forward(prompt, cache)[-1]
        tokens: list[int] = []
        gaps: list[float] = []
        while True:
            best = logits.topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float((best.values[0] - best.values[1]) / best.values[0].abs().clamp_min(1e-6)))
            if tokens[-1] in self._eos or len(tokens) == self._max_new_tokens:
                return tokens, gaps
            logits = self._forward([tokens[-1]], cache)[-1]

    @torch.inference_mode()
    def speculative(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Greedy speculative decoding: the tokens, and the accepted length of every block."""
        cache = DynamicCache()
        tokens = [int(self._forward(prompt, cache)[-1].argmax())]
        context = self._context(0)
        lengths: list[int] = []
        while tokens[-1] not in self._eos and len(tokens) < self._max_new_tokens:
            start = len(prompt) + len(tokens) - 1  # position of the last sampled, not yet verified token
            drafted = self._draft(tokens[-1], start, context)
            chosen = self._forward([tokens[-1], *drafted], cache).argmax(-1).tolist()
            run = next((k for k, token in enumerate(drafted) if token != chosen[k]), len(drafted))
            accepted = self._until_eos(chosen[: run + 1])
            lengths.append(len(accepted))
            tokens += accepted
            _forget(cache, len(drafted) - run)
            context = _joined(context, self._context(start, run + 1))
        return tokens[: self._max_new_tokens], lengths

    def _forward(self, ids: list[int], cache: DynamicCache) -> Tensor:
        """Logits [n, V] float32 of `ids`, which follow what the cache holds; their taps are kept."""
        batch = torch.tensor([ids], device=self._device)
        hidden = self._target.decoder(input_ids=batch, **{self._cache_name: cache}, use_cache=True).last_hidden_state
        return functional.linear(hidden[0], self._target.head).float()

    def _context(self, start: int, count: int | None = None) -> list[ContextKeys]:
        """The drafter's context keys of the first `count` tokens of the target's latest forward."""
        taps = torch.cat([self._taps[i][0, :count] for i in range(len(self._taps))], dim=-1).to(self._dtype)
        positions = torch.arange(start, start + len(taps), device=self._device)
        return self._drafter.context_keys(taps, positions)

    def _draft(self, token: int, start: int, context: list[ContextKeys]) -> list[int]:
        """The B - 1 tokens proposed to follow `token`, which stands at `start`."""
        config = self._drafter.config
        ids = torch.full((1, config.block_size), config.mask_token_id, device=self._device)
        ids[0, 0] = token
        at = torch.tensor([start], device=self._device)
        unused = torch.zeros_like(ids)
        blocks = Blocks(
            anchors=at,
            keep=torch.ones_like(at, dtype=torch.bool),
            first=torch.zeros_like(at),
            input_ids=ids,
            positions=at[:, None] + torch.arange(config.block_size, device=self._device),
            labels=unused,
            teacher_rows=unused,
            valid=unused.bool(),
        )
        attention = DenseAttention(blocks, start, config.rules)
        hidden = self._drafter(self._embedding[ids[0]], blocks.positions[0], context, attention)
        drafted: list[int] = functional.linear(hidden[1:], self._head).argmax(-1).tolist()
        return drafted

    def _until_eos(self, tokens: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        return tokens[: end + 1]


def _forget(cache: DynamicCache, tokens: int) -> None:
    """Drop the target's last `tokens` tokens from its cache."""
    try:
        cache.crop(-tokens)
    except (NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
        raise TargetError(
            f"the target's cache cannot be cut back ({error})",
            needed="a target whose layers all keep keys and values",
            do="evaluate in a server that supports this target",
        ) from None


def _joined(a: list[ContextKeys], b: list[ContextKeys]) -> list[ContextKeys]:
    return [ContextKeys(torch.cat([x.key, y.key]), torch.cat([x.value, y.value])) for x, y in zip(a, b, strict=True)]
