"""How states go into records and come out again, on the device that holds them.

The bytes are declared by `record.py`; the arithmetic of the quantised codecs is `quantise.py`'s.

Legend: K taps, H target width, R record bytes; a leading ... stands for rows and tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from draftcache.common.ends import apply_ends
from draftcache.common.manifest import PLAIN_ENDS, TargetEnds
from draftcache.common.quantise import FORMATS, dequantise, quantise
from draftcache.common.record import TOP_K, Field, RecordSpec

LOGIT_ROWS = 2048
_DTYPES = {"bfloat16": torch.bfloat16, "uint8": torch.uint8, "int32": torch.int32}


def field_tensor(
    records: Tensor,  # [..., R] uint8
    field: Field,
) -> Tensor:  # [..., *field.shape], a view
    """One field of records, without a copy; the torch twin of `record.field_view`."""
    cut = records[..., field.offset : field.offset + field.nbytes].view(_DTYPES[field.dtype])
    view: Tensor = cut.unflatten(-1, field.shape)
    return view


def put_tap(
    records: Tensor,  # [..., R] uint8, written
    spec: RecordSpec,
    position: int,
    hidden: Tensor,  # [..., H]
) -> None:
    """Encode one tapped layer's output into the records."""
    values = field_tensor(records, spec.field("taps"))[..., position, :]
    if spec.codec == "bf16":
        values.copy_(hidden)
        return
    coded, scales = quantise(hidden.to(torch.bfloat16), FORMATS[spec.codec])
    values.copy_(coded)
    field_tensor(records, spec.field("tap_scales"))[..., position, :].copy_(scales)


def put_teacher(
    records: Tensor,  # [rows, tokens, R] uint8, written
    spec: RecordSpec,
    last: Tensor,  # [rows, tokens, H] after the final norm
    head: Tensor,  # [V, H]
    ends: TargetEnds = PLAIN_ENDS,
) -> None:
    """Write what the record keeps of the teacher: the last hidden state, its most probable tokens, or nothing.

    For the latter logits exist for LOGIT_ROWS tokens at a time.
    """
    if spec.has("last"):
        field_tensor(records, spec.field("last")).copy_(last)
    if spec.has("top_ids"):
        ids, log_probs = (field_tensor(records, spec.field(name)) for name in ("top_ids", "top_log_probs"))
        for row in range(last.shape[0]):
            for cut in (slice(i, i + LOGIT_ROWS) for i in range(0, last.shape[1], LOGIT_ROWS)):
                products = functional.linear(last[row, cut].to(head.device), head).float()
                logits = apply_ends(products, ends)
                top = logits.topk(TOP_K, dim=-1)
                ids[row, cut].copy_(top.indices)
                log_probs[row, cut].copy_(top.values - logits.logsumexp(-1, keepdim=True))


def read_taps(
    records: Tensor,  # [..., R] uint8
    spec: RecordSpec,
    dtype: torch.dtype,
) -> Tensor:  # [..., K * H]
    """All taps of each token, side by side; a view where the codec and dtype are bfloat16."""
    values = field_tensor(records, spec.field("taps"))
    if spec.codec != "bf16":
        scales = field_tensor(records, spec.field("tap_scales"))
        values = dequantise(values, scales, FORMATS[spec.codec], torch.bfloat16)
    return values.flatten(-2).to(dtype)
