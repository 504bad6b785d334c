"""Prompts out of JSONL lines: what a server would be sent."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftcache.common.data import Line, read_lines
from draftcache.common.errors import DataError, first_line
from draftcache.common.manifest import TargetIdentity


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


def check_prompts(prompts: Sequence[tuple[str, list[int]]], target: TargetIdentity, new_tokens: int) -> None:
    """Raise DataError for a prompt with ids that the target has no row for, or too long for its context."""
    most = target.max_position_embeddings - new_tokens
    for where, ids in prompts:
        if max(ids) >= target.vocab_size:
            needed = f"ids below the target's {target.vocab_size}"
            raise DataError(f"{where}: token id {max(ids)}", needed=needed, do="correct or remove the line")
        if len(ids) > most:
            raise DataError(
                f"{where}: a prompt of {len(ids)} tokens",
                needed=f"at most {most}, which with {new_tokens} new ones fill the target's context",
                do="remove the line, or lower --max-new-tokens",
            )


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
