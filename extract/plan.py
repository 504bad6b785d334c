"""What an extraction will do, from flags, data, tokenizer and configuration alone: no weights, no device.

The plan is deterministic, so a resumed run plans exactly the same batches; its manifest says everything that decides
them.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from tqdm import tqdm

from draftcache.common.data import read_lines
from draftcache.common.errors import DataError, UsageError
from draftcache.common.layout import (
    DEFAULT_CEILINGS,
    DEFAULT_TOKEN_BUDGET,
    LAYOUT_VERSION,
    check_ceilings,
    row_stride,
    rows_per_batch,
)
from draftcache.common.manifest import (
    BucketSummary,
    DataFile,
    DataReport,
    ExtractSettings,
    Manifest,
    TargetIdentity,
    digest_file,
)
from draftcache.common.store import BucketSamples
from draftcache.common.target import check_layer_ids, default_layer_ids, identify, load_tokenizer, read_config
from draftcache.common.templates import read_template, template_arguments
from draftcache.common.version import VERSION
from draftcache.extract.buckets import Batch, fill_buckets, plan_batches
from draftcache.extract.template import Template, Tokens, tokenize

DEFAULT_TAPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractConfig:
    """What `draftcache extract` was asked to do. None means: derive it from the target or the ceilings."""

    target: Path
    data: tuple[Path, ...]
    store: Path
    layer_ids: tuple[int, ...] | None = None
    ceilings: tuple[int, ...] = DEFAULT_CEILINGS
    token_budget: int = DEFAULT_TOKEN_BUDGET
    max_length: int | None = None
    min_supervised: int = 2
    limit: int | None = None
    codec: str = "bf16"
    teacher: str = "last"
    chat_template: Path | None = None
    chat_template_kwargs: str = "{}"  # JSON
    max_dropped: float = 0.9  # share of the samples read
    max_void: float = 0.1  # share of the samples run
    dtype: str | None = None  # of the target's forward; stored states are bfloat16 whatever it is
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    device_map: str | None = None  # "auto": one target over several GPUs
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False
    force: bool = False  # go on although space looks short

    def __post_init__(self) -> None:
        check_ceilings(self.ceilings)
        if self.max_length is not None and not 2 <= self.max_length <= self.ceilings[-1]:
            raise UsageError(
                f"--max-length {self.max_length}",
                needed=f"2 to the largest ceiling, {self.ceilings[-1]}",
                do="lower it, or add a larger ceiling to --buckets",
            )
        for name, value in (("--token-budget", self.token_budget), ("--limit", self.limit)):
            if value is not None and value < 1:
                raise UsageError(f"{name} {value}", needed="at least 1", do=f"correct {name}")
        for name, share in (("--max-dropped", self.max_dropped), ("--max-void", self.max_void)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name} {share}", needed="a share within 0..1", do=f"correct {name}")
        if self.resume and self.overwrite:
            raise UsageError("--resume with --overwrite", needed="one of them", do="leave one out")
        if self.min_supervised < 2:
            raise UsageError(
                f"--min-supervised {self.min_supervised}",
                needed="at least 2: an anchor and a token after it",
                do="raise it",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The samples by bucket, the batches in order, and the manifest that the store will have but for its files."""

    manifest: Manifest
    buckets: tuple[BucketSamples, ...]
    batches: tuple[Batch, ...]
    chat_template: Path | None  # a file that takes the place of the target's own template

    @property
    def max_tokens(self) -> int:
        """Padded tokens of the largest batch."""
        return max(batch.count * row_stride(batch.ceiling) for batch in self.batches)

    def bucket(self, batch: Batch) -> BucketSamples:
        """The samples of a batch's bucket."""
        return next(bucket for bucket in self.buckets if bucket.ceiling == batch.ceiling)


def make_plan(config: ExtractConfig) -> Plan:
    """Read and tokenize the data and plan its batches. Raises DraftcacheError for anything wrong in flags or data."""
    layers = read_config(config.target, weights=not config.dry_run).get_text_config().num_hidden_layers
    layer_ids = default_layer_ids(layers, DEFAULT_TAPS) if config.layer_ids is None else config.layer_ids
    check_layer_ids(layer_ids, layers)
    tokenizer = load_tokenizer(config.target)
    identity = identify(config.target, tokenizer, config.dtype)
    max_length = _max_length(config, identity)
    arguments = template_arguments(config.chat_template_kwargs)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    digests = _digest_data(config.data)
    template = Template(
        tokenizer=tokenizer,
        vocab_size=identity.vocab_size,
        tokenizer_size=identity.tokenizer_size,
        arguments=arguments,
    )
    samples, report, lines_per_file = _tokenize_all(config, template, max_length)
    buckets = fill_buckets(samples, config.ceilings)
    data = tuple(
        DataFile(name=path.name, lines=lines_per_file.get(path, 0), digest=digest) for path, digest in digests.items()
    )
    return Plan(
        manifest=_manifest(config, layer_ids, max_length, identity, report, data, buckets),
        buckets=tuple(buckets),
        batches=tuple(plan_batches(buckets, config.token_budget)),
        chat_template=config.chat_template,
    )


def _max_length(config: ExtractConfig, identity: TargetIdentity) -> int:
    """Tokens after which samples are cut: never beyond what the target knows positions for, where no server goes."""
    limit = identity.max_position_embeddings
    if config.max_length is not None and config.max_length > limit:
        raise UsageError(
            f"--max-length {config.max_length}", needed=f"at most the target's {limit} positions", do="lower it"
        )
    return config.max_length or min(config.ceilings[-1], limit)


def _digest_data(paths: Sequence[Path]) -> dict[Path, str]:
    """Every file's digest; UsageError for a file that is missing or given twice, under whatever name."""
    digests: dict[Path, str] = {}
    for path in paths:
        if not path.is_file():
            found = "No such file" if not path.exists() else "Is a directory" if path.is_dir() else "Not a regular file"
            raise UsageError(f"{path}: {found}", needed="a readable .jsonl or .jsonl.gz file", do="check --data")
        digest = digest_file(path)
        twin = next((other for other, known in digests.items() if known == digest), None)
        if twin is not None:
            raise UsageError(
                f"{path} holds the same lines as {twin}", needed="each file once", do="leave out one --data"
            )
        digests[path] = digest
    return digests


def _tokenize_all(
    config: ExtractConfig, template: Template, max_length: int
) -> tuple[list[tuple[int, Tokens]], DataReport, dict[Path, int]]:
    """Tokens of every kept sample with its line's number, what became of all samples, and lines read per file."""
    kept: list[tuple[int, Tokens]] = []
    dropped, notes = Counter[str](), Counter[str]()
    lines_per_file: Counter[Path] = Counter()
    read = truncated = supervised_cut = 0
    for line in tqdm(read_lines(config.data, config.limit), desc="tokenize", unit=" lines", disable=None):
        lines_per_file[Path(line.where.rpartition(":")[0])] += 1
        rendered = tokenize(line, template)
        notes.update(rendered.notes)
        for tokens in rendered.samples:
            read += 1
            cut = _truncate(tokens, max_length)
            truncated += len(cut.input_ids) < len(tokens.input_ids)
            supervised_cut += sum(tokens.loss_mask) - sum(cut.loss_mask)
            reason = _drop_reason(cut, config.min_supervised)
            if reason:
                dropped[reason] += 1
            else:
                kept.append((line.number, cut))
    if not kept or len(kept) < (1 - config.max_dropped) * read:
        left = f"{len(kept)} samples are left" if kept else "no sample is left"
        lines = sum(lines_per_file.values())
        raise DataError(
            f"{', '.join(map(str, config.data))}: {left} of {lines} lines read ({dict(dropped)})",
            needed=f"at least one, and no more than {config.max_dropped:.0%} dropped",
            do="check the data, --max-length, --min-supervised and --max-dropped",
        )
    report = DataReport(
        read=read,
        kept=len(kept),
        dropped=dict(sorted(dropped.items())),
        truncated=truncated,
        supervised_tokens=sum(sum(tokens.loss_mask) for _, tokens in kept),
        supervised_tokens_cut=supervised_cut,
        notes=dict(sorted(notes.items())),
    )
    return kept, report, dict(lines_per_file)


def _truncate(tokens: Tokens, max_length: int) -> Tokens:
    return Tokens(input_ids=tokens.input_ids[:max_length], loss_mask=tokens.loss_mask[:max_length])


def _drop_reason(tokens: Tokens, min_supervised: int) -> str | None:
    """Why a sample cannot be trained on, or None. An anchor needs context before it and a supervised token after it."""
    supervised = sum(tokens.loss_mask)
    if supervised == 0:
        return "no_supervised_tokens"
    mask = tokens.loss_mask
    if supervised < min_supervised or not any(a and b for a, b in pairwise(mask[1:])):
        return "too_few_supervised_tokens"
    return None


def _manifest(
    config: ExtractConfig,
    layer_ids: tuple[int, ...],
    max_length: int,
    identity: TargetIdentity,
    report: DataReport,
    data: tuple[DataFile, ...],
    buckets: Sequence[BucketSamples],
) -> Manifest:
    return Manifest(
        layout_version=LAYOUT_VERSION,
        draftcache_version=VERSION,
        target=identity,
        settings=ExtractSettings(
            layer_ids=layer_ids,
            ceilings=config.ceilings,
            token_budget=config.token_budget,
            max_length=max_length,
            min_supervised=config.min_supervised,
            limit=config.limit,
            codec=config.codec,
            teacher=config.teacher,
            chat_template=None if config.chat_template is None else _text_digest(read_template(config.chat_template)),
            chat_template_kwargs=json.dumps(template_arguments(config.chat_template_kwargs), sort_keys=True),
        ),
        final_norm_applied=True,
        data=data,
        report=report,
        buckets=tuple(
            BucketSummary(
                ceiling=bucket.ceiling,
                samples=len(bucket.samples),
                rows=rows_per_batch(config.token_budget, bucket.ceiling),
                digest=bucket.digest(),
            )
            for bucket in buckets
        ),
    )


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
