"""A run that begins with a released drafter: the weights are that one's, and whatever does not fit is refused."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftcache.common.errors import CheckpointError, MismatchError
from draftcache.common.store import Store
from draftcache.tests.commands import run
from draftcache.tests.runs import metrics
from draftcache.train.checkpoint import load_drafter, read_run
from draftcache.train.run import train
from draftcache.train.serving.export import ExportConfig, export
from draftcache.train.settings import GeometryOptions, TrainConfig, build_config


@pytest.fixture(scope="module")
def trained(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a drafter whose geometry is nobody's default."""
    geometry = GeometryOptions(
        num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=48, block_size=4,
        layer_types="sliding-last-full", sliding_window=24, mask_token_id=301,
    )  # fmt: skip
    out = tmp_path_factory.mktemp("warm") / "run"
    train(TrainConfig(store=store.path, out=out, geometry=geometry, token_budget=256, steps=30, device="cpu"))
    return out


@pytest.fixture(scope="module")
def released(trained: Path) -> Path:
    """The same drafter as it is released."""
    return export(ExportConfig(checkpoint=trained, out=trained.parent / "released")).folder


def given(store: Store, out: Path, released: Path, **more: object) -> dict[str, object]:
    """The flags of a run that begins with the released drafter."""
    small = {"token_budget": 256, "steps": 3, "device": "cpu", "lr": 1e-12}
    return {"store": store.path, "out": out, "init_from": released, **small, **more}


def test_a_run_begins_with_the_released_weights_and_geometry(
    store: Store, trained: Path, released: Path, tmp_path: Path
) -> None:
    train(build_config(given(store, tmp_path / "warm", released)))
    run, drafter = load_drafter(tmp_path / "warm", torch.device("cpu"))
    assert run.drafter == read_run(trained).drafter
    weights = load_file(released / "model.safetensors")
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(tensor, weights[name].float(), rtol=0, atol=1e-6)
    first, last = metrics(tmp_path / "warm")[0], metrics(trained)[-1]
    assert first["loss"] < 1.05 * last["loss"] < metrics(trained)[0]["loss"]


def test_the_block_size_may_be_another_one(store: Store, released: Path, tmp_path: Path) -> None:
    train(build_config(given(store, tmp_path / "warm", released, block_size=6)))
    assert read_run(tmp_path / "warm").drafter.block_size == 6


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"num_layers": 1, "layer_types": "full"}, "layer_types"),
        ({"intermediate_size": 64}, "intermediate_size: found 48, wanted 64"),
        ({"mask_token_id": 302}, "mask_token_id: found 301, wanted 302"),
        ({"sliding_window": 25}, "sliding_window"),
    ],
)
def test_a_drafter_of_another_geometry_is_refused(
    store: Store, released: Path, tmp_path: Path, flags: dict[str, object], word: str
) -> None:
    with pytest.raises(MismatchError, match=word):
        train(build_config(given(store, tmp_path / "warm", released, **flags)))
    assert not (tmp_path / "warm").exists()


def test_a_drafter_for_other_layers_is_refused(store: Store, released: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(released, copy)
    config = json.loads((copy / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 2, 4]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(MismatchError, match="layer_ids"):
        train(build_config(given(store, tmp_path / "warm", copy)))


def test_missing_unknown_and_damaged_tensors_are_refused(store: Store, released: Path, tmp_path: Path) -> None:
    weights = load_file(released / "model.safetensors")
    broken = {
        "fc.weight": {name: tensor for name, tensor in weights.items() if name != "fc.weight"},
        "layers.2.q": weights | {"layers.2.q": torch.zeros(1)},
        "norm.weight": weights | {"norm.weight": torch.ones(31)},
        "not finite": weights | {"norm.weight": torch.full((32,), math.nan)},
    }
    for word, tensors in broken.items():
        copy = tmp_path / word.replace(" ", "-")
        shutil.copytree(released, copy)
        save_file(tensors, copy / "model.safetensors")
        (copy / "draftcache.json").unlink()  # another tool wrote it
        with pytest.raises(CheckpointError, match=word):
            train(build_config(given(store, copy / "warm", copy)))


def test_a_warm_run_resumes_with_its_first_flags(
    store: Store, released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(released.parent)
    places = ("--store", store.path, "--out", tmp_path / "run")
    flags = (*places, "--init-from", "released", "--token-budget", 256, "--device", "cpu", "--steps", 1)
    assert run(capsys, "train", *flags).code == 0
    assert run(capsys, "train", *flags, "--resume").code == 0
    assert "init_from" in run(capsys, "train", "--resume", tmp_path / "run", "--init-from", tmp_path).message
    assert "config.json" in run(capsys, "train", *places, "--init-from", tmp_path).message
