"""Conversation to token ids and loss mask through the target's own chat template, by prefix renders.

No stock template marks what the assistant generates. But the text up to an assistant turn, rendered with the
generation prompt, is what a server would send; what the render with that turn adds is what the target would answer.
So every assistant turn's text and its end-of-turn are supervised, headers never. White space that the template puts
behind the end-of-turn is not. A template whose renders do not continue one another cannot be handled so: refused.
"""

from dataclasses import dataclass
from typing import Any

from draftcache.common.data import Line
from draftcache.common.errors import DataError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Token ids of one conversation and their loss mask (1 = the assistant generated it), equally long."""

    input_ids: list[int]
    loss_mask: list[int]


def tokenize(line: Line, tokenizer: Any, vocab_size: int) -> Tokens:
    """Ids and mask of one line. `vocab_size` counts the embedding's rows.

    Raises DataError, naming the line, if the template cannot render it, if its renders are not prefixes of one
    another, or if an id lies outside the embedding.
    """
    if line.input_ids is not None:
        _check_ids(line, line.input_ids, vocab_size)
        return Tokens(input_ids=list(line.input_ids), loss_mask=list(line.loss_mask))
    text = _render(tokenizer, line, len(line.messages), generation_prompt=False)
    spans = _assistant_spans(line, tokenizer, text)
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(f"{line.where}: half of a surrogate pair", needed="whole characters", do="correct the line")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    _check_ids(line, ids, vocab_size)
    mask = [0] * len(ids)
    remaining = iter(spans)
    begin, end = next(remaining, (len(text), len(text)))
    for position, (start, _) in enumerate(encoded["offset_mapping"]):
        while start >= end and begin < len(text):
            begin, end = next(remaining, (len(text), len(text)))
        mask[position] = int(begin <= start < end)
    return Tokens(input_ids=ids, loss_mask=mask)


def _assistant_spans(line: Line, tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Character ranges that the assistant generated, in order."""
    spans: list[tuple[int, int]] = []
    for turn, message in enumerate(line.messages):
        if message["role"] != "assistant":
            continue
        if turn == 0:  # nothing was asked: a server would not have been here, and many templates cannot render it
            continue
        before = _render(tokenizer, line, turn, generation_prompt=True)
        after = _render(tokenizer, line, turn + 1, generation_prompt=False)
        if not (after.startswith(before) and text.startswith(after)):
            raise DataError(
                f"{line.where}: the chat template rewrites earlier text when turn {turn} is added",
                needed="renders that continue one another",
                do="give the line as input_ids and loss_mask, or use a template that keeps history",
            )
        spans.append((len(before), len(after.rstrip())))
    return spans


def _render(tokenizer: Any, line: Line, turns: int, *, generation_prompt: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(
            list(line.messages[:turns]), tokenize=False, add_generation_prompt=generation_prompt
        )
    except Exception as error:  # templates raise whatever jinja raises
        raise DataError(
            f"{line.where}: the chat template fails ({first_line(error)})",
            needed="a conversation that the target's template can render",
            do="correct the line, or give it as input_ids and loss_mask",
        ) from None
    assert isinstance(text, str)
    return text


def _check_ids(line: Line, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    if max(ids, default=0) >= vocab_size:
        raise DataError(
            f"{line.where}: token id {max(ids)}",
            needed=f"ids within the target's embedding, 0..{vocab_size - 1}",
            do="tokenize the line with this target's tokenizer",
        )
