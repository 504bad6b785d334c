"""What `evaluate`, `replay` and `export` refuse before they begin: prompts, numbers, places, changed weights."""

from pathlib import Path

import pytest
import torch

from draftcache.common.errors import CheckpointError
from draftcache.common.store import Store
from draftcache.tests.commands import run
from draftcache.tests.runs import small_run
from draftcache.tests.stores import flip_bit, messages, write_jsonl
from draftcache.train.run import train
from draftcache.train.serving.export import ExportConfig, export
from draftcache.train.serving.released import load_released
from draftcache.train.warm_start import released_options

Capture = pytest.CaptureFixture[str]
GOOD = {"messages": messages("hi")}


@pytest.fixture(scope="module")
def exported(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a drafter of one step."""
    folder = tmp_path_factory.mktemp("exported")
    train(small_run(store, folder / "run", steps=1))
    return export(ExportConfig(checkpoint=folder / "run", out=folder / "drafter")).folder


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"messages": messages("x" * 3000)}, "p.jsonl:2: a prompt of 3019 tokens; needed: at most 896"),
        ({"input_ids": [1, 320], "loss_mask": [0, 0]}, "p.jsonl:2: token id 320; needed: ids below the target's 320"),
        ({"messages": messages("\ud800")}, "p.jsonl:2: half of a surrogate pair"),
    ],
)
def test_a_prompt_that_the_target_cannot_read_is_refused(
    capsys: Capture, exported: Path, target_folder: Path, tmp_path: Path, record: object, found: str
) -> None:
    data = write_jsonl(tmp_path / "p.jsonl", [GOOD, record])
    refused = run(capsys, "evaluate", "--drafter", exported, "--target", target_folder, "--data", data)
    assert refused.code == 2
    assert found in refused.message


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temperature", "1e-300"),
        ("--temperature", "nan"),
        ("--temperature", 100),
        ("--seed", -1),
        ("--seed", 2**70),
        ("--limit", 0),
        ("--max-new-tokens", 1),
        ("--json", "/proc"),
        ("--json", "/no/such/folder/x.json"),
    ],
)
def test_a_number_or_place_that_cannot_work_is_refused_before_anything_is_decoded(
    capsys: Capture, exported: Path, target_folder: Path, tmp_path: Path, flag: str, value: object
) -> None:
    data = write_jsonl(tmp_path / "p.jsonl", [GOOD])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftcache.train.serving.evaluate.load_target", None)
        args = ("evaluate", "--drafter", exported, "--target", target_folder, "--data", data)
        refused = run(capsys, *args, flag, value)
    assert refused.code == 2
    assert refused.message.startswith(f"draftcache: {flag} ")


def test_exported_weights_that_changed_are_refused(exported: Path, store: Store, capsys: Capture) -> None:
    weights = exported / "model.safetensors"
    before = weights.read_bytes()
    try:
        flip_bit(weights, -5)
        with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since it was exported"):
            load_released(exported, torch.device("cpu"))
        assert released_options(exported)["num_layers"] == 1
        args = ("--store", store.path, "--out", exported.parent / "warm", "--init-from", exported, "--steps", 1)
        refused = run(capsys, "train", *args, "--token-budget", 256)
        assert "has changed since it was exported" in refused.message
        assert not (exported.parent / "warm").exists()
    finally:
        weights.write_bytes(before)
    assert load_released(exported, torch.device("cpu")).config.block_size == 4
