"""What the codecs and the top-64 teacher lose on a real target's hidden states, tap by tap.

The physics: rounding to m mantissa bits moves a value by 2^-m / sqrt(12) of its power of two, root mean square; over
mantissas spread evenly in the logarithm that is 0.212 x 2^-m of the value. So bf16 should err by 0.17 % and mxfp8
(e4m3) by 2.7 %; mxfp4 (e2m1) by 10.6 % at best, by 11.5 % on normally distributed values, and by more where an outlier
channel sets the scale and leaves the rest of its group a coarse grid. The error is noise, so a cosine should be
1 - error^2 / 2. What a stored state is for is the target's choice, so `last` also goes through the head; the codecs
leave it in bf16, and the table says why. The top 64 tokens should hold nearly all of the distribution; they are chosen
from logits in bfloat16, as a bfloat16 target gives them, in which the first two are sometimes equal.

    python -m draftcache.benchmarks.bench_codecs TARGET [--data examples/conversations.jsonl] [--tokens 4096]

TARGET is the folder that `examples/smollm2_target.py` makes. It runs on the CPU in float32; what the codecs make of
those states is read back through the very functions that extraction and training use. Errors and cosines are taken per
token and then averaged; everything behind the head counts supervised tokens only.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional

from draftcache.benchmarks.rows import append_row
from draftcache.common.codec import field_tensor, put_tap, put_teacher, read_taps
from draftcache.common.data import read_lines
from draftcache.common.record import CODECS, TOP_K, record_spec
from draftcache.common.target import Target, default_layer_ids, load_target, load_tokenizer, tap_layers
from draftcache.extract.template import Template, tokenize

TAPS = 5
HEAD_ROWS = 256
CONVERSATIONS = Path(__file__).parents[1] / "examples" / "conversations.jsonl"


@torch.no_grad()
def real_states(folder: Path, target: Target, data: Path, tokens: int) -> tuple[dict[str, Tensor], Tensor]:
    """At least `tokens` tokens' states, float32 [T, H] by plane, and [T] bool: whether the next token is supervised."""
    layer_ids = default_layer_ids(len(target.layers), TAPS)
    tokenizer = load_tokenizer(folder)
    template = Template(tokenizer=tokenizer, vocab_size=len(target.embedding), tokenizer_size=len(tokenizer))
    taps: list[list[Tensor]] = [[] for _ in layer_ids]
    last: list[Tensor] = []
    supervised: list[Tensor] = []
    hooks = tap_layers(target, layer_ids, lambda position, output: taps[position].append(output[0]))
    for line in read_lines([data]):
        (sample,) = tokenize(line, template).samples
        ids, mask = torch.tensor([sample.input_ids]), torch.tensor(sample.loss_mask)
        last.append(target.decoder(input_ids=ids, use_cache=False).last_hidden_state[0])
        supervised.append(functional.pad(mask[1:], (0, 1)).bool())
        if sum(map(len, last)) >= tokens:
            break
    for hook in hooks:
        hook.remove()
    planes = {f"layer {layer}": torch.cat(states) for layer, states in zip(layer_ids, taps, strict=True)}
    return planes | {"last": torch.cat(last)}, torch.cat(supervised)


def through(codec: str, states: Tensor) -> Tensor:
    """States, [T, H] float32, written into records by a codec and read back."""
    spec = record_spec(1, states.shape[1], codec, "none")
    records = torch.zeros(len(states), spec.record_bytes, dtype=torch.uint8)
    put_tap(records, spec, 0, states)
    return read_taps(records, spec, torch.float32)


def losses(states: Tensor, found: Tensor) -> dict[str, float]:
    """Relative error and cosine per token: their means, and the worst token's."""
    error = (found - states).norm(dim=-1) / states.norm(dim=-1)
    cosine = functional.cosine_similarity(found, states, dim=-1)
    return {
        "error": float(error.mean()),
        "error_max": float(error.max()),
        "cosine": float(cosine.mean()),
        "cosine_min": float(cosine.min()),
    }


@torch.no_grad()
def chosen(last: Tensor, head: Tensor) -> Tensor:
    """[T]: the target's choice at each token, in float32."""
    return torch.cat([functional.linear(rows, head).argmax(-1) for rows in last.split(HEAD_ROWS)])


@torch.no_grad()
def top_teacher(last: Tensor, head: Tensor) -> dict[str, float]:
    """What a bfloat16 target's top-64 keeps of the distribution in float32."""
    spec = record_spec(1, last.shape[1], "bf16", "top")
    records = torch.zeros(1, len(last), spec.record_bytes, dtype=torch.uint8)
    put_teacher(records, spec, last.bfloat16()[None], head.bfloat16())
    ids, log_probs = (field_tensor(records, spec.field(name))[0] for name in ("top_ids", "top_log_probs"))
    exact = torch.cat(
        [
            functional.linear(rows, head).log_softmax(-1).gather(-1, kept.long())
            for rows, kept in zip(last.split(HEAD_ROWS), ids.split(HEAD_ROWS), strict=True)
        ]
    )
    mass = exact.exp().sum(-1)
    return {
        "remaining_mass": 1 - float(mass.mean()),
        "remaining_mass_p99": float((1 - mass).quantile(0.99)),
        "log_prob_error": float((log_probs.float() - exact).abs().mean()),
        "argmax_agreement": float((ids[:, 0] == chosen(last, head)).float().mean()),
    }


def compare(planes: dict[str, Tensor], supervised: Tensor, head: Tensor) -> None:
    """A table of every codec and plane, and one of what the head makes of it; then one row per codec and teacher."""
    table: dict[str, list[object]] = {name: [name] for name in planes}
    behind_head: list[list[object]] = []
    want = chosen(planes["last"][supervised], head)
    counts = {"tokens": len(supervised), "supervised": int(supervised.sum())}
    rows: dict[str, dict[str, float]] = {}
    for codec in CODECS:
        metrics: dict[str, float] = {}
        for name, states in planes.items():
            figures = losses(states, through(codec, states))
            metrics |= {f"{name}/{figure}": value for figure, value in figures.items()}
            table[name] += [figures["error"], figures["cosine"], figures["cosine_min"]]
        found = chosen(through(codec, planes["last"][supervised]), head)
        metrics["last/argmax_agreement"] = float((found == want).float().mean())
        behind_head.append([f"last in {codec}", metrics["last/argmax_agreement"], None])
        rows[codec] = counts | metrics
    top = top_teacher(planes["last"][supervised], head)
    behind_head.append([f"top {TOP_K}", top["argmax_agreement"], top["remaining_mass"]])
    rows[f"top{TOP_K}"] = counts | top
    headers = [f"{codec} {figure}" for codec in CODECS for figure in ("error", "cosine", "worst")]
    print(tabulate(table.values(), headers=["state", *headers], floatfmt=".5f"))
    print(tabulate(behind_head, headers=["teacher", "argmax agreement", "remaining mass"], floatfmt=".5f"))
    for case, figures in rows.items():
        append_row("bench_codecs", f"smollm2-135m/{case}", figures)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run the target, compare."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--data", type=Path, default=CONVERSATIONS)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args(arguments)
    target = load_target(options.target, torch.device("cpu"), "float32")
    planes, supervised = real_states(options.target, target, options.data, options.tokens)
    compare(planes, supervised, target.head)


if __name__ == "__main__":
    main()
