"""What a user may give by hand for the chat template: another template, and extra arguments."""

import json
from pathlib import Path
from typing import Any

from draftcache.common.errors import UsageError, first_line

RESERVED = frozenset(
    {
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        "return_assistant_tokens_mask",
    }
)
"""What `apply_chat_template` takes besides the template's own arguments."""


def read_template(path: Path) -> str:
    """The text of `--chat-template`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {first_line(error)}", needed="a Jinja file", do="check --chat-template") from None


def template_arguments(text: str) -> dict[str, Any]:
    """The arguments in `--chat-template-kwargs`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        found = first_line(error)
    if not isinstance(found, dict):
        raise UsageError(
            f"--chat-template-kwargs {text}: {found}",
            needed="a JSON object",
            do='pass for example {"enable_thinking": false}',
        )
    reserved = sorted(RESERVED.intersection(found))
    if reserved:
        raise UsageError(
            f"--chat-template-kwargs sets {reserved}",
            needed="arguments of the chat template alone",
            do="leave them out: draftcache sets them itself, and --chat-template gives another template",
        )
    return found
