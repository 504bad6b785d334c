"""A tiny random model of every family that targets come from, built by transformers itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

LAYERS = 4
VOCABULARY = 320
HIDDEN = 32

_TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_NO_HEAD_DIM = {name: value for name, value in _TEXT.items() if name != "head_dim"}
_SLIDING = {"sliding_window": 16}
_GEMMA = _SLIDING | {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model class of transformers, whose configuration's class is named alike, and what to expect of its targets."""

    model: str
    config: dict[str, Any]
    tied: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


FAMILIES = {
    "llama": Family(model="LlamaForCausalLM", config=_TEXT),
    "llama-tied": Family(model="LlamaForCausalLM", config=_TEXT | {"tie_word_embeddings": True}, tied=True),
    "qwen2": Family(model="Qwen2ForCausalLM", config=_TEXT),
    "qwen3": Family(model="Qwen3ForCausalLM", config=_TEXT),
    "qwen3-moe": Family(model="Qwen3MoeForCausalLM", config=_TEXT | _EXPERTS),
    "mistral": Family(model="MistralForCausalLM", config=_TEXT | _SLIDING),
    "mistral3": Family(
        model="Mistral3ForConditionalGeneration",
        config={
            "text_config": {"model_type": "mistral"} | _TEXT,
            "vision_config": {"model_type": "pixtral"} | _SIGLIP,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2": Family(
        model="Gemma2ForCausalLM",
        config=_TEXT | _GEMMA | {"final_logit_softcapping": 3.0},
        tied=True,
        embedding_scale=HIDDEN**0.5,
        logit_softcap=3.0,
    ),
    "gemma3": Family(
        model="Gemma3ForConditionalGeneration",
        config={"text_config": _TEXT | _GEMMA, "vision_config": _SIGLIP, "mm_tokens_per_image": 4},
        tied=True,
        embedding_scale=HIDDEN**0.5,
    ),
    "gemma3-text": Family(model="Gemma3ForCausalLM", config=_TEXT | _GEMMA, tied=True, embedding_scale=HIDDEN**0.5),
    "gpt-oss": Family(
        model="GptOssForCausalLM",
        config=_TEXT
        | _SLIDING
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "phi3": Family(model="Phi3ForCausalLM", config=_NO_HEAD_DIM),
    "glm4": Family(model="Glm4ForCausalLM", config=_TEXT),
    "glm4-moe": Family(
        model="Glm4MoeForCausalLM",
        config=_TEXT
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    "qwen3-next": Family(
        model="Qwen3NextForCausalLM", config=_TEXT | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 32}
    ),
    "qwen3.5": Family(
        model="Qwen3_5ForConditionalGeneration",
        config={"text_config": _TEXT | _LINEAR, "vision_config": _QWEN_VISION},
    ),
    "qwen3.5-moe": Family(
        model="Qwen3_5MoeForConditionalGeneration",
        config={
            "text_config": _NO_HEAD_DIM | {"head_dim": 16, "shared_expert_intermediate_size": 32} | _EXPERTS | _LINEAR,
            "vision_config": _QWEN_VISION,
        },
    ),
    "granite": Family(
        model="GraniteForCausalLM",
        config=_NO_HEAD_DIM | {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
        embedding_scale=12.0,
        logit_scale=0.125,
    ),
    "cohere2": Family(
        model="Cohere2ForCausalLM", config=_TEXT | _SLIDING | {"logit_scale": 0.0625}, tied=True, logit_scale=0.0625
    ),
}


def family_target(folder: Path, name: str) -> Path:
    """Write a random model of a family in bfloat16; returns the folder. Norms' weights are far from one."""
    family = FAMILIES[name]
    stem = family.model.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    text_only = name == "gemma3-text"
    config = getattr(transformers, f"{stem}{'Text' if text_only else ''}Config")(**family.config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(transformers, family.model)(config)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name and parameter.dim() == 1:
                parameter.uniform_(0.2, 1.8)
            parameter.data = parameter.data.to(torch.bfloat16)  # not model.to(), which would round rotary angles
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    return folder
