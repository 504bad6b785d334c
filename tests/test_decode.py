"""Decoding block by block with tiny targets: the text is the target's own, and lengths are counted right."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from draftcache.common.errors import TargetError
from draftcache.common.target import Target, load_target
from draftcache.tests.decoding import CPU, GREEDY, PROMPT, Oracle, tiny_runner
from draftcache.tests.stores import LAYER_IDS
from draftcache.train.serving.decode import DrafterRunner, TargetDecoder, _crop, speculate
from draftcache.train.serving.verify_block import Sampling


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


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_a_drafter_that_is_right_so_often_has_that_accepted_length(
    decoder: TargetDecoder, runner: DrafterRunner, right: int
) -> None:
    plain = decoder.plain(PROMPT, 21, GREEDY).tokens
    runner.draft = Oracle(runner, plain, [right])  # type: ignore[method-assign]
    found = speculate(decoder, runner, PROMPT, 21, GREEDY)
    assert found.tokens == plain
    assert set(found.lengths[:-1]) == {right + 1}
    assert found.starts == [len(PROMPT) + i * (right + 1) for i in range(len(found.lengths))]


def test_drafting_many_blocks_at_once_changes_nothing(decoder: TargetDecoder, runner: DrafterRunner) -> None:
    ids = torch.arange(30) % 7 + 70
    with torch.inference_mode():
        decoder.forward(ids.tolist(), decoder.new_cache())
        taps = decoder.taps(LAYER_IDS)
        at = torch.arange(3, 29)
        together = runner.draft(ids[at], at, runner.context(taps, 0))
        alone = [runner.draft(ids[i : i + 1], torch.tensor([i]), runner.context(taps[:i], 0)) for i in at.tolist()]
    assert torch.equal(together, torch.cat(alone))


def test_an_end_of_text_within_a_block_ends_it(decoder: TargetDecoder, runner: DrafterRunner) -> None:
    plain = decoder.plain(PROMPT, 21, GREEDY).tokens
    end = next(i for i, token in enumerate(plain) if i > 5 and token not in plain[:i])
    kept = decoder._eos
    try:
        decoder._eos = {plain[end]}
        runner.draft = Oracle(runner, plain, [4])  # type: ignore[method-assign]
        found = speculate(decoder, runner, PROMPT, 21, GREEDY)
        assert found.tokens == decoder.plain(PROMPT, 21, GREEDY).tokens == plain[: end + 1]
        assert sum(found.lengths) == end
    finally:
        decoder._eos = kept


def test_sampled_text_has_the_targets_distribution(decoder: TargetDecoder, runner: DrafterRunner) -> None:
    """Second tokens of many sampled texts, in eight groups, against the target's own probabilities."""
    draws, groups, temperature = 150, 8, 0.7
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
    decoder = TargetDecoder(target, (0, 3))
    try:
        runner = tiny_runner(target, (0, 3))
        plain = decoder.plain(PROMPT, 30, GREEDY).tokens
        runner.draft = Oracle(runner, plain, right)  # type: ignore[method-assign]
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
