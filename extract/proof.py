"""Proves, on the first batch and on some later ones, that the records hold what the manifest says.

The extraction's own path (hooks, the decoder's output) is compared with a second one through transformers: its
`output_hidden_states` and its logits, on one sample alone. So a layer that is one off, a norm that is missing or
applied twice, or padding that reaches into a sample stops the run before anything is written.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from draftcache.common.codec import field_tensor, read_taps
from draftcache.common.errors import TargetError
from draftcache.common.record import RecordSpec
from draftcache.common.target import Target

MIN_ARGMAX_AGREEMENT = 0.97
"""The head itself was proven when the target was loaded; what may differ here are near ties under other rounding."""
MAX_ERROR = {"bf16": 0.15, "mxfp8": 0.2, "mxfp4": 0.4}
"""Relative, between a sample in its padded batch and alone: another shape, so other kernels and other rounding."""
MAX_ODD_TOKENS = 0.05
"""Share that may lie above: an expert chosen otherwise at a near tie moves some tokens, a wrong layer moves all."""
_MAX_TOKENS = 512


@torch.no_grad()
def prove_batch(
    target: Target,
    layer_ids: Sequence[int],
    record: RecordSpec,
    input_ids: Tensor,  # [n, C] int64
    lengths: Tensor,  # [n] int64
    records: Tensor,  # [n, S, R] uint8, what extraction made of them
) -> None:
    """Raise TargetError unless the shortest sample's records agree with transformers' own hidden states and logits."""
    row = int(lengths.argmin())
    length = min(int(lengths[row]), _MAX_TOKENS)
    output = target.model(input_ids=input_ids[row : row + 1, :length], output_hidden_states=True, use_cache=False)
    stored = records[row, :length]
    taps = read_taps(stored, record, torch.float32).unflatten(-1, (len(layer_ids), -1))
    final_layer = len(target.layers) - 1
    for position, layer in enumerate(layer_ids):
        if layer == final_layer:  # transformers gives this one after the norm only
            continue
        _compare(f"the tap of layer {layer}", taps[:, position], output.hidden_states[layer + 1][0], record.codec)
    if record.has("last"):
        last = field_tensor(stored, record.field("last"))
        _compare("the last hidden state", last, output.hidden_states[-1][0], "bf16")
        own = functional.linear(last.to(target.head.dtype), target.head).float().argmax(-1)
    elif record.has("top_ids"):
        own = field_tensor(stored, record.field("top_ids"))[:, 0].long()
    else:
        return
    agreement = _argmax_agreement(own, output.logits[0])
    if agreement < MIN_ARGMAX_AGREEMENT:
        raise TargetError(
            f"the stored teacher chooses the target's token at {agreement:.1%} of {length} positions",
            needed=f"at least {MIN_ARGMAX_AGREEMENT:.1%}: logits that are head(final norm(state)) and nothing more",
            do="report the model family; its logits need a step that this version does not know",
        )


def _compare(what: str, stored: Tensor, wanted: Tensor, codec: str) -> None:
    error = (stored.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1).clamp_min(1e-30)
    odd = float((~(error < MAX_ERROR[codec])).float().mean())
    if odd > MAX_ODD_TOKENS or not bool(error.isfinite().all()):
        raise TargetError(
            f"{what} differs from transformers' own: relative error up to {float(error.max()):.4f}",
            needed=f"below {MAX_ERROR[codec]} at {1 - MAX_ODD_TOKENS:.0%} of the tokens",
            do="report the model family; its layers are built in a way that this version misreads",
        )


def _argmax_agreement(own: Tensor, logits: Tensor) -> float:
    """Share of positions at which `own` is the token that the target's logits choose, near ties counted."""
    chosen = logits.float().gather(-1, own[:, None]).squeeze(-1)
    best = logits.float().amax(-1)
    tolerance = best.abs().clamp_min(1.0) * torch.finfo(torch.bfloat16).eps
    return float((chosen >= best - tolerance).float().mean())
