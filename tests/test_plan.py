"""The plan of an extraction: what is dropped, cut and reported, and what is refused before anything is written."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftcache.common.errors import DataError, DraftcacheError, TargetError, UsageError
from draftcache.common.store import Store
from draftcache.extract.plan import ExtractConfig, make_plan
from draftcache.extract.run import extract
from draftcache.tests.stores import (
    LAYERS,
    messages,
    tiny_config,
    write_jsonl,
)

GOOD = {"messages": messages("hi", "yo man")}


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


def test_samples_end_where_the_targets_positions_end(tmp_path: Path, target_folder: Path) -> None:
    target, data = tmp_path / "target", write_jsonl(tmp_path / "data.jsonl", [ids_line(100, range(5, 100))])
    shutil.copytree(target_folder, target)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 70}))
    config = tiny_config(tmp_path / "store", target=target, data=[data])
    plan = make_plan(config)
    assert (plan.manifest.settings.max_length, plan.manifest.report.truncated) == (70, 1)
    with pytest.raises(UsageError, match="--max-length 71; needed: at most the target's 70 positions"):
        make_plan(dataclasses.replace(config, max_length=71))


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
