"""The speculators package loads what `export --format speculators` writes, and computes the trainer's logits."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from draftcache.benchmarks.quality_peer import import_dflash, installed
from draftcache.common.store import Store, open_store
from draftcache.common.target import load_parts
from draftcache.tests.helpers import taps_of
from draftcache.train.checkpoint import load_drafter
from draftcache.train.model.anchors import lay_out_blocks
from draftcache.train.run import train
from draftcache.train.serving import parity
from draftcache.train.serving.export import ExportConfig, export
from draftcache.train.serving.parity import slot_logits
from draftcache.train.serving.released import load_released
from draftcache.train.settings import GeometryOptions, TrainConfig

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    geometry = GeometryOptions(num_layers=2, block_size=4)
    train(TrainConfig(store=store.path, out=out, geometry=geometry, token_budget=256, steps=4, device="cpu"))
    return out


@pytest.fixture
def folder(tmp_path: Path, run_folder: Path) -> Path:
    return export(ExportConfig(checkpoint=run_folder, out=tmp_path / "x", layout="speculators")).folder


def test_the_configuration_says_what_the_format_asks_for(folder: Path, run_folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    run, _ = load_drafter(run_folder, CPU)
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [i + 1 for i in run.drafter.layer_ids]
    assert config["speculators_config"]["verifier"]["name_or_path"] == run.target.name
    assert config["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert config["sliding_window_non_causal"] is True  # or vLLM would run the full layers causally
    assert config["sample_from_anchor"] is False


def test_this_project_reads_it_back(folder: Path, run_folder: Path) -> None:
    run, trained = load_drafter(run_folder, CPU)
    drafter = load_released(folder, CPU)
    assert drafter.config.layer_ids == run.drafter.layer_ids
    assert drafter.config.rope_theta == run.drafter.rope_theta
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name].to(torch.bfloat16).float())


@pytest.mark.skipif(not installed(), reason="the speculators package is not installed")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("layout", ["speculators", "zlab"])
def test_the_package_itself_computes_the_trainers_logits(
    tmp_path: Path,
    run_folder: Path,
    store: Store,
    target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,  # the released layout goes through the package's own converter
) -> None:
    core, configs = import_dflash()
    monkeypatch.chdir(target_folder.parent)  # where the verifier's name leads to its folder
    folder = export(ExportConfig(checkpoint=run_folder, out=tmp_path / layout, layout=layout)).folder
    if layout == "zlab":
        converters = importlib.import_module("speculators.convert.dflash.converter")
        converters.DFlashConverter().convert(folder, tmp_path / "converted", target_folder.name, validate=False)
        folder = tmp_path / "converted"
    config = configs.DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = core.DFlashDraftModel.from_pretrained(folder, config=config).float().eval()
    assert not any(bool(tensor.isnan().any()) for tensor in model.state_dict().values())
    run, trained = load_drafter(run_folder, CPU)
    parts = load_parts(store.path, store.manifest, CPU)
    compared = 0
    for batch in parity._single_samples(open_store(store.path), seed=1, count=3):
        taps = taps_of(batch, store.manifest.record)
        with torch.inference_mode():
            _, logits, _, mask, rows = model._backbone_forward(
                taps[None],
                batch.input_ids[None],
                batch.loss_mask[None].long(),
                torch.zeros(1, batch.tokens, taps.shape[1] // len(run.drafter.layer_ids)),
                batch.documents[None].long(),
                batch.positions[None].long(),
                max_anchors=6,
            )
        anchors = rows[::4]
        keep = mask.view(6, 4).any(-1)
        blocks = lay_out_blocks(batch, anchors, keep, 4, run.drafter.mask_token_id)
        wanted = slot_logits(trained, parts, taps, batch, blocks)[keep]
        found = logits.view(6, 4, -1)[keep]
        assert (found - wanted).std() < 0.02 * wanted.std()
        compared += int(keep.sum())
    assert compared > 6
