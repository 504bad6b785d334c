"""JSON lines to conversations: the three forms, the numbering, and every refused line by file and number."""

import gzip
import json
from pathlib import Path

import pytest

from draftcache.common.data import Line, read_lines
from draftcache.common.errors import DataError, DraftcacheError, UsageError

GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


def write(path: Path, *lines: str) -> Path:
    """Write lines of text; returns the path."""
    path.write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")
    return path


def read(path: Path, *lines: str) -> list[Line]:
    """What these lines of text are read as."""
    return list(read_lines([write(path / "data.jsonl", *lines)]))


def refusal(path: Path, text: str) -> DataError:
    """The error that this line, the third of its file, is refused with; it names file and line."""
    with pytest.raises(DataError) as caught:
        read(path, GOOD, "", text)
    assert caught.value.found.startswith(f"{path / 'data.jsonl'}:3: ")
    return caught.value


def test_messages(tmp_path: Path) -> None:
    (line,) = read(tmp_path, GOOD)
    assert line.messages == ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    assert line.input_ids is None
    assert (line.number, line.where) == (0, f"{tmp_path / 'data.jsonl'}:1")


def test_conversations_by_from_and_value(tmp_path: Path) -> None:
    turns = [("system", "s"), ("human", "h"), ("gpt", "g"), ("user", "u"), ("assistant", "a"), ("tool", "t")]
    (line,) = read(tmp_path, json.dumps({"conversations": [{"from": f, "value": v} for f, v in turns]}))
    assert [tuple(m.values()) for m in line.messages] == [
        ("system", "s"),
        ("user", "h"),
        ("assistant", "g"),
        ("user", "u"),
        ("assistant", "a"),
        ("tool", "t"),
    ]


def test_conversations_by_role_and_content(tmp_path: Path) -> None:
    (line,) = read(tmp_path, '{"conversations": [{"role": "developer", "content": "é\\n"}], "id": 7}')
    assert line.messages == ({"role": "developer", "content": "é\n"},)


def test_token_ids_with_their_mask(tmp_path: Path) -> None:
    (line,) = read(tmp_path, '{"input_ids": [5, 0, 99999], "loss_mask": [0, 1, 1]}')
    assert (line.input_ids, line.loss_mask, line.messages) == ((5, 0, 99999), (0, 1, 1), ())


def test_empty_text_is_text(tmp_path: Path) -> None:
    (line,) = read(tmp_path, '{"messages": [{"role": "assistant", "content": ""}]}')
    assert line.messages == ({"role": "assistant", "content": ""},)


def test_gzip_is_known_by_its_bytes_not_by_its_name(tmp_path: Path) -> None:
    packed = tmp_path / "data.jsonl"
    packed.write_bytes(gzip.compress(f"{GOOD}\n\n{GOOD}\n".encode()))
    assert [line.where for line in read_lines([packed])] == [f"{packed}:1", f"{packed}:3"]
    plain = write(tmp_path / "data.jsonl.gz", GOOD)
    assert [line.number for line in read_lines([plain])] == [0]


def test_blank_lines_are_counted_but_hold_nothing(tmp_path: Path) -> None:
    found = read(tmp_path, "", GOOD, "  \t", GOOD, "")
    assert [(line.number, line.where.rpartition(":")[2]) for line in found] == [(1, "2"), (3, "4")]


def test_a_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(f"{GOOD}\n{GOOD}", encoding="utf-8")
    assert [line.number for line in read_lines([tmp_path / "data.jsonl"])] == [0, 1]


def test_line_separators_within_text_do_not_end_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c"
    first, second = read(
        tmp_path, json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False), GOOD
    )
    assert first.messages[0]["content"] == text
    assert second.where.endswith(":2")


def test_numbers_go_on_over_files_and_lines_start_again(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", GOOD, "", GOOD)
    second = write(tmp_path / "b.jsonl", GOOD)
    assert [(line.number, line.where) for line in read_lines([first, second])] == [
        (0, f"{first}:1"),
        (2, f"{first}:3"),
        (3, f"{second}:1"),
    ]


@pytest.mark.parametrize(("limit", "numbers"), [(1, [0]), (2, [0]), (3, [0, 2]), (4, [0, 2, 3]), (None, [0, 2, 3, 4])])
def test_limit_counts_lines_over_all_files(tmp_path: Path, limit: int | None, numbers: list[int]) -> None:
    files = [write(tmp_path / "a.jsonl", GOOD, "", GOOD), write(tmp_path / "b.jsonl", GOOD, GOOD)]
    assert [line.number for line in read_lines(files, limit)] == numbers


def test_lines_beyond_the_limit_are_not_looked_at(tmp_path: Path) -> None:
    assert len(list(read_lines([write(tmp_path / "a.jsonl", GOOD, "broken")], limit=1))) == 1


def test_lines_before_a_broken_one_are_handed_out(tmp_path: Path) -> None:
    lines = read_lines([write(tmp_path / "a.jsonl", GOOD, "broken")])
    assert next(lines).number == 0
    with pytest.raises(DataError):
        next(lines)


@pytest.mark.parametrize("text", ["{", "{'a': 1}", "nonsense", '{"messages": [}', GOOD + GOOD, GOOD[:-1]])
def test_broken_json_is_refused(tmp_path: Path, text: str) -> None:
    assert "not JSON" in refusal(tmp_path, text).found


@pytest.mark.parametrize(("text", "kind"), [("[1]", "list"), ("3", "int"), ('"a"', "str"), ("null", "NoneType")])
def test_a_line_that_is_not_an_object_is_refused(tmp_path: Path, text: str, kind: str) -> None:
    assert f"a JSON {kind}" in refusal(tmp_path, text).found


@pytest.mark.parametrize(
    "text", ["{}", '{"text": "a"}', '{"messages": []}', '{"messages": null}', '{"messages": "a"}', '{"messages": {}}']
)
def test_a_line_without_turns_is_refused(tmp_path: Path, text: str) -> None:
    assert "a non-empty list" in refusal(tmp_path, text).needed


@pytest.mark.parametrize("role", ['"bot"', '""', '"User"', "null", "3"])
def test_unknown_roles_are_refused(tmp_path: Path, role: str) -> None:
    text = f'{{"messages": [{{"role": "user", "content": "a"}}, {{"role": {role}, "content": "a"}}]}}'
    assert f"turn 1 has the role {json.loads(role)!r}" in refusal(tmp_path, text).found


@pytest.mark.parametrize("role", ['["user"]', "{}"])
def test_roles_that_are_no_text_are_refused(tmp_path: Path, role: str) -> None:
    assert "turn 0" in refusal(tmp_path, f'{{"messages": [{{"role": {role}, "content": "a"}}]}}').found


@pytest.mark.parametrize("turn", ['{"role": "user"}', '{"content": "a"}', '"user"', "null", "[]"])
def test_incomplete_turns_are_refused(tmp_path: Path, turn: str) -> None:
    assert "turn 0 " in refusal(tmp_path, f'{{"messages": [{turn}]}}').found


@pytest.mark.parametrize("content", ["null", "3", '[{"type": "text", "text": "a"}]', '{"text": "a"}'])
def test_content_that_is_no_text_is_refused(tmp_path: Path, content: str) -> None:
    error = refusal(tmp_path, f'{{"messages": [{{"role": "user", "content": {content}}}]}}')
    assert f"turn 0 has content of type {type(json.loads(content)).__name__}" in error.found


@pytest.mark.parametrize(
    "ids", ["[]", "null", "5", '"ab"', "[1, -1]", "[1, true]", "[1, 2.0]", '[1, "2"]', "[1, null]"]
)
def test_bad_token_ids_are_refused(tmp_path: Path, ids: str) -> None:
    assert "input_ids" in refusal(tmp_path, f'{{"input_ids": {ids}, "loss_mask": [0, 1]}}').found


@pytest.mark.parametrize("mask", ["[]", "[1]", "[0, 1, 1]", "null", "1", "[0, 2]", "[0, -1]", "[0, 0.5]", '[0, "1"]'])
def test_bad_masks_are_refused(tmp_path: Path, mask: str) -> None:
    error = refusal(tmp_path, f'{{"input_ids": [3, 4], "loss_mask": {mask}}}')
    assert "loss_mask" in error.found
    assert "2 zeros and ones" in error.needed


def test_token_ids_without_a_mask_are_refused(tmp_path: Path) -> None:
    assert "loss_mask" in refusal(tmp_path, '{"input_ids": [3, 4]}').found


def test_json_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    assert "not JSON" in refusal(tmp_path, "[" * 100_000).found


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path, packed: bool) -> None:
    raw = f"{GOOD}\n".encode() + b'{"messages": [{"role": "user", "content": "\xff"}]}\n'
    (tmp_path / "data.jsonl").write_bytes(gzip.compress(raw) if packed else raw)
    with pytest.raises(DataError) as caught:
        list(read_lines([tmp_path / "data.jsonl"]))
    assert str(tmp_path / "data.jsonl") in caught.value.found
    assert "UTF-8" in caught.value.found


def test_bytes_that_are_not_utf8_are_refused_by_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(f"{GOOD}\n".encode() + b"\xff\n")
    with pytest.raises(DataError) as caught:
        list(read_lines([tmp_path / "data.jsonl"]))
    assert caught.value.found.startswith(f"{tmp_path / 'data.jsonl'}:2")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        list(read_lines([write(tmp_path / "a.jsonl", GOOD), tmp_path / "missing.jsonl"]))
    assert caught.value.found == f"{tmp_path / 'missing.jsonl'}: No such file or directory"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        list(read_lines([tmp_path]))
    assert str(tmp_path) in caught.value.found


@pytest.mark.parametrize("keep", [3, 12, 40, -9, -1])
def test_a_truncated_gzip_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(f"{GOOD}\n".encode() * 3)[:keep])
    with pytest.raises(UsageError) as caught:
        list(read_lines([path]))
    assert str(path) in caught.value.found


@pytest.mark.parametrize("at", [10, 20, -6])  # how the text is packed, the packed text, its checksum
def test_a_damaged_gzip_is_refused(tmp_path: Path, at: int) -> None:
    whole = bytearray(gzip.compress(f"{GOOD}\n".encode() * 3))
    whole[at] ^= 0xFF
    (tmp_path / "data.jsonl").write_bytes(whole)
    with pytest.raises(DraftcacheError) as caught:
        list(read_lines([tmp_path / "data.jsonl"]))
    assert str(tmp_path / "data.jsonl") in caught.value.found
