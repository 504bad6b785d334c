"""Greedy verification takes the target's choices; sampled verification leaves the target's distribution unchanged."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from draftcache.common.errors import UsageError
from draftcache.train.serving.verify_block import Chooser, Sampling

CPU = torch.device("cpu")
WORDS = 5
DRAWS = 6000
CHI_SQUARE_24 = 51.2
"""What 24 degrees of freedom exceed once in a thousand times."""


def table(seed: int = 0) -> Tensor:
    """[5, 5] logits: row w is the target's next word after w."""
    return 1.5 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("drafted", "accepted"), [([3, 1, 4], 4), ([3, 1, 0], 3), ([3, 0, 4], 2), ([0, 1, 4], 1)])
def test_greedy_takes_the_leading_run_and_its_own_next_token(drafted: list[int], accepted: int) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 2]), WORDS).float()
    found = Chooser(Sampling(), CPU).verify(logits, torch.tensor(drafted))
    assert found == [3, 1, 4, 2][:accepted]


def pairs(drafted: tuple[int, int], temperature: float) -> Counter[tuple[int, int]]:
    """The first two words after word 0, many times over, drafted and verified."""
    words = table()
    chooser = Chooser(Sampling(temperature=temperature, seed=1), CPU)
    rows = words[torch.tensor([0, *drafted])]
    found: Counter[tuple[int, int]] = Counter()
    for _ in range(DRAWS):
        text = chooser.verify(rows, torch.tensor(drafted))
        if len(text) == 1:
            text.append(chooser.choose(words[text[0]]))
        found[text[0], text[1]] += 1
    return found


def chi_square(found: Counter[tuple[int, int]], temperature: float) -> float:
    """The statistic of pairs against the target's own distribution; 24 degrees of freedom."""
    p = (table() / temperature).softmax(-1)
    expected = {(a, b): DRAWS * float(p[0, a] * p[a, b]) for a in range(WORDS) for b in range(WORDS)}
    assert min(expected.values()) > 5, "too few expected for the statistic"
    return sum((found[pair] - count) ** 2 / count for pair, count in expected.items())


@pytest.mark.parametrize("drafted", [(0, 1), (4, 4)])
def test_sampled_text_has_the_targets_distribution(drafted: tuple[int, int]) -> None:
    assert chi_square(pairs(drafted, temperature=1.7), temperature=1.7) < CHI_SQUARE_24


def test_the_statistic_notices_another_distribution() -> None:
    assert chi_square(pairs((0, 1), temperature=1.7), temperature=1.5) > CHI_SQUARE_24


def test_a_certain_target_accepts_what_it_would_say() -> None:
    logits = 1000 * torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 2]), WORDS).float()
    chooser = Chooser(Sampling(temperature=1.0), CPU)
    assert chooser.verify(logits, torch.tensor([3, 1, 4])) == [3, 1, 4, 2]
    assert chooser.verify(logits, torch.tensor([3, 0, 4])) == [3, 1]


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_temperatures_that_mean_nothing_are_refused(temperature: float) -> None:
    with pytest.raises(UsageError):
        Sampling(temperature=temperature)
