"""Every family against transformers itself: which layer, which norm, which logits, and that padding is unseen."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from draftcache.common.codec import field_tensor
from draftcache.common.ends import apply_ends
from draftcache.common.errors import TargetError
from draftcache.common.layout import row_stride
from draftcache.common.record import record_spec
from draftcache.common.target import Target, identify, load_target
from draftcache.extract.buckets import Batch, fill_buckets
from draftcache.extract.forward import Forward, batch_inputs
from draftcache.extract.template import Tokens
from draftcache.tests.families import FAMILIES, HIDDEN, LAYERS, VOCABULARY, family_target
from draftcache.tests.stores import byte_tokenizer

CPU = torch.device("cpu")
ALL_LAYERS = tuple(range(LAYERS))
RECORD = record_spec(LAYERS, HIDDEN, "bf16", "last")
NOISE = 0.02
"""Relative; records hold bfloat16, which rounds to 0.4 %."""

by_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives every family's folder, made when first asked for."""
    root = tmp_path_factory.mktemp("families")
    return cache(lambda family: family_target(root / family, family))


@pytest.fixture(scope="module")
def load(folder: Any) -> Any:
    """Gives every family's target, loaded once for each dtype."""
    return cache(lambda family, dtype=None: load_target(folder(family), CPU, dtype))


def padded(lengths: tuple[int, ...], ceiling: int, fill: int = 0) -> tuple[Tensor, Tensor]:
    """[n, C] ids and [n] lengths of samples that begin alike; the padding is `fill`."""
    rng = random.Random(1)
    ids = [rng.randrange(3, VOCABULARY) for _ in range(max(lengths))]
    tokens = [(n, Tokens(input_ids=ids[:length], loss_mask=[1] * length)) for n, length in enumerate(lengths)]
    (bucket,) = fill_buckets(tokens, (ceiling,))
    batch, real = batch_inputs(bucket, Batch(ceiling=ceiling, shard=0, first=0, count=len(lengths)), CPU)
    padding = torch.arange(ceiling) >= real[:, None]
    return batch.masked_fill(padding, fill), real


def states(target: Target, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """[n, S, K, H] taps of all layers and [n, S, H] last, as the records hold them."""
    with Forward(target, ALL_LAYERS, RECORD, len(ids) * row_stride(ids.shape[1]), CPU) as forward:
        records = forward(ids, lengths).clone()
        assert not forward.void.any()
    return field_tensor(records, RECORD.field("taps")), field_tensor(records, RECORD.field("last"))


def difference(one: Tensor, two: Tensor) -> float:
    """The largest relative difference of any token's state."""
    return float(((one.float() - two.float()).norm(dim=-1) / two.float().norm(dim=-1)).max())


@by_family
@torch.no_grad()
def test_states_are_transformers_own_bit_for_bit(load: Any, family: str) -> None:
    target = load(family)
    ids, lengths = padded((40, 64, 9), 64)
    taps, last = states(target, ids, lengths)
    output = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    assert len(output.hidden_states) == LAYERS + 1
    for row, length in enumerate(lengths.tolist()):
        for layer in range(LAYERS - 1):
            assert torch.equal(taps[row, :length, layer], output.hidden_states[layer + 1][row, :length])
        assert torch.equal(last[row, :length], output.hidden_states[-1][row, :length])
        before_norm = taps[row, :length, -1]
        assert torch.equal(target.decoder.norm(before_norm), last[row, :length])
        assert difference(before_norm, last[row, :length]) > 10 * NOISE


@by_family
@torch.no_grad()
def test_head_of_last_gives_the_targets_logits(load: Any, family: str) -> None:
    target = load(family)
    ids, lengths = padded((64, 30), 64)
    _, last = states(target, ids, lengths)
    wanted = target.model(input_ids=ids, use_cache=False).logits.float()
    logits = apply_ends(functional.linear(last, target.head).float(), target.ends)
    for row, length in enumerate(lengths.tolist()):
        best = wanted[row, :length].gather(-1, logits[row, :length].argmax(-1, keepdim=True))[:, 0]
        assert torch.equal(best, wanted[row, :length].amax(-1))  # the same token, or one that ties in bfloat16
        assert difference(logits[row, :length], wanted[row, :length]) < NOISE


@by_family
@pytest.mark.parametrize("other", ["in a batch", "in another bucket", "beside other padding"])
def test_what_pads_a_sample_is_not_seen(load: Any, family: str, other: str) -> None:
    target = load(family, "float32")
    alone = states(target, *padded((50,), 50))
    lengths = (50,) if other == "in another bucket" else (50, 64, 3)
    ceiling, fill = 192 if other == "in another bucket" else 64, 7 if other == "beside other padding" else 0
    there = states(target, *padded(lengths, ceiling, fill))
    for one, two in zip(alone, there, strict=True):
        assert difference(two[0, :50], one[0, :50]) < NOISE


@by_family
@torch.no_grad()
def test_an_attention_mask_would_change_nothing(load: Any, family: str) -> None:
    target = load(family, "float32")
    ids, lengths = padded((40, 64, 9), 64)
    mask = (torch.arange(64) < lengths[:, None]).long()
    without = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
    masked = target.decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    for row, length in enumerate(lengths.tolist()):
        assert difference(masked[row, :length], without[row, :length]) < 1e-3


@by_family
def test_the_ends_are_measured(load: Any, family: str) -> None:
    expected, ends = FAMILIES[family], load(family).ends
    assert ends.embedding_scale == pytest.approx(expected.embedding_scale, rel=1e-3)
    assert ends.logit_scale == pytest.approx(expected.logit_scale, rel=1e-3)
    assert ends.logit_softcap == expected.logit_softcap
    if expected.embedding_scale == 1.0:
        assert ends.embedding_scale == 1.0  # exactly: training compares with that


@by_family
def test_the_configuration_says_who_the_target_is(folder: Any, load: Any, family: str) -> None:
    identity, target = identify(folder(family), byte_tokenizer()), load(family)
    assert (identity.hidden_size, identity.vocab_size, identity.num_layers) == (HIDDEN, VOCABULARY, LAYERS)
    assert (identity.num_heads, identity.num_kv_heads) == (4, 2)
    assert identity.dtype == str(target.head.dtype).removeprefix("torch.") == "bfloat16"
    assert identity.tied_head == FAMILIES[family].tied == (target.head.data_ptr() == target.embedding.data_ptr())
    assert identity.rope_theta >= 10_000
    assert identity.intermediate_size == 64
    assert identity.quantization is None


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_a_vision_tower_never_runs(load: Any, family: str) -> None:
    target = load(family)
    towers = [module for name, module in target.model.named_modules() if name.endswith("vision_tower")]
    assert towers

    def refuse(*_: object) -> None:
        raise AssertionError("the vision tower ran")

    hooks = [tower.register_forward_pre_hook(refuse) for tower in towers]
    states(target, *padded((20,), 64))
    for hook in hooks:
        hook.remove()


def test_a_vision_tower_is_not_loaded_where_transformers_can_leave_it_out(folder: Any, load: Any) -> None:
    assert any("visual" in name for name in load_file(folder("qwen3.5") / "model.safetensors"))
    assert not any("visual" in name for name, _ in load("qwen3.5").model.named_parameters())


def rewritten(folder: Path, to: Path, top: bool | None, nested: bool | None, *, head: bool) -> Path:
    """A copy of a Qwen3.5 target whose two configurations say so of a tied head, with or without a head in the file."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    for holder, value in ((config, top), (config["text_config"], nested)):
        holder.pop("tie_word_embeddings", None)
        if value is not None:
            holder["tie_word_embeddings"] = value
    (to / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    if not head:
        del weights["lm_head.weight"]
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(("top", "nested"), [(True, True), (True, None), (True, False), (None, True), (False, True)])
def test_a_head_is_tied_if_either_configuration_says_so(
    tmp_path: Path, folder: Any, top: bool | None, nested: bool | None
) -> None:
    tied = rewritten(folder("qwen3.5"), tmp_path / "tied", top, nested, head=False)
    target = load_target(tied, CPU)
    assert target.head.data_ptr() == target.embedding.data_ptr()
    assert identify(tied, byte_tokenizer()).tied_head


@pytest.mark.parametrize(("top", "nested"), [(False, False), (None, None), (False, None), (None, False)])
def test_a_missing_head_is_refused_if_none_says_tied(
    tmp_path: Path, folder: Any, top: bool | None, nested: bool | None
) -> None:
    with pytest.raises(TargetError, match="lacks the weights"):
        load_target(rewritten(folder("qwen3.5"), tmp_path / "untied", top, nested, head=False), CPU)


def test_a_head_of_its_own_beside_a_nested_tied_flag_is_refused(tmp_path: Path, folder: Any) -> None:
    with pytest.raises(TargetError, match="tie_word_embeddings"):
        load_target(rewritten(folder("qwen3.5"), tmp_path / "both", False, True, head=True), CPU)


def test_logits_that_need_another_step_are_refused(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    real = LlamaForCausalLM.forward

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = real(self, *args, **kwargs)
        output.logits = output.logits + torch.arange(VOCABULARY)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    with pytest.raises(TargetError, match="logits are not head"):
        load_target(folder("llama"), CPU)


def test_a_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64)
    PhiForCausalLM(config).save_pretrained(tmp_path / "phi")
    with pytest.raises(TargetError, match="bias"):
        load_target(tmp_path / "phi", CPU)
