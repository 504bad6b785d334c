"""Builders of tiny targets, data files and stores: real ones, made by transformers and by the real extraction."""

import json
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftcache.common.data import Line
from draftcache.common.store import Store
from draftcache.extract.plan import ExtractConfig
from draftcache.extract.run import extract

HIDDEN = 32
LAYERS = 8
VOCABULARY = 320
TOKENIZER_SIZE = 259
ENDOFTEXT, IM_START, IM_END = 256, 257, 258

LAYER_IDS = (1, 3, 5)
CEILINGS = (64, 128, 190)
TOKEN_BUDGET = 256
"""Rows per shard: 4 of ceiling 64, 2 of 128, 1 of 190, whose stride is 192."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OVERHEAD = 1 + len("user\n") + 2 + 1 + len("assistant\n") + 2
"""Tokens of a rendered exchange besides its two texts."""


def byte_tokenizer(template: str = CHATML) -> Any:
    """A tokenizer whose ids 0..255 are UTF-8 bytes, without merges, then <|endoftext|>, <|im_start|>, <|im_end|>."""
    core = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


@cache
def tiny_model(*, tied: bool = False, layers: int = LAYERS, seed: int = 0) -> Any:
    """A random Qwen3 causal LM of width 32 in bfloat16, shared by its users: not to be changed.

    Its norms' weights are far from one, so that a state before a norm points elsewhere than after it.
    """
    config = Qwen3Config(
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=ENDOFTEXT,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.2, 1.8)
            parameter.data = parameter.data.to(torch.bfloat16)  # not model.to(), which would round the rotary angles
    return model.eval()


def tiny_target(
    folder: Path,
    *,
    tied: bool = False,
    layers: int = LAYERS,
    seed: int = 0,
    template: str = CHATML,
    max_shard_size: str = "1GB",  # a small one gives several weight files and their index
) -> Path:
    """A Hugging Face folder of `tiny_model` with the byte tokenizer and a chat template; returns the folder."""
    byte_tokenizer(template).save_pretrained(folder)
    tiny_model(tied=tied, layers=layers, seed=seed).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def messages(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation: user and assistant in turn, after a system turn if given."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


def line(*turns: dict[str, str], number: int = 0) -> Line:
    """A parsed line holding these messages."""
    return Line(number=number, where=f"data.jsonl:{number + 1}", messages=turns)


def token_line(ids: Sequence[int], mask: Sequence[int], number: int = 0) -> Line:
    """A parsed line that is already tokenized."""
    return Line(number=number, where=f"data.jsonl:{number + 1}", input_ids=tuple(ids), loss_mask=tuple(mask))


def random_exchange(length: int, rng: random.Random) -> dict[str, Any]:
    """One question and answer of random letters that the byte tokenizer turns into exactly `length` tokens (>= 30)."""
    letters = length - _OVERHEAD
    asked = rng.randint(1, letters // 2)
    texts = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=k)) for k in (asked, letters - asked)]
    return {"messages": messages(*texts)}


def mixed_lengths(count: int, seed: int = 0) -> list[int]:
    """Lengths within 30..190 for all three ceilings in turn; the first ones are equal to their ceilings."""
    rng = random.Random(seed)
    ranges = [(30, 64), (65, 128), (129, 190)]
    return [CEILINGS[i] if i < 3 else rng.randint(*ranges[i % 3]) for i in range(count)]


def write_jsonl(path: Path, records: Iterable[object]) -> Path:
    """Write one JSON value a line; returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def tiny_data(path: Path, count: int = 14, seed: int = 0) -> Path:
    """Write `count` random exchanges of `mixed_lengths`; returns the path."""
    rng = random.Random(seed)
    return write_jsonl(path, [random_exchange(length, rng) for length in mixed_lengths(count, seed)])


def tiny_config(
    folder: Path,
    *,
    target: Path,
    data: Sequence[Path],
    layer_ids: tuple[int, ...] = LAYER_IDS,
    max_length: int | None = None,
    min_supervised: int = 2,
    limit: int | None = None,
    teacher: str = "last",
    dtype: str | None = None,
    overwrite: bool = False,
) -> ExtractConfig:
    """An extraction on the CPU into `folder` with the small ceilings and token budget."""
    return ExtractConfig(
        target=target,
        data=tuple(data),
        store=folder,
        layer_ids=layer_ids,
        ceilings=CEILINGS,
        token_budget=TOKEN_BUDGET,
        max_length=max_length,
        min_supervised=min_supervised,
        limit=limit,
        teacher=teacher,
        dtype=dtype,
        device="cpu",
        overwrite=overwrite,
    )


def tiny_store(
    folder: Path,  # holds the store, and beside it the target and the data unless given
    *,
    target: Path | None = None,
    count: int = 14,
    seed: int = 0,
    layer_ids: tuple[int, ...] = LAYER_IDS,
    teacher: str = "last",
) -> Store:
    """Run the real extraction on `count` random exchanges: several shards in each of three buckets."""
    folder.mkdir(parents=True, exist_ok=True)
    target = target or tiny_target(folder / "target")
    data = tiny_data(folder / "data.jsonl", count, seed)
    return extract(tiny_config(folder / "store", target=target, data=[data], layer_ids=layer_ids, teacher=teacher))


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its name in there."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place; a negative offset counts from its end."""
    with path.open("r+b") as file:
        file.seek(offset, 2 if offset < 0 else 0)
        position = file.tell()
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def _byte_letters() -> list[str]:
    """The letter by which byte-level BPE writes each byte, as GPT-2 chose them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 0x100 + hidden.index(byte)) for byte in range(256)]
