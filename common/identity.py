"""What identifies a target, read from configuration, tokenizer and files alone, under the names that families use."""

import hashlib
import json
from pathlib import Path
from typing import Any

from draftcache.common.errors import TargetError, first_line

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    TEMPLATE_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")
_SAMPLED_PAGES = 64
_SAMPLED_BYTES = 4096
_EPSILON_NAMES = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")


def weight_files(folder: Path) -> list[Path]:
    """The target's weight files, sorted by name."""
    return sorted(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern))


def copied_files(source: Path) -> list[Path]:
    """The target's files that a store keeps as they are."""
    return [source / name for name in ("config.json", *TOKENIZER_FILES) if (source / name).is_file()]


def says_tied(config: Any) -> bool:
    """Whether a target's configuration, or the text configuration nested in it, calls embedding and head one."""
    return any(bool(getattr(c, "tie_word_embeddings", False)) for c in (config, config.get_text_config()))


def quantization(folder: Path, config: Any) -> str | None:
    """The method by which the weights are quantised, or None."""
    if any(path.suffix == ".gguf" for path in weight_files(folder)):
        return "gguf"
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def intermediate_size(text: Any) -> int:
    """Width of the MLP; where every layer has experts, what a token passes through of them."""
    width = getattr(text, "intermediate_size", None) or text.moe_intermediate_size * text.num_experts_per_tok
    return int(width)


def norm_epsilon(text: Any) -> float:
    """The epsilon of the norms."""
    return float(next((getattr(text, name) for name in _EPSILON_NAMES if hasattr(text, name)), 1e-6))


def rope_theta(text: Any, folder: Path) -> float:
    """The base of the rotary embedding, of full-attention layers where kinds differ; TargetError if none is named."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:  # one set of parameters per layer type
        parameters = parameters.get("full_attention") or {}
    theta = parameters.get("rope_theta", getattr(text, "rope_theta", None))
    if theta is None:
        raise TargetError(
            f"{folder}/config.json names no rope_theta",
            needed="rope_parameters.rope_theta or rope_theta",
            do="add it; a guess would only show in serving",
        )
    return float(theta)


def special_ids(folder: Path, config: Any, tokenizer: Any) -> set[int]:
    """Ids with a meaning of their own in what a server sees: the tokenizer's, the configurations', the template's.

    Reserved tokens that nothing names are not among them, nor is the token that the tokenizer itself calls its mask.
    """
    ids: set[int] = set(tokenizer.all_special_ids)
    generation = _generation_config(folder / "generation_config.json")
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        for value in (getattr(config, name, None), getattr(config.get_text_config(), name, None), generation.get(name)):
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    strange = [value for value in ids if type(value) is not int]
    if strange:
        raise TargetError(f"{folder} names the special tokens {strange}", needed="token ids", do="correct its files")
    template = str(tokenizer.chat_template)
    ids.update(number for number, token in tokenizer.added_tokens_decoder.items() if token.content in template)
    return ids - {tokenizer.mask_token_id}


def _generation_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        found = first_line(error)
    if not isinstance(found, dict):
        raise TargetError(f"{path}: {found}", needed="a JSON object", do="restore the file, or remove it")
    return found


def weights_digest(folder: Path) -> str:
    """Names, sizes, safetensors headers and evenly spaced pages of the weight files: a second's work for 54 GB."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            if path.suffix == ".safetensors":
                header = int.from_bytes(file.read(8), "little")
                digest.update(file.read(min(header, size)))
            for i in range(_SAMPLED_PAGES):
                file.seek((size - _SAMPLED_BYTES) * i // (_SAMPLED_PAGES - 1) if size > _SAMPLED_BYTES else 0)
                digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the tokenizer files."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(f"{name} ".encode() + (folder / name).read_bytes())
    return digest.hexdigest()
