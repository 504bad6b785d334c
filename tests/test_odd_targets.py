"""Targets that come otherwise than as plain safetensors on one device: GGUF, quantised, spread over devices."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftcache.common.codec import field_tensor
from draftcache.common.errors import TargetError, UsageError
from draftcache.common.stats import read_row_records
from draftcache.common.target import identify, load_target
from draftcache.extract.run import extract
from draftcache.tests.families import FAMILIES, HIDDEN, LAYERS, VOCABULARY, family_target
from draftcache.tests.stores import byte_tokenizer, tiny_config, tiny_data
from draftcache.train.settings import TrainConfig
from draftcache.train.setup import resolve

CPU = torch.device("cpu")


def write_gguf(path: Path, *, head: bool = True) -> None:
    """A random Llama of the family's sizes as a GGUF file in float16."""
    gguf: Any = pytest.importorskip("gguf")
    writer, rng = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCABULARY)

    def add(name: str, *shape: int) -> None:
        kind = np.float32 if len(shape) == 1 else np.float16
        writer.add_tensor(name, rng.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(kind))

    add("token_embd.weight", VOCABULARY, HIDDEN)
    add("output_norm.weight", HIDDEN)
    if head:
        add("output.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for name, *shape in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q", 64, HIDDEN),
            ("attn_k", 32, HIDDEN),
            ("attn_v", 32, HIDDEN),
            ("attn_output", HIDDEN, 64),
            ("ffn_gate", 64, HIDDEN),
            ("ffn_up", 64, HIDDEN),
            ("ffn_down", HIDDEN, 64),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with a Llama's configuration and the byte tokenizer."""
    folder = family_target(tmp_path / "llama", "llama")
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_gguf_file_beside_configuration_and_tokenizer_is_a_target(tmp_path: Path, llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    write_gguf(llama / "model-f16.gguf")
    config = tiny_config(tmp_path / "store", target=llama, data=[tiny_data(tmp_path / "d.jsonl", 4)], layer_ids=(1,))
    store = extract(config)
    assert store.manifest.target.quantization == "gguf"
    assert store.manifest.report.kept == 4


def test_two_gguf_files_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    for name in ("a.gguf", "b.gguf"):
        (llama / name).write_bytes(b"GGUF")
    with pytest.raises(TargetError, match="2 GGUF files"):
        load_target(llama, CPU)


def test_a_broken_gguf_file_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(TargetError, match="does not load"):
        load_target(llama, CPU)


def test_the_quantisation_is_recorded(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert identify(llama, byte_tokenizer()).quantization == "fp8"


def test_a_device_map_gives_the_same_store(tmp_path: Path, llama: Path) -> None:
    pytest.importorskip("accelerate")
    data = tiny_data(tmp_path / "d.jsonl", 4)
    stores = []
    for device_map in (None, "auto"):
        config = tiny_config(tmp_path / str(device_map), target=llama, data=[data], layer_ids=(1, 2))
        stores.append(extract(dataclasses.replace(config, device_map=device_map)))
    one, two = (
        {str(p.relative_to(store.path)): p.read_bytes() for p in store.path.rglob("*") if p.is_file()}
        for store in stores
    )
    assert one == two


def test_weights_that_a_device_map_leaves_behind_are_refused(llama: Path) -> None:
    """A target that does not fit: transformers would bring weights from the host again and again, and never here."""
    pytest.importorskip("accelerate")
    with pytest.raises(TargetError, match="does not fit"):
        load_target(llama, CPU, device_map="meta")


def test_training_refuses_a_target_whose_ends_are_not_plain(tmp_path: Path) -> None:
    target = family_target(tmp_path / "gemma", "gemma2")
    byte_tokenizer().save_pretrained(target)
    data = tiny_data(tmp_path / "d.jsonl", 4)
    store = extract(tiny_config(tmp_path / "store", target=target, data=[data], layer_ids=(1, 2), teacher="top"))
    assert store.manifest.ends.logit_softcap == FAMILIES["gemma2"].logit_softcap
    with pytest.raises(UsageError, match=r"scales its embedding by 5\.65"):
        resolve(TrainConfig(store=store.path, out=tmp_path / "run", device="cpu"), store)


def test_a_top_teacher_holds_the_capped_log_probabilities(tmp_path: Path) -> None:
    target = family_target(tmp_path / "gemma", "gemma2")
    byte_tokenizer().save_pretrained(target)
    data = tiny_data(tmp_path / "d.jsonl", 1)
    store = extract(tiny_config(tmp_path / "store", target=target, data=[data], layer_ids=(1,), teacher="top"))
    (bucket,) = store.buckets.values()
    records = torch.from_numpy(read_row_records(bucket, 0))
    ids = torch.from_numpy(bucket.samples.input_ids).long()[None]
    with torch.no_grad():
        logits = load_target(target, CPU).model(input_ids=ids).logits[0].float()
    wanted = logits.log_softmax(-1)
    spec = store.manifest.record
    chosen = field_tensor(records, spec.field("top_ids")).long()
    held = field_tensor(records, spec.field("top_log_probs")).float()
    assert torch.allclose(held, wanted.gather(-1, chosen), atol=0.05)
    assert float(wanted.amax(-1).max()) < -1  # a cap of 3 keeps every probability small
