"""Measures drafters with the real target: accepted length by decoding, speed, and whether the text is the target's own.

Every prompt is decoded plainly once and speculatively with every drafter. Greedy speculative text is the target's own
text; where rounding makes the target's two best tokens a tie, either is right and the texts may part. With sampling the
two texts are two draws, and only lengths and speed are compared.
"""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from draftcache.common import config as configs
from draftcache.common.errors import TargetError, UsageError
from draftcache.common.manifest import PLAIN_ENDS
from draftcache.common.target import Target, check_device, identify, load_target, load_tokenizer
from draftcache.common.templates import read_template, template_arguments
from draftcache.train.model.drafter import Drafter
from draftcache.train.serving.decode import DrafterRunner, Plain, TargetDecoder, speculate
from draftcache.train.serving.drafters import load_drafters
from draftcache.train.serving.prompts import check_prompts, read_prompts
from draftcache.train.serving.replay import replay
from draftcache.train.serving.tally import Difference, SetReport, Tally
from draftcache.train.serving.verify_block import Sampling

TIE_ULPS = 8
"""A difference from plain decoding counts as a tie if the target's two best logits lie within so many roundings."""
_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """What `draftcache evaluate` was asked to do. `dtype` None: the target's own."""

    target: Path
    data: tuple[Path, ...]
    checkpoints: tuple[Path, ...] = ()  # runs
    drafters: tuple[Path, ...] = ()  # exported or released folders
    max_new_tokens: int = 128
    limit: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    chat_template: Path | None = None  # takes the place of the target's own, as in extraction
    chat_template_kwargs: str = "{}"  # JSON
    dtype: str | None = None
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens}", needed="at least 2", do="correct it")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"--limit {self.limit}", needed="at least 1", do="correct it")


def evaluate(config: EvaluateConfig) -> list[SetReport]:
    """Decode every prompt of every file; one report per file and drafter, those of one file one after another."""
    check_device(config.device)
    device = torch.device(config.device)
    tokenizer = load_tokenizer(config.target)
    arguments = template_arguments(config.chat_template_kwargs)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    identity = identify(config.target, tokenizer)
    loaded = load_drafters(config.checkpoints, config.drafters, identity, device)
    prompts = {path: read_prompts(path, tokenizer, config.limit, arguments) for path in config.data}
    for held in prompts.values():
        check_prompts(held, identity, config.max_new_tokens)
    target = load_target(config.target, device, config.dtype)
    if target.ends != PLAIN_ENDS:
        raise TargetError(
            f"this target does more at its ends than look up and multiply: {target.ends}",
            needed="a target without scales or caps there, as `train` needs it too",
            do="measure in a server that supports it",
        )
    drafters = [(one.name, one.drafter) for one in loaded]
    return measure(target, drafters, prompts, config.max_new_tokens, config.sampling)


def measure(
    target: Target,
    drafters: Sequence[tuple[str, Drafter]],
    prompts: dict[Path, list[tuple[str, list[int]]]],
    limit: int,  # new tokens of a text
    sampling: Sampling,
) -> list[SetReport]:
    """`evaluate` on what is loaded already."""
    runners = [DrafterRunner(name, drafter, target) for name, drafter in drafters]
    layer_ids = [i for runner in runners for i in runner.config.layer_ids]
    with closing(TargetDecoder(target, layer_ids)) as decoder:
        for runner in runners:
            _, first = next(iter(prompts.values()))[0]
            decoder.plain(first, _WARM_UP_TOKENS, sampling)
            speculate(decoder, runner, first, _WARM_UP_TOKENS, sampling)
        sets = (_one_set(path, held, decoder, runners, limit, sampling) for path, held in prompts.items())
        return [report for reports in sets for report in reports]


def write_reports(path: Path, reports: Sequence[SetReport], config: EvaluateConfig) -> None:
    """Write what was measured and how as JSON."""
    text = json.dumps(
        {"settings": _settings(config), "sets": [configs.to_dict(report) for report in reports]}, indent=2
    )
    path.write_text(text + "\n", encoding="utf-8")


def _settings(config: EvaluateConfig) -> dict[str, Any]:
    return {
        "target": config.target.resolve().name,
        "temperature": config.sampling.temperature,
        "seed": config.sampling.seed,
        "max_new_tokens": config.max_new_tokens,
        "dtype": config.dtype,
        "device": config.device,
    }


def _one_set(
    path: Path,
    prompts: Sequence[tuple[str, list[int]]],
    decoder: TargetDecoder,
    runners: Sequence[DrafterRunner],
    limit: int,
    sampling: Sampling,
) -> list[SetReport]:
    tallies = [Tally(runner.name, path.name, runner.config.block_size) for runner in runners]
    tie = TIE_ULPS * torch.finfo(decoder.target.head.dtype).eps
    for where, prompt in tqdm(prompts, desc=f"evaluate {path.name}", unit=" prompts", disable=None):
        plain = decoder.plain(prompt, limit, sampling)
        for runner, tally in zip(runners, tallies, strict=True):
            text = speculate(decoder, runner, prompt, limit, sampling)
            tally.add(text, plain)
            if sampling.greedy:
                tally.compare(_difference(where, plain, text.tokens, tie))
        if sampling.greedy:
            _replay_all(prompt, plain, decoder, runners, tallies)
    return [tally.report() for tally in tallies]


@torch.inference_mode()
def _replay_all(
    prompt: list[int],
    plain: Plain,
    decoder: TargetDecoder,
    runners: Sequence[DrafterRunner],
    tallies: Sequence[Tally],
) -> None:
    """Every position of the plain text as an anchor: what training measures on it."""
    ids = [*prompt, *plain.tokens]
    decoder.forward(ids, decoder.new_cache())
    known, finished = torch.tensor(ids, device=decoder.device), decoder.is_end(ids[-1])
    for runner, tally in zip(runners, tallies, strict=True):
        taps = decoder.taps(runner.config.layer_ids)
        tally.replayed += replay(runner, known, taps, len(prompt), finished=finished)


def _difference(where: str, plain: Plain, tokens: Sequence[int], tie: float) -> Difference | None:
    for position, (x, y) in enumerate(zip(plain.tokens, tokens, strict=False)):
        if x != y:
            gap = plain.gaps[position]
            return Difference(prompt=where, position=position, gap=gap, tie=gap <= tie)
    assert len(plain.tokens) == len(tokens), "one text is the beginning of the other, and both should have gone on"
    return None
