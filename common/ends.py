"""What a target does between embedding row and first layer, and between head and logits: measured, never assumed.

Model families scale embeddings or logits, or cap logits, under many names and in many places. Here the loaded target
runs a few tokens, and its own first hidden states and logits are explained by one factor each. What cannot be explained
so is refused: a drafter that borrows embedding and head would be trained against something else than the target.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftcache.common.errors import TargetError
from draftcache.common.manifest import TargetEnds

_TOKENS = 48
_PLAIN = 1e-3
_MAX_RESIDUAL = 0.02
"""Relative to what is explained: bfloat16 rounds to 0.4 % at each operation."""
_CAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "logit_softcapping")


@torch.no_grad()
def measure_ends(
    model: Any,  # transformers.PreTrainedModel
    decoder: nn.Module,
    first_layer: nn.Module,
    embedding: Tensor,  # [V, H]
    head: Tensor,  # [V, H]
) -> TargetEnds:
    """Run some tokens and explain the target's two ends; TargetError if they are more than a factor and a cap."""
    sound = embedding.sum(-1).isfinite().nonzero().flatten()  # a damaged row is found per sample, not here
    ids = sound[torch.linspace(0, len(sound) - 1, _TOKENS, device=sound.device).long()]
    seen: dict[str, Tensor] = {}
    hooks = [
        first_layer.register_forward_pre_hook(lambda _module, inputs: seen.update(first=inputs[0][0])),
        decoder.register_forward_hook(lambda _module, _inputs, output: seen.update(last=output.last_hidden_state[0])),
    ]
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    for hook in hooks:
        hook.remove()
    rows, first = embedding[ids].float(), seen["first"].float()
    products = functional.linear(seen["last"].to(head.device, head.dtype), head).float()
    embedding_scale = _factor(rows, first.to(rows.device), "its first layer's input is not a multiple of the embedding")
    text = model.config.get_text_config()
    cap = next((float(value) for name in _CAP_NAMES if (value := getattr(text, name, None))), None)
    uncapped = logits if cap is None else cap * (logits.double() / cap).clamp(-1 + 1e-6, 1 - 1e-6).atanh().float()
    what = "its logits are not head(last hidden state), scaled and capped"
    return TargetEnds(
        embedding_scale=embedding_scale,
        logit_scale=_factor(products, uncapped.to(products.device), what),
        logit_softcap=cap,
    )


def apply_ends(
    products: Tensor,  # [..., V] head(last hidden state)
    ends: TargetEnds,
) -> Tensor:  # [..., V]
    """The target's logits."""
    if ends.logit_scale != 1.0:
        products = products * ends.logit_scale
    if ends.logit_softcap is not None:
        products = ends.logit_softcap * torch.tanh(products / ends.logit_softcap)
    return products


def _factor(plain: Tensor, found: Tensor, problem: str) -> float:
    """The factor by which `found` is a multiple of `plain`, exactly 1 where it is none."""
    finite = plain.isfinite() & found.isfinite()
    plain, found = plain.where(finite, 0.0), found.where(finite, 0.0)
    factor = float((plain.double() * found).sum() / plain.double().square().sum().clamp_min(1e-30))
    residual = float((found - factor * plain).norm() / found.norm().clamp_min(1e-30))
    if not (residual < _MAX_RESIDUAL and math.isfinite(factor) and factor > 0):
        raise TargetError(
            f"this target cannot be drafted for: {problem} (residual {residual:.3f})",
            needed=f"a residual below {_MAX_RESIDUAL}",
            do="report the model family; its embedding or head needs a step that this version does not know",
        )
    return 1.0 if abs(factor - 1.0) < _PLAIN else factor
