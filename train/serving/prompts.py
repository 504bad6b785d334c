"""Prompts out of JSONL lines: what a server would be sent."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftcache.common.data import Line, read_lines
from draftcache.common.errors import DataError, first_line


def read_prompts(
    path: Path,
    tokenizer: Any,
    limit: int | None,
    arguments: Mapping[str, Any],  # of the chat template
) -> list[tuple[str, list[int]]]:
    """Every line's place and the ids of what stands before its last assistant turn, or its first supervised token."""
    prompts = [(line.where, _prompt_ids(line, tokenizer, arguments)) for line in read_lines([path], limit)]
    if not prompts:
        raise DataError(f"{path} holds no prompts", needed="at least one line", do="check --data")
    return prompts


def _prompt_ids(line: Line, tokenizer: Any, arguments: Mapping[str, Any]) -> list[int]:
    if line.input_ids is not None:
        ids = list(line.input_ids[: line.loss_mask.index(1)] if 1 in line.loss_mask else line.input_ids)
    else:
        turns = list(line.messages)
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        text = _render(line, turns, tokenizer, arguments) if turns else ""
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise DataError(f"{line.where}: nothing stands before the answer", needed="a prompt", do="remove the line")
    return ids


def _render(line: Line, turns: list[dict[str, Any]], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            turns, tools=list(line.tools) or None, tokenize=False, add_generation_prompt=True, **arguments
        )
    except Exception as error:  # templates raise whatever jinja raises
        raise DataError(
            f"{line.where}: the chat template fails ({first_line(error)})",
            needed="a conversation that the target's template can render",
            do="correct the line, or give it as input_ids and loss_mask",
        ) from None
    return text
