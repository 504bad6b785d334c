"""Conversation to ids and loss mask through the target's own chat template, by prefix renders.

No stock template marks what the assistant generates. But the text up to an assistant turn, rendered with the
generation prompt, is what a server would send; what the render with that turn adds is what the target would answer.
So every assistant turn's text and its end-of-turn are supervised, headers never. White space that the template puts
behind the end-of-turn is not.

Reasoning templates rewrite history: an answer loses its reasoning once the user speaks again. Then one text cannot show
every answer as it was generated, and the conversation becomes several samples, each rendered up to a turn and
supervised where that text shows what was generated; no turn is supervised twice.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftcache.common.data import REASONING_NAMES, Line
from draftcache.common.errors import DataError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Token ids of one sample and their loss mask (1 = the assistant generated it), equally long."""

    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """How lines become tokens: the target's tokenizer, and extra arguments of its chat template."""

    tokenizer: Any
    vocab_size: int  # rows of the target's embedding
    tokenizer_size: int  # ids from here on are rows that the tokenizer does not know
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The samples of one line, and what the template left out of it, counted by kind."""

    samples: list[Tokens]
    notes: Counter[str]


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant turn: the text sent for it, and the text that ends with it as it was generated."""

    message: dict[str, Any]
    before: str
    after: str

    @property
    def generated(self) -> str:
        return self.after[len(self.before) :]


def tokenize(line: Line, template: Template) -> Rendered:
    """Samples of one line: one, unless the template rewrites history.

    Raises DataError, naming the line, if the template cannot render it, if an answer does not continue what was sent
    for it, if the text begins with two beginnings, or if an id lies outside the embedding.
    """
    if line.input_ids is not None:
        _check_ids(line, line.input_ids, template)
        tokens = Tokens(input_ids=list(line.input_ids), loss_mask=list(line.loss_mask))
        unknown = max(line.input_ids) >= template.tokenizer_size
        return Rendered(samples=[tokens], notes=Counter({"ids_unknown_to_the_tokenizer": 1} if unknown else {}))
    text = _render(template, line, len(line.messages), generation_prompt=False)
    turns = _assistant_turns(template, line)
    notes = Counter(_left_out(line, turns, text))
    waiting = [turn for turn in turns if _shows_tool_calls(turn)]
    samples: list[Tokens] = []
    for candidate in (text, *(turn.after for turn in reversed(waiting))):
        shown = [turn for turn in waiting if candidate.startswith(turn.after)]
        if shown:
            samples.append(_encode(template, line, candidate, shown))
            waiting = [turn for turn in waiting if turn not in shown]
    if len(samples) > 1:
        notes["lines_in_several_samples"] += 1
    return Rendered(samples=samples or [_encode(template, line, text, [])], notes=notes)


def _assistant_turns(template: Template, line: Line) -> list[_Turn]:
    turns: list[_Turn] = []
    for number, message in enumerate(line.messages):
        if message["role"] != "assistant" or number == 0:
            continue  # at 0 nothing was asked: a server would not have been here, and many templates cannot render it
        before = _render(template, line, number, generation_prompt=True)
        after = _render(template, line, number + 1, generation_prompt=False)
        if not after.startswith(before):
            raise DataError(
                f"{line.where}: the chat template rewrites what was sent when the answer of turn {number} is added",
                needed="an answer that continues the text with the generation prompt",
                do="give --chat-template-kwargs or --chat-template as in serving, or the line as input_ids and mask",
            )
        turns.append(_Turn(message, before, after))
    return turns


def _encode(template: Template, line: Line, text: str, turns: list[_Turn]) -> Tokens:
    """One sample: the text's ids, supervised where these turns were generated."""
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(f"{line.where}: half of a surrogate pair", needed="whole characters", do="correct the line")
    encoded = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    _check_ids(line, ids, template)
    mask = [0] * len(ids)
    remaining = iter([(len(turn.before), len(turn.after.rstrip())) for turn in turns])
    begin, end = next(remaining, (len(text), len(text)))
    for position, (start, _) in enumerate(encoded["offset_mapping"]):
        while start >= end and begin < len(text):
            begin, end = next(remaining, (len(text), len(text)))
        mask[position] = int(begin <= start < end)
    return Tokens(input_ids=ids, loss_mask=mask)


def _left_out(line: Line, turns: list[_Turn], text: str) -> dict[str, int]:
    """What the line says and the template does not show, by kind."""
    names = [str(tool.get("function", tool).get("name")) for tool in line.tools]
    return {
        kind: count
        for kind, count in (
            ("lines_without_their_tools", int(any(name not in text for name in names))),
            ("turns_without_their_tool_calls", sum(not _shows_tool_calls(turn) for turn in turns)),
            ("turns_without_their_reasoning", sum(not _shows_reasoning(turn) for turn in turns)),
        )
        if count
    }


def _shows_tool_calls(turn: _Turn) -> bool:
    """A turn whose calls the template drops is not what was generated, so it is not supervised."""
    return all(call["function"]["name"] in turn.generated for call in turn.message.get("tool_calls", ()))


def _shows_reasoning(turn: _Turn) -> bool:
    reasoning = turn.message.get(REASONING_NAMES[0], "")
    return "".join(reasoning.split()) in "".join(turn.generated.split())


def _render(template: Template, line: Line, turns: int, *, generation_prompt: bool) -> str:
    try:
        text = template.tokenizer.apply_chat_template(
            list(line.messages[:turns]),
            tools=list(line.tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **template.arguments,
        )
    except Exception as error:  # templates raise whatever jinja raises
        raise DataError(
            f"{line.where}: the chat template fails ({first_line(error)})",
            needed="a conversation that the target's template can render",
            do="correct the line, or give it as input_ids and loss_mask",
        ) from None
    assert isinstance(text, str)
    return text


def _check_ids(line: Line, ids: list[int] | tuple[int, ...], template: Template) -> None:
    if max(ids, default=0) >= template.vocab_size:
        raise DataError(
            f"{line.where}: token id {max(ids)}",
            needed=f"ids within the target's embedding, 0..{template.vocab_size - 1}",
            do="tokenize the line with this target's tokenizer",
        )
    bos = template.tokenizer.bos_token_id
    if bos is not None and list(ids[:2]) == [bos, bos]:
        raise DataError(
            f"{line.where}: the text begins with token {bos} twice",
            needed="at most one beginning-of-text token",
            do="remove it from the text: the chat template writes its own",
        )
