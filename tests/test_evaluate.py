"""`evaluate` as a whole: several drafters and files, greedy and sampled, and whom it refuses."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftcache.common.errors import MismatchError, UsageError
from draftcache.common.store import Store
from draftcache.common.target import load_target
from draftcache.tests.commands import run
from draftcache.tests.decoding import CPU, GREEDY, PROMPT, tiny_runner
from draftcache.tests.stores import LAYER_IDS, messages, write_jsonl
from draftcache.train.run import train
from draftcache.train.serving.decode import Plain, TargetDecoder, speculate
from draftcache.train.serving.evaluate import TIE_ULPS, EvaluateConfig, _difference, evaluate
from draftcache.train.serving.export import ExportConfig, export
from draftcache.train.serving.prompts import read_prompts
from draftcache.train.serving.tally import Tally
from draftcache.train.serving.verify_block import Sampling
from draftcache.train.settings import GeometryOptions, TrainConfig


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    geometry = GeometryOptions(num_layers=2, block_size=5, layer_types="sliding,full", sliding_window=12)
    train(TrainConfig(store=store.path, out=out, geometry=geometry, token_budget=256, steps=3, device="cpu"))
    return out


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    tokens = {"input_ids": PROMPT, "loss_mask": [0, 0, 1, 1]}
    lines = [{"messages": messages("hi")}, {"messages": messages("what?", "never read")}, tokens]
    return write_jsonl(tmp_path / "prompts.jsonl", lines)


def test_speculative_text_is_the_targets_own(run_folder: Path, target_folder: Path, prompts: Path) -> None:
    (report,) = evaluate(
        EvaluateConfig(
            checkpoints=(run_folder,),
            target=target_folder,
            data=(prompts,),
            max_new_tokens=24,
            dtype="float32",
            device="cpu",
        )
    )
    assert (report.prompts, report.equal, report.differences) == (3, 3, ())
    assert report.blocks > 0
    assert report.accepted_length == pytest.approx(1 + sum(report.slot_rates))
    assert list(report.slot_rates) == sorted(report.slot_rates, reverse=True)
    assert sum(span.blocks for span in report.spans) == report.blocks
    assert report.along_path == pytest.approx(report.accepted_length, rel=0.1)  # the last block may be cut off


def test_in_bfloat16_texts_part_at_ties_only(run_folder: Path, target_folder: Path, tmp_path: Path) -> None:
    lines = [{"input_ids": [40 + 7 * i, 10, 65 + i], "loss_mask": [0, 0, 1]} for i in range(12)]
    data = write_jsonl(tmp_path / "many.jsonl", lines)
    (report,) = evaluate(
        EvaluateConfig(
            checkpoints=(run_folder,),
            target=target_folder,
            data=(data,),
            max_new_tokens=32,
            dtype="bfloat16",
            device="cpu",
        )
    )
    assert report.unexplained == 0
    assert (report.equal or 0) + len(report.differences) == report.prompts == 12
    assert all(0 <= d.gap <= TIE_ULPS * 2**-7 for d in report.differences)


def test_sampling_is_repeatable_and_compares_no_texts(run_folder: Path, target_folder: Path, prompts: Path) -> None:
    config = EvaluateConfig(
        checkpoints=(run_folder,),
        target=target_folder,
        data=(prompts,),
        max_new_tokens=12,
        sampling=Sampling(temperature=1.0, seed=4),
        dtype="float32",
        device="cpu",
    )
    a, b = (evaluate(config)[0] for _ in range(2))
    assert a.equal is None
    assert a.any_anchor is None
    assert (a.tokens, a.blocks, a.slot_rates) == (b.tokens, b.blocks, b.slot_rates)


def test_several_drafters_and_files_in_one_table(
    tmp_path: Path, run_folder: Path, target_folder: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = export(ExportConfig(checkpoint=run_folder, out=tmp_path / "exported")).folder
    more = write_jsonl(tmp_path / "more.jsonl", [{"messages": messages("and now?")}])
    args: list[object] = ["--checkpoint", run_folder, "--drafter", exported, "--target", target_folder]
    args += ["--data", prompts, "--data", more, "--max-new-tokens", 8, "--dtype", "float32", "--device", "cpu"]
    outcome = run(capsys, "evaluate", *args, "--json", tmp_path / "all.json")
    assert outcome.code == 0, outcome.err
    figures = json.loads((tmp_path / "all.json").read_text())
    found = [(s["drafter"], s["name"], s["prompts"]) for s in figures["sets"]]
    a, b = str(run_folder), str(exported)
    assert found == [(a, "prompts.jsonl", 3), (b, "prompts.jsonl", 3), (a, "more.jsonl", 1), (b, "more.jsonl", 1)]
    assert all(s["equal"] == s["prompts"] for s in figures["sets"])
    assert figures["settings"]["max_new_tokens"] == 8
    card = export(ExportConfig(checkpoint=run_folder, out=tmp_path / "again", measured=tmp_path / "all.json")).folder
    assert "more.jsonl" in (card / "README.md").read_text()


def test_evaluating_nothing_is_refused(
    target_folder: Path, prompts: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = ("evaluate", "--target", target_folder, "--data", prompts, "--device", "cpu")
    assert "--checkpoint or --drafter" in run(capsys, *args).message
    outcome = run(capsys, *args, "--drafter", tmp_path)
    assert outcome.code == 2
    assert "config.json" in outcome.message


def test_prompts_are_rendered_as_in_extraction(
    tmp_path: Path, run_folder: Path, target_folder: Path, tokenizer: Any
) -> None:
    data = write_jsonl(tmp_path / "p.jsonl", [{"messages": messages("hi", "ho"), "tools": [{"name": "look"}]}])
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ tools[0]['name'] }} {{ mood }} {{ messages[-1]['content'] }}:"
    ((_, ids),) = read_prompts(data, other, None, {"mood": "glad"})
    assert bytes(ids) == b"look glad hi:"
    template = tmp_path / "t.jinja"
    template.write_text(other.chat_template)
    config = EvaluateConfig(
        checkpoints=(run_folder,), target=target_folder, data=(data,), chat_template=template, device="cpu"
    )
    with pytest.raises(MismatchError, match="template_digest"):  # the run was extracted with the target's own
        evaluate(config)
    with pytest.raises(UsageError, match="JSON object"):
        evaluate(dataclasses.replace(config, chat_template=None, chat_template_kwargs="[]"))


def test_an_exported_drafter_refuses_another_target(tmp_path: Path, run_folder: Path, target_folder: Path) -> None:
    exported = export(ExportConfig(checkpoint=run_folder, out=tmp_path / "exported")).folder
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"messages": messages("hi")}])
    with pytest.raises(MismatchError, match="rms_norm_eps"):
        evaluate(EvaluateConfig(drafters=(exported,), target=other, data=(prompts,), device="cpu"))
    (exported / "draftcache.json").unlink()  # now it might be anybody's, and only sizes can be checked
    (report,) = evaluate(
        EvaluateConfig(
            drafters=(exported,), target=other, data=(prompts,), max_new_tokens=4, dtype="float32", device="cpu"
        )
    )
    assert report.equal == 1


def test_a_difference_is_a_tie_only_if_the_gap_says_so() -> None:
    plain = Plain(tokens=[5, 6, 7], gaps=[0.5, 0.02, 0.5], seconds=1.0)
    assert _difference("p:1", plain, [5, 6, 7], tie=1.0) is None
    found = [_difference("p:1", plain, [5, 9, 7], tie) for tie in (0.04, 0.01)]
    assert [(d.position, d.tie) for d in found if d] == [(1, True), (1, False)]
    assert TIE_ULPS * torch.finfo(torch.bfloat16).eps == pytest.approx(0.0625)


def test_a_tally_without_blocks_reports_plain_decoding(target_folder: Path) -> None:
    target = load_target(target_folder, CPU, "float32")
    decoder, runner, tally = TargetDecoder(target, LAYER_IDS), tiny_runner(target, LAYER_IDS), Tally("d", "p", 5)
    tally.add(speculate(decoder, runner, PROMPT, 1, GREEDY), decoder.plain(PROMPT, 1, GREEDY))
    decoder.close()
    report = tally.report()
    assert (report.tokens, report.blocks, report.accepted_length, report.along_path) == (1, 0, 1.0, None)
