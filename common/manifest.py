"""The store's identity card: what it was made from, in full, and the check that refuses a stranger.

`manifest.json` is written last when a store is created, after ids, masks, lengths and the target's parts; a folder
without it is not a store.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from draftcache.common import config
from draftcache.common.errors import DamageError, MismatchError, StoreError, UsageError
from draftcache.common.files import write_json
from draftcache.common.layout import LAYOUT_VERSION
from draftcache.common.record import RecordSpec, record_spec

MANIFEST_NAME = "manifest.json"
_CHECKSUM = "checksum"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """What makes a target that target, and the numbers a drafter for it needs. Digests are SHA-256 in hex."""

    name: str
    architecture: str
    model_type: str
    dtype: str  # in which it was run
    hidden_size: int
    vocab_size: int  # rows of the embedding, which may exceed the tokenizer's size
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    attention_bias: bool
    tied_head: bool
    tokenizer_size: int
    special_token_ids: tuple[int, ...]
    config_digest: str
    weights_digest: str  # tensor names, shapes, file sizes and sampled pages
    tokenizer_digest: str
    template_digest: str
    quantization: str | None = None  # the method, where the weights are quantised


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetEnds:
    """What the target does besides looking rows up in its embedding and multiplying with its head, as measured.

    First layer's input = embedding row x `embedding_scale`; logits = cap(head(last) x `logit_scale`), where cap(x) is
    `logit_softcap` x tanh(x / `logit_softcap`), or x if that is None.
    """

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


PLAIN_ENDS = TargetEnds()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One data file: its name without folder, lines read from it and the SHA-256 of its bytes."""

    name: str
    lines: int
    digest: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSettings:
    """The settings of stage one that decide what the store holds."""

    layer_ids: tuple[int, ...]  # 0-based, output of that decoder layer, in stored order
    ceilings: tuple[int, ...]
    token_budget: int
    max_length: int
    min_supervised: int
    limit: int | None
    codec: str
    teacher: str
    chat_template: str | None = None  # SHA-256 of a template given by hand in place of the target's own
    chat_template_kwargs: str = "{}"  # JSON, keys sorted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What became of every sample read: read = kept + the sum of `dropped`.

    A line is one sample, or several where the template rewrites history (then a note counts such lines).
    """

    read: int
    kept: int
    dropped: dict[str, int]
    truncated: int
    supervised_tokens: int
    supervised_tokens_cut: int
    notes: dict[str, int]  # things worth knowing that dropped nothing, by kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketSummary:
    """One bucket: its ceiling, number of samples, rows per shard, and the crc32c of its ids, masks and lengths."""

    ceiling: int
    samples: int
    rows: int
    digest: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of the store that never changes: its path within it, its size and the SHA-256 of its bytes."""

    name: str
    size: int
    digest: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a store says of itself. `final_norm_applied` speaks of the field `last`."""

    layout_version: int
    draftcache_version: str
    target: TargetIdentity
    settings: ExtractSettings
    final_norm_applied: bool
    data: tuple[DataFile, ...]
    report: DataReport
    buckets: tuple[BucketSummary, ...]
    ends: TargetEnds = PLAIN_ENDS  # measured when the target was first loaded
    files: tuple[StoredFile, ...] = ()  # metadata, ids and masks, the target's parts

    @property
    def record(self) -> RecordSpec:
        """The fields of one token's record."""
        s = self.settings
        return record_spec(len(s.layer_ids), self.target.hidden_size, s.codec, s.teacher)

    @property
    def identity(self) -> str:
        """Fingerprint of what the store was made from: what a run trained on it records."""
        return config.fingerprint(_made_from(self))


def write_manifest(store: Path, manifest: Manifest) -> None:
    """Write a store's manifest with its own checksum: from here on the folder is a store."""
    plain = config.to_dict(manifest)
    write_json(store / MANIFEST_NAME, plain | {_CHECKSUM: config.fingerprint(plain)})


def read_manifest(store: Path) -> Manifest:
    """Read a store's manifest; StoreError if there is none, or if it is damaged or of another layout version."""
    path = store / MANIFEST_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(
            f"{store} has no {MANIFEST_NAME}", needed="a store made by `draftcache extract`", do="check --store"
        ) from None
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}", needed="a readable manifest", do="check the store's folder"
        ) from None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not JSON ({error})", needed="an undamaged manifest", do="extract again") from None
    version = values.get("layout_version") if isinstance(values, dict) else None
    if version != LAYOUT_VERSION:
        raise StoreError(
            f"{path} has layout version {version}",
            needed=f"version {LAYOUT_VERSION}",
            do="use the draftcache version that wrote it, or extract again",
        )
    if values.pop(_CHECKSUM, None) != config.fingerprint(values):
        raise DamageError(f"{path} fails its checksum", needed="an undamaged manifest", do="extract again")
    try:
        return config.from_dict(Manifest, values, str(path))
    except UsageError as error:
        raise StoreError(error.found, needed=error.needed, do="extract again") from None


def check_same(found: Manifest, wanted: Manifest, what: str) -> None:
    """Raise MismatchError naming every difference in what two stores were made from."""
    lines = config.differences(_made_from(found), _made_from(wanted))
    if lines:
        raise MismatchError(
            f"{what} was made from something else: {'; '.join(lines[:6])}",
            needed="the same target, tokenizer, template, data and settings",
            do="use the first run's flags, or another folder",
        )


def _made_from(manifest: Manifest) -> dict[str, Any]:
    """The manifest without what says nothing of its own: the version, what follows from the rest, the folder's name."""
    plain = config.to_dict(manifest)
    for name in ("draftcache_version", "ends", "files"):
        del plain[name]
    del plain["target"]["name"]
    return plain


def check_file(store: Path, manifest: Manifest, name: str) -> None:
    """Raise DamageError unless a file that the manifest lists has its size and digest."""
    (wanted,) = (file for file in manifest.files if file.name == name)
    path, found = store / name, "is not the file that extraction wrote"
    try:
        sound = path.is_file() and path.stat().st_size == wanted.size and digest_file(path) == wanted.digest
    except OSError as error:
        sound, found = False, f"cannot be read: {error.strerror}"
    if not sound:
        raise DamageError(
            f"{path} {found}",
            needed="its bytes unchanged",
            do="run `draftcache extract --resume` with the first run's settings",
        )


def digest_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
