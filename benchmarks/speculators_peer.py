"""The same step on the same states by another trainer, the package `speculators` 0.9.0, in its best case.

The network, the anchor draw, the masks, the losses, the metrics, the data set, its sampler, its collate function and
its DataLoader are the package's own; `PeerStep.step` repeats the order of its trainer. Favours done to it:

- data that lies on the device already (`PeerStep.batch`), all of one shape, and no logging, which would wait for the
  device many times a step;
- its fused Triton loss (the eager one needs several more logits-sized tensors), called from outside its
  `torch.compile`, which torch 2.11 fails on; the network and the metrics stay compiled;
- torch's fused AdamW, where its trainer takes torch's default.

Left as its trainer has them: float32 parameters under bfloat16 autocast, embedding and both heads among them;
gradients that live until the next backward pass; logits of all slots at once, the teacher's beside them, slot 0 too;
block masks, anchors and accuracies of every step.

    pip install speculators==0.9.0
    export PYTORCH_ALLOC_CONF=expandable_segments:True

    peer = build_peer(FULL_SCALE, "last")
    loss = peer.step()

    write_peer_dataset(folder, samples)
    for batch in peer_batches(peer_loader(folder, FULL_SCALE)):
        peer.step(batch)

The first steps compile and tune kernels: time later ones. Two peers in one process need `torch.compiler.reset()`
between them, or their compilations count against one limit.

Legend: T context tokens, S tokens of a sample, A anchors, H width, K taps, V vocabulary.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.train.data import ArrowDataset
from speculators.train.dataloader import _limit_worker_threads, _setup_dataloader
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import Qwen3Config

from draftcache.benchmarks.step_cases import DEVICE, SUPERVISED_FROM, Geometry
from draftcache.train.model.drafter import INIT_STD, SLIDING

LOSSES = {"last": ("kl_div", "fixed-exp-decay"), "argmax": ("ce", "dpace")}
"""Loss and weights by slot for each teacher: the full distribution, or its argmax, which is the package's default."""
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.01, 1.0
"""Its trainer's defaults."""

Batch = dict[str, Any]
"""Arguments of the package's forward: hidden_states [1, T, K*H] and verifier_last_hidden_states [1, T, H] in bfloat16;
input_ids, loss_mask, position_ids and document_ids (-1: padding), [1, T] int64; error_records, int."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStep:
    """The package's model and optimizer, and a batch on the device."""

    model: DFlashDraftModel
    optimizer: torch.optim.Optimizer
    call: dict[str, Any]  # what its trainer passes to forward beside the batch
    batch: Batch

    def step(self, batch: Batch | None = None) -> Tensor:
        """One update from `batch`, or from the resident one. Returns the loss, a scalar on the device."""
        batch = self.batch if batch is None else batch
        with torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16):
            _, loss, _ = self.model(**batch, **self.call)
        self.optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        detached: Tensor = loss.detach()
        return detached


def build_peer(
    geometry: Geometry, teacher: str, *, device: torch.device = DEVICE, compile_mask: bool = True
) -> PeerStep:
    """The package's drafter at `geometry`, randomly initialised, with a random batch; `teacher` is a key of LOSSES.

    `compile_mask=False` builds block masks by plain torch instead of the package's compiled function, whose
    compilation was seen not to end at small shapes. A device without CUDA gets eager attention and the eager loss.
    """
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    with device:
        model = build_model(geometry, "simple_flex_attention" if cuda else "eager")
    _fill_frozen(model)
    if cuda and not compile_mask:
        model._create_mask_fn = create_block_mask
    loss, weights = LOSSES[teacher]
    call, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn=loss,
        loss_implementation="fused" if cuda else "eager",
        max_anchors=geometry.anchors,
        per_position_loss_weight=weights,
    )
    call["loss_config"] = {
        name: (torch.compiler.disable(function), weight) for name, (function, weight) in call["loss_config"].items()
    }
    return PeerStep(
        model=model.train(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True),
        call=call,
        batch=random_peer_batch(geometry, device),
    )


def build_model(geometry: Geometry, attention: str) -> DFlashDraftModel:
    """The package's network on the current device, its frozen embedding and heads still NaN."""
    drafter = geometry.drafter
    layers = Qwen3Config(
        vocab_size=drafter.vocab_size,
        hidden_size=drafter.hidden_size,
        intermediate_size=drafter.intermediate_size,
        num_hidden_layers=len(drafter.layer_types),
        num_attention_heads=drafter.num_heads,
        num_key_value_heads=drafter.num_kv_heads,
        head_dim=drafter.head_dim,
        rms_norm_eps=drafter.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": drafter.rope_theta},
        max_position_embeddings=geometry.tokens,
        layer_types=list(drafter.layer_types),
        use_sliding_window=SLIDING in drafter.layer_types,
        sliding_window=drafter.sliding_window,
    )
    layers._attn_implementation = attention
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=drafter.vocab_size,
        block_size=drafter.block_size,
        aux_hidden_state_layer_ids=[layer + 1 for layer in drafter.layer_ids],  # it counts the embedding's output as 0
        mask_token_id=drafter.mask_token_id,
        sliding_window_non_causal=not drafter.sliding_causal,
    )
    return DFlashDraftModel(config)


def _fill_frozen(model: DFlashDraftModel) -> None:
    """Random values where its trainer loads the target's embedding and head; the package leaves NaN there."""
    with torch.no_grad():
        model.embed_tokens.weight.normal_(0, INIT_STD)
        model.lm_head.weight.normal_(0, INIT_STD)
        model.verifier_lm_head.weight.copy_(model.lm_head.weight)


def random_peer_batch(geometry: Geometry, device: torch.device) -> Batch:
    """As many documents as our own random batch holds, one after another as the package packs them, then padding."""
    tokens, length = geometry.tokens, geometry.document
    index = torch.arange(tokens, device=device)
    document = index // length
    real = document < tokens // geometry.stride
    position = index % length * real
    shape = 1, tokens, geometry.taps * geometry.hidden
    return {
        "hidden_states": torch.randn(shape, device=device, dtype=torch.bfloat16),
        "verifier_last_hidden_states": torch.randn(1, tokens, geometry.hidden, device=device, dtype=torch.bfloat16),
        "input_ids": (torch.randint(0, geometry.vocabulary - 1, (tokens,), device=device) * real)[None],
        "loss_mask": (real & (position >= int(SUPERVISED_FROM * length))).long()[None],
        "position_ids": position[None],
        "document_ids": torch.where(real, document, -1)[None],
        "error_records": 0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSample:
    """One sample as the package stores it."""

    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S], 1 where the target would have generated the token
    hidden_states: Tensor  # [S, K+1, H] bfloat16, the last state after the taps


def write_peer_dataset(folder: Path, samples: Iterable[PeerSample], repeat: int = 1) -> None:
    """Write `samples` as the package's offline data set: an Arrow table, and one safetensors file per sample.

    Samples are taken one at a time; `repeat` makes an epoch go over them so often, by links.
    Its last states lie before the final norm, which its model applies itself.
    """
    states = folder / "hidden_states"
    states.mkdir(parents=True)
    columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for row, sample in enumerate(samples):
        columns["input_ids"].append(sample.input_ids.tolist())
        columns["loss_mask"].append(sample.loss_mask.tolist())
        columns["seq_len"].append(len(sample.input_ids))
        content = {"hidden_states": sample.hidden_states.contiguous(), "token_ids": sample.input_ids.contiguous()}
        save_file(content, states / f"hs_{row}.safetensors")
    count = len(columns["seq_len"])
    for row in range(count, repeat * count):
        (states / f"hs_{row}.safetensors").hardlink_to(states / f"hs_{row % count}.safetensors")
    table = Dataset.from_dict({name: values * repeat for name, values in columns.items()})
    table.set_format("torch")
    table.save_to_disk(folder)


def peer_loader(folder: Path, geometry: Geometry, *, workers: int = 12, prefetch: int = 4) -> DataLoader[Batch]:
    """The package's data set in its DataLoader, with its defaults: spawned workers, pinned memory, T tokens a batch.

    `workers * prefetch` batches lie in shared memory, at full scale 3.0 GB each: 145 GB with the defaults.
    """
    _limit_worker_threads()
    dataset = ArrowDataset(max_len=geometry.tokens, datapath=folder, on_missing="raise")
    loader: DataLoader[Batch] = _setup_dataloader(
        dataset,
        geometry.tokens,
        geometry.hidden,
        num_workers=workers,
        num_target_layers=geometry.taps,
        prefetch_factor=prefetch,
    )
    return loader


def peer_batches(loader: DataLoader[Batch], device: torch.device = DEVICE) -> Iterator[Batch]:
    """Batches on the device, epoch after epoch without end, copied as its trainer copies them."""
    sampler: Any = loader.batch_sampler
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in loader:
            if batch["error_records"]:
                raise RuntimeError(f"speculators dropped {batch['error_records']} samples of a batch, epoch {epoch}")
            yield {
                name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }
