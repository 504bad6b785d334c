"""What users get wrong: one line that says found, needed and do, exit code 2, and nothing half-written."""

import json
import shutil
from pathlib import Path

import click
import pytest

from draftcache.cli import cli
from draftcache.common.store import Store
from draftcache.tests.commands import Outcome, run
from draftcache.tests.stores import messages, tiny_data, write_jsonl

Capture = pytest.CaptureFixture[str]


def refused(outcome: Outcome, *words: str) -> None:
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    for word in ("; needed: ", "; do: ", *words):
        assert word in outcome.message, outcome.message


def extract(capsys: Capture, target: Path, data: Path, store: Path, *extra: object) -> Outcome:
    return run(capsys, "extract", "--target", target, "--data", data, "--store", store, "--device", "cpu", *extra)


def train(capsys: Capture, store: Path, out: Path, *extra: object) -> Outcome:
    small = ("--device", "cpu", "--steps", 1, "--num-layers", 1, "--block-size", 4, "--token-budget", 256)
    return run(capsys, "train", "--store", store, "--out", out, *small, *extra)


def _calling(arguments: str) -> dict[str, object]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


GOOD_LINE = json.dumps({"messages": messages("hi", "hello there")})
BAD_DATA = {
    "broken JSON": (GOOD_LINE + '\n{"messages": [', "data.jsonl:2"),
    "unknown role": (GOOD_LINE + '\n{"messages": [{"role": "robot", "content": "x"}]}', "data.jsonl:2"),
    "no content": ('{"messages": [{"role": "user", "content": null}]}', "data.jsonl:1"),
    "no lines": ("", "no sample is left"),
    "nothing supervised": (json.dumps({"messages": messages("only a question")}), "no_supervised_tokens"),
    "ids outside the embedding": ('{"input_ids": [1, 320, 3], "loss_mask": [0, 1, 1]}', "0..319"),
    "a tool that is no schema": (
        '{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": "f"}]}',
        "'f'",
    ),
    "arguments nested too deeply": (
        json.dumps({"messages": [*messages("hi"), _calling("[" * 100_000)]}),
        "arguments in JSON",
    ),
    "tools nested too deeply": (json.dumps({"messages": messages("hi"), "tools": "[" * 100_000}), "JSON schemas"),
    "mask of another length": ('{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}', "data.jsonl:1"),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_data_is_refused_by_line_and_nothing_is_written(
    capsys: Capture, tmp_path: Path, target_folder: Path, kind: str
) -> None:
    text, where = BAD_DATA[kind]
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    refused(extract(capsys, target_folder, data, tmp_path / "store"), where)
    assert not (tmp_path / "store").exists()


def test_missing_data_file_is_refused(capsys: Capture, tmp_path: Path, target_folder: Path) -> None:
    refused(extract(capsys, target_folder, tmp_path / "none.jsonl", tmp_path / "store"), "none.jsonl", "No such file")
    assert not (tmp_path / "store").exists()


def test_target_without_weights_is_refused_before_the_data_is_read(
    capsys: Capture, tmp_path: Path, target_folder: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(target_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    refused(extract(capsys, bare, tmp_path / "none.jsonl", tmp_path / "store"), "no weights")


def test_target_folder_that_is_none_is_refused(capsys: Capture, tmp_path: Path) -> None:
    refused(extract(capsys, tmp_path / "none", tmp_path / "d", tmp_path / "store"), "config.json")


BAD_TARGETS: dict[str, tuple[str, bytes]] = {
    "weights cut": ("model.safetensors", b"\x90\x00\x00"),
    "weights of noise": ("model.safetensors", b"\xff" * 5000),
    "configuration nested too deeply": ("config.json", b"[" * 100_000),
    "configuration of another kind": ("config.json", b'{"model_type": "qwen3", "hidden_size": "wide"}'),
    "no width": ("config.json", b'{"model_type": "qwen3", "hidden_size": 0}'),
    "tokenizer nested too deeply": ("tokenizer.json", b"[" * 100_000),
    "generation settings cut": ("generation_config.json", b'{"eos_'),
    "generation settings of another kind": ("generation_config.json", b"[]"),
    "special tokens by name": ("generation_config.json", b'{"eos_token_id": "<|im_end|>"}'),
}


@pytest.mark.parametrize("kind", BAD_TARGETS)
def test_damaged_targets_are_refused(capsys: Capture, tmp_path: Path, target_folder: Path, kind: str) -> None:
    name, content = BAD_TARGETS[kind]
    target = tmp_path / "target"
    shutil.copytree(target_folder, target)
    (target / name).write_bytes(content)
    data = tiny_data(tmp_path / "data.jsonl", count=2)
    refused(extract(capsys, target, data, tmp_path / "store", "--buckets", 192), str(target))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("layers", ["8", "-1", "3,3"])
def test_layer_ids_that_are_no_layers_are_refused(
    capsys: Capture, tmp_path: Path, target_folder: Path, layers: str
) -> None:
    data = tiny_data(tmp_path / "data.jsonl", count=2)
    refused(extract(capsys, target_folder, data, tmp_path / "store", f"--layers={layers}"), "0..7")


def test_words_where_numbers_belong_are_a_usage_error(capsys: Capture, tmp_path: Path, target_folder: Path) -> None:
    outcome = extract(capsys, target_folder, tmp_path / "d", tmp_path / "store", "--layers", "a")
    assert outcome.code == 2
    assert "integers separated by commas" in outcome.err


@pytest.mark.parametrize(
    "flags",
    [
        ("--buckets", "128,64"),
        ("--buckets", "64,99999999999999"),
        ("--chat-template-kwargs", '{"add_generation_prompt": false}'),
        ("--chat-template-kwargs", "[" * 100_000),
        ("--max-length", 9000),
        ("--min-supervised", 1),
        ("--token-budget", 0),
    ],
)
def test_extract_settings_that_cannot_work_are_refused(
    capsys: Capture, tmp_path: Path, target_folder: Path, flags: tuple[object, ...]
) -> None:
    refused(extract(capsys, target_folder, tmp_path / "d", tmp_path / "store", *flags))


def test_an_existing_store_is_kept_unless_overwritten(
    capsys: Capture, tmp_path: Path, target_folder: Path, store: Store
) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store.path, copy)
    before = (copy / "manifest.json").read_bytes()
    data = tiny_data(tmp_path / "data.jsonl", count=2)
    refused(extract(capsys, target_folder, data, copy), "exists", "--overwrite")
    assert (copy / "manifest.json").read_bytes() == before
    assert extract(capsys, target_folder, data, copy, "--buckets", "192", "--overwrite").code == 0
    assert (copy / "manifest.json").read_bytes() != before


@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_a_folder_or_file_that_is_no_store_is_left_alone(
    capsys: Capture, tmp_path: Path, target_folder: Path, flag: str
) -> None:
    data = tiny_data(tmp_path / "data.jsonl", count=2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "letter.txt").write_text("dear")
    refused(extract(capsys, target_folder, data, tmp_path / "folder", flag), "is no store")
    refused(extract(capsys, target_folder, data, tmp_path / "folder" / "letter.txt", flag), "is no store")
    assert (tmp_path / "folder" / "letter.txt").read_text() == "dear"


def test_a_device_that_is_not_there_is_refused(
    capsys: Capture, tmp_path: Path, target_folder: Path, store: Store
) -> None:
    data = tiny_data(tmp_path / "data.jsonl", count=2)
    refused(extract(capsys, target_folder, data, tmp_path / "store", "--device", "nonsense"), "nonsense")
    refused(train(capsys, store.path, tmp_path / "run", "--device", "nonsense"), "nonsense")
    assert not (tmp_path / "store").exists()
    assert not (tmp_path / "run").exists()


def test_training_on_no_store_is_refused(capsys: Capture, tmp_path: Path) -> None:
    refused(train(capsys, tmp_path, tmp_path / "run"), "manifest.json")


def test_teacher_that_the_store_does_not_hold_is_refused(capsys: Capture, tmp_path: Path, target_folder: Path) -> None:
    data = tiny_data(tmp_path / "data.jsonl", count=2)
    assert extract(capsys, target_folder, data, tmp_path / "store", "--teacher", "none", "--buckets", 192).code == 0
    refused(train(capsys, tmp_path / "store", tmp_path / "run", "--teacher", "last"), "'last'", "'none'")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("mask_id", "word"), [(320, "0..319"), (-1, "0..319"), (258, "special"), (97, "occurs")])
def test_mask_token_that_cannot_serve_is_refused(
    capsys: Capture, tmp_path: Path, store: Store, mask_id: int, word: str
) -> None:
    refused(train(capsys, store.path, tmp_path / "run", "--mask-token-id", mask_id), word)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--layer-types", "full,full"),
        ("--heads", 3),
        ("--block-size", 1),
        ("--gamma", -1),
        ("--lr", 0),
        ("--batching", "packed", "--rows", 2),
        ("--batching", "packed", "--token-budget", 128),
        ("--graph",),
        ("--anchors", 0),
    ],
)
def test_train_settings_that_cannot_work_are_refused(
    capsys: Capture, tmp_path: Path, store: Store, flags: tuple[object, ...]
) -> None:
    refused(train(capsys, store.path, tmp_path / "run", *flags))
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten(capsys: Capture, tmp_path: Path, store: Store) -> None:
    assert train(capsys, store.path, tmp_path / "run").code == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    refused(train(capsys, store.path, tmp_path / "run"), "holds a run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_evaluating_with_another_target_is_refused(
    capsys: Capture, tmp_path: Path, store: Store, target_folder: Path
) -> None:
    assert train(capsys, store.path, tmp_path / "run").code == 0
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"messages": messages("hi")}])
    outcome = run(
        capsys, "evaluate", "--checkpoint", tmp_path / "run", "--target", other, "--data", prompts, "--device", "cpu"
    )
    refused(outcome, "rms_norm_eps")


def test_stats_prints_tables_and_json(capsys: Capture, store: Store) -> None:
    assert "layer 3" in run(capsys, "stats", "--store", store.path).out
    figures = json.loads(run(capsys, "stats", "--store", store.path, "--json").out)
    assert sum(bucket["samples"] for bucket in figures["buckets"]) == store.manifest.report.kept


def test_command_line_surface() -> None:
    """Flags are a promise: a change here is a change for every user's scripts."""
    flags = {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in cli.commands.items()
    }
    assert isinstance(cli, click.Group)
    assert flags == json.loads((Path(__file__).parent / "golden" / "flags.json").read_text())
