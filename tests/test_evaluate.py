"""Speculative decoding with a real (tiny) target: its text is the target's own, and its lengths are counted right."""

from pathlib import Path

import pytest
import torch

from draftcache.common.store import Store
from draftcache.common.target import load_target
from draftcache.tests.stores import messages, write_jsonl
from draftcache.train.checkpoint import load_drafter
from draftcache.train.drafter import ContextKeys
from draftcache.train.evaluate import EvaluateConfig, SetReport, _Decoder, evaluate
from draftcache.train.run import train
from draftcache.train.settings import GeometryOptions, TrainConfig


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    geometry = GeometryOptions(num_layers=2, block_size=5, layer_types="sliding,full", sliding_window=12)
    train(TrainConfig(store=store.path, out=out, geometry=geometry, token_budget=256, steps=3, device="cpu"))
    return out


@pytest.fixture
def report(tmp_path: Path, run_folder: Path, target_folder: Path) -> SetReport:
    tokens = {"input_ids": [104, 105, 10, 65], "loss_mask": [0, 0, 1, 1]}
    lines = [{"messages": messages("hi")}, {"messages": messages("what?", "never read")}, tokens]
    data = write_jsonl(tmp_path / "prompts.jsonl", lines)
    config = EvaluateConfig(
        checkpoint=run_folder, target=target_folder, data=(data,), max_new_tokens=24, dtype="float32"
    )
    (found,) = evaluate(config)
    return found


def test_speculative_text_is_the_targets_own(report: SetReport) -> None:
    assert (report.prompts, report.equal, report.differences) == (3, 3, ())


def test_accepted_length_is_tokens_per_block(report: SetReport) -> None:
    assert report.blocks > 0
    assert report.accepted_length == pytest.approx(1 + sum(report.slot_rates))
    assert list(report.slot_rates) == sorted(report.slot_rates, reverse=True)


class _Oracle:
    """Stands in for the drafter's proposals: right for `right` slots, then wrong."""

    def __init__(self, decoder: _Decoder, plain: list[int], prompt: int, right: int) -> None:
        self._plain, self._prompt, self._right = plain, prompt, right
        self._slots = decoder.block_size - 1

    def __call__(self, token: int, start: int, context: list[ContextKeys]) -> list[int]:
        assert context[0].key.shape[0] == start, "the drafter sees exactly the tokens before the anchor"
        at = start - self._prompt
        assert self._plain[at] == token
        following = [self._plain[i] if i < len(self._plain) else 0 for i in range(at + 1, at + 1 + self._slots)]
        return [t if k < self._right else (t + 1) % 300 for k, t in enumerate(following)]


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_a_drafter_that_is_right_so_often_has_that_accepted_length(
    run_folder: Path, target_folder: Path, right: int
) -> None:
    _, drafter = load_drafter(run_folder, torch.device("cpu"))
    decoder = _Decoder(load_target(target_folder, torch.device("cpu"), "float32"), drafter, max_new_tokens=21)
    try:
        prompt = [104, 105, 10, 65]
        plain, _ = decoder.plain(prompt)
        decoder._draft = _Oracle(decoder, plain, len(prompt), right)  # type: ignore[method-assign]
        text, lengths = decoder.speculative(prompt)
    finally:
        decoder.close()
    assert text == plain
    assert set(lengths[:-1]) == {right + 1}
