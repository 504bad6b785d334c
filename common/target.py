"""The frozen target: loads it, finds its decoder, embedding and head through its structure, and says who it is.

Nothing here goes by model names. The decoder is the module that owns a list of exactly `num_hidden_layers` layers and
the input embedding; its output is the hidden state after the final norm, and the output embedding turns that into
logits.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging as transformers_logging

from draftcache.common.ends import measure_ends
from draftcache.common.errors import StoreError, TargetError, UsageError, first_line
from draftcache.common.files import atomic_path
from draftcache.common.identity import (
    TEMPLATE_FILE,
    WEIGHT_PATTERNS,
    copied_files,
    intermediate_size,
    norm_epsilon,
    quantization,
    rope_theta,
    says_tied,
    special_ids,
    tokenizer_digest,
    weight_files,
    weights_digest,
)
from draftcache.common.manifest import Manifest, TargetEnds, TargetIdentity, check_file
from draftcache.common.tensors import save_tensors

PARTS_PATH = "target/embedding_and_head.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target. `decoder(input_ids)` gives the last hidden state after the final norm."""

    model: Any  # transformers.PreTrainedModel, which is untyped
    decoder: nn.Module
    layers: nn.ModuleList
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]; the embedding itself when tied
    ends: TargetEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """What training needs of the target: its embedding and head, both [V, H] in the target's dtype."""

    embedding: Tensor
    head: Tensor


def default_layer_ids(num_layers: int, taps: int) -> tuple[int, ...]:
    """The released drafters' choice: evenly spaced from layer 1 to num_layers - 3, rounded half to even.

    Source: z-lab/dflash. Ids are 0-based and name the output of that decoder layer. Raises UsageError where they would
    not be distinct.
    """
    if taps == 1:
        return (num_layers // 2,)
    ids = tuple(round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps))
    if len(set(ids)) != taps or not all(0 <= i < num_layers for i in ids):
        raise UsageError(
            f"a target of {num_layers} layers has no {taps} distinct default layers",
            needed=f"layer ids within 0..{num_layers - 1}",
            do="choose them with --layers",
        )
    return ids


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    """Raise UsageError unless the ids are distinct and name decoder layers of the target."""
    if not layer_ids or len(set(layer_ids)) != len(layer_ids) or not all(0 <= i < num_layers for i in layer_ids):
        raise UsageError(
            f"layer ids {list(layer_ids)}",
            needed=f"distinct ids within 0..{num_layers - 1} (0-based, output of that decoder layer)",
            do="correct --layers",
        )


def read_config(folder: Path, *, weights: bool = True) -> Any:
    """The target's transformers configuration; TargetError if the folder has none or, unless told, lacks weights."""
    if not (folder / "config.json").is_file():
        raise TargetError(
            f"{folder} has no config.json", needed="a Hugging Face model folder", do="check the path of --target"
        )
    if weights and not weight_files(folder):
        raise TargetError(
            f"{folder} has no weights",
            needed=f"files of the kinds {', '.join(WEIGHT_PATTERNS)}",
            do="download the whole model folder",
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises a dozen unrelated types
        raise TargetError(
            f"{folder}/config.json: {first_line(error)}",
            needed="a model type that transformers knows",
            do="see --target",
        ) from None


def load_tokenizer(folder: Path) -> Any:
    """The target's fast tokenizer; TargetError if there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of transformers and tokenizers, which raise plain Exception
        raise TargetError(
            f"{folder}: no tokenizer ({first_line(error)})",
            needed="tokenizer files",
            do="add tokenizer.json to the folder",
        ) from None
    if not tokenizer.is_fast:
        raise TargetError(
            f"{folder} has a tokenizer without character offsets", needed="a fast tokenizer", do="add tokenizer.json"
        )
    return tokenizer


def check_device(name: str) -> None:
    """Raise UsageError unless torch can use the device called `name`."""
    try:
        if torch.device(name).type not in ("cpu", "cuda") or name.startswith("cpu:"):
            raise ValueError("neither cpu nor cuda, nor one of cuda:0, cuda:1, ...")
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UsageError(
            f"device {name!r}: {first_line(error)}", needed="a device that torch can use here", do="correct --device"
        ) from None


def load_target(folder: Path, device: torch.device, dtype: str | None = None, device_map: str | None = None) -> Target:
    """Load the frozen target in its own dtype unless another is named; `device_map` spreads it over several GPUs.

    Raises TargetError if weights are missing (a head is never left random) or if its structure is not understood.
    """
    config = read_config(folder)
    model, missing = _load_model(folder, config, dtype, device_map)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or getattr(head, "bias", None) is not None:
        raise TargetError(
            f"{type(model).__name__} has no plain input and output embedding (one is missing, or the head has a bias)",
            needed="get_input_embeddings() and get_output_embeddings(), each one matrix",
            do="use a causal language model whose logits are head(last)",
        )
    if says_tied(config) and {name.rpartition(".")[0] for name in missing} == {_name_of(model, head)}:
        head.weight, missing = embedding.weight, []  # only one of two nested configurations says tied
    if missing:
        raise TargetError(
            f"{folder} lacks the weights {missing[:4]}{' and more' if len(missing) > 4 else ''}",
            needed="every weight of the model",
            do="download the whole model folder; if the head is tied, set tie_word_embeddings in config.json",
        )
    if device_map is None:
        model = model.to(device)
    model = model.eval().requires_grad_(False)
    _check_ends_are_there(folder, config, embedding.weight, head.weight)
    decoder, layers = _find_decoder(model, config.get_text_config().num_hidden_layers, embedding)
    ends = measure_ends(model, decoder, layers[0], embedding.weight, head.weight)
    return Target(model=model, decoder=decoder, layers=layers, embedding=embedding.weight, head=head.weight, ends=ends)


def identify(folder: Path, tokenizer: Any, dtype: str | None = None) -> TargetIdentity:
    """Who the target in `folder` is, from its configuration, tokenizer and files alone; `dtype` as it is run."""
    config = read_config(folder, weights=False)
    text = config.get_text_config()
    heads = text.num_attention_heads
    if min(text.hidden_size, text.vocab_size, text.num_hidden_layers, heads) < 1:
        raise TargetError(f"{folder}/config.json: a size below 1", needed="a model's sizes", do="restore config.json")
    return TargetIdentity(
        name=folder.resolve().name,
        architecture=(config.architectures or ["unknown"])[0],
        model_type=config.model_type,
        dtype=dtype or str(text.dtype or config.dtype or torch.float32).removeprefix("torch."),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate_size=intermediate_size(text),
        rms_norm_eps=norm_epsilon(text),
        rope_theta=rope_theta(text, folder),
        max_position_embeddings=text.max_position_embeddings,
        attention_bias=bool(getattr(text, "attention_bias", False)),
        tied_head=says_tied(config),
        tokenizer_size=max(tokenizer.get_vocab().values()) + 1,  # ids may have gaps
        special_token_ids=tuple(sorted(special_ids(folder, config, tokenizer))),
        config_digest=hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        weights_digest=weights_digest(folder),
        tokenizer_digest=tokenizer_digest(folder),
        quantization=quantization(folder, config),
        template_digest=hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
    )


def tap_layers(target: Target, layer_ids: Sequence[int], sink: Callable[[int, Tensor], None]) -> list[Any]:
    """Call `sink(position, output)` with each tapped layer's output [rows, tokens, H] in every forward from now on.

    Returns the hook handles; `remove()` each to stop.
    """

    def hook_for(position: int) -> Any:
        def hook(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            sink(position, output[0] if isinstance(output, tuple) else output)

        return hook

    return [target.layers[layer].register_forward_hook(hook_for(i)) for i, layer in enumerate(layer_ids)]


def save_parts(target: Target, source: Path, store: Path, chat_template: Path | None = None) -> None:
    """Put embedding, head (unless tied), config and tokenizer files of the target into a store.

    `chat_template` takes the place of the target's own.
    """
    folder = (store / PARTS_PATH).parent
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"embed_tokens.weight": target.embedding}
    if target.head.data_ptr() != target.embedding.data_ptr():
        parts["lm_head.weight"] = target.head
    with atomic_path(store / PARTS_PATH) as partial:
        save_tensors(partial, {name: part.detach().cpu().contiguous() for name, part in parts.items()})
    for path in copied_files(source):
        shutil.copyfile(path, folder / path.name)
    if chat_template is not None:
        shutil.copyfile(chat_template, folder / TEMPLATE_FILE)


def load_parts(store: Path, manifest: Manifest, device: torch.device) -> TargetParts:
    """The embedding and head that extraction put into a store; StoreError if they are not what the manifest says."""
    path, identity = store / PARTS_PATH, manifest.target
    check_file(store, manifest, PARTS_PATH)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except Exception as error:  # safetensors raises its own type, OSError and ValueError
        raise StoreError(f"{path}: {first_line(error)}", needed="the target's parts", do="extract again") from None
    shape = (identity.vocab_size, identity.hidden_size)
    embedding = parts.get("embed_tokens.weight")
    head = embedding if identity.tied_head else parts.get("lm_head.weight")
    if embedding is None or head is None or tuple(embedding.shape) != shape or tuple(head.shape) != shape:
        raise StoreError(
            f"{path} holds { {name: list(part.shape) for name, part in parts.items()} }",
            needed=f"embedding and head of shape {list(shape)}",
            do="extract again",
        )
    return TargetParts(embedding=embedding, head=head)


def _find_decoder(model: nn.Module, num_layers: int, embedding: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    for module in model.modules():
        lists = [c for c in module.children() if isinstance(c, nn.ModuleList) and len(c) == num_layers]
        if len(lists) == 1 and any(child is embedding for child in module.children()):
            return module, lists[0]
    raise TargetError(
        f"no module of {type(model).__name__} owns both a list of {num_layers} layers and the input embedding",
        needed="a decoder built that way",
        do="report the model family; this one is not supported yet",
    )


def _load_model(folder: Path, config: Any, dtype: str | None, device_map: str | None) -> tuple[Any, list[str]]:
    """The model as transformers loads it, and the names of the weights that its files lack."""
    known = type(config) in AutoModelForCausalLM._model_mapping
    auto = AutoModelForCausalLM if known else AutoModelForImageTextToText  # its text decoder is all that runs
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = auto.from_pretrained(
            folder,
            dtype=getattr(torch, dtype) if dtype else "auto",
            device_map=device_map,
            local_files_only=True,
            output_loading_info=True,
            **_gguf_arguments(folder, config),
        )
    except Exception as error:  # of transformers, safetensors and torch: a cut file, a shape, a missing package
        raise TargetError(
            f"{folder} does not load: {first_line(error)}", needed="a causal language model", do="check the folder"
        ) from None
    model, info = loaded
    return model, sorted(info["missing_keys"])


def _gguf_arguments(folder: Path, config: Any) -> dict[str, Any]:
    """What transformers must be told where a GGUF file is all there is: to read it by config.json, and unpacked."""
    files = weight_files(folder)
    if any(path.suffix != ".gguf" for path in files):
        return {}
    if len(files) != 1:
        raise TargetError(f"{folder} holds {len(files)} GGUF files", needed="one", do="move the others away")
    named = {"gguf_file": files[0].name, "config": config}
    if not hasattr(transformers, "GgufConfig"):  # before 5.20 or so they were always unpacked
        return named
    return named | {"quantization_config": transformers.GgufConfig(dequantize=True)}


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is wanted]
    return names[0]


def _check_ends_are_there(folder: Path, config: Any, embedding: Tensor, head: Tensor) -> None:
    tied, given = says_tied(config), embedding.data_ptr() == head.data_ptr()
    if embedding.is_meta or head.is_meta:
        raise TargetError(f"{folder} does not fit on the GPUs", needed="room for all its weights", do="use more GPUs")
    if not (embedding.is_floating_point() and head.is_floating_point() and embedding.dim() == head.dim() == 2):
        raise TargetError(
            f"{folder}: the embedding is {embedding.dtype}, the head {head.dtype}",
            needed="both in a floating-point type, as training borrows them",
            do="use a quantised target that leaves embedding and head alone",
        )
    if tied != given:
        raise TargetError(
            f"{folder}: tie_word_embeddings is {tied}, but the weights {'have' if tied else 'lack'} a head",
            needed="a configuration that says what the weights are",
            do="correct tie_word_embeddings in config.json",
        )
