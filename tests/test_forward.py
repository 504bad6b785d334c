"""The target's forward: padding and batches change nothing, and nothing of it stays behind."""

from pathlib import Path

import pytest
import torch

from draftcache.common.target import Target
from draftcache.extract import forward
from draftcache.extract.buckets import Batch
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.tests.states import CPU, RECORD, random_samples, run_forward, states
from draftcache.tests.stores import (
    LAYER_IDS,
    files_of,
    tiny_store,
)


@pytest.mark.parametrize("other", ["in a batch", "in another bucket", "in both"])
def test_a_samples_states_do_not_depend_on_what_pads_it(target: Target, other: str) -> None:
    alone = run_forward(target, random_samples(50, ceiling=50))
    lengths = (50,) if other == "in another bucket" else (50, 64, 3)
    padded = run_forward(target, random_samples(*lengths, ceiling=64 if other == "in a batch" else 192))
    for one, two in zip(states(alone[0, :50]), states(padded[0, :50]), strict=True):
        difference = (one.float() - two.float()).norm(dim=-1) / one.float().norm(dim=-1)
        assert float(difference.max()) < 0.02  # bfloat16 has 8 bits


def test_the_order_within_a_batch_does_not_matter(target: Target) -> None:
    samples = random_samples(30, 60, ceiling=64)
    turned = random_samples(60, 30, ceiling=64)
    assert torch.equal(run_forward(target, samples), run_forward(target, turned).flip(0))


def test_the_fill_id_leaves_no_trace(tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = []
    for fill in (0, 7):
        monkeypatch.setattr(forward, "FILL_ID", fill)
        trees.append(files_of(tiny_store(tmp_path / str(fill), target=target_folder, count=6).path))
    ids, _ = batch_inputs(random_samples(3, ceiling=64), Batch(ceiling=64, shard=0, first=0, count=1), CPU)
    assert ids[0, 3:].tolist() == [7] * 61  # the change did reach the forward
    assert trees[0] == trees[1]


def test_a_forward_leaves_nothing_of_the_batch_before(target: Target) -> None:
    spec, small, large = RECORD, random_samples(10, ceiling=64), random_samples(192, 150, ceiling=192)
    with Forward(target, LAYER_IDS, spec, 2 * 192, CPU) as run:
        one = Batch(ceiling=64, shard=0, first=0, count=1)
        fresh = run(*batch_inputs(small, one, CPU)).clone()
        run(*batch_inputs(large, Batch(ceiling=192, shard=0, first=0, count=2), CPU))
        again = run(*batch_inputs(small, one, CPU))
        assert torch.equal(fresh, again)
        assert again.shape == (1, 64, spec.record_bytes)


def test_a_ceiling_that_is_not_whole_chunks(target: Target) -> None:
    records = run_forward(target, random_samples(70, 66, ceiling=70))
    assert records.shape == (2, 128, RECORD.record_bytes)
    assert not records[0, 70:].any()
    assert records[0, :70].any(-1).all()


def test_a_closed_forward_removes_its_hooks(target: Target) -> None:
    before = [len(layer._forward_hooks) for layer in target.layers]  # transformers may have put some of its own
    run_forward(target, random_samples(5, ceiling=64))
    assert [len(layer._forward_hooks) for layer in target.layers] == before
