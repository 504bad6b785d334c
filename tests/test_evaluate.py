"""Speculative decoding with real (tiny) targets: its text is the target's own, and its lengths are counted right."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from draftcache.common.errors import MismatchError, TargetError
from draftcache.common.store import Store, open_store
from draftcache.common.target import Target, load_parts, load_target
from draftcache.tests.commands import run
from draftcache.tests.stores import messages, write_jsonl
from draftcache.train.checkpoint import load_drafter
from draftcache.train.decode import DrafterRunner, TargetDecoder, _crop, speculate
from draftcache.train.drafter import FULL, ContextKeys, Drafter, DrafterConfig
from draftcache.train.evaluate import EvaluateConfig, evaluate
from draftcache.train.export import ExportConfig, export
from draftcache.train.replay import Replay, _answers, along_path, replay, replay_stored
from draftcache.train.run import train
from draftcache.train.setup import GeometryOptions, TrainConfig
from draftcache.train.tally import Tally
from draftcache.train.verify_block import Sampling

CPU = torch.device("cpu")
PROMPT = [104, 105, 10, 65]
GREEDY = Sampling()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    geometry = GeometryOptions(num_layers=2, block_size=5, layer_types="sliding,full", sliding_window=12)
    train(TrainConfig(store=store.path, out=out, geometry=geometry, token_budget=256, steps=3, device="cpu"))
    return out


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return load_target(target_folder, CPU, "float32")


@pytest.fixture(scope="module")
def decoder(target: Target) -> Iterator[TargetDecoder]:
    found = TargetDecoder(target, (1, 3, 5))
    yield found
    found.close()


@pytest.fixture
def runner(run_folder: Path, target: Target) -> DrafterRunner:
    return DrafterRunner("drafter", load_drafter(run_folder, CPU)[1], target)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    tokens = {"input_ids": PROMPT, "loss_mask": [0, 0, 1, 1]}
    lines = [{"messages": messages("hi")}, {"messages": messages("what?", "never read")}, tokens]
    return write_jsonl(tmp_path / "prompts.jsonl", lines)


class _Oracle:
    """Stands in for a drafter's proposals: at each anchor right for so many slots as `right` says for its position."""

    def __init__(
        self, runner: DrafterRunner, plain: list[int], right: Sequence[int], prompt: int = len(PROMPT)
    ) -> None:
        self._plain, self._right, self._prompt = plain, right, prompt
        self._slots = runner.config.block_size - 1

    def __call__(self, tokens: Tensor, anchors: Tensor, context: list[ContextKeys]) -> Tensor:
        assert context[0].key.shape[0] >= int(anchors[-1]), "the drafter sees every token before the anchor"
        return torch.tensor([self._row(int(a) - self._prompt, int(t)) for a, t in zip(anchors, tokens, strict=True)])

    def _row(self, at: int, token: int) -> list[int]:
        assert self._plain[at] == token
        right = self._right[at % len(self._right)]
        following = [self._plain[i] if i < len(self._plain) else 0 for i in range(at + 1, at + 1 + self._slots)]
        return [t if k < right else (t + 1) % 300 for k, t in enumerate(following)]


def test_speculative_text_is_the_targets_own(run_folder: Path, target_folder: Path, prompts: Path) -> None:
    (report,) = evaluate(
        EvaluateConfig(
            checkpoints=(run_folder,), target=target_folder, data=(prompts,), max_new_tokens=24, dtype="float32"
        )
    )
    assert (report.prompts, report.equal, report.differences) == (3, 3, ())
    assert report.blocks > 0
    assert report.accepted_length == pytest.approx(1 + sum(report.slot_rates))
    assert list(report.slot_rates) == sorted(report.slot_rates, reverse=True)
    assert sum(span.blocks for span in report.spans) == report.blocks
    assert report.along_path == pytest.approx(report.accepted_length, rel=0.1)  # the last block may be cut off


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_a_drafter_that_is_right_so_often_has_that_accepted_length(
    decoder: TargetDecoder, runner: DrafterRunner, right: int
) -> None:
    plain = decoder.plain(PROMPT, 21, GREEDY).tokens
    runner.draft = _Oracle(runner, plain, [right])  # type: ignore[method-assign]
    found = speculate(decoder, runner, PROMPT, 21, GREEDY)
    assert found.tokens == plain
    assert set(found.lengths[:-1]) == {right + 1}
    assert found.starts == [len(PROMPT) + i * (right + 1) for i in range(len(found.lengths))]


def test_replaying_a_text_gives_the_lengths_of_decoding_it(decoder: TargetDecoder, runner: DrafterRunner) -> None:
    plain = decoder.plain(PROMPT, 60, GREEDY).tokens
    right = [0] * 10 + [4] * 9  # easy and hard stretches, so that the two means differ
    runner.draft = _Oracle(runner, plain, right)  # type: ignore[method-assign]
    decoded = speculate(decoder, runner, PROMPT, 60, GREEDY)
    ids = torch.tensor(PROMPT + plain)
    with torch.inference_mode():
        decoder.forward(ids.tolist(), decoder.new_cache())
        found = replay(runner, ids, decoder.taps((1, 3, 5)), len(PROMPT), finished=False)
    whole = [n for start, n in zip(decoded.starts, decoded.lengths, strict=True) if start < len(ids) - 5]
    assert (found.path_blocks, found.path_tokens) == (len(whole), sum(whole))
    lengths = [right[i % 19] + 1 for i in range(len(plain) - 5)]
    assert (found.anchors, found.any_anchor) == (len(lengths), sum(lengths))
    assert found.any_anchor / found.anchors > 1.05 * found.path_tokens / found.path_blocks


def test_replaying_stored_samples_needs_no_target(run_folder: Path, store: Store, target: Target) -> None:
    opened = open_store(store.path)
    drafter = load_drafter(run_folder, CPU)[1]
    rows = [(ceiling, row) for ceiling, bucket in opened.buckets.items() for row in range(len(bucket.samples.samples))]
    parts = load_parts(opened.path, opened.manifest, CPU)
    found = replay_stored(DrafterRunner("drafter", drafter, parts), opened, rows, CPU)
    wanted = Replay()
    decoder = TargetDecoder(target, drafter.config.layer_ids)
    runner = DrafterRunner("drafter", drafter, target)
    for ceiling, row in rows:
        samples = opened.buckets[ceiling].samples
        ids, mask = (values[samples.tokens(row)].tolist() for values in (samples.input_ids, samples.loss_mask))
        end = len(mask) - mask[::-1].index(1)
        with torch.inference_mode():
            decoder.forward(ids[:end], decoder.new_cache())
            taps = decoder.taps(drafter.config.layer_ids).bfloat16()
            wanted += replay(runner, torch.tensor(ids[:end]), taps, mask.index(1), finished=True)
    decoder.close()
    assert (
        found.anchors
        == wanted.anchors
        == sum(int(b.samples.loss_mask.sum()) - len(b.samples.samples) for b in opened.buckets.values())
    )
    assert found.any_anchor == pytest.approx(wanted.any_anchor, rel=0.01)  # stored taps were computed in bfloat16
    assert found.path_tokens == wanted.path_tokens
    assert list(_answers(np.array([0, 1, 1, 0, 0, 1], dtype=np.uint8))) == [(1, 3), (5, 6)]


def test_drafting_many_blocks_at_once_changes_nothing(decoder: TargetDecoder, runner: DrafterRunner) -> None:
    ids = torch.arange(30) % 7 + 70
    with torch.inference_mode():
        decoder.forward(ids.tolist(), decoder.new_cache())
        taps = decoder.taps((1, 3, 5))
        at = torch.arange(3, 29)
        together = runner.draft(ids[at], at, runner.context(taps, 0))
        alone = [runner.draft(ids[i : i + 1], torch.tensor([i]), runner.context(taps[:i], 0)) for i in at.tolist()]
    assert torch.equal(together, torch.cat(alone))


def test_the_path_through_lengths() -> None:
    assert along_path([3, 9, 9, 1, 2, 9]) == (6, 3)
    assert along_path([2, 2, 4]) == (6, 2)  # the last block may reach beyond the anchors
    assert along_path([]) == (0, 0)


def test_an_end_of_text_within_a_block_ends_it(decoder: TargetDecoder, runner: DrafterRunner) -> None:
    plain = decoder.plain(PROMPT, 21, GREEDY).tokens
    end = next(i for i, token in enumerate(plain) if i > 5 and token not in plain[:i])
    kept = decoder._eos
    try:
        decoder._eos = {plain[end]}
        runner.draft = _Oracle(runner, plain, [4])  # type: ignore[method-assign]
        found = speculate(decoder, runner, PROMPT, 21, GREEDY)
        assert found.tokens == decoder.plain(PROMPT, 21, GREEDY).tokens == plain[: end + 1]
        assert sum(found.lengths) == end
    finally:
        decoder._eos = kept


def test_sampled_text_has_the_targets_distribution(decoder: TargetDecoder, runner: DrafterRunner) -> None:
    """Second tokens of many sampled texts, in eight groups, against the target's own probabilities."""
    draws, groups, temperature = 300, 8, 0.7
    with torch.inference_mode():
        first = (decoder.forward(PROMPT, decoder.new_cache())[-1] / temperature).softmax(-1)
        first[list(decoder._eos)] = 0  # such texts have no second token, and are left out below
        vocabulary = torch.arange(len(first))
        batch = torch.cat([torch.tensor(PROMPT).expand(len(first), -1), vocabulary[:, None]], dim=1)
        states = decoder.target.decoder(input_ids=batch).last_hidden_state[:, -1]
        second = (states @ decoder.target.head.T / temperature).softmax(-1)
        exact = first @ second
    texts = (
        speculate(decoder, runner, PROMPT, 2, Sampling(temperature=temperature, seed=seed)).tokens
        for seed in range(draws)
    )
    seconds = [text[1] % groups for text in texts if len(text) == 2]
    share = [float(exact[g::groups].sum() / exact.sum()) for g in range(groups)]
    assert len(seconds) > 0.8 * draws
    expected = [len(seconds) * p for p in share]
    statistic = sum((seconds.count(g) - e) ** 2 / e for g, e in enumerate(expected))
    assert statistic < 24.3, "more than once in a thousand with 7 degrees of freedom"


def test_sampling_is_repeatable_and_compares_no_texts(run_folder: Path, target_folder: Path, prompts: Path) -> None:
    config = EvaluateConfig(
        checkpoints=(run_folder,),
        target=target_folder,
        data=(prompts,),
        max_new_tokens=12,
        sampling=Sampling(temperature=1.0, seed=4),
        dtype="float32",
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


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Three layers of linear attention with a running state, and one of full attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = Qwen3_5TextConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        vocab_size=320,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        initializer_range=0.1,
        eos_token_id=319,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return load_target(folder, CPU, "float32")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Full layers and layers with a window that is shorter than the texts."""
    folder = tmp_path_factory.mktemp("windowed")
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        vocab_size=320,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_sliding_window=True,
        sliding_window=6,
        initializer_range=0.1,
        eos_token_id=319,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return load_target(folder, CPU, "float32")


@pytest.mark.parametrize("kind", ["hybrid", "windowed"])
def test_plain_decoding_needs_no_cache_to_say_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    target: Target = request.getfixturevalue(kind)
    decoder = TargetDecoder(target, (0,))
    tokens = decoder.plain(PROMPT, 20, GREEDY).tokens
    decoder.close()
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in tokens:
            ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert ids[len(PROMPT) :] == tokens


@pytest.mark.parametrize("right", [[0], [2], [4], [4, 0, 0, 3, 2, 4, 0]])
@pytest.mark.parametrize("kind", ["hybrid", "windowed"])
def test_targets_with_other_layers_are_put_back_after_a_block(
    kind: str, right: list[int], request: pytest.FixtureRequest
) -> None:
    target: Target = request.getfixturevalue(kind)
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        layer_types=(FULL,),
        sliding_window=8,
        sliding_causal=True,
        block_size=5,
        layer_ids=(0, 3),
        mask_token_id=318,
        vocab_size=320,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        attention_bias=False,
    )
    decoder = TargetDecoder(target, config.layer_ids)
    try:
        runner = DrafterRunner("oracle", Drafter(config), target)
        plain = decoder.plain(PROMPT, 30, GREEDY).tokens
        runner.draft = _Oracle(runner, plain, right)  # type: ignore[method-assign]
        found = speculate(decoder, runner, PROMPT, 30, GREEDY)
    finally:
        decoder.close()
    assert found.tokens == plain
    assert len(set(plain)) > 3, "a text of one token proves nothing"


def test_a_cache_that_can_be_neither_cut_nor_copied_is_refused() -> None:
    cache = DynamicCache()
    cache.layers.append(DynamicSlidingWindowLayer(sliding_window=4))
    cache.update(torch.zeros(1, 1, 6, 2), torch.zeros(1, 1, 6, 2), 0)
    with pytest.raises(TargetError, match="cannot be cut back"):
        _crop(cache, 2)


def test_a_difference_is_a_tie_only_if_the_gap_says_so(decoder: TargetDecoder) -> None:
    from draftcache.train.evaluate import TIE_ULPS, _difference

    plain = decoder.plain(PROMPT, 8, GREEDY)
    assert _difference("p:1", plain, plain.tokens, tie=1.0) is None
    other = [*plain.tokens[:5], (plain.tokens[5] + 1) % 300, *plain.tokens[6:]]
    found = [_difference("p:1", plain, other, tie) for tie in (plain.gaps[5] * 2, plain.gaps[5] / 2)]
    assert [(d.position, d.tie) for d in found if d] == [(5, True), (5, False)]
    assert TIE_ULPS * torch.finfo(torch.bfloat16).eps == pytest.approx(0.0625)


def test_a_tally_without_blocks_reports_plain_decoding(decoder: TargetDecoder, runner: DrafterRunner) -> None:
    tally = Tally("d", "p", 5)
    plain = decoder.plain(PROMPT, 1, GREEDY)
    tally.add(speculate(decoder, runner, PROMPT, 1, GREEDY), plain)
    report = tally.report()
    assert (report.tokens, report.blocks, report.accepted_length, report.along_path) == (1, 0, 1.0, None)
