"""Our own attention kernels against the dense reference, forward and every gradient."""

import pytest
import torch

from draftcache.tests.kernel_device import DEVICE, kernels
from draftcache.train.model.anchors import Blocks
from draftcache.train.model.attention import DenseAttention, Visibility

TOKENS = 256


def blocks_of(documents: list[int], size: int, dropped: int) -> Blocks:
    """Blocks at some positions of documents of these lengths, and dropped ones behind them."""
    generator = torch.Generator().manual_seed(sum(documents))
    anchors, first, begin = list[int](), list[int](), 0
    for length in documents:
        positions = torch.randperm(length - 2, generator=generator)[: max(1, length // 15)] + 1
        anchors += sorted((begin + positions).tolist())
        first += [begin] * len(positions)
        begin += -(-length // 64) * 64
    assert begin <= TOKENS, "these documents do not fit"
    keep = torch.tensor([True] * len(anchors) + [False] * dropped)
    zeros = torch.zeros(len(keep), size, dtype=torch.int64)
    return Blocks(
        anchors=torch.tensor(anchors + [TOKENS - 1] * dropped),
        keep=keep,
        first=torch.tensor(first + [0] * dropped),
        input_ids=zeros,
        positions=zeros,
        labels=zeros,
        teacher_rows=zeros,
        valid=zeros.bool(),
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked rows too
@pytest.mark.parametrize(
    ("documents", "size", "heads", "kv_heads", "rule", "dropped"),
    [
        ([100, 90], 4, 2, 1, Visibility(None, causal=False), 0),
        ([100, 90], 4, 2, 1, Visibility(8, causal=True), 3),
        ([120, 70], 8, 6, 2, Visibility(40, causal=True), 2),
        ([90], 8, 4, 4, Visibility(None, causal=True), 1),
        ([5, 60], 32, 8, 2, Visibility(20, causal=True), 0),
    ],
    ids=str,
)
def test_prefix_attention_equals_the_dense_reference(
    documents: list[int], size: int, heads: int, kv_heads: int, rule: Visibility, dropped: int
) -> None:
    candidate = kernels("benchmarks.prefix_attention")
    blocks = blocks_of(documents, size, dropped)
    slots, width = len(blocks.keep) * size, 16
    generator = torch.Generator().manual_seed(1)
    shapes = [(slots, heads), (TOKENS, kv_heads), (TOKENS, kv_heads), (slots, kv_heads), (slots, kv_heads)]
    inputs = [torch.randn(*shape, width, generator=generator).requires_grad_() for shape in shapes]
    query, context_key, context_value, key, value = inputs
    wanted = DenseAttention(blocks, TOKENS, {rule})(
        query, torch.cat([context_key, key]), torch.cat([context_value, value]), rule
    )
    gradient = torch.randn(wanted.shape, generator=generator)
    wanted_gradients = torch.autograd.grad(wanted, inputs, gradient)
    moved = [x.detach().to(DEVICE).requires_grad_() for x in inputs]
    seen = candidate.ranges(
        *(x.to(DEVICE) for x in (blocks.anchors, blocks.keep, blocks.first)),
        TOKENS,
        size,
        rule.window or 0,
        rule.causal,
    )
    found = candidate.prefix_attention(*moved, seen)
    found_gradients = torch.autograd.grad(found, moved, gradient.to(DEVICE))
    tolerance = 1e-4 if DEVICE == "cpu" else 5e-3  # products of float32 are TF32 on CUDA
    torch.testing.assert_close(found.cpu(), wanted, rtol=tolerance, atol=tolerance)
    for one, other in zip(found_gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=tolerance, atol=10 * tolerance)
