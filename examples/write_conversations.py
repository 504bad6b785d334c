"""Let the target answer prompts.txt greedily and write the answers as conversations.jsonl and heldout.jsonl.

Run as `python examples/write_conversations.py TARGET`, TARGET being the folder that smollm2_target.py makes.
Only answers that the target ended by itself are kept, with their text exactly as decoded. Of the kept prompts, in the
order of the file, every tenth is held out, so each subject gives some.

Promises: no sampling, a fixed batch plan and a fixed thread count, so a second run on the same machine and versions
writes the same bytes; other hardware may round bf16 differently and answer otherwise. Nothing is written before the
last answer is there.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
HELD_OUT_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of prompts.txt, named after its subject and its place in it."""

    id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the target said: the tokens before eos, their text, and whether eos came before the limit."""

    tokens: list[int]
    text: str
    ended: bool


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts in file order; ids look like `home-repairs-07`. Exits when a line is out of place or said twice."""
    prompts: list[Prompt] = []
    seen: set[str] = set()
    subject, count = "", 0
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = raw.strip()
        if line.startswith("#"):
            subject, count = line.lstrip("# ").replace(" ", "-"), 0
        elif line:
            if not subject:
                sys.exit(f"{path}:{number}: a prompt before any '# subject' line; add the subject above it")
            if line in seen:
                sys.exit(f"{path}:{number}: the prompt {line!r} for the second time; each may stand once; remove it")
            seen.add(line)
            count += 1
            prompts.append(Prompt(id=f"{subject}-{count:02d}", text=line))
    return prompts


def encode(tokenizer: Any, prompts: list[Prompt]) -> list[list[int]]:
    """Token ids of each prompt under the chat template, up to where the answer begins."""
    turns = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def plan_batches(lengths: list[int], size: int) -> list[list[int]]:
    """Indices in batches of similar length (ties by index, so the plan is always the same)."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    return [order[start : start + size] for start in range(0, len(order), size)]


def answer_batch(model: Any, tokenizer: Any, rows: list[list[int]], max_new_tokens: int) -> list[Answer]:
    """Greedy answers of one left-padded batch."""
    width = max(len(row) for row in rows)
    end = end_of_turn(tokenizer)
    ids = torch.full((len(rows), width), end, device=model.device)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = torch.tensor(row, device=model.device)
        mask[index, width - len(row) :] = 1
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=end,
            pad_token_id=end,
        )
    return [read_answer(tokenizer, row) for row in output[:, width:].tolist()]


def end_of_turn(tokenizer: Any) -> int:
    """The token that closes a turn in ChatML; older transformers do not read it off a GGUF file as eos."""
    end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return end


def read_answer(tokenizer: Any, tokens: list[int]) -> Answer:
    """Cut at the first end of turn (what follows it is padding) and decode without any tidying."""
    end = end_of_turn(tokenizer)
    ended = end in tokens
    kept = tokens[: tokens.index(end)] if ended else tokens
    text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return Answer(tokens=kept, text=text, ended=ended)


def conversation(prompt: Prompt, answer: Answer) -> dict[str, Any]:
    """The JSON object of one kept prompt."""
    messages = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": answer.text}]
    return {"id": prompt.id, "messages": messages}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSONL beside the final name and move it into place."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def answer_all(
    model: Any, tokenizer: Any, prompts: list[Prompt], batch: int, max_new_tokens: int
) -> tuple[list[dict[str, Any]], int, int]:
    """Conversations of the kept prompts in file order, how many were empty, how many re-encode to the same tokens."""
    rows = encode(tokenizer, prompts)
    batches = plan_batches([len(row) for row in rows], batch)
    answers: dict[int, Answer] = {}
    start = time.monotonic()
    for number, indices in enumerate(batches, start=1):
        found = answer_batch(model, tokenizer, [rows[index] for index in indices], max_new_tokens)
        answers.update(zip(indices, found, strict=True))
        ended = sum(answer.ended for answer in answers.values())
        spent = time.monotonic() - start
        print(f"batch {number}/{len(batches)}: {ended} of {len(answers)} ended, {spent:.0f} s", flush=True)
    kept = [index for index in range(len(prompts)) if answers[index].ended and answers[index].text.strip()]
    empty = sum(answer.ended and not answer.text.strip() for answer in answers.values())
    same = sum(
        tokenizer.encode(answers[index].text, add_special_tokens=False) == answers[index].tokens for index in kept
    )
    return [conversation(prompts[index], answers[index]) for index in kept], empty, same


def main() -> None:
    """Parse, answer, split, report."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("target", type=Path, help="folder made by smollm2_target.py")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.txt")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the two jsonl files")
    parser.add_argument("--batch", type=int, default=16, help="prompts per batch; another size may change answers")
    parser.add_argument("--max-new-tokens", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="torch device; another one may change answers")
    options = parser.parse_args()
    if not (options.target / "config.json").is_file():
        parser.error(f"{options.target} has no config.json; a target folder is needed; run smollm2_target.py first")
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).to(options.device)

    prompts = read_prompts(options.prompts)
    kept, empty, same = answer_all(model, tokenizer, prompts, options.batch, options.max_new_tokens)
    heldout = kept[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [row for place, row in enumerate(kept, start=1) if place % HELD_OUT_EVERY]
    write_lines(options.out / "conversations.jsonl", training)
    write_lines(options.out / "heldout.jsonl", heldout)
    unfinished = len(prompts) - len(kept) - empty
    print(f"{len(prompts)} prompts: kept {len(kept)} ({len(training)} training, {len(heldout)} held out)")
    print(f"dropped {unfinished} at the limit of {options.max_new_tokens} new tokens, {empty} empty")
    print(f"{same} of {len(kept)} kept answers re-encode to exactly the tokens that were generated")


if __name__ == "__main__":
    main()
