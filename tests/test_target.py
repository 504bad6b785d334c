"""Targets: what is taken over from one, who it is, and which are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftcache.common.errors import TargetError
from draftcache.common.store import Store
from draftcache.common.target import default_layer_ids, load_parts
from draftcache.extract.run import extract
from draftcache.tests.states import CPU
from draftcache.tests.stores import (
    HIDDEN,
    LAYER_IDS,
    LAYERS,
    VOCABULARY,
    files_of,
    tiny_config,
    tiny_model,
    tiny_store,
    tiny_target,
)


def test_default_layers_are_the_released_drafters() -> None:
    assert default_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(LAYERS, 5) == (1, 2, 3, 4, 5)
    assert default_layer_ids(30, 1) == (15,)


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
    buckets = files_of(sharded.path / "buckets")
    assert buckets == files_of(store.path / "buckets")
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
