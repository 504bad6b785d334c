"""The model card of an exported drafter: what it is for, what it was made from, how to serve it."""

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from draftcache.common.manifest import Manifest
from draftcache.train.checkpoint import Run
from draftcache.train.model.drafter import FULL, SLIDING
from draftcache.train.model.loss import default_gamma


def model_card(
    run: Run,
    layout: str,
    checkpoint: str,
    manifest: Manifest | None,
    measured: Sequence[dict[str, Any]],  # name, prompts and accepted_length of prompt files
    trained: Mapping[str, float],  # accepted length as training measured it, by the kind of samples
) -> str:
    """README.md as text. It depends on the run alone, so that a repeated export gives the same bytes."""
    target = run.target
    parts = [
        _front_matter(target.name),
        f"# DFlash drafter for {target.name}",
        f"A block-diffusion draft model for speculative decoding with {target.name}, trained by draftcache "
        f"{run.versions['draftcache']} and exported in the {layout} format. It serves this target and no other: "
        "a fine-tuned or rotated target needs its own drafter.",
        "## Serve",
        _serving(run, layout),
        "## Measured",
        _measured(measured, trained),
        "## Target",
        _table(_target_rows(run)),
        "## Data",
        _data(manifest),
        "## Drafter and training",
        _table(_drafter_rows(run, checkpoint)),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(target: str) -> str:
    return f"---\nbase_model: {target}\ntags:\n- dflash\n- speculative-decoding\n- draft-model\n---"


def _serving(run: Run, layout: str) -> str:
    drafted, name = run.drafter.block_size - 1, run.target.name
    notes = [
        f"TARGET is the folder or repository of {name}, DRAFTER this folder; {drafted} drafted tokens a block are what "
        "it was trained for. Use the chat template that the data below was rendered with, and bfloat16.",
    ]
    mixed = {FULL, SLIDING} <= set(run.drafter.layer_types)
    if mixed:
        notes.append("Layers of two kinds need vLLM's V2 model runner, which the first line below switches on.")
    if max(run.drafter.layer_ids) == run.target.num_layers - 1:
        notes.append(
            "The target's last layer is tapped, which SGLang could not do for every target when this was written."
        )
    vllm = (
        f"{'VLLM_USE_V2_MODEL_RUNNER=1 ' if mixed else ''}vllm serve TARGET --speculative-config "
        f'\'{{"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": {drafted}}}\''
    )
    sglang = "python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH "
    sglang += f"--speculative-draft-model-path DRAFTER --speculative-num-draft-tokens {run.drafter.block_size}"
    commands = [vllm, sglang] if layout == "zlab" else [vllm]
    return "\n\n".join([*notes, *(f"```\n{command}\n```" for command in commands)])


def _measured(measured: Sequence[dict[str, Any]], trained: Mapping[str, float]) -> str:
    parts = []
    if measured:
        rows = [[m["name"], m["prompts"], f"{m['accepted_length']:.3f}"] for m in measured]
        head = ["prompts", "count", "accepted length"]
        parts.append(tabulate(rows, headers=head, tablefmt="github", disable_numparse=True))
        parts.append("Accepted length is the number of tokens that one forward of the target yields, by real decoding.")
    else:
        parts.append(
            "Not decoded yet. `draftcache evaluate --drafter DRAFTER --target TARGET --data PROMPTS` measures it."
        )
    if trained:
        figures = ", ".join(f"{value:.3f} on {samples} samples" for samples, value in trained.items())
        parts.append(
            f"In training: {figures}, over anchors drawn from all positions; decoding takes a path of its own."
        )
    return "\n\n".join(parts)


def _target_rows(run: Run) -> list[tuple[str, object]]:
    t = run.target
    return [
        ("name", t.name),
        ("architecture", t.architecture),
        ("run in", t.dtype if t.quantization is None else f"{t.dtype}, quantised by {t.quantization}"),
        ("layers, width, vocabulary", f"{t.num_layers}, {t.hidden_size}, {t.vocab_size}"),
        ("weights digest", t.weights_digest),
        ("tokenizer digest", t.tokenizer_digest),
        ("chat template digest", t.template_digest),
    ]


def _data(manifest: Manifest | None) -> str:
    if manifest is None:
        return "Named by the store's identity below; `draftcache export --store STORE` lists the files here."
    rows = [[data.name, data.lines, data.digest] for data in manifest.data]
    files = tabulate(rows, headers=["file", "lines", "SHA-256"], tablefmt="github")
    report, settings = manifest.report, manifest.settings
    template = "the target's own" if settings.chat_template is None else f"one given by hand, {settings.chat_template}"
    return (
        f"{files}\n\n{report.kept} of {report.read} lines kept, {report.supervised_tokens} supervised tokens, "
        f"at most {settings.max_length} tokens a sample; stored as {settings.codec} with teacher {settings.teacher}. "
        f"Chat template: {template}, with arguments {settings.chat_template_kwargs}."
    )


def _drafter_rows(run: Run, checkpoint: str) -> list[tuple[str, object]]:
    d, loss = run.drafter, run.loss
    gamma = loss.gamma or default_gamma(d.block_size)
    sliding = SLIDING in d.layer_types
    return [
        ("layers", ", ".join(d.layer_types)),
        ("window of sliding layers", d.sliding_window if sliding else "none"),
        ("slots of a block see", _causality(run)),
        ("heads, kv heads, head width", f"{d.num_heads}, {d.num_kv_heads}, {d.head_dim}"),
        ("MLP width", d.intermediate_size),
        ("block size", d.block_size),
        ("mask token", d.mask_token_id),
        ("rope base", d.rope_theta),
        ("tapped layers (0-based, output)", ", ".join(map(str, d.layer_ids))),
        ("embedding and head", "the target's, not in this folder"),
        ("teacher", loss.teacher),
        ("weighting", f"decay, gamma {gamma}" if loss.weighting == "decay" else f"D-PACE, alpha {loss.alpha}"),
        ("steps", f"{run.steps}; this is {checkpoint}"),
        ("micro-batches a step, anchors in each", f"{run.micro_batches}, {run.anchors}"),
        ("batching", f"{run.batching.kind}, {run.batching.token_budget} tokens"),
        ("peak learning rate", run.optim.lr),
        ("seed", run.seed),
        ("trained in", run.dtype),
        ("store identity", run.store_identity),
    ]


def _causality(run: Run) -> str:
    sees = {FULL: "the whole block", SLIDING: "the slots before them and themselves"}
    return "; ".join(f"{kind}: {sees[kind]}" for kind in dict.fromkeys(run.drafter.layer_types))


def _table(rows: Sequence[tuple[str, object]]) -> str:
    return tabulate(rows, headers=["", ""], tablefmt="github", disable_numparse=True)
