"""What an evaluation says of one drafter on one prompt file, and the counts it comes from."""

from collections import Counter
from dataclasses import dataclass

from draftcache.train.serving.decode import Plain, Speculative
from draftcache.train.serving.replay import Replay

_FIRST_SPAN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where speculative text left plain text: prompt, token position, and the gap of the target's two best logits."""

    prompt: str
    position: int
    gap: float
    tie: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Blocks whose anchors stand at positions begin..end-1 of the sequence, prompt included."""

    begin: int
    end: int
    blocks: int
    accepted_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReport:
    """Figures of one drafter on one prompt file. None where sampling leaves nothing to compare or replay."""

    drafter: str
    name: str
    prompts: int
    tokens: int
    blocks: int
    accepted_length: float  # tokens of a block, mean over the blocks that decoding made: a server's number
    along_path: float | None  # the same from replaying the plain text: equal but for ties
    any_anchor: float | None  # over all positions of the plain text, as training draws its anchors
    plain_tokens_s: float
    speculative_tokens_s: float
    speedup: float
    equal: int | None  # prompts whose text is the plain one
    slot_rates: tuple[float, ...]  # share of blocks that accept at least k drafted tokens, k = 1..B-1
    spans: tuple[Span, ...]
    differences: tuple[Difference, ...]

    @property
    def unexplained(self) -> int:
        """Differences that are no ties: a defect."""
        return sum(not d.tie for d in self.differences)


class Tally:
    """Counts of one drafter on one prompt file while it is decoded."""

    def __init__(self, drafter: str, name: str, block_size: int) -> None:
        self._drafter, self._name = drafter, name
        self._reached = [0] * (block_size - 1)
        self._span_blocks: Counter[int] = Counter()
        self._span_tokens: Counter[int] = Counter()
        self._prompts = self._tokens = self._plain_tokens = self._blocks = self._emitted = self._equal = 0
        self._seconds = self._plain_seconds = 0.0
        self._compared = False
        self._differences: list[Difference] = []
        self.replayed = Replay()

    def add(self, text: Speculative, plain: Plain) -> None:
        """One prompt, decoded both ways."""
        self._prompts += 1
        self._tokens += len(text.tokens)
        self._plain_tokens += len(plain.tokens)
        self._seconds += text.seconds
        self._plain_seconds += plain.seconds
        self._blocks += len(text.lengths)
        self._emitted += sum(text.lengths)
        for start, length in zip(text.starts, text.lengths, strict=True):
            for k in range(length - 1):
                self._reached[k] += 1
            self._span_blocks[_span(start)] += 1
            self._span_tokens[_span(start)] += length

    def compare(self, difference: Difference | None) -> None:
        """How the prompt's text compares with the plain one."""
        self._compared = True
        self._equal += difference is None
        if difference is not None:
            self._differences.append(difference)

    def report(self) -> SetReport:
        """The figures."""
        blocks, replayed = self._blocks, self.replayed
        plain, speculative = self._plain_tokens / self._plain_seconds, self._tokens / self._seconds
        return SetReport(
            drafter=self._drafter,
            name=self._name,
            prompts=self._prompts,
            tokens=self._tokens,
            blocks=blocks,
            accepted_length=self._emitted / blocks if blocks else 1.0,
            along_path=replayed.path_tokens / replayed.path_blocks if replayed.path_blocks else None,
            any_anchor=replayed.any_anchor / replayed.anchors if replayed.anchors else None,
            plain_tokens_s=plain,
            speculative_tokens_s=speculative,
            speedup=speculative / plain,
            equal=self._equal if self._compared else None,
            slot_rates=tuple(count / blocks if blocks else 0.0 for count in self._reached),
            spans=tuple(
                Span(
                    begin=0 if i == 0 else _FIRST_SPAN << (i - 1),
                    end=_FIRST_SPAN << i,
                    blocks=self._span_blocks[i],
                    accepted_length=self._span_tokens[i] / self._span_blocks[i],
                )
                for i in sorted(self._span_blocks)
            ),
            differences=tuple(self._differences),
        )


def _span(position: int) -> int:
    """0 for positions below 128, 1 below 256, 2 below 512 and so on."""
    return (position // _FIRST_SPAN).bit_length()
