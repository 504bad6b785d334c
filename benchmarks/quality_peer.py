"""The quality study's peer: the speculators package's drafter, trained on this project's batches.

Its model is imported without the packages that only its data path needs:

    pip install --no-deps speculators==0.9.0 loguru pydantic-settings

It also asks for an older transformers than this project's; the model itself works with ours.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from draftcache.common.codec import field_tensor, read_taps
from draftcache.common.store import Store
from draftcache.train.batch import FlatBatch, view_batch
from draftcache.train.checkpoint import Run
from draftcache.train.model.loss import default_gamma
from draftcache.train.optim import learning_rate
from draftcache.train.order import context_shapes, epoch_batches
from draftcache.train.ring import Ring
from draftcache.train.serving.released import speculators_config, tensor_shapes
from draftcache.train.setup import bucket_index

_UNUSED = (
    "openai",
    "openai.types",
    "openai.types.chat",
    "openai.types.completion",
    "datasets",
    "hs_connectors",
    "aiohttp",
    "httpx",
)


class _Placeholder(types.ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("speculators") is not None


def import_dflash() -> tuple[Any, Any]:
    """The package's DFlash modules `core` and `config`. Its compiled mask builder, which can hang, is switched off."""
    for name in _UNUSED:
        parent = name.partition(".")[0]
        if name not in sys.modules and (parent in sys.modules or importlib.util.find_spec(parent) is None):
            sys.modules[name] = _Placeholder(name)
    core = importlib.import_module("speculators.models.dflash.core")
    core._compiled_create_block_mask = core.create_block_mask  # type: ignore[attr-defined]
    return core, importlib.import_module("speculators.models.dflash.config")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """How the package's model is trained: on this project's batches, with this project's optimizer settings."""

    run: Run  # geometry, batching, seed, steps and optimizer
    loss: str  # of the package: kl_div, ce, ...
    weighting: str  # fixed-exp-decay or dpace


def train_peer(store: Store, peer: PeerRun, target: Path, device: torch.device) -> dict[str, Tensor]:
    """Train the package's model; returns the tensors of a released drafter.

    Its anchors, masks, loss and compiled forward are its own, and so is autocast to bfloat16 over float32 parameters.
    The stored last hidden states are past the final norm, so the model's own copy of that norm is taken out.
    """
    run = peer.run
    torch.manual_seed(run.seed)
    model = _build(run, target).to(device).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {n: tuple(p.shape) for n, p in trained.items()} == tensor_shapes(run.drafter), "the peer has other tensors"
    o = run.optim
    optimizer = torch.optim.AdamW(
        trained.values(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: float(learning_rate(torch.tensor(float(step)), o, run.steps)) / o.lr
    )
    losses = importlib.import_module("speculators.losses")
    chosen = losses.resolve_loss_config(peer.loss, "fused" if device.type == "cuda" else "eager")
    arguments = {  # torch 2.11 cannot compile the fused losses together with the model
        "loss_config": {name: (torch.compiler.disable(function), w) for name, (function, w) in chosen.items()},
        "gamma": run.loss.gamma or default_gamma(run.drafter.block_size),
        "max_anchors": run.anchors,
        "per_position_loss_weight": peer.weighting,
        "dpace_alpha": run.loss.alpha,
    }
    for batch in tqdm(_batches(store, run, device), total=run.steps, desc="speculators", unit=" steps", disable=None):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            _, loss, _ = model(**_inputs(store, batch, device), **arguments)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), o.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: parameter.detach().float() for name, parameter in trained.items()}


def _build(run: Run, target: Path) -> Any:
    """The package's model with this run's geometry, its frozen parts from the target's folder."""
    core, configs = import_dflash()
    values = speculators_config(run.drafter, run.target)
    values["speculators_config"]["verifier"]["name_or_path"] = str(target)
    config = configs.DFlashSpeculatorConfig.from_dict(values)
    if not torch.cuda.is_available():
        config.transformer_layer_config._attn_implementation = "eager"
    model = core.DFlashDraftModel(config).float()
    model.load_verifier_weights()
    model.verifier_norm = torch.nn.Identity()
    return model


def _batches(store: Store, run: Run, device: torch.device) -> Iterator[FlatBatch]:
    """The micro-batches that this project's training would take, on the device."""
    index = bucket_index(store)
    epochs = (epoch_batches(index, run.batching, run.seed, epoch) for epoch in count())
    micro_batches = islice(chain.from_iterable(epochs), run.steps)
    max_tokens = max(context_shapes(index, run.batching))
    with Ring(store, micro_batches, max_tokens, pinned=device.type == "cuda") as ring:
        for _ in range(run.steps):
            filled = ring.take()
            block = filled.batch.block.to(device, copy=True)
            yield view_batch(block, filled.batch.tokens, filled.batch.records.shape[1])
            ring.give_back(filled)


def _inputs(store: Store, batch: FlatBatch, device: torch.device) -> dict[str, Tensor]:
    record = store.manifest.record
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {
        "hidden_states": read_taps(batch.records, record, dtype)[None],
        "input_ids": batch.input_ids[None],
        "loss_mask": batch.loss_mask[None].long(),
        "verifier_last_hidden_states": field_tensor(batch.records, record.field("last"))[None].to(dtype),
        "document_ids": batch.documents[None].long(),
        "position_ids": batch.positions[None].long(),
    }
