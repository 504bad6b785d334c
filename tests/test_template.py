"""Loss masks that can be checked by hand: every byte is a token, so a mask is a string of dots and letters."""

from typing import Any

import pytest

from draftcache.common.data import Line
from draftcache.common.errors import DataError
from draftcache.extract.template import Template, Tokens, tokenize
from draftcache.tests.stores import (
    CHATML,
    IM_END,
    IM_START,
    TOKENIZER_SIZE,
    VOCABULARY,
    byte_tokenizer,
    line,
    messages,
    token_line,
)

STRIPPED = CHATML.replace("message['content']", "message['content'].strip()")
FORGETFUL = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if loop.last or message['role'] != 'assistant' %}{{ message['content'] }}{% endif %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokens_of(one: Line, tokenizer: Any, vocab_size: int = VOCABULARY) -> Tokens:
    """The line's only sample."""
    template = Template(tokenizer=tokenizer, vocab_size=vocab_size, tokenizer_size=TOKENIZER_SIZE)
    (found,) = tokenize(one, template).samples
    return found


def spell(tokenizer: Any, one: Line) -> str:
    """The line's text with every unsupervised byte or token as a dot, and special tokens as < ( and > )."""
    tokens = tokens_of(one, tokenizer)
    assert len(tokens.input_ids) == len(tokens.loss_mask)
    letters = {IM_START: "(", IM_END: ")", 10: "/"}
    return "".join(
        letters.get(i) or (chr(i) if 32 <= i < 127 else "#") if supervised else "."
        for i, supervised in zip(tokens.input_ids, tokens.loss_mask, strict=True)
    )


def header(role: str) -> str:
    """The dots of a turn's opening: its mark, its role and a newline."""
    return "." * (1 + len(role) + 1)


def test_ids_are_the_rendered_bytes(tokenizer: Any) -> None:
    tokens = tokens_of(line(*messages("hi", "yo")), tokenizer)
    user, assistant = list(b"user\nhi"), list(b"assistant\nyo")
    assert tokens.input_ids == [IM_START, *user, IM_END, 10, IM_START, *assistant, IM_END, 10]
    assert tokens.loss_mask == [0] * (3 + len(user) + 1 + len("assistant\n")) + [1, 1, 1, 0]


def test_every_answer_and_its_end_of_turn_are_supervised(tokenizer: Any) -> None:
    found = spell(tokenizer, line(*messages("hi", "yo", "more?", "no!")))
    asked = [header("user") + "." * len(text) + ".." + header("assistant") for text in ("hi", "more?")]
    assert found == f"{asked[0]}yo).{asked[1]}no!)."


def test_a_system_turn_is_not_supervised(tokenizer: Any) -> None:
    found = spell(tokenizer, line(*messages("hi", "yo", system="be brief")))
    assert found == header("system") + "." * 8 + ".." + header("user") + "...." + header("assistant") + "yo)."


def test_a_tool_turn_is_not_supervised(tokenizer: Any) -> None:
    turns = [*messages("hi", "call"), {"role": "tool", "content": "42"}, {"role": "assistant", "content": "it is 42"}]
    asked = header("user") + "...." + header("assistant")
    assert spell(tokenizer, line(*turns)) == f"{asked}call).{header('tool')}....{header('assistant')}it is 42)."


def test_a_trailing_user_turn_is_not_supervised(tokenizer: Any) -> None:
    found = spell(tokenizer, line(*messages("hi", "yo", "bye")))
    assert found == header("user") + "...." + header("assistant") + "yo)." + header("user") + "....."


def test_an_answer_to_nothing_is_not_supervised(tokenizer: Any) -> None:
    turns = [{"role": "assistant", "content": "welcome"}, *messages("hi", "yo")]
    found = spell(tokenizer, line(*turns))
    assert found == header("assistant") + "." * 9 + header("user") + "...." + header("assistant") + "yo)."


def test_two_answers_in_a_row_are_both_supervised(tokenizer: Any) -> None:
    turns = [*messages("hi", "yo"), {"role": "assistant", "content": "and"}]
    assert spell(tokenizer, line(*turns)).endswith("yo)." + header("assistant") + "and).")


def test_no_answer_no_supervision(tokenizer: Any) -> None:
    assert set(spell(tokenizer, line(*messages("hi")))) == {"."}


def test_text_of_several_bytes_a_letter_keeps_the_mask_in_step(tokenizer: Any) -> None:
    found = spell(tokenizer, line(*messages("é漢😀", "aé漢😀z", "ü", "ok")))
    first = header("user") + "." * (2 + 3 + 4) + ".." + header("assistant") + "a" + "#" * (2 + 3 + 4) + "z)."
    assert found == first + header("user") + ".." + ".." + header("assistant") + "ok)."


def test_of_an_empty_answer_the_end_of_turn_is_supervised(tokenizer: Any) -> None:
    found = spell(tokenizer, line(*messages("hi", "", "hi", "yo")))
    assert (
        found
        == header("user") + "...." + header("assistant") + ")." + header("user") + "...." + header("assistant") + "yo)."
    )


def test_an_answers_own_newlines_are_supervised_and_the_templates_is_not(tokenizer: Any) -> None:
    assert spell(tokenizer, line(*messages("hi", "yo\n\n"))).endswith(header("assistant") + "yo//).")
    assert spell(tokenizer, line(*messages("hi", "\n", "hi", " "))).endswith(header("assistant") + " ).")


def test_the_answers_text_in_a_question_is_not_supervised(tokenizer: Any) -> None:
    found = spell(tokenizer, line(*messages("yo", "yo", "yo", "yo")))
    turn = header("user") + "...." + header("assistant") + "yo)."
    assert found == turn * 2


def test_a_template_without_a_newline_behind_the_end_of_turn() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("<|im_end|>\n", "<|im_end|>"))
    found = spell(tokenizer, line(*messages("hi", "yo", "hi", "ja")))
    assert (
        found
        == header("user") + "..." + header("assistant") + "yo)" + header("user") + "..." + header("assistant") + "ja)"
    )


def test_empty_answers_under_a_template_without_any_marks() -> None:
    tokenizer = byte_tokenizer("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    turns = [{"role": "assistant", "content": text} for text in ("", "", "b", "")]
    assert spell(tokenizer, line(*messages("a"), *turns, *messages("c", "d"))) == ".b.d"


def test_a_template_that_strips_text_is_followed() -> None:
    assert spell(byte_tokenizer(STRIPPED), line(*messages(" hi\n", "\n yo "))) == (
        header("user") + "...." + header("assistant") + "yo)."
    )


def test_a_default_system_turn_of_the_template_is_not_supervised() -> None:
    template = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nhelp<|im_end|>\n{% endif %}" + CHATML
    found = spell(byte_tokenizer(template), line(*messages("hi", "yo")))
    assert found == header("system") + "......" + header("user") + "...." + header("assistant") + "yo)."


def refusal(tokenizer: Any, one: Line) -> DataError:
    """The error that a line is refused with; it names the line."""
    with pytest.raises(DataError) as caught:
        tokens_of(one, tokenizer)
    assert caught.value.found.startswith(f"{one.where}: ")
    return caught.value


def test_the_same_template_is_followed_where_it_rewrites_nothing() -> None:
    tokens = tokens_of(line(*messages("a", "b")), byte_tokenizer(FORGETFUL))
    assert bytes(i for i, m in zip(tokens.input_ids, tokens.loss_mask, strict=True) if m) == b"b</>"


def test_a_generation_prompt_that_the_answer_does_not_continue_is_refused() -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    assert "rewrites what was sent" in refusal(byte_tokenizer(template), line(*messages("a", "b"))).found


def test_a_template_that_raises_is_refused() -> None:
    template = "{% if messages|length > 2 %}{{ raise_exception('two turns at most') }}{% endif %}" + CHATML
    tokenizer = byte_tokenizer(template)
    assert "two turns at most" in refusal(tokenizer, line(*messages("a", "b", "c"), number=3)).found
    assert spell(tokenizer, line(*messages("a", "b"))).endswith("b).")


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    assert "chat template fails" in refusal(tokenizer, line(*messages("a", "b"))).found


def test_text_that_is_no_unicode_is_refused(tokenizer: Any) -> None:
    refusal(tokenizer, line(*messages("a \ud83d", "b")))


def test_ids_outside_the_embedding_are_refused(tokenizer: Any) -> None:
    error = refusal(tokenizer, token_line([1, VOCABULARY, 2], [0, 1, 1], number=4))
    assert f"data.jsonl:5: token id {VOCABULARY}" in error.found
    assert f"0..{VOCABULARY - 1}" in error.needed


def test_rendered_ids_outside_the_embedding_are_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError) as caught:
        tokens_of(line(*messages("a", "b")), tokenizer, IM_END)
    assert f"token id {IM_END}" in caught.value.found


def test_given_ids_and_masks_are_taken_as_they_are(tokenizer: Any) -> None:
    tokens = tokens_of(token_line([5, VOCABULARY - 1, 0], [1, 0, 1]), tokenizer)
    assert (tokens.input_ids, tokens.loss_mask) == ([5, VOCABULARY - 1, 0], [1, 0, 1])
