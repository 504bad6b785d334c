"""Prompts out of JSONL lines: what a server would be sent."""

from pathlib import Path
from typing import Any

from draftcache.common.data import Line, read_lines
from draftcache.common.errors import DataError


def read_prompts(path: Path, tokenizer: Any, limit: int | None) -> list[tuple[str, list[int]]]:
    """Every line's place and prompt ids: what stands before its last assistant turn, or before its first supervised
    token.
    """
    prompts = [(line.where, _prompt_ids(line, tokenizer)) for line in read_lines([path], limit)]
    if not prompts:
        raise DataError(f"{path} holds no prompts", needed="at least one line", do="check --data")
    return prompts


def _prompt_ids(line: Line, tokenizer: Any) -> list[int]:
    if line.input_ids is not None:
        ids = list(line.input_ids[: line.loss_mask.index(1)] if 1 in line.loss_mask else line.input_ids)
    else:
        turns = list(line.messages)
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        tools = list(line.tools) or None
        text = tokenizer.apply_chat_template(turns, tools, tokenize=False, add_generation_prompt=True) if turns else ""
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise DataError(f"{line.where}: nothing stands before the answer", needed="a prompt", do="remove the line")
    return ids
