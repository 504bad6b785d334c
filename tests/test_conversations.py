"""Conversations as people have them: tools, reasoning, templates by hand, several samples a line, files given twice."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftcache.common.data import Line, read_lines
from draftcache.common.errors import DataError, MismatchError, UsageError
from draftcache.common.identity import special_ids
from draftcache.common.store import Store, open_store
from draftcache.common.target import identify, read_config
from draftcache.extract.plan import ExtractConfig, make_plan
from draftcache.extract.run import extract
from draftcache.extract.template import Rendered, Template, tokenize
from draftcache.tests.commands import run
from draftcache.tests.stores import (
    CHATML,
    IM_START,
    TOKENIZER_SIZE,
    VOCABULARY,
    byte_tokenizer,
    line,
    messages,
    tiny_config,
    tiny_target,
    token_line,
    write_jsonl,
)
from draftcache.tests.templates import REASONING, TOOLS

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def call(arguments: Any, **extra: Any) -> dict[str, Any]:
    """An assistant turn that calls the weather tool."""
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]} | extra


def parsed(tmp_path: Path, **record: Any) -> Line:
    """One line of data, as read from a file."""
    (found,) = read_lines([write_jsonl(tmp_path / "one.jsonl", [record])])
    return found


def rendered(one: Line, template: str, **arguments: Any) -> Rendered:
    """Samples of a line under the byte tokenizer with this template."""
    return tokenize(
        one,
        Template(
            tokenizer=byte_tokenizer(template),
            vocab_size=VOCABULARY,
            tokenizer_size=TOKENIZER_SIZE,
            arguments=arguments,
        ),
    )


def texts(found: Rendered) -> list[tuple[str, str]]:
    """Whole text and supervised text of every sample."""
    tokenizer = byte_tokenizer()
    return [
        (
            tokenizer.decode(tokens.input_ids),
            tokenizer.decode([i for i, m in zip(tokens.input_ids, tokens.loss_mask, strict=True) if m]),
        )
        for tokens in found.samples
    ]


# Tools


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}', '{ "city":"Köln" }'])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_tool_call_is_supervised_and_its_result_is_not(
    tmp_path: Path, arguments: Any, content: dict[str, Any]
) -> None:
    turns = [
        {"role": "user", "content": "Wetter?"},
        call(arguments, **content),
        {"role": "tool", "content": "18 C", "tool_call_id": "c1"},
        {"role": "assistant", "content": "18 Grad."},
    ]
    found = rendered(parsed(tmp_path, messages=turns, tools=[WEATHER]), TOOLS)
    ((text, supervised),) = texts(found)
    wanted = '<call>{"name": "get_weather", "arguments": {"city": "Köln"}}</call>'
    assert supervised == f"{wanted}<|im_end|>18 Grad.<|im_end|>"
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert json.dumps(WEATHER) in text
    assert not found.notes


def test_tools_may_be_given_as_json_text(tmp_path: Path) -> None:
    turns = messages("hi", "yo")
    listed, as_text = (parsed(tmp_path, messages=turns, tools=t) for t in ([WEATHER], json.dumps([WEATHER])))
    assert listed.tools == as_text.tools == (WEATHER,)


def test_what_the_template_drops_is_not_supervised_and_counted(tmp_path: Path) -> None:
    turns = [*messages("hi"), call({"city": "Bonn"}), {"role": "tool", "content": "9 C"}, *messages("x", "nine")[1:]]
    found = rendered(parsed(tmp_path, messages=turns, tools=[WEATHER]), CHATML)
    ((_, supervised),) = texts(found)
    assert supervised == "nine<|im_end|>"
    assert found.notes == {"lines_without_their_tools": 1, "turns_without_their_tool_calls": 1}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [{"role": "assistant", "content": None}]}, "content of type NoneType"),
        ({"messages": [call("{city")]}, "calls get_weather with '{city'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "a tool call"),
        ({"messages": messages("a", "b"), "tools": "{"}, "tools '{'"),
        ({"messages": messages("a", "b"), "tools": ["f"]}, "tools of type list"),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": [1]}]}, "reasoning of type list"),
    ],
)
def test_tools_and_reasoning_that_make_no_sense_are_refused(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        parsed(tmp_path, **record)
    assert "one.jsonl:1: " in caught.value.found
    assert words in caught.value.found


# Reasoning


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_field_and_inline_are_the_same(tmp_path: Path, name: str) -> None:
    in_field = {"role": "assistant", "content": "42", name: "six times seven"}
    inline = {"role": "assistant", "content": "<think>\nsix times seven\n</think>\n\n42"}
    one, two = (rendered(parsed(tmp_path, messages=[*messages("hm"), turn]), REASONING) for turn in (in_field, inline))
    assert one == two
    assert texts(one)[0][1] == "<think>\nsix times seven\n</think>\n\n42<|im_end|>"
    assert not one.notes


def test_a_template_that_rewrites_history_gives_one_sample_a_turn(tmp_path: Path) -> None:
    turns = messages("a?", "", "b?", "", "c?", "")
    for turn, (thought, answer) in zip(turns[1::2], [("one", "A"), ("two", "B"), ("three", "C")], strict=True):
        turn |= {"content": answer, "reasoning_content": thought}
    found = rendered(parsed(tmp_path, messages=turns), REASONING)
    shown = texts(found)
    assert [supervised for _, supervised in shown] == [
        f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>"
        for thought, answer in (("three", "C"), ("two", "B"), ("one", "A"))
    ]
    tokenizer = byte_tokenizer(REASONING)
    for (text, supervised), number in zip(shown, (5, 3, 1), strict=True):
        sent = tokenizer.apply_chat_template(turns[:number], tokenize=False, add_generation_prompt=True)
        assert text == f"{sent}{supervised}\n"  # what a server sends for that turn, then the answer
        assert "<think>" not in sent
    assert found.notes == {"lines_in_several_samples": 1}


def test_turns_that_one_text_shows_share_a_sample(tmp_path: Path) -> None:
    """Between two questions reasoning stays, so a tool call and the answer after it are one sample."""
    thinks = {"reasoning_content": "look it up"}
    turns = [*messages("a?"), {"role": "assistant", "content": "get", **thinks}, {"role": "tool", "content": "9"}]
    turns += [{"role": "assistant", "content": "nine", **thinks}, *messages("b?")]
    found = rendered(parsed(tmp_path, messages=turns), REASONING)
    assert [supervised.count("<think>") for _, supervised in texts(found)] == [2]


def test_an_empty_thought_belongs_to_the_prompt_where_the_prompt_has_it(tmp_path: Path) -> None:
    one = parsed(tmp_path, messages=messages("hm", "42"))
    thinking, not_thinking = rendered(one, REASONING), rendered(one, REASONING, enable_thinking=False)
    assert texts(thinking)[0][1] == "<think>\n\n</think>\n\n42<|im_end|>"
    assert texts(not_thinking)[0][1] == "42<|im_end|>"
    assert thinking.samples[0].input_ids == not_thinking.samples[0].input_ids


def test_reasoning_that_the_template_drops_is_counted(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "42", "reasoning_content": "six times seven"}
    found = rendered(parsed(tmp_path, messages=[*messages("hm"), turn]), CHATML)
    assert found.notes == {"turns_without_their_reasoning": 1}


# Beginnings, multi-byte text, tokens given


def bos_template(template: str) -> Template:
    tokenizer = byte_tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>"
    return Template(tokenizer=tokenizer, vocab_size=VOCABULARY, tokenizer_size=TOKENIZER_SIZE)


def test_a_template_writes_one_beginning_and_no_second_is_added() -> None:
    found = tokenize(line(*messages("hi", "yo")), bos_template("{{ bos_token }}" + CHATML))
    assert found.samples[0].input_ids[:2] == [256, IM_START]
    assert tokenize(line(*messages("hi", "yo")), bos_template(CHATML)).samples[0].input_ids[0] == IM_START


@pytest.mark.parametrize("one", [line(*messages("<|endoftext|>hi", "yo")), token_line([256, 256, 5], [0, 1, 1])])
def test_two_beginnings_are_refused(one: Line) -> None:
    template = bos_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="begins with token 256 twice"):
        tokenize(one, template)


def test_a_supervised_letter_of_several_bytes_is_whole(tmp_path: Path) -> None:
    ((_, supervised),) = texts(rendered(parsed(tmp_path, messages=messages("ß漢", "😀ß漢é")), CHATML))
    assert supervised == "😀ß漢é<|im_end|>"


def test_a_given_mask_of_ones_and_a_single_token_are_taken() -> None:
    found = rendered(token_line([5, 6], [1, 1]), CHATML)
    assert found.samples[0].loss_mask == [1, 1]
    assert rendered(token_line([5], [1]), CHATML).samples[0].input_ids == [5]
    assert rendered(token_line([TOKENIZER_SIZE], [1]), CHATML).notes == {"ids_unknown_to_the_tokenizer": 1}


# The whole extraction


@pytest.fixture
def config(tmp_path: Path, target_folder: Path) -> ExtractConfig:
    """Three questions, two of them in one line."""
    data = write_jsonl(
        tmp_path / "data.jsonl", [{"messages": messages("a?", "A", "b?", "B")}, {"messages": messages("c?", "C")}]
    )
    return tiny_config(tmp_path / "store", target=target_folder, data=[data])


def test_a_template_file_takes_the_place_of_the_targets(tmp_path: Path, config: ExtractConfig) -> None:
    (tmp_path / "own.jinja").write_text(REASONING)
    by_hand = extract(dataclasses.replace(config, chat_template=tmp_path / "own.jinja"))
    assert by_hand.manifest.report.read == by_hand.manifest.report.kept == 3
    assert by_hand.manifest.report.notes == {"lines_in_several_samples": 1}
    assert sorted(n for bucket in by_hand.buckets.values() for n in bucket.samples.samples.tolist()) == [0, 0, 1]
    assert (by_hand.path / "target" / "chat_template.jinja").read_text() == REASONING
    shipped = tiny_target(tmp_path / "shipped", template=REASONING)
    own = extract(dataclasses.replace(config, target=shipped, store=tmp_path / "own"))
    digests = [[bucket.samples.digest() for bucket in store.buckets.values()] for store in (own, by_hand)]
    assert digests[0] == digests[1]
    assert own.manifest.identity != by_hand.manifest.identity


def test_template_arguments_are_kept_and_must_agree_on_resume(tmp_path: Path, config: ExtractConfig) -> None:
    target = tiny_target(tmp_path / "reasons", template=REASONING)
    arguments = '{"enable_thinking":  false}'
    one = dataclasses.replace(config, target=target, chat_template_kwargs=arguments)
    store = extract(one)
    assert store.manifest.settings.chat_template_kwargs == '{"enable_thinking": false}'
    assert store.manifest.report.supervised_tokens == 3 * 2  # a letter and the end of turn
    extract(dataclasses.replace(one, resume=True))
    with pytest.raises(MismatchError, match="chat_template_kwargs"):
        extract(dataclasses.replace(one, resume=True, chat_template_kwargs="{}"))


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_template_arguments_that_are_no_object_are_refused(config: ExtractConfig, text: str) -> None:
    with pytest.raises(UsageError, match="--chat-template-kwargs"):
        make_plan(dataclasses.replace(config, chat_template_kwargs=text))


def test_a_template_file_that_is_not_there_is_refused(tmp_path: Path, config: ExtractConfig) -> None:
    with pytest.raises(UsageError, match=r"no\.jinja"):
        make_plan(dataclasses.replace(config, chat_template=tmp_path / "no.jinja"))


def test_a_file_given_twice_is_refused(tmp_path: Path, config: ExtractConfig) -> None:
    (tmp_path / "copy.jsonl").write_bytes(config.data[0].read_bytes())
    for twin in (config.data[0], tmp_path / "copy.jsonl", tmp_path / "." / "data.jsonl"):
        with pytest.raises(UsageError, match="holds the same lines as"):
            make_plan(dataclasses.replace(config, data=(*config.data, twin)))


def test_truncation_says_what_it_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path, target_folder: Path) -> None:
    lines = [{"input_ids": [7] * 100, "loss_mask": [0] * 50 + [1] * 50}, {"input_ids": [7] * 60, "loss_mask": [1] * 60}]
    data = write_jsonl(tmp_path / "d.jsonl", lines)
    made = ("extract", "--target", target_folder, "--data", data, "--store", tmp_path / "s", "--device", "cpu")
    found = run(capsys, *made, "--buckets", "64,128", "--max-length", 78)
    assert found.code == 0
    assert "2 of 2 samples kept, 1 truncated, which cost 20.0% of the supervised tokens" in found.out


def test_too_many_dropped_samples_stop_the_run(tmp_path: Path, target_folder: Path) -> None:
    lines = [{"messages": messages("hi", "yo")}] + [{"messages": messages("hi")}] * 3
    config = tiny_config(tmp_path / "s", target=target_folder, data=[write_jsonl(tmp_path / "d.jsonl", lines)])
    assert make_plan(dataclasses.replace(config, max_dropped=0.75)).manifest.report.kept == 1
    with pytest.raises(DataError, match="1 samples are left of 4 lines read"):
        make_plan(dataclasses.replace(config, max_dropped=0.7))


def test_stats_shows_samples_with_their_supervised_text(
    capsys: pytest.CaptureFixture[str], config: ExtractConfig
) -> None:
    store: Store = open_store(extract(config).path)
    plain = run(capsys, "stats", "--store", store.path, "--show", 1).out
    assert "[[A<|im_end|>]]" in plain
    assert "[[B<|im_end|>]]" in plain
    assert "c?" not in plain
    two = run(capsys, "stats", "--store", store.path, "--show", 2).out
    assert "<|im_start|>user\nc?<|im_end|>\n<|im_start|>assistant\n[[C<|im_end|>]]" in two


def test_on_a_terminal_supervised_text_is_green(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, config: ExtractConfig
) -> None:
    store = extract(config)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[32m\x1b[1mA<|im_end|>\x1b[0m" in run(capsys, "stats", "--store", store.path, "--show", 1).out


def test_special_tokens_are_those_that_a_server_may_meet(tmp_path: Path) -> None:
    """Also the ones that this data does not use; but not a token that the tokenizer calls its mask."""
    target = tiny_target(tmp_path / "target")
    identity = identify(target, byte_tokenizer())
    assert identity.special_token_ids == (256, 257, 258)  # pad, the template's own mark, end of turn
    plain = byte_tokenizer("{{ messages[0].content }}")
    config = read_config(target)
    assert special_ids(target, config, plain) == {256, 258}
    plain.add_special_tokens({"mask_token": "<|mask|>"})
    assert plain.mask_token_id == 259
    assert special_ids(target, config, plain) == {256, 258}
    assert identify(target, plain).tokenizer_size == 260
