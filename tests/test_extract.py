"""Stage one on a tiny real target: what is stored, and what is in the way of a store."""

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftcache.common.errors import DataError, StoreError
from draftcache.common.journal import read_journal
from draftcache.common.store import Bucket, Store, open_store
from draftcache.common.target import load_parts
from draftcache.extract.buckets import Batch, plan_batches
from draftcache.extract.forward import batch_inputs
from draftcache.extract.run import extract
from draftcache.tests.states import CPU, states, stored
from draftcache.tests.stores import (
    LAYER_IDS,
    TOKEN_BUDGET,
    files_of,
    tiny_config,
    tiny_data,
    tiny_store,
    write_jsonl,
)


@pytest.fixture(scope="module")
def reference(target_folder: Path) -> Any:
    """The tiny target as transformers alone loads it."""
    return AutoModelForCausalLM.from_pretrained(target_folder, dtype="auto")


def batches_of(store: Store) -> Iterator[tuple[Bucket, Batch, Tensor, Tensor]]:
    """Every batch of a store with its padded input ids [n, C] and lengths [n]."""
    for batch in plan_batches([bucket.samples for bucket in store.buckets.values()], TOKEN_BUDGET):
        bucket = store.buckets[batch.ceiling]
        yield bucket, batch, *batch_inputs(bucket.samples, batch, CPU)


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
    entries = list(read_journal(store.path))
    written = [(190, n) for n in range(4)] + [(128, n) for n in range(3)] + [(64, n) for n in range(2)]
    assert [(entry.bucket, entry.shard) for entry in entries] == written
    for entry in entries:
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


def test_the_stored_bytes_are_plain_numpy(store: Store) -> None:
    array: Any = zarr.open_group(str(store.path), mode="r")["buckets/64/records"]
    field = array.attrs["fields"][0]
    raw = np.asarray(array[1])[: int(store.buckets[64].samples.lengths[1])]
    cut = raw[:, field["offset"] : field["offset"] + field["nbytes"]]
    taps = (np.ascontiguousarray(cut).view("<u2").astype("<u4") << 16).view("<f4").reshape(-1, *field["shape"])
    wanted, _ = states(stored(store.buckets[64], 1)[: len(raw)])
    assert np.array_equal(taps, wanted.float().numpy())


# What is in the way


def test_an_existing_store_is_refused_and_left_alone(tmp_path: Path, target_folder: Path, data: Path) -> None:
    config = tiny_config(tmp_path / "store", target=target_folder, data=[data])
    extract(config)
    before = files_of(tmp_path / "store")
    with pytest.raises(StoreError) as caught:
        extract(config)
    assert str(tmp_path / "store") in caught.value.found
    assert "--overwrite" in caught.value.do
    assert files_of(tmp_path / "store") == before
    with pytest.raises(StoreError):  # at once, before target and data are looked at
        extract(dataclasses.replace(config, target=tmp_path / "nowhere"))


def test_overwrite_replaces_a_store(tmp_path: Path, target_folder: Path, data: Path) -> None:
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data], layer_ids=(2,)))
    (tmp_path / "store" / "left-over").write_text("x")
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data], overwrite=True))
    fresh = extract(tiny_config(tmp_path / "fresh", target=target_folder, data=[data]))
    assert files_of(tmp_path / "store") == files_of(fresh.path)


def test_overwrite_keeps_the_old_store_if_the_new_one_cannot_be_made(
    tmp_path: Path, target_folder: Path, data: Path
) -> None:
    extract(tiny_config(tmp_path / "store", target=target_folder, data=[data]))
    before = files_of(tmp_path / "store")
    broken = write_jsonl(tmp_path / "broken.jsonl", [[]])
    with pytest.raises(DataError):
        extract(tiny_config(tmp_path / "store", target=target_folder, data=[broken], overwrite=True))
    assert files_of(tmp_path / "store") == before


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
    assert files_of(tmp_path / "store") == {"thesis.txt": b"mine"}
