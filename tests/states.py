"""Reads stored states back, and runs a target over samples made for the purpose."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from draftcache.common.layout import row_stride
from draftcache.common.memory import aligned_bytes
from draftcache.common.record import RecordSpec, record_spec
from draftcache.common.shard import RowReader
from draftcache.common.store import Bucket, BucketSamples
from draftcache.common.target import Target
from draftcache.extract.buckets import Batch, fill_buckets
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.template import Tokens
from draftcache.tests.stores import HIDDEN, LAYER_IDS, VOCABULARY

CPU = torch.device("cpu")
RECORD = record_spec(len(LAYER_IDS), HIDDEN, "bf16", "last")


def stored(bucket: Bucket, row: int) -> Tensor:
    """[S, R] uint8: one padded row of a bucket, as read from disk."""
    out = aligned_bytes(bucket.geometry.row_bytes)
    bucket.read_row(RowReader(), row, out)
    return torch.from_numpy(out.reshape(bucket.geometry.stride, -1).copy())


def states(records: Tensor, spec: RecordSpec = RECORD) -> tuple[Tensor, Tensor]:
    """[..., K, H] taps and [..., H] last of records, bfloat16."""
    values = records.view(torch.bfloat16)[..., : (len(LAYER_IDS) + 1) * HIDDEN]
    taps, last = values.split([spec.field("taps").nbytes // 2, HIDDEN], dim=-1)
    return taps.unflatten(-1, (-1, HIDDEN)), last


def random_samples(*lengths: int, ceiling: int, seed: int = 0) -> BucketSamples:
    """A bucket of samples of random ids; the first `min(lengths)` ids of all are the same."""
    rng = random.Random(seed)
    ids = [rng.randrange(VOCABULARY) for _ in range(max(lengths))]
    tokens = [(n, Tokens(input_ids=ids[:length], loss_mask=[1] * length)) for n, length in enumerate(lengths)]
    (bucket,) = fill_buckets(tokens, (ceiling,))
    return bucket


def run_forward(target: Target, samples: BucketSamples, layer_ids: Sequence[int] = LAYER_IDS) -> Tensor:
    """[n, S, R] records of all samples of a bucket in one batch, a copy."""
    batch = Batch(ceiling=samples.ceiling, shard=0, first=0, count=len(samples.samples))
    spec = record_spec(len(layer_ids), HIDDEN, "bf16", "last")
    with Forward(target, layer_ids, spec, batch.count * row_stride(batch.ceiling), CPU) as run:
        return run(*batch_inputs(samples, batch, CPU)).clone()
