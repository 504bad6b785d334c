"""The form in which DFlash drafters are released: tensor names, shapes and config keys, in both directions.

Two layouts are known. `zlab` is that of the checkpoints of z-lab on Hugging Face, which vLLM and SGLang load.
`speculators` is that of the speculators package (0.9), which vLLM loads too. Both hold the same tensors under the same
names; embedding and head are the target's and are not among them.

Layer ids are the target's, 0-based, output of that layer, everywhere in this project and in `target_layer_ids`. Readers
that count the embedding as layer 0 (`eagle_aux_hidden_state_layer_ids`, `aux_hidden_state_layer_ids`) get them plus 1.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftcache.common.errors import CheckpointError, UsageError, first_line
from draftcache.common.manifest import TargetIdentity, digest_file
from draftcache.train.model.drafter import FULL, SLIDING, Drafter, DrafterConfig

FORMATS = ("zlab", "speculators")
CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
ORIGIN_NAME = "draftcache.json"
"""In an exported folder: which target, run and checkpoint it comes from, and the SHA-256 of its weights."""
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's tensors that some speculators files carry; the target's own are used instead."""
_SPECULATORS_VERSION = "0.9.0"


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a released drafter: 3 + 11 a layer, and 4 biases a layer with `attention_bias`."""
    width, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config.layer_ids) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (query, width),
        "self_attn.k_proj.weight": (key, width),
        "self_attn.v_proj.weight": (key, width),
        "self_attn.o_proj.weight": (width, query),
        "self_attn.q_norm.weight": (d,),
        "self_attn.k_norm.weight": (d,),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if config.attention_bias:
        rows = {"q": query, "k": key, "v": key, "o": width}
        layer |= {f"self_attn.{name}_proj.bias": (count,) for name, count in rows.items()}
    for i in range(len(config.layer_types)):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def one_causality(config: DrafterConfig) -> bool | None:
    """Whether slots see only earlier slots of their block, if that is the same in every layer; None if it is not."""
    found = {config.rule(layer_type).causal for layer_type in config.layer_types}
    return found.pop() if len(found) == 1 else None


def check_servable(config: DrafterConfig, target: TargetIdentity, layout: str) -> None:
    """Raise UsageError, with the reason, for a drafter that some engine would run otherwise than it was trained."""
    if SLIDING in config.layer_types and not config.sliding_causal:
        raise UsageError(
            "sliding layers whose slots see later slots of their block",
            needed="causal sliding layers: SGLang runs every sliding layer causally, whatever the configuration says",
            do="train with full layers, or with causal sliding ones",
        )
    if layout == "speculators" and SLIDING in config.layer_types:
        raise UsageError(
            "sliding layers in the speculators format",
            needed="full layers only: the package's window is wider than the one trained here, and vLLM makes full "
            "layers causal where this format says that sliding ones are",
            do="export with --format zlab",
        )
    if config.layer_ids and max(config.layer_ids) >= target.num_layers:
        raise UsageError(
            f"layer ids {list(config.layer_ids)} for a target of {target.num_layers} layers",
            needed=f"ids within 0..{target.num_layers - 1}",
            do="extract with other --layers",
        )


def zlab_config(config: DrafterConfig, target: TargetIdentity) -> dict[str, Any]:
    """config.json as z-lab writes it, with every key in all the places where some engine looks for it."""
    causal = one_causality(config)
    dflash: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.layer_ids),
        "block_size": config.block_size,
        "num_target_layers": target.num_layers,
        "sample_from_anchor": False,
    }
    if causal is not None:  # for vLLM one value here overrules all layers, so mixed drafters must not have it
        dflash["causal"] = causal
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_decoder_config(config, target),
        "has_embed_tokens": False,  # both are the target's
        "has_lm_head": False,
        "is_neox_style": True,
        "torch_dtype": "bfloat16",
        "block_size": config.block_size,
        "num_target_layers": target.num_layers,
        "target_hidden_size": target.hidden_size,
        "mask_token_id": config.mask_token_id,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.layer_ids],
        "is_causal": causal,
        "dflash_config": dflash,
    }


def speculators_config(config: DrafterConfig, target: TargetIdentity) -> dict[str, Any]:
    """config.json as the speculators package writes it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": _SPECULATORS_VERSION,
        "transformer_layer_config": {"model_type": "qwen3", **_decoder_config(config, target)},
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": target.hidden_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
    }


def _decoder_config(config: DrafterConfig, target: TargetIdentity) -> dict[str, Any]:
    """The keys of a Qwen3 decoder, the rope base in the spelling of transformers 5 and in the one before."""
    sliding = SLIDING in config.layer_types
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layer_types),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "max_window_layers": len(config.layer_types),
        "dtype": "bfloat16",
    }


def read_released_config(folder: Path) -> DrafterConfig:
    """The drafter that a released folder of either layout describes.

    Raises CheckpointError for a folder that is none, for keys that contradict one another, and for kinds of drafters
    that this project does not know.
    """
    path = folder / CONFIG_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config = _parse(values)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, UsageError) as error:
        detail = f"no key {error}" if isinstance(error, LookupError) else first_line(error)
        raise CheckpointError(
            f"{path}: {detail}", needed="the configuration of a DFlash drafter", do="check the folder"
        ) from None
    return config


def load_released(folder: Path, device: torch.device) -> Drafter:
    """The drafter in a released folder, in float32. Raises CheckpointError unless its names and shapes are right."""
    drafter = Drafter(read_released_config(folder)).to(device)
    drafter.load_state_dict(read_released_weights(folder, drafter.config, device))
    return drafter


def read_released_weights(folder: Path, config: DrafterConfig, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a released folder by their bare names, in the dtype that they have there.

    Raises CheckpointError for others than `config` needs, and for weights that changed since `export` wrote them.
    """
    weights: dict[str, Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt", device=str(device)) as file:
                weights |= {name.removeprefix("model."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own types
        raise CheckpointError(f"{folder}: {first_line(error)}", needed="safetensors files", do="export again") from None
    weights = {name: tensor for name, tensor in weights.items() if name not in _BORROWED}
    wanted = tensor_shapes(config)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = sorted(name for name in set(wanted) | set(found) if wanted.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder}: {len(wrong)} tensors are missing, unknown or of another shape, first {name}: "
            f"found {found.get(name)}, by the configuration {wanted.get(name)}",
            needed=f"exactly the {len(wanted)} tensors of this drafter",
            do="check that weights and config.json belong together",
        )
    _check_digest(folder)
    return weights


def _check_digest(folder: Path) -> None:
    """Raise CheckpointError for exported weights that are not those that were written; others have no digest."""
    origin, weights = folder / ORIGIN_NAME, folder / WEIGHTS_NAME
    if not origin.exists():
        return
    try:
        same = json.loads(origin.read_text(encoding="utf-8"))["weights_sha256"] == digest_file(weights)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{origin}: {first_line(error)}", needed="what `export` wrote", do="export again"
        ) from None
    if not same:
        raise CheckpointError(f"{weights} has changed since it was exported", needed="its bytes", do="export again")


def _parse(values: Mapping[str, Any]) -> DrafterConfig:
    if "speculators_model_type" in values:
        inner, dflash = values["transformer_layer_config"], values
        layer_ids = tuple(i - 1 for i in values["aux_hidden_state_layer_ids"])
        non_causal = values.get("sliding_window_non_causal", False)
        _refuse(values["speculators_model_type"] != "dflash", "another kind of speculator than dflash")
        _refuse(values["draft_vocab_size"] != inner["vocab_size"], "a pruned vocabulary")
    else:
        inner, dflash = values, values["dflash_config"]
        layer_ids = tuple(dflash["target_layer_ids"])
        causal = dflash.get("causal") if values.get("is_causal") is None else values["is_causal"]
        non_causal = causal is False
        _refuse(causal is True and FULL in (inner.get("layer_types") or (FULL,)), "causal full layers")
        for name in ("block_size", "mask_token_id"):
            _refuse(len({m[name] for m in (values, dflash) if name in m}) > 1, f"two values of {name}")
    layers = inner["num_hidden_layers"]
    layer_types = tuple(inner.get("layer_types") or (FULL,) * layers)
    _refuse(bool(dflash.get("sample_from_anchor")), "sample_from_anchor")
    _refuse("projector_type" in dflash or bool(dflash.get("conv_kernel_size")), "an extended DFlash drafter")
    _refuse(len(layer_types) != layers, f"{len(layer_types)} layer types for {layers} layers")
    counts = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    wrong = [name for name in counts if type(inner[name]) is not int]
    _refuse(bool(wrong), f"{wrong} that are no whole numbers")
    return DrafterConfig(
        hidden_size=inner["hidden_size"],
        intermediate_size=inner["intermediate_size"],
        num_heads=inner["num_attention_heads"],
        num_kv_heads=inner.get("num_key_value_heads", inner["num_attention_heads"]),
        head_dim=inner.get("head_dim") or inner["hidden_size"] // inner["num_attention_heads"],
        layer_types=layer_types,
        sliding_window=inner.get("sliding_window") or 1,
        sliding_causal=not non_causal,
        block_size=dflash.get("block_size", values.get("block_size")),
        layer_ids=layer_ids,
        mask_token_id=dflash.get("mask_token_id", values.get("mask_token_id")),
        vocab_size=inner["vocab_size"],
        rope_theta=_rope_theta(inner),
        rms_norm_eps=float(inner["rms_norm_eps"]),
        attention_bias=bool(inner.get("attention_bias", False)),
    )


def _rope_theta(inner: Mapping[str, Any]) -> float:
    parameters = (inner.get("rope_parameters") or {}) | (inner.get("rope_scaling") or {})
    _refuse(parameters.get("rope_type", "default") != "default", f"rope of type {parameters.get('rope_type')}")
    _refuse(bool({"mrope_section", "mrope_interleaved"} & set(parameters)), "mrope")
    partial = parameters.get("partial_rotary_factor", inner.get("partial_rotary_factor", 1.0))
    _refuse(partial != 1.0, "a rotation of part of the head")
    found = {float(m["rope_theta"]) for m in (inner, parameters) if m.get("rope_theta") is not None}
    _refuse(len(found) != 1, f"rope bases {sorted(found)}")
    return found.pop()


def _refuse(condition: bool, what: str) -> None:
    if condition:
        raise ValueError(what)
