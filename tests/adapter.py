"""How the shared cases speak to this project: their check scripts import this file by path.

Only public means are used: the command line, zarr-python, numpy and safetensors, and the drafter's own classes.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from safetensors.numpy import load_file

from draftcache.common.record import Field, field_view, widen_bfloat16
from draftcache.common.store import open_store
from draftcache.common.target import load_parts
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.checkpoint import load_drafter, newest_checkpoint, read_run
from draftcache.train.model.anchors import Blocks, lay_out_blocks
from draftcache.train.model.attention import DenseAttention
from draftcache.train.model.loss import accepted_length, decay_weights


def cli(*args: object, timeout: float = 300) -> tuple[int, str, str]:
    """Run the command line; exit code, stdout, stderr."""
    command = [sys.executable, "-m", "draftcache", *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    return result.returncode, result.stdout, result.stderr


def extract(
    target: Path,
    data: Path,
    store: str,
    layers: Sequence[int] | None = None,
    max_length: int | None = None,
    buckets: Sequence[int] | None = None,
    extra: Sequence[object] = (),
) -> tuple[int, str, str]:
    """`draftcache extract` with these settings."""
    args: list[object] = ["extract", "--target", target, "--data", data, "--store", store]
    if layers is not None:
        args.append("--layers=" + ",".join(map(str, layers)))
    if max_length:
        args += ["--max-length", max_length]
    if buckets:
        args += ["--buckets", ",".join(map(str, buckets))]
    return cli(*args, *extra)


def train(
    store: str,
    target: Path,
    out: str,
    steps: int | None = None,
    seed: int = 0,
    extra: Sequence[object] = (),
) -> tuple[int, str, str]:
    """`draftcache train` against the data's tokens; the target itself is not needed."""
    assert target.exists()
    args: list[object] = ["train", "--store", store, "--out", out, "--seed", seed, "--teacher", "tokens"]
    args += ["--head-dim", 16, "--block-size", 4, "--num-layers", 2, "--log-every", 1]
    return cli(*args, *(["--steps", steps] if steps else []), *extra)


def samples(store: str) -> list[dict[str, Any]]:
    """All stored samples, unpadded, in the order of their lines; read with zarr-python alone."""
    manifest = json.loads((Path(store) / "manifest.json").read_text())
    found = []
    for _, bucket in sorted(zarr.open_group(store, mode="r")["buckets"].groups()):  # type: ignore[union-attr]
        records = bucket["records"]
        fields = {
            f["name"]: Field(name=f["name"], dtype=f["dtype"], shape=tuple(f["shape"]), offset=f["offset"])
            for f in records.attrs["fields"]
        }
        for row, length in enumerate(np.asarray(bucket["length"]).tolist()):
            record = np.asarray(records[row, :length])
            found.append(
                {
                    "source_line": int(bucket["sample"][row]),
                    "input_ids": np.asarray(bucket["input_ids"][row, :length]).tolist(),
                    "loss_mask": np.asarray(bucket["loss_mask"][row, :length]).tolist(),
                    "hidden": widen_bfloat16(field_view(record, fields["taps"])).transpose(1, 0, 2),
                    "layer_ids": manifest["settings"]["layer_ids"],
                    "last": widen_bfloat16(field_view(record, fields["last"])) if "last" in fields else None,
                    "last_is_normed": manifest["final_norm_applied"],
                }
            )
    return sorted(found, key=lambda s: s["source_line"])


def report(store: str) -> dict[str, Any]:
    """What became of every line read."""
    found: dict[str, Any] = json.loads((Path(store) / "manifest.json").read_text())["report"]
    return found


def chunk_files(store: str) -> list[Path]:
    """The files that hold hidden states."""
    return sorted(Path(store).glob("buckets/*/records/c/*/*/*"))


def metrics(out: str) -> list[dict[str, Any]]:
    """Per-step records of a run."""
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def weights(out: str) -> dict[str, np.ndarray[Any, Any]]:
    """The newest checkpoint's drafter weights by name."""
    found: dict[str, np.ndarray[Any, Any]] = load_file(newest_checkpoint(Path(out)) / "drafter.safetensors")
    return found


def draft_logits(
    checkpoint: str, input_ids: Sequence[int], hidden: np.ndarray[Any, Any], anchors: Sequence[int], store: str
) -> np.ndarray[Any, Any]:
    """The training forward for one sequence: float32 [anchors, block size, vocabulary]."""
    run, drafter = load_drafter(Path(checkpoint), torch.device("cpu"))
    parts = load_parts(Path(store), open_store(Path(store)).manifest, torch.device("cpu"))
    batch = _one_sequence(input_ids, [1] * len(input_ids))
    blocks = _blocks(batch, anchors, run.drafter.block_size, run.drafter.mask_token_id)
    taps = torch.from_numpy(hidden.transpose(1, 0, 2).reshape(len(input_ids), -1))
    with torch.inference_mode():
        context = drafter.context_keys(taps, batch.positions)
        embedded = parts.embedding.float()[blocks.input_ids.flatten()]
        attention = DenseAttention(blocks, batch.tokens, run.drafter.rules)
        states = drafter(embedded, blocks.positions.flatten(), context, attention)
        logits: torch.Tensor = states @ parts.head.float().T
    return logits.view(len(anchors), run.drafter.block_size, -1).numpy()


def objective(
    checkpoint: str, input_ids: Sequence[int], loss_mask: Sequence[int], anchors: Sequence[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Labels and decay weights that the training loss uses for these anchors, [anchors, block size] each."""
    run = read_run(Path(checkpoint))
    size = run.drafter.block_size
    batch = _one_sequence(input_ids, loss_mask)
    blocks = _blocks(batch, anchors, size, run.drafter.mask_token_id)
    decay = torch.cat([torch.zeros(1), decay_weights(size, run.loss.gamma, torch.device("cpu"))])
    return blocks.labels.numpy(), (decay * blocks.valid).numpy()


def accept_length(pred: np.ndarray[Any, Any], target: np.ndarray[Any, Any], valid: np.ndarray[Any, Any]) -> float:
    """The training metric over blocks, pooled over two micro-batches as sum and count."""
    right, counted = torch.from_numpy(pred == target), torch.from_numpy(valid.astype(bool))
    middle = len(right) // 2
    parts = [accepted_length(right[cut], counted[cut]) for cut in (slice(middle), slice(middle, None))]
    return float(sum(total for total, _ in parts) / sum(count for _, count in parts))


def _one_sequence(input_ids: Sequence[int], loss_mask: Sequence[int]) -> FlatBatch:
    tokens = len(input_ids)
    batch = view_batch(torch.zeros(batch_bytes(tokens, 64), dtype=torch.uint8), tokens, 64)
    batch.input_ids.copy_(torch.tensor(input_ids))
    batch.loss_mask.copy_(torch.tensor(loss_mask))
    batch.positions.copy_(torch.arange(tokens))
    return batch


def _blocks(batch: FlatBatch, anchors: Sequence[int], block_size: int, mask_token_id: int) -> Blocks:
    at = torch.tensor(anchors)
    return lay_out_blocks(batch, at, torch.ones_like(at, dtype=torch.bool), block_size, mask_token_id)
