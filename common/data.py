"""Streams JSONL lines (plain or gzip) into conversations; refuses a bad line by file and number.

Three forms are understood, told apart by their keys:

    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}     or with role/content
    {"input_ids": [...], "loss_mask": [0, 1, ...]}                  already tokenized

A message may carry `tool_calls`, `tool_call_id`, `name` and its reasoning, and a line `tools`: all of it goes to the
chat template, under the names and in the form in which servers hand it over.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from draftcache.common.errors import DataError, UsageError

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Under which data and templates know the text that an assistant thought before its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the data: where it stands, and either messages or tokens with their mask."""

    number: int  # 0-based over all files: the sample number in the store
    where: str  # "file:line" with the line counted from 1, for messages
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    input_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] = ()


def read_lines(files: Sequence[Path], limit: int | None = None) -> Iterator[Line]:
    """Every line of the files in order, at most `limit`. Empty lines count but hold nothing and are skipped.

    Raises UsageError for a file that cannot be read and DataError for a line that cannot be understood.
    """
    number = 0
    for path in files:
        for count, text in enumerate(_text_lines(path), 1):
            if limit is not None and number >= limit:
                return
            if text.strip():
                yield _parse(number, f"{path}:{count}", text)
            number += 1


def _text_lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield _decoded(path, number, line)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: {reason}", needed="a readable .jsonl or .jsonl.gz file", do="check --data") from None


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: not UTF-8 text ({error.reason})", needed="JSON lines in UTF-8", do="convert the file"
        ) from None


def _parse(number: int, where: str, text: str) -> Line:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not JSON ({error})", needed="one JSON object a line", do="correct the line"
        ) from None
    if "\\ud" in text.lower() and not _is_unicode(record):
        _refuse(where, "half of a surrogate pair, which is no character", "Unicode text")
    if not isinstance(record, dict):
        _refuse(where, f"a JSON {type(record).__name__}", "a JSON object")
    if "input_ids" in record:
        return _parse_tokens(number, where, record)
    turns = record.get("messages", record.get("conversations"))
    if not isinstance(turns, list) or not turns:
        _refuse(where, f"keys {sorted(record)}", "a non-empty list `messages` or `conversations`, or `input_ids`")
    messages = tuple(_message(where, i, turn) for i, turn in enumerate(turns))
    return Line(number=number, where=where, messages=messages, tools=_tools(where, record.get("tools")))


def _is_unicode(record: Any) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _message(where: str, position: int, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        _refuse(where, f"turn {position} is a {type(turn).__name__}", "an object with role and content")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        _refuse(where, f"turn {position} has the role {role!r}", f"one of {sorted(ROLES)}")
    calls = turn.get("tool_calls") or []
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        _refuse(where, f"turn {position} has content of type {type(content).__name__}", "a string")
    message: dict[str, Any] = {"role": ROLES[role], "content": content}
    if calls:
        message["tool_calls"] = _tool_calls(where, position, calls)
    reasoning = next((turn[name] for name in REASONING_NAMES if turn.get(name)), "")
    if not isinstance(reasoning, str):
        _refuse(where, f"turn {position} has reasoning of type {type(reasoning).__name__}", "a string")
    if reasoning:
        message |= dict.fromkeys(REASONING_NAMES, reasoning)
    for name in ("tool_call_id", "name"):
        if isinstance(turn.get(name), str):
            message[name] = turn[name]
    return message


def _tool_calls(where: str, position: int, calls: Any) -> list[dict[str, Any]]:
    """The calls with arguments as objects: servers parse the JSON text in which clients send them."""
    parsed = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(where, f"turn {position} has a tool call {call!r:.60}", "an object whose function has a name")
        arguments = function.get("arguments", {})
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            _refuse(where, f"turn {position} calls {function['name']} with {arguments!r:.60}", "arguments in JSON")
        parsed.append({"type": "function"} | call | {"function": function | {"arguments": arguments}})
    return parsed


def _tools(where: str, tools: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            _refuse(where, f"tools {tools!r:.60}", "a list of JSON schemas")
    if not isinstance(tools or [], list) or not all(isinstance(tool, dict) for tool in tools or []):
        _refuse(where, f"tools of type {type(tools).__name__}", "a list of JSON schemas")
    for tool in tools or []:
        if not isinstance(tool.get("function", {}), dict):
            _refuse(where, f"a tool whose function is {tool['function']!r:.60}", "a JSON schema")
    return tuple(tools or [])


def _parse_tokens(number: int, where: str, record: dict[str, Any]) -> Line:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        _refuse(where, "input_ids that are not a list of token ids", "a non-empty list of integers >= 0")
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        _refuse(where, "a loss_mask that does not fit input_ids", f"a list of {len(ids)} zeros and ones")
    return Line(number=number, where=where, input_ids=tuple(ids), loss_mask=tuple(int(m) for m in mask))


def _refuse(where: str, found: str, needed: str) -> NoReturn:
    raise DataError(f"{where}: {found}", needed=needed, do="correct or remove the line")
