"""The exported folder: names, keys, bytes, and that an independent reader computes the trainer's logits from it."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from draftcache.common.errors import CheckpointError, MismatchError, UsageError
from draftcache.common.store import Store, open_store
from draftcache.common.target import load_parts
from draftcache.tests.commands import run
from draftcache.tests.helpers import taps_of
from draftcache.tests.reader import block_logits, engine_causality, read_folder
from draftcache.tests.runs import metrics, small_run
from draftcache.train.checkpoint import (
    best_checkpoint,
    checkpoints,
    load_drafter,
    newest_checkpoint,
    read_progress,
    write_checkpoint,
)
from draftcache.train.model.anchors import draw_anchors, lay_out_blocks
from draftcache.train.model.drafter import FULL, SLIDING, Drafter, DrafterConfig
from draftcache.train.run import train
from draftcache.train.serving import parity
from draftcache.train.serving.export import ExportConfig, export
from draftcache.train.serving.parity import slot_logits
from draftcache.train.serving.released import (
    check_servable,
    load_released,
    read_released_config,
    tensor_shapes,
)
from draftcache.train.settings import GeometryOptions, TrainConfig

CPU = torch.device("cpu")
KINDS = {"full": "full,full", "sliding": "sliding,sliding", "mixed": "sliding,full"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: Store) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, layer_types in KINDS.items():
        geometry = GeometryOptions(num_layers=2, block_size=4, layer_types=layer_types, sliding_window=12)
        train(
            TrainConfig(store=store.path, out=folder / name, geometry=geometry, token_budget=256, steps=4, device="cpu")
        )
    return {name: folder / name for name in KINDS}


def exported(runs: dict[str, Path], kind: str, out: Path, store: Path | None = None) -> Path:
    return export(ExportConfig(checkpoint=runs[kind], out=out, store=store)).folder


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_independent_reader_computes_the_trainers_logits(
    tmp_path: Path, runs: dict[str, Path], store: Store, kind: str
) -> None:
    folder = read_folder(exported(runs, kind, tmp_path / "x"))
    run_, trained = load_drafter(runs[kind], CPU)
    parts = load_parts(store.path, store.manifest, CPU)
    for batch in parity._single_samples(open_store(store.path), seed=1, count=3):
        anchors, keep = draw_anchors(batch, 0, 5)
        blocks = lay_out_blocks(batch, anchors, keep, 4, run_.drafter.mask_token_id)
        taps = taps_of(batch, store.manifest.record)
        wanted = slot_logits(trained, parts, taps, batch, blocks)
        for i in keep.nonzero().flatten().tolist():
            a = int(anchors[i])
            found = block_logits(folder, taps[:a], int(batch.input_ids[a]), parts.embedding.float(), parts.head.float())
            assert (found - wanted[i]).std() < 0.02 * wanted[i].std()


def test_the_reader_notices_every_number_of_the_configuration(
    tmp_path: Path, runs: dict[str, Path], store: Store
) -> None:
    folder = read_folder(exported(runs, "mixed", tmp_path / "x"))
    parts = load_parts(store.path, store.manifest, CPU)
    (batch,) = parity._single_samples(open_store(store.path), seed=1, count=1)
    taps = taps_of(batch, store.manifest.record)[:40]

    def logits(**changes: Any) -> torch.Tensor:
        changed = dataclasses.replace(folder, config=folder.config | changes)
        return block_logits(changed, taps, 65, parts.embedding.float(), parts.head.float())

    usual = logits()
    theta = {"rope_theta": 100.0, "rope_parameters": {"rope_theta": 100.0}}
    masked = folder.config["dflash_config"] | {"mask_token_id": 7}
    for changes in ({"sliding_window": 6}, theta, {"is_causal": True}, {"is_causal": False}, {"dflash_config": masked}):
        assert (logits(**changes) - usual).std() > 0.001 * usual.std(), changes


@pytest.mark.parametrize("kind", KINDS)
def test_names_shapes_and_dtype_are_the_released_ones(tmp_path: Path, runs: dict[str, Path], kind: str) -> None:
    folder = exported(runs, kind, tmp_path / "x")
    weights = load_file(folder / "model.safetensors")
    config = read_released_config(folder)
    assert {name: tuple(w.shape) for name, w in weights.items()} == tensor_shapes(config)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert len({p.stat().st_mode for p in folder.iterdir()}) == 1
    assert len(weights) == 2 * 11 + 3
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "config.json",
        "draftcache.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_the_table_of_tensors_is_the_drafters_own(bias: bool) -> None:
    config = dataclasses.replace(geometry(), attention_bias=bias)
    assert {name: tuple(w.shape) for name, w in Drafter(config).state_dict().items()} == tensor_shapes(config)


def geometry(**changes: Any) -> DrafterConfig:
    usual = DrafterConfig(
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        layer_types=(SLIDING, FULL),
        sliding_window=9,
        sliding_causal=True,
        block_size=6,
        layer_ids=(1, 3, 5),
        mask_token_id=319,
        vocab_size=320,
        rope_theta=1e7,
        rms_norm_eps=1e-5,
        attention_bias=False,
    )
    return dataclasses.replace(usual, **changes)


def test_the_parameter_count_of_a_released_drafter() -> None:
    qwen3_8b = geometry(
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        layer_types=(FULL,) * 5,
        layer_ids=(1, 9, 17, 25, 33),
    )
    shapes = tensor_shapes(qwen3_8b)
    assert len(shapes) == 58
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 1_048_626_432


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_and_sglang_run_every_layer_as_it_was_trained(tmp_path: Path, runs: dict[str, Path], kind: str) -> None:
    config = config_of(exported(runs, kind, tmp_path / "x"))
    trained = load_drafter(runs[kind], CPU)[0].drafter
    for i, layer_type in enumerate(config["layer_types"]):
        rule = trained.rule(layer_type)
        assert engine_causality(config, i) == rule.causal
        assert rule.causal == (layer_type == "sliding_attention")  # SGLang goes by the type alone
        assert rule.window == (config["sliding_window"] if layer_type == "sliding_attention" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_keeps_what_the_configuration_says(tmp_path: Path, runs: dict[str, Path], kind: str) -> None:
    folder = exported(runs, kind, tmp_path / "x")
    config, read = config_of(folder), Qwen3Config.from_pretrained(folder)
    for name in (
        "layer_types",
        "sliding_window",
        "head_dim",
        "rms_norm_eps",
        "block_size",
        "dflash_config",
        "is_causal",
    ):
        assert getattr(read, name) == config[name], name
    assert isinstance(read.rope_parameters, dict)
    assert read.rope_parameters["rope_theta"] == config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert read.rope_parameters["rope_type"] == "default"
    assert read.dtype == torch.bfloat16


def test_exporting_twice_gives_equal_bytes(tmp_path: Path, runs: dict[str, Path], store: Store) -> None:
    a, b = (exported(runs, "mixed", tmp_path / name, store.path) for name in ("a", "b"))
    for path in a.iterdir():
        assert path.read_bytes() == (b / path.name).read_bytes(), path.name


def test_the_command_exports_and_proves(
    tmp_path: Path, runs: dict[str, Path], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "measured.json"
    sets = [{"drafter": "run", "name": "questions.jsonl", "prompts": 12, "accepted_length": 2.3456}]
    measured.write_text(json.dumps({"sets": sets}))
    out = tmp_path / "x"
    args = ("--checkpoint", runs["mixed"], "--out", out, "--store", store.path, "--measured", measured)
    outcome = run(capsys, "export", *args)
    assert outcome.code == 0, outcome.err
    assert "25 tensors" in outcome.out
    assert "4 stored samples" in outcome.out
    card = (out / "README.md").read_text()
    for words in ("vllm serve", "VLLM_USE_V2_MODEL_RUNNER=1", "DFLASH", 'num_speculative_tokens": 3', "2.346"):
        assert words in card
    rows = [json.loads(line) for line in (runs["mixed"] / "metrics.jsonl").read_text().splitlines()]
    assert f"In training: {rows[-1]['accepted_length']:.3f} on training samples" in card
    target = store.manifest.target
    for fact in (target.weights_digest, target.template_digest, store.manifest.data[0].digest, "1, 3, 5"):
        assert fact in card
    again = run(capsys, "export", *args)
    assert again.code == 2
    assert "exists" in again.message


def test_the_best_checkpoint_is_taken_unless_one_is_named(tmp_path: Path, store: Store) -> None:
    run_ = tmp_path / "run"
    train(small_run(store, run_, steps=6, save_every=1, keep=6, share=0.3, validate_every=2))
    best = best_checkpoint(run_)
    held_out = {row["step"]: row["accepted_length"] for row in metrics(run_, "validation.jsonl")}
    assert held_out[int(best.name[-8:])] == max(held_out.values())
    other = next(path for path in checkpoints(run_) if path != best)
    for given, taken in ((run_, best), (other, other)):
        out = export(ExportConfig(checkpoint=given, out=tmp_path / taken.name)).folder
        assert json.loads((out / "draftcache.json").read_text())["checkpoint"] == taken.name
        wanted = load_file(taken / "drafter.safetensors")
        for name, tensor in load_file(out / "model.safetensors").items():
            assert torch.equal(tensor, wanted[name].to(torch.bfloat16)), name
    assert f"{max(held_out.values()):.3f} on held-out samples" in (tmp_path / best.name / "README.md").read_text()


def test_what_cannot_be_served_is_refused(runs: dict[str, Path]) -> None:
    target = load_drafter(runs["full"], CPU)[0].target
    for config, layout, word in [
        (geometry(sliding_causal=False), "zlab", "SGLang"),
        (geometry(), "speculators", "--format zlab"),
        (geometry(layer_ids=(1, 8)), "zlab", "0..7"),
    ]:
        with pytest.raises(UsageError) as error:
            check_servable(config, target, layout)
        assert word in str(error.value)
    check_servable(geometry(layer_types=(FULL, FULL), sliding_causal=False), target, "speculators")


def test_nothing_is_left_of_a_refused_export(tmp_path: Path, runs: dict[str, Path]) -> None:
    with pytest.raises(UsageError):
        export(ExportConfig(checkpoint=runs["mixed"], out=tmp_path / "x", layout="speculators"))
    broken = tmp_path / "broken"
    shutil.copytree(runs["full"], broken)
    checkpoint = newest_checkpoint(broken)
    weights = load_file(checkpoint / "drafter.safetensors")
    weights["fc.weight"][0, 0] = 3.4e38  # finite as float32, not as bfloat16
    write_checkpoint(broken, read_progress(checkpoint), {"drafter.safetensors": weights})
    with pytest.raises(CheckpointError, match="not finite"):
        export(ExportConfig(checkpoint=broken, out=tmp_path / "x"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken"]


def test_another_store_is_refused(tmp_path: Path, runs: dict[str, Path], store: Store) -> None:
    other = json.loads((runs["full"] / "run.json").read_text()) | {"store_identity": "0" * 64}
    shutil.copytree(runs["full"], tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps(other))
    checkpoint = newest_checkpoint(tmp_path / "run")
    weights = load_file(checkpoint / "drafter.safetensors")
    write_checkpoint(tmp_path / "run", read_progress(checkpoint), {"drafter.safetensors": weights})
    with pytest.raises(MismatchError):
        export(ExportConfig(checkpoint=tmp_path / "run", out=tmp_path / "x", store=store.path))
    assert not (tmp_path / "x").exists()


def test_logits_that_differ_stop_the_export(
    tmp_path: Path, runs: dict[str, Path], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(folder: Path, device: torch.device) -> Drafter:
        drafter = load_released(folder, device)
        with torch.no_grad():
            drafter.fc.weight.copy_(drafter.fc.weight.roll(32, 1))  # the taps in another order
        return drafter

    monkeypatch.setattr("draftcache.train.serving.export.load_released", damaged)
    with pytest.raises(CheckpointError, match="off the trainer's"):
        exported(runs, "full", tmp_path / "x", store.path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 8},
        {"rope_theta": 5.0},
        {"layer_types": ["full_attention"]},
        {"is_causal": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        {"hidden_size": None},
        {"dflash_config": None},
    ],
)
def test_a_configuration_that_means_something_else_is_refused(
    tmp_path: Path, runs: dict[str, Path], changes: dict[str, Any]
) -> None:
    folder = exported(runs, "full", tmp_path / "x")
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))
    with pytest.raises(CheckpointError, match=r"config\.json|tensors"):
        load_released(folder, CPU)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, runs: dict[str, Path], change: str) -> None:
    folder = exported(runs, "full", tmp_path / "x")
    weights = load_file(folder / "model.safetensors")
    moved = weights.pop("layers.1.mlp.up_proj.weight")
    if change == "unknown":
        weights |= {"layers.1.mlp.up_proj.weight": moved, "module.fc.weight": moved.clone()}
    elif change == "shape":
        weights["layers.1.mlp.up_proj.weight"] = moved[:-1].contiguous()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensors are missing"):
        load_released(folder, CPU)


def test_a_prefix_and_borrowed_tensors_are_understood(tmp_path: Path, runs: dict[str, Path]) -> None:
    folder = exported(runs, "full", tmp_path / "x")
    plain = load_released(folder, CPU).state_dict()
    weights = {f"model.{name}": w for name, w in load_file(folder / "model.safetensors").items()}
    save_file(weights | {"lm_head.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    (folder / "draftcache.json").unlink()  # another tool wrote it
    assert all(torch.equal(w, plain[name]) for name, w in load_released(folder, CPU).state_dict().items())
