"""The attention kernels against the dense reference, forward and every gradient."""

import dataclasses

import pytest
import torch
from torch import Tensor

from draftcache.tests.kernel_device import DEVICE, kernels
from draftcache.train.kernels import prefix_attention
from draftcache.train.model.anchors import Blocks
from draftcache.train.model.attention import Attention, DenseAttention, PrefixAttention, Visibility

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


def attended(attention: Attention, rule: Visibility, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Output and the gradient of every input, on the CPU."""
    query, context_key, context_value, key, value = inputs
    out = attention(query, context_key, context_value, key, value, rule)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, inputs, gradient.to(out.device)))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked rows too
@pytest.mark.parametrize(
    ("documents", "size", "heads", "kv_heads", "width", "rule", "dropped"),
    [
        ([100, 90], 4, 2, 1, 16, Visibility(None, causal=False), 0),
        ([100, 90], 4, 2, 1, 16, Visibility(8, causal=True), 3),
        ([120, 70], 8, 6, 2, 16, Visibility(40, causal=True), 2),
        ([90], 8, 4, 4, 16, Visibility(None, causal=True), 1),
        ([5, 60], 32, 8, 2, 16, Visibility(20, causal=True), 0),
        ([60, 30], 32, 16, 2, 10, Visibility(None, causal=False), 1),  # 256 rows a key head: two programs share it
        ([60, 30], 5, 3, 1, 24, Visibility(16, causal=False), 1),  # nothing is a power of two
        ([100], 70, 2, 1, 4, Visibility(None, causal=True), 0),
        ([110, 120], 16, 4, 1, 16, Visibility(None, causal=False), 2),  # two blocks a bundle, one of them half empty
    ],
    ids=str,
)
def test_prefix_attention_equals_the_dense_reference(
    documents: list[int], size: int, heads: int, kv_heads: int, width: int, rule: Visibility, dropped: int
) -> None:
    kernels("train.kernels.prefix_kernels")
    blocks = blocks_of(documents, size, dropped)
    slots = len(blocks.keep) * size
    generator = torch.Generator().manual_seed(1)
    shapes = [(slots, heads), (TOKENS, kv_heads), (TOKENS, kv_heads), (slots, kv_heads), (slots, kv_heads)]
    inputs = [torch.randn(*shape, width, generator=generator).requires_grad_() for shape in shapes]
    gradient = torch.randn(slots, heads, width, generator=generator)
    wanted = attended(DenseAttention(blocks, TOKENS, {rule}), rule, inputs, gradient)
    moved = [x.detach().to(DEVICE).requires_grad_() for x in inputs]
    there = Blocks(**{field.name: getattr(blocks, field.name).to(DEVICE) for field in dataclasses.fields(Blocks)})
    found = attended(PrefixAttention(there, TOKENS, {rule}), rule, moved, gradient)
    tolerance = 1e-4 if DEVICE == "cpu" else 5e-3  # products of float32 are TF32 on CUDA
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=10 * tolerance)


class Kernel:
    """Stands for a kernel on a device whose shared memory holds so many keys."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.ran: list[int] = []

    def __getitem__(self, _grid: tuple[int, ...]) -> "Kernel":
        return self

    def __call__(self, *, KEYS: int, num_warps: int, num_stages: int) -> None:
        if self.most < KEYS:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(KEYS * num_stages, self.most * num_warps, "shared memory")
        self.ran.append(KEYS)


def test_a_device_takes_the_first_tiles_that_it_holds() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    tiles = ((128, 8, 2), (64, 8, 2), (32, 4, 1))
    for most, ran in ((128, [128]), (100, [64]), (32, [32])):
        kernel = Kernel(most)
        prefix_attention._launch(kernel, (1,), (), {}, tiles)
        assert kernel.ran == ran
    with pytest.raises(errors.OutOfResources):
        prefix_attention._launch(Kernel(16), (1,), (), {}, tiles)
