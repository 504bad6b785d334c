"""Stage one's table of contents: read and tokenize, plan, load the target, run it, write.

Everything that can be wrong with flags, data or target folder is found before the store's folder is made.
"""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from draftcache.common import config as configs
from draftcache.common.data import Line, read_lines
from draftcache.common.errors import DataError, StoreError, UsageError
from draftcache.common.files import write_json
from draftcache.common.layout import (
    DEFAULT_CEILINGS,
    DEFAULT_TOKEN_BUDGET,
    LAYOUT_VERSION,
    check_ceilings,
    row_stride,
    rows_per_batch,
)
from draftcache.common.manifest import (
    MANIFEST_NAME,
    BucketSummary,
    DataFile,
    DataReport,
    ExtractSettings,
    Manifest,
    TargetIdentity,
    digest_file,
)
from draftcache.common.store import BucketSamples, Journal, Store, create_store, is_store
from draftcache.common.target import (
    Target,
    check_layer_ids,
    default_layer_ids,
    identify,
    load_target,
    load_tokenizer,
    read_config,
    save_parts,
)
from draftcache.common.version import VERSION
from draftcache.extract.buckets import Batch, fill_buckets, plan_batches
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.proof import prove_first_batch
from draftcache.extract.template import Tokens, tokenize
from draftcache.extract.writer import Writer

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
    dtype: str | None = None  # of the target's forward; stored states are bfloat16 whatever it is
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    overwrite: bool = False

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
        if self.min_supervised < 2:
            raise UsageError(
                f"--min-supervised {self.min_supervised}",
                needed="at least 2: an anchor and a token after it",
                do="raise it",
            )


def extract(config: ExtractConfig) -> Store:
    """Make a store. Raises DraftcacheError before the folder is touched for anything wrong in flags, data or target."""
    if is_store(config.store) and not config.overwrite:
        raise StoreError(f"{config.store} exists", needed="a new folder", do="choose another, or pass --overwrite")
    layers = read_config(config.target).get_text_config().num_hidden_layers
    layer_ids = default_layer_ids(layers, DEFAULT_TAPS) if config.layer_ids is None else config.layer_ids
    check_layer_ids(layer_ids, layers)
    tokenizer = load_tokenizer(config.target)
    identity = identify(config.target, tokenizer, config.dtype)
    samples, report, lines_per_file = _tokenize_all(config, tokenizer, identity)
    buckets = fill_buckets(samples, config.ceilings)
    manifest = _manifest(config, layer_ids, identity, report, lines_per_file, buckets)
    batches = plan_batches(buckets, config.token_budget)
    max_tokens = max(batch.count * row_stride(batch.ceiling) for batch in batches)
    device = torch.device(config.device)
    target = load_target(config.target, device, identity.dtype)
    with Forward(target, layer_ids, manifest.record, max_tokens, device) as forward:
        work = _Work({bucket.ceiling: bucket for bucket in buckets}, batches, forward, device)
        _prove(work, target, manifest)
        if config.overwrite and is_store(config.store):
            shutil.rmtree(config.store)
        store = _begin_store(config.store, manifest, buckets, target, config.target)
        _write_all(work, store, max_tokens)
    return store


@dataclass(frozen=True, slots=True)
class _Work:
    buckets: Mapping[int, BucketSamples]
    batches: Sequence[Batch]
    forward: Forward
    device: torch.device


def _tokenize_all(
    config: ExtractConfig, tokenizer: Any, identity: TargetIdentity
) -> tuple[list[tuple[int, Tokens]], DataReport, dict[Path, int]]:
    """Tokens of every kept line by sample number, what became of all lines, and lines read per file."""
    max_length = config.max_length or config.ceilings[-1]
    kept: list[tuple[int, Tokens]] = []
    dropped, notes = Counter[str](), Counter[str]()
    lines_per_file: Counter[Path] = Counter()
    read = truncated = supervised_cut = 0
    for line in tqdm(read_lines(config.data, config.limit), desc="tokenize", unit=" lines", disable=None):
        read += 1
        lines_per_file[Path(line.where.rpartition(":")[0])] += 1
        tokens = tokenize(line, tokenizer, identity.vocab_size)
        cut = _truncate(tokens, max_length)
        truncated += len(cut.input_ids) < len(tokens.input_ids)
        supervised_cut += sum(tokens.loss_mask) - sum(cut.loss_mask)
        notes.update(_notes(line, tokens, identity))
        reason = _drop_reason(cut, config.min_supervised)
        if reason:
            dropped[reason] += 1
        else:
            kept.append((line.number, cut))
    if not kept:
        raise DataError(
            f"{', '.join(map(str, config.data))}: no sample is left of {read} lines read ({dict(dropped)})",
            needed="at least one line with supervised tokens",
            do="check the data, --max-length and --min-supervised",
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


def _notes(line: Line, tokens: Tokens, identity: TargetIdentity) -> list[str]:
    unknown = line.input_ids is not None and max(tokens.input_ids) >= identity.tokenizer_size
    return ["ids_unknown_to_the_tokenizer"] if unknown else []


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
    identity: TargetIdentity,
    report: DataReport,
    lines_per_file: dict[Path, int],
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
            max_length=config.max_length or config.ceilings[-1],
            min_supervised=config.min_supervised,
            limit=config.limit,
            codec=config.codec,
            teacher=config.teacher,
        ),
        final_norm_applied=True,
        data=tuple(
            DataFile(name=path.name, lines=lines_per_file.get(path, 0), digest=digest_file(path))
            for path in config.data
        ),
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


def _begin_store(
    path: Path, manifest: Manifest, buckets: Sequence[BucketSamples], target: Target, target_folder: Path
) -> Store:
    """Commit everything but the records: from the manifest's rename on, `path` is a store."""
    create_store(path, manifest.record, {s.ceiling: s.rows for s in manifest.buckets}, buckets)
    store = Store(path, manifest)
    save_parts(target, target_folder, store.target_folder)
    write_json(path / MANIFEST_NAME, configs.to_dict(manifest))
    return store


def _prove(work: _Work, target: Target, manifest: Manifest) -> None:
    """Run the first batch once before anything is written, and compare it with what transformers says."""
    batch = work.batches[0]
    input_ids, lengths = batch_inputs(work.buckets[batch.ceiling], batch, work.device)
    records = work.forward(input_ids, lengths)
    prove_first_batch(target, manifest.settings.layer_ids, manifest.record, input_ids, lengths, records)


def _write_all(work: _Work, store: Store, max_tokens: int) -> None:
    with (
        Journal(store.path) as journal,
        Writer(journal, max_tokens * store.manifest.record.record_bytes) as writer,
        tqdm(total=store.manifest.report.kept, desc="extract", unit=" samples", disable=None) as bar,
    ):
        for batch in work.batches:
            input_ids, lengths = batch_inputs(work.buckets[batch.ceiling], batch, work.device)
            records = work.forward(input_ids, lengths)
            writer.submit(batch, store.buckets[batch.ceiling], records, lengths.tolist())
            bar.update(batch.count)
