"""The proof of the first batch: right records pass, and every wrong kind is refused."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftcache.common.errors import TargetError
from draftcache.common.record import record_spec
from draftcache.common.store import BucketSamples
from draftcache.common.target import Target, load_target
from draftcache.extract.buckets import Batch
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.proof import prove_batch
from draftcache.extract.run import extract
from draftcache.tests.states import CPU, RECORD, random_samples, run_forward
from draftcache.tests.stores import (
    HIDDEN,
    LAYER_IDS,
    LAYERS,
    tiny_config,
)


def prove(target: Target, samples: BucketSamples, records: Tensor, layer_ids: Sequence[int] = LAYER_IDS) -> None:
    """`prove_batch` of one batch of all samples."""
    batch = Batch(ceiling=samples.ceiling, shard=0, first=0, count=len(samples.samples))
    spec = record_spec(len(layer_ids), HIDDEN, "bf16", "last")
    prove_batch(target, layer_ids, spec, *batch_inputs(samples, batch, CPU), records)


SAMPLES = random_samples(60, 40, 64, ceiling=64)


def before_the_norm(target: Target, samples: BucketSamples) -> Tensor:
    """Records whose `last` is the last layer's output, the final norm not applied."""
    records = run_forward(target, samples)
    raw = run_forward(target, samples, (LAYERS - 1,))
    first = RECORD.field("last").offset
    records[..., first : first + 2 * HIDDEN] = raw[..., : 2 * HIDDEN]
    return records


def test_right_records_are_proved(target: Target) -> None:
    prove(target, SAMPLES, run_forward(target, SAMPLES))


def test_the_last_layer_may_be_tapped(target: Target) -> None:
    prove(target, SAMPLES, run_forward(target, SAMPLES, (3, LAYERS - 1)), (3, LAYERS - 1))


@pytest.mark.parametrize("wrong", [(0, 2, 4), (2, 4, 6), (1, 3, 4), (1, 5, 3)])
def test_taps_of_other_layers_are_refused(target: Target, wrong: tuple[int, ...]) -> None:
    with pytest.raises(TargetError) as caught:
        prove(target, SAMPLES, run_forward(target, SAMPLES, wrong))
    tap = next(right for right, other in zip(LAYER_IDS, wrong, strict=True) if right != other)
    assert caught.value.found.startswith(f"the tap of layer {tap} differs")


def test_a_last_state_before_the_norm_is_refused(target: Target) -> None:
    with pytest.raises(TargetError) as caught:
        prove(target, SAMPLES, before_the_norm(target, SAMPLES))
    assert caught.value.found.startswith("the last hidden state differs")


def test_a_last_state_normed_twice_is_refused(target: Target) -> None:
    records = run_forward(target, SAMPLES)
    first = RECORD.field("last").offset
    last = records[..., first : first + 2 * HIDDEN].view(torch.bfloat16)
    last.copy_(target.model.model.norm(last.clone()))
    with pytest.raises(TargetError) as caught:
        prove(target, SAMPLES, records)
    assert caught.value.found.startswith("the last hidden state differs")


def test_a_last_state_before_a_norm_of_equal_weights_is_refused(target_folder: Path) -> None:
    target = load_target(target_folder, CPU)
    target.model.model.norm.weight.fill_(1.0)
    with pytest.raises(TargetError):
        prove(target, SAMPLES, before_the_norm(target, SAMPLES))


def test_a_sample_that_sees_its_padding_is_refused(target: Target) -> None:
    records = run_forward(target, SAMPLES)
    records[1] = records[1].roll(1, 0)  # the shortest row, which is the one compared
    with pytest.raises(TargetError):
        prove(target, SAMPLES, records)


def test_states_that_are_not_finite_are_refused(target: Target) -> None:
    records = run_forward(target, SAMPLES)
    records[1, 5].view(torch.bfloat16)[40] = float("nan")
    with pytest.raises(TargetError):
        prove(target, SAMPLES, records)


def test_another_head_is_refused(target: Target) -> None:
    other = dataclasses.replace(target, head=target.head.flip(0))
    with pytest.raises(TargetError) as caught:
        prove(other, SAMPLES, run_forward(target, SAMPLES))
    assert "the stored teacher chooses the target's token at" in caught.value.found


def test_a_failed_proof_leaves_no_store(
    tmp_path: Path, target_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Forward._tap
    monkeypatch.setattr(Forward, "_tap", lambda self, position, hidden: real(self, position, hidden.flip(-1)))
    with pytest.raises(TargetError):
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    assert not (tmp_path / "store").exists()
