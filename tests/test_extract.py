"""Stage one on a tiny real target: what is stored, what is refused, and what is left behind."""

import copy
import dataclasses
import errno
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftcache.common import shard
from draftcache.common.errors import DataError, DraftcacheError, StoreError, TargetError, UsageError
from draftcache.common.journal import Journal
from draftcache.common.layout import ShardGeometry, row_stride
from draftcache.common.manifest import read_manifest
from draftcache.common.memory import aligned_bytes
from draftcache.common.record import RecordSpec, record_spec
from draftcache.common.shard import Bytes, RowReader
from draftcache.common.store import Bucket, BucketSamples, Store, open_store
from draftcache.common.target import Target, default_layer_ids, load_parts, load_target
from draftcache.extract import forward, writer
from draftcache.extract.buckets import Batch, fill_buckets, plan_batches
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.plan import ExtractConfig
from draftcache.extract.proof import prove_first_batch
from draftcache.extract.run import extract
from draftcache.extract.template import Tokens
from draftcache.extract.writer import Writer
from draftcache.tests.stores import (
    HIDDEN,
    LAYER_IDS,
    LAYERS,
    TOKEN_BUDGET,
    VOCABULARY,
    messages,
    tiny_config,
    tiny_data,
    tiny_model,
    tiny_store,
    tiny_target,
    write_jsonl,
)

CPU = torch.device("cpu")
RECORD = record_spec(len(LAYER_IDS), HIDDEN, "bf16", "last")
GOOD = {"messages": messages("hi", "yo man")}


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    """The tiny target, loaded."""
    return load_target(target_folder, CPU)


@pytest.fixture(scope="module")
def reference(target_folder: Path) -> Any:
    """The tiny target as transformers alone loads it."""
    return AutoModelForCausalLM.from_pretrained(target_folder, dtype="auto")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six good lines in two buckets."""
    return tiny_data(tmp_path / "data.jsonl", count=6)


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


def batches_of(store: Store) -> Iterator[tuple[Bucket, Batch, Tensor, Tensor]]:
    """Every batch of a store with its padded input ids [n, C] and lengths [n]."""
    for batch in plan_batches([bucket.samples for bucket in store.buckets.values()], TOKEN_BUDGET):
        bucket = store.buckets[batch.ceiling]
        yield bucket, batch, *batch_inputs(bucket.samples, batch, CPU)


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


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


# What is stored


def test_states_equal_transformers_own_of_the_same_batch_bit_for_bit(store: Store, reference: Any) -> None:
    checked = 0
    for bucket, batch, ids, lengths in batches_of(store):
        with torch.no_grad():
            output = reference(input_ids=ids, output_hidden_states=True, use_cache=False)
        for position, length in enumerate(lengths.tolist()):
            taps, last = states(stored(bucket, batch.first + position)[:length])
            for tap, layer in enumerate(LAYER_IDS):
                assert torch.equal(taps[:, tap], output.hidden_states[layer + 1][position, :length])
            assert torch.equal(last, output.hidden_states[-1][position, :length])
            checked += 1
    assert checked == store.manifest.report.kept == 14


def test_head_of_last_gives_the_logits_and_their_argmax(store: Store, reference: Any) -> None:
    parts = load_parts(store.path, store.manifest, CPU)
    for bucket, batch, ids, lengths in batches_of(store):
        with torch.no_grad():
            logits = reference(input_ids=ids, use_cache=False).logits
        for position, length in enumerate(lengths.tolist()):
            own = torch.nn.functional.linear(states(stored(bucket, batch.first + position))[1], parts.head)
            assert torch.equal(own[:length].argmax(-1), logits[position, :length].argmax(-1))


def test_records_are_zero_beyond_each_length(store: Store) -> None:
    for bucket in store.buckets.values():
        for row, length in enumerate(bucket.samples.lengths.tolist()):
            records = stored(bucket, row)
            assert not records[length:].any()
            assert records[:length].any(-1).all()


def test_ids_and_masks_are_the_tokenized_lines(store: Store, tokenizer: Any) -> None:
    lines = [json.loads(text) for text in (store.path.parent / "data.jsonl").read_text().splitlines()]
    found = {}
    for bucket in store.buckets.values():
        for row, number in enumerate(bucket.samples.samples.tolist()):
            cut = bucket.samples.tokens(row)
            found[number] = (bucket.samples.input_ids[cut].tolist(), bucket.samples.loss_mask[cut].tolist())
    assert sorted(found) == list(range(14))
    for number, line in enumerate(lines):
        text = tokenizer.apply_chat_template(line["messages"], tokenize=False)
        answer = len(line["messages"][1]["content"])
        ids = tokenizer(text)["input_ids"]
        assert found[number] == (ids, [0] * (len(ids) - answer - 2) + [1] * (answer + 1) + [0])


def test_the_journal_goes_from_the_largest_ceiling_down(store: Store) -> None:
    entries = list(store.committed())
    assert entries == [(190, n) for n in range(4)] + [(128, n) for n in range(3)] + [(64, n) for n in range(2)]
    for entry in store.committed().values():
        assert store.buckets[entry.bucket].shard_path(entry.shard).stat().st_size == entry.size


def test_without_a_teacher_last_is_left_out(tmp_path: Path, target_folder: Path, store: Store) -> None:
    bare = tiny_store(tmp_path, target=target_folder, teacher="none")
    assert [field.name for field in bare.manifest.record.fields] == ["taps"]
    taps = bare.manifest.record.field("taps").nbytes
    for ceiling, bucket in bare.buckets.items():
        assert torch.equal(stored(bucket, 0)[:, :taps], stored(store.buckets[ceiling], 0)[:, :taps])


def test_states_of_a_target_run_in_float32_are_stored_rounded(
    tmp_path: Path, target_folder: Path, store: Store, reference: Any
) -> None:
    data = tiny_data(tmp_path / "data.jsonl")
    wide = extract(tiny_config(tmp_path / "store", target=target_folder, data=[data], dtype="float32"))
    assert wide.manifest.target.dtype == "float32"
    exact = copy.deepcopy(reference).float()
    for bucket, batch, ids, lengths in batches_of(wide):
        with torch.no_grad():
            output = exact(input_ids=ids, output_hidden_states=True, use_cache=False)
        taps, last = states(stored(bucket, batch.first)[: lengths[0]])
        assert torch.equal(taps[:, 1], output.hidden_states[LAYER_IDS[1] + 1][0, : lengths[0]].bfloat16())
        assert torch.equal(last, output.hidden_states[-1][0, : lengths[0]].bfloat16())
    assert load_parts(wide.path, wide.manifest, CPU).head.dtype == torch.float32
    assert wide.manifest.identity != store.manifest.identity


def test_default_layers_are_the_released_drafters() -> None:
    assert default_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(LAYERS, 5) == (1, 2, 3, 4, 5)
    assert default_layer_ids(30, 1) == (15,)


# Padding and batches


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
        trees.append(files(tiny_store(tmp_path / str(fill), target=target_folder, count=6).path))
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
    run_forward(target, random_samples(5, ceiling=64))
    assert all(not layer._forward_hooks for layer in target.layers)


# The proof


def prove(target: Target, samples: BucketSamples, records: Tensor, layer_ids: Sequence[int] = LAYER_IDS) -> None:
    """`prove_first_batch` of one batch of all samples."""
    batch = Batch(ceiling=samples.ceiling, shard=0, first=0, count=len(samples.samples))
    spec = record_spec(len(layer_ids), HIDDEN, "bf16", "last")
    prove_first_batch(target, layer_ids, spec, *batch_inputs(samples, batch, CPU), records)


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


# Targets


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, target=tiny_target(tmp_path / "target", tied=True), count=3)
    assert store.manifest.target.tied_head
    assert list(load_file(store.path / "target" / "embedding_and_head.safetensors")) == ["embed_tokens.weight"]
    parts = load_parts(store.path, store.manifest, CPU)
    assert torch.equal(parts.head, tiny_model(tied=True).lm_head.weight)
    assert parts.head is parts.embedding


def test_an_untied_head_is_stored_beside_the_embedding(store: Store) -> None:
    assert not store.manifest.target.tied_head
    parts = load_parts(store.path, store.manifest, CPU)
    assert torch.equal(parts.head, tiny_model().lm_head.weight)
    assert torch.equal(parts.embedding, tiny_model().model.embed_tokens.weight)
    assert not torch.equal(parts.head, parts.embedding)


def test_sharded_weights_give_the_same_store(tmp_path: Path, store: Store) -> None:
    target = tiny_target(tmp_path / "target", max_shard_size="40KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    sharded = tiny_store(tmp_path, target=target)
    buckets = files(sharded.path / "buckets")
    assert buckets == files(store.path / "buckets")
    assert any("records/c/" in name for name in buckets)


def without_weight(folder: Path, name: str) -> None:
    """Take one tensor out of a target's only weight file."""
    weights = {key: value.clone() for key, value in load_file(folder / "model.safetensors").items() if key != name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.3.mlp.up_proj.weight", "model.norm.weight"])
def test_a_missing_weight_is_refused_and_never_random(tmp_path: Path, data: Path, name: str) -> None:
    target = tiny_target(tmp_path / "target")
    without_weight(target, name)
    with pytest.raises(TargetError) as caught:
        extract(tiny_config(tmp_path / "store", target=target, data=[data]))
    assert f"lacks the weights ['{name}']" in caught.value.found
    assert not (tmp_path / "store").exists()


def test_a_missing_file_of_sharded_weights_is_refused(tmp_path: Path, data: Path) -> None:
    target = tiny_target(tmp_path / "target", max_shard_size="40KB")
    sorted(target.glob("*.safetensors"))[1].unlink()
    with pytest.raises(TargetError):
        extract(tiny_config(tmp_path / "store", target=target, data=[data]))
    assert not (tmp_path / "store").exists()


def test_a_config_that_calls_a_head_of_its_own_tied_is_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(TargetError, match="tie_word_embeddings"):
        tiny_store(tmp_path, target=target, count=3)
    assert not (tmp_path / "store").exists()


def test_the_manifest_names_the_target(store: Store, target_folder: Path) -> None:
    identity = store.manifest.target
    assert (identity.architecture, identity.model_type, identity.dtype) == ("Qwen3ForCausalLM", "qwen3", "bfloat16")
    assert (identity.hidden_size, identity.vocab_size, identity.tokenizer_size) == (HIDDEN, VOCABULARY, 259)
    assert (identity.num_layers, identity.num_heads, identity.num_kv_heads, identity.head_dim) == (LAYERS, 4, 2, 16)
    assert identity.name == target_folder.name
    assert store.manifest.settings.layer_ids == LAYER_IDS
    assert store.manifest.final_norm_applied


def test_another_target_has_another_identity(tmp_path: Path, store: Store) -> None:
    other = tiny_store(tmp_path, target=tiny_target(tmp_path / "target", seed=1), count=3).manifest.target
    assert other.weights_digest != store.manifest.target.weights_digest
    assert other.tokenizer_digest == store.manifest.target.tokenizer_digest
    assert other.config_digest == store.manifest.target.config_digest


# Dropping, truncating, reporting


def ids_line(length: int, supervised: Sequence[int]) -> dict[str, list[int]]:
    """A tokenized line with these positions supervised."""
    return {"input_ids": list(range(length)), "loss_mask": [int(i in supervised) for i in range(length)]}


def report_of(tmp_path: Path, target: Path, records: Sequence[object], **settings: Any) -> tuple[Store, dict[str, Any]]:
    """A store of these lines, and its report."""
    data = write_jsonl(tmp_path / "data.jsonl", records)
    store = extract(tiny_config(tmp_path / "store", target=target, data=[data], **settings))
    return store, dataclasses.asdict(store.manifest.report)


def test_the_report_adds_up(tmp_path: Path, target_folder: Path) -> None:
    records = [
        ids_line(60, range(20, 60)),
        ids_line(60, []),  # nothing to learn
        ids_line(60, [0, 1]),  # position 0 cannot be an anchor
        ids_line(60, [10, 20, 30]),  # no two in a row
        ids_line(60, [10, 11]),
        ids_line(100, range(90, 100)),  # all of it cut away
        ids_line(100, range(60, 100)),  # cut to 80, half of it supervised
        ids_line(81, [70, 71, 80]),
        ids_line(80, range(1, 80)),  # just fits
        {"input_ids": [300, 300, 300], "loss_mask": [0, 1, 1]},  # an id that the tokenizer does not know
    ]
    store, report = report_of(tmp_path, target_folder, records, max_length=80)
    assert report == {
        "read": 10,
        "kept": 6,
        "dropped": {"no_supervised_tokens": 2, "too_few_supervised_tokens": 2},
        "truncated": 3,
        "supervised_tokens": 40 + 2 + 20 + 2 + 79 + 2,
        "supervised_tokens_cut": 10 + 20 + 1,
        "notes": {"ids_unknown_to_the_tokenizer": 1},
    }
    assert report["read"] == report["kept"] + sum(report["dropped"].values())
    held = dict[int, int]()
    for bucket in store.buckets.values():
        held |= dict(zip(bucket.samples.samples.tolist(), bucket.samples.lengths.tolist(), strict=True))
    assert held == {0: 60, 4: 60, 6: 80, 7: 80, 8: 80, 9: 3}
    assert sum(int(b.samples.loss_mask.sum()) for b in store.buckets.values()) == report["supervised_tokens"]
    assert [summary.samples for summary in store.manifest.buckets] == [3, 3]


def test_truncation_cuts_on_the_right(tmp_path: Path, target_folder: Path) -> None:
    store, _ = report_of(tmp_path, target_folder, [ids_line(250, range(5, 250))])
    (bucket,) = store.buckets.values()
    assert bucket.samples.input_ids.tolist() == list(range(190))  # the largest ceiling
    assert bucket.samples.loss_mask.tolist() == [0] * 5 + [1] * 185


def test_min_supervised_drops_shorter_answers(tmp_path: Path, target_folder: Path) -> None:
    records = [ids_line(40, range(10, 10 + count)) for count in (2, 9, 10, 11)]
    store, report = report_of(tmp_path, target_folder, records, min_supervised=10)
    assert report["dropped"] == {"too_few_supervised_tokens": 2}
    assert store.buckets[64].samples.samples.tolist() == [2, 3]


def test_limit_and_blank_lines(tmp_path: Path, target_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n")
    write_jsonl(tmp_path / "b.jsonl", [GOOD] * 3)
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    store = extract(tiny_config(tmp_path / "store", target=target_folder, data=paths, limit=4))
    assert store.manifest.report.read == 3
    assert store.buckets[64].samples.samples.tolist() == [0, 2, 3]
    assert [(file.name, file.lines) for file in store.manifest.data] == [("a.jsonl", 2), ("b.jsonl", 1)]
    assert store.manifest.settings.limit == 4


# What is in the way


def test_an_existing_store_is_refused_and_left_alone(tmp_path: Path, target_folder: Path, data: Path) -> None:
    config = tiny_config(tmp_path / "store", target=target_folder, data=[data])
    extract(config)
    before = files(tmp_path / "store")
    with pytest.raises(StoreError) as caught:
        extract(config)
    assert str(tmp_path / "store") in caught.value.found
    assert "--overwrite" in caught.value.do
    assert files(tmp_path / "store") == before
    with pytest.raises(StoreError):  # at once, before target and data are looked at
        extract(dataclasses.replace(config, target=tmp_path / "nowhere"))


def test_overwrite_replaces_a_store(tmp_path: Path, target_folder: Path, data: Path) -> None:
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data], layer_ids=(2,)))
    (tmp_path / "store" / "left-over").write_text("x")
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data], overwrite=True))
    fresh = extract(tiny_config(tmp_path / "fresh", target=target_folder, data=[data]))
    assert files(tmp_path / "store") == files(fresh.path)


def test_overwrite_keeps_the_old_store_if_the_new_one_cannot_be_made(
    tmp_path: Path, target_folder: Path, data: Path
) -> None:
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    before = files(tmp_path / "store")
    broken = write_jsonl(tmp_path / "broken.jsonl", [[]])
    with pytest.raises(DataError):
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[broken], overwrite=True))
    assert files(tmp_path / "store") == before


def test_overwrite_makes_a_store_where_there_is_none(tmp_path: Path, target_folder: Path, data: Path) -> None:
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data], overwrite=True))
    assert open_store(tmp_path / "store").manifest.report.kept == 6


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_store_is_never_removed(
    tmp_path: Path, target_folder: Path, data: Path, overwrite: bool
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError):
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[data], overwrite=overwrite))
    assert files(tmp_path / "store") == {"thesis.txt": b"mine"}


# Errors on the way


@pytest.mark.parametrize("call", [1, 2, 3, 6])
def test_an_error_in_the_writer_thread_surfaces(
    tmp_path: Path, target_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    real, calls = shard.write_shard, list[Path]()

    def broken_disk(path: Path, geometry: ShardGeometry, records: Bytes, lengths: Sequence[int]) -> int:
        calls.append(path)
        if len(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, geometry, records, lengths)

    monkeypatch.setattr(writer, "write_shard", broken_disk)
    data = tiny_data(data, count=9)
    with pytest.raises(OSError) as caught:
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    assert caught.value.errno == errno.EIO
    with pytest.raises(StoreError):
        open_store(tmp_path / "store")
    kept = Store(tmp_path / "store", read_manifest(tmp_path / "store")).committed()
    present = {str(path) for path in (tmp_path / "store").glob("buckets/*/records/c/*/0/0")}
    named = {str(tmp_path / "store/buckets" / f"{c}/records/c/{n}/0/0") for c, n in kept}
    assert str(calls[call - 1]) not in named
    assert named == present
    assert len(named) >= call - 1


def test_records_may_be_overwritten_once_they_are_submitted(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(store.path, tmp_path / "copied")
    bucket = Store(tmp_path / "copied", store.manifest).buckets[64]
    batch, go_on = Batch(ceiling=64, shard=1, first=4, count=1), threading.Event()

    def slow(path: Path, geometry: ShardGeometry, records: Bytes, lengths: Sequence[int]) -> int:
        assert go_on.wait(timeout=30)
        return shard.write_shard(path, geometry, records, lengths)

    monkeypatch.setattr(writer, "write_shard", slow)
    records = stored(bucket, 4)[None]
    wanted = records.clone()
    with Journal(tmp_path / "copied") as journal, Writer(journal, records.numel()) as commits:
        commits.submit(batch, bucket, records, [int(bucket.samples.lengths[4])])
        records.fill_(7)  # the next forward, while the thread still has to write
        go_on.set()
    assert torch.equal(stored(bucket, 4), wanted[0])


def test_a_full_disk_is_told_as_such(
    tmp_path: Path, target_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_fd: int, _buffers: Sequence[Any], _offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full_disk)
    with pytest.raises(StoreError) as caught:
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    assert caught.value.found == f"{tmp_path / 'store'}: No space left on device"


def test_records_are_flushed_before_the_journal_names_them(
    tmp_path: Path, target_folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, events = os.fsync, list[str]()

    def watched(fd: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path / "store")))
        real(fd)

    monkeypatch.setattr(os, "fsync", watched)
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    writes = events[events.index("journal") + 1 :]
    shards = [event for event in writes if event.endswith(".partial")]
    assert len(shards) == 4
    for number, name in enumerate(shards):
        folder = str(Path(name).parent)
        assert writes[3 * number : 3 * number + 3] == [name, folder, "journal/rank-0.jsonl"]


def target_without(name: str) -> Callable[[Path, ExtractConfig], ExtractConfig]:
    """A change to a configuration: its target lacks this file."""

    def change(folder: Path, config: ExtractConfig) -> ExtractConfig:
        shutil.copytree(config.target, folder / "broken")
        (folder / "broken" / name).unlink()
        return dataclasses.replace(config, target=folder / "broken")

    return change


def with_settings(**settings: Any) -> Callable[[Path, ExtractConfig], ExtractConfig]:
    """A change to a configuration: these settings."""
    return lambda _folder, config: dataclasses.replace(config, **settings)


def with_lines(*texts: str) -> Callable[[Path, ExtractConfig], ExtractConfig]:
    """A change to a configuration: these lines follow the good ones, in a second file."""

    def change(folder: Path, config: ExtractConfig) -> ExtractConfig:
        (folder / "more.jsonl").write_text("".join(f"{text}\n" for text in texts))
        return dataclasses.replace(config, data=(*config.data, folder / "more.jsonl"))

    return change


BAD_INPUT = [
    pytest.param(lambda d, c: dataclasses.replace(c, data=(*c.data, d / "no")), UsageError, "/no: ", id="missing file"),
    pytest.param(with_lines(json.dumps(GOOD), "{"), DataError, "more.jsonl:2: not JSON", id="broken line"),
    pytest.param(with_lines('{"messages": [{"role": "bot"}]}'), DataError, "more.jsonl:1: ", id="unknown role"),
    pytest.param(with_lines('{"input_ids": [320], "loss_mask": [1]}'), DataError, "token id 320", id="foreign id"),
    pytest.param(
        lambda d, c: dataclasses.replace(c, data=(write_jsonl(d / "n.jsonl", [{"messages": messages("hi")}] * 3),)),
        DataError,
        "no sample is left of 3 lines read ({'no_supervised_tokens': 3})",
        id="no supervised tokens",
    ),
    pytest.param(
        lambda d, c: dataclasses.replace(c, data=(write_jsonl(d / "n.jsonl", []),)), DataError, "no sample", id="empty"
    ),
    pytest.param(
        lambda d, c: dataclasses.replace(c, target=d / "nowhere"), TargetError, "no config.json", id="no target"
    ),
    pytest.param(target_without("model.safetensors"), TargetError, "has no weights", id="target without weights"),
    pytest.param(target_without("config.json"), TargetError, "has no config.json", id="target without config"),
    pytest.param(target_without("tokenizer.json"), TargetError, "", id="target without tokenizer"),
    pytest.param(target_without("chat_template.jinja"), DataError, "template fails", id="target without template"),
    pytest.param(with_settings(layer_ids=(1, LAYERS)), UsageError, f"[1, {LAYERS}]", id="layer too high"),
    pytest.param(with_settings(layer_ids=(1, -1)), UsageError, "[1, -1]", id="negative layer"),
    pytest.param(with_settings(layer_ids=(1, 1)), UsageError, "[1, 1]", id="layer twice"),
    pytest.param(with_settings(layer_ids=()), UsageError, "[]", id="no layer"),
    pytest.param(with_settings(codec="fp4"), UsageError, "'fp4'", id="unknown codec"),
    pytest.param(with_settings(teacher="first"), UsageError, "'first'", id="unknown teacher"),
]


@pytest.mark.parametrize(("change", "kind", "words"), BAD_INPUT)
def test_bad_input_writes_nothing(
    tmp_path: Path,
    target_folder: Path,
    data: Path,
    change: Callable[[Path, ExtractConfig], ExtractConfig],
    kind: type[DraftcacheError],
    words: str,
) -> None:
    config = change(tmp_path, tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    with pytest.raises(DraftcacheError) as caught:
        extract(config)
    assert type(caught.value) is kind
    assert words in caught.value.found
    assert not (tmp_path / "store").exists()


def test_a_missing_file_beyond_the_limit_is_refused(tmp_path: Path, target_folder: Path, data: Path) -> None:
    with pytest.raises(UsageError):
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[data, tmp_path / "no"], limit=2))


@pytest.mark.parametrize(
    "setting",
    [
        {"ceilings": (128, 64)},
        {"ceilings": ()},
        {"token_budget": 0},
        {"limit": 0},
        {"max_length": 1},
        {"max_length": 191},
        {"min_supervised": 1},
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    config = tiny_config(tmp_path / "store", target=tmp_path, data=[])
    with pytest.raises(UsageError):
        dataclasses.replace(config, **setting)


def test_the_stored_bytes_are_plain_numpy(store: Store) -> None:
    array: Any = zarr.open_group(str(store.path), mode="r")["buckets/64/records"]
    field = array.attrs["fields"][0]
    raw = np.asarray(array[1])[: int(store.buckets[64].samples.lengths[1])]
    cut = raw[:, field["offset"] : field["offset"] + field["nbytes"]]
    taps = (np.ascontiguousarray(cut).view("<u2").astype("<u4") << 16).view("<f4").reshape(-1, *field["shape"])
    wanted, _ = states(stored(store.buckets[64], 1)[: len(raw)])
    assert np.array_equal(taps, wanted.float().numpy())
