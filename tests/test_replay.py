"""Replaying known texts: the same accepted lengths as decoding them, with the target or from a store alone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from draftcache.common.store import Store, open_store
from draftcache.common.target import Target, load_parts, load_target
from draftcache.tests.decoding import CPU, GREEDY, PROMPT, Oracle, tiny_runner
from draftcache.tests.stores import LAYER_IDS
from draftcache.train.serving.decode import DrafterRunner, TargetDecoder, speculate
from draftcache.train.serving.replay import Replay, _answers, along_path, replay, replay_stored


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return load_target(target_folder, CPU, "float32")


@pytest.fixture(scope="module")
def decoder(target: Target) -> Iterator[TargetDecoder]:
    found = TargetDecoder(target, LAYER_IDS)
    yield found
    found.close()


@pytest.fixture
def runner(target: Target) -> DrafterRunner:
    return tiny_runner(target, LAYER_IDS)


def test_replaying_a_text_gives_the_lengths_of_decoding_it(decoder: TargetDecoder, runner: DrafterRunner) -> None:
    plain = decoder.plain(PROMPT, 60, GREEDY).tokens
    right = [0] * 10 + [4] * 9  # easy and hard stretches, so that the two means differ
    runner.draft = Oracle(runner, plain, right)  # type: ignore[method-assign]
    decoded = speculate(decoder, runner, PROMPT, 60, GREEDY)
    ids = torch.tensor(PROMPT + plain)
    with torch.inference_mode():
        decoder.forward(ids.tolist(), decoder.new_cache())
        found = replay(runner, ids, decoder.taps(LAYER_IDS), len(PROMPT), finished=False)
    whole = [n for start, n in zip(decoded.starts, decoded.lengths, strict=True) if start < len(ids) - 5]
    assert (found.path_blocks, found.path_tokens) == (len(whole), sum(whole))
    lengths = [right[i % 19] + 1 for i in range(len(plain) - 5)]
    assert (found.anchors, found.any_anchor) == (len(lengths), sum(lengths))
    assert found.any_anchor / found.anchors > 1.05 * found.path_tokens / found.path_blocks


def test_replaying_stored_samples_needs_no_target(store: Store, target: Target, decoder: TargetDecoder) -> None:
    opened = open_store(store.path)
    rows = [(ceiling, row) for ceiling, bucket in opened.buckets.items() for row in range(len(bucket.samples.samples))]
    parts = load_parts(opened.path, opened.manifest, CPU)
    drafter = tiny_runner(target, LAYER_IDS)._drafter
    found = replay_stored(DrafterRunner("drafter", drafter, parts), opened, rows, CPU)
    wanted, runner, supervised = Replay(), DrafterRunner("drafter", drafter, target), 0
    for ceiling, row in rows:
        samples = opened.buckets[ceiling].samples
        ids, mask = (values[samples.tokens(row)].tolist() for values in (samples.input_ids, samples.loss_mask))
        end = len(mask) - mask[::-1].index(1)
        supervised += sum(mask)
        with torch.inference_mode():
            decoder.forward(ids[:end], decoder.new_cache())
            taps = decoder.taps(LAYER_IDS).bfloat16()
            wanted += replay(runner, torch.tensor(ids[:end]), taps, mask.index(1), finished=True)
    assert found.anchors == wanted.anchors == supervised - len(rows)
    assert found.any_anchor == pytest.approx(wanted.any_anchor, rel=0.01)  # stored taps were computed in bfloat16
    assert found.path_tokens == wanted.path_tokens
    assert list(_answers(np.array([0, 1, 1, 0, 0, 1], dtype=np.uint8))) == [(1, 3), (5, 6)]


def test_the_path_through_lengths() -> None:
    assert along_path([3, 9, 9, 1, 2, 9]) == (6, 3)
    assert along_path([2, 2, 4]) == (6, 2)  # the last block may reach beyond the anchors
    assert along_path([]) == (0, 0)
