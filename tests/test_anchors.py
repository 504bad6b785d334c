"""The anchor draw and the layout of blocks (architecture decision 4, specification sections 2.1 and 2.2)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftcache.tests.helpers import MASK_TOKEN, Document, blocks_at, document, flat_batch, supervised
from draftcache.train import order
from draftcache.train.batch import FlatBatch
from draftcache.train.model.anchors import draw_anchors, hash32

BITS_32 = (1 << 32) - 1


def drawn(batch: FlatBatch, count: int, seed: int = 0) -> list[int]:
    """The anchors that a draw keeps."""
    anchors, keep = draw_anchors(batch, seed, count)
    found: list[int] = anchors[keep].tolist()
    return found


def valid_anchors(*documents: Document) -> list[int]:
    """Every valid anchor of the documents' layout: what a draw of as many as there can be keeps."""
    batch = flat_batch(documents)
    return drawn(batch, batch.tokens - 1)


def draw_order(batch: FlatBatch, document_number: int, seed: int = 0) -> list[int]:
    """The positions of one document in the order in which ever larger draws take them."""
    taken: list[int] = []
    for count in range(1, batch.tokens):
        kept = [a for a in drawn(batch, count, seed) if batch.documents[a] == document_number]
        taken += [p for p in batch.positions[kept].tolist() if p not in taken]
    return taken


def mix_twin(state: int) -> int:
    """MurmurHash3's 32-bit finaliser on plain integers."""
    state ^= state >> 16
    state = state * 0x85EBCA6B & BITS_32
    state ^= state >> 13
    state = state * 0xC2B2AE35 & BITS_32
    return state ^ state >> 16


def hash32_twin(seed: int, epoch: int, sample: int, position: int) -> int:
    """What `hash32` must give for one element."""
    state = mix_twin((epoch & BITS_32) ^ mix_twin(seed & BITS_32))
    state = mix_twin(state ^ (sample & BITS_32))
    state = mix_twin(state ^ (sample >> 32))
    return mix_twin(state ^ position)


def hash32_of(seed: int, epoch: int, sample: int, position: int) -> int:
    """`anchors.hash32` of one element."""
    return int(hash32(seed, torch.tensor([epoch]), torch.tensor([sample]), torch.tensor([position])))


def test_valid_anchors_of_the_specification_example() -> None:
    assert valid_anchors(supervised(12, prompt=5)) == [5, 6, 7, 8, 9, 10]


def test_position_zero_and_the_last_token_are_never_anchors() -> None:
    assert valid_anchors(document([1] * 6)) == [1, 2, 3, 4]


def test_an_anchor_needs_its_own_and_the_next_token_supervised() -> None:
    assert valid_anchors(document([0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0])) == [3, 7, 8]


def test_a_document_of_one_or_two_tokens_has_no_anchor() -> None:
    assert valid_anchors(document([1]), document([1, 1])) == []


def test_anchors_stop_at_the_border_of_two_documents_without_padding_between() -> None:
    found = valid_anchors(supervised(64, prompt=60, sample=1), document([1] * 5, sample=2))
    assert found == [60, 61, 62, 65, 66, 67]


def test_the_last_token_of_the_context_is_no_anchor() -> None:
    assert valid_anchors(supervised(128, prompt=124)) == [124, 125, 126]


def test_a_supervised_padding_token_is_no_anchor() -> None:
    batch = flat_batch([supervised(8, prompt=4)])
    batch.loss_mask[20:30] = 1
    batch.positions[20:30] = torch.arange(1, 11, dtype=torch.int32)
    assert drawn(batch, 127) == [4, 5, 6]


@pytest.mark.parametrize(("state", "mixed"), [(0, 0), (1, 0x514E28B7), (BITS_32, 0x81F16F39)])
def test_the_twin_is_the_published_finaliser(state: int, mixed: int) -> None:
    assert mix_twin(state) == mixed


@given(
    seed=st.integers(-(1 << 31), 1 << 40),
    epoch=st.integers(0, 1 << 33),
    sample=st.integers(0, (1 << 62) - 1),
    position=st.integers(0, BITS_32),
)
@settings(max_examples=60, deadline=None)
def test_hash32_equals_the_plain_integer_twin(seed: int, epoch: int, sample: int, position: int) -> None:
    assert hash32_of(seed, epoch, sample, position) == hash32_twin(seed, epoch, sample, position)


@given(
    seed=st.integers(-(1 << 31), 1 << 40),
    epoch=st.integers(0, 1 << 33),
    samples=st.lists(st.integers(0, (1 << 62) - 1), min_size=1, max_size=8),
    salt=st.integers(0, BITS_32),
)
@settings(max_examples=60, deadline=None)
def test_numpy_and_torch_hash_alike(seed: int, epoch: int, samples: list[int], salt: int) -> None:
    in_numpy = order.hash32(seed, epoch, np.array(samples, dtype=np.int64), salt)
    in_torch = hash32(seed, torch.tensor([epoch]), torch.tensor(samples), torch.full((len(samples),), salt))
    assert in_numpy.tolist() == in_torch.tolist()


def test_hash32_works_element_by_element() -> None:
    samples, positions = torch.tensor([3, 3, 4]), torch.tensor([0, 7, 7])
    together = hash32(5, torch.tensor([2]), samples, positions).tolist()
    assert together == [hash32_of(5, 2, s, p) for s, p in ((3, 0), (3, 7), (4, 7))]


@pytest.mark.parametrize("count", [1, 5, 19])
def test_the_draw_takes_the_smallest_hashes(count: int) -> None:
    batch = flat_batch([supervised(30, prompt=18, sample=8), supervised(20, prompt=9, sample=3)], epoch=2)
    valid = drawn(batch, 127, seed=6)
    where = {flat: (int(batch.samples[flat]), int(batch.positions[flat])) for flat in valid}
    ranked = sorted(valid, key=lambda flat: (hash32_twin(6, 2, *where[flat]), flat))
    assert drawn(batch, count, seed=6) == sorted(ranked[:count])


@pytest.mark.parametrize("count", [1, 3, 10, 11, 40])
def test_a_draw_is_sorted_without_replacement_and_drops_what_is_missing(count: int) -> None:
    batch = flat_batch([supervised(16, prompt=5, sample=4)])
    anchors, keep = draw_anchors(batch, 1, count)
    kept = anchors[keep].tolist()
    assert anchors.shape == keep.shape == (count,)
    assert len(kept) == min(count, 10)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(range(5, 15))
    assert keep.tolist() == [True] * len(kept) + [False] * (count - len(kept))
    assert ((anchors >= 0) & (anchors < batch.tokens)).all()


@pytest.mark.parametrize("count", range(1, 13))
def test_equal_hashes_still_give_distinct_anchors(count: int) -> None:
    twice = [supervised(10, prompt=3, sample=7)] * 2
    kept = drawn(flat_batch(twice), count)
    assert len(set(kept)) == min(count, 12)


def test_more_anchors_than_tokens_are_dropped_too() -> None:
    batch = flat_batch([supervised(16, prompt=5)])
    anchors, keep = draw_anchors(batch, 0, batch.tokens + 64)
    assert anchors[keep].tolist() == list(range(5, 15))
    assert len(anchors) == batch.tokens + 64


def test_the_draw_does_not_depend_on_row_bucket_or_packing() -> None:
    one, other = supervised(30, prompt=14, sample=11), supervised(70, prompt=60, sample=5)
    alone = draw_order(flat_batch([one]), 0)
    assert sorted(alone) == list(range(14, 29))
    assert alone != sorted(alone)
    assert draw_order(flat_batch([other, one]), 1) == alone
    assert draw_order(flat_batch([one, other], stride=128), 0) == alone


def test_seed_epoch_and_sample_each_change_the_draw() -> None:
    def order_of(seed: int, epoch: int, sample: int) -> tuple[int, ...]:
        return tuple(draw_order(flat_batch([supervised(30, prompt=14, sample=sample)], epoch=epoch), 0, seed))

    assert len({order_of(*key) for key in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2))}) == 4


def test_slots_labels_and_teacher_rows_of_the_specification_table() -> None:
    one = supervised(12, prompt=5, sample=9)
    batch = flat_batch([supervised(20, prompt=2), one])
    blocks = blocks_at(batch, [64 + 6])
    assert blocks.first.tolist() == [64]
    assert blocks.input_ids.tolist() == [[one.ids[6], MASK_TOKEN, MASK_TOKEN, MASK_TOKEN]]
    assert blocks.positions.tolist() == [[6, 7, 8, 9]]
    assert blocks.labels.tolist() == [list(one.ids[6:10])]
    assert blocks.teacher_rows[:, 1:].tolist() == [[64 + 6, 64 + 7, 64 + 8]]
    assert blocks.valid.tolist() == [[False, True, True, True]]


def test_unsupervised_slots_are_not_trained() -> None:
    batch = flat_batch([document([0, 1, 1, 0, 1, 1])])
    assert blocks_at(batch, [1, 2]).valid.tolist() == [[False, True, False, True], [False, False, True, True]]


def test_slots_behind_the_document_are_not_trained() -> None:
    batch = flat_batch([supervised(12, prompt=5)])
    batch.loss_mask[:] = 1  # so that the document alone decides
    assert blocks_at(batch, [8, 9, 10]).valid.tolist() == [
        [False, True, True, True],
        [False, True, True, False],
        [False, True, False, False],
    ]


def test_slots_in_the_next_document_are_not_trained() -> None:
    batch = flat_batch([supervised(64, prompt=60, sample=1), document([1] * 5, sample=2)])
    assert blocks_at(batch, [62]).valid.tolist() == [[False, True, False, False]]


def test_slots_behind_the_context_are_not_trained() -> None:
    one = supervised(128, prompt=100)
    blocks = blocks_at(flat_batch([one]), [125, 126])
    assert blocks.valid.tolist() == [[False, True, True, False], [False, True, False, False]]
    assert blocks.labels[0, :3].tolist() == list(one.ids[125:])
    assert blocks.positions.tolist() == [[125, 126, 127, 128], [126, 127, 128, 129]]


def test_a_dropped_block_trains_nothing() -> None:
    blocks = blocks_at(flat_batch([supervised(12, prompt=2)]), [4, 5], keep=[True, False])
    assert blocks.valid.any(1).tolist() == [True, False]
