"""The peer of the benchmarks trains the same network on the same states. Needs the package `speculators`."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from draftcache.benchmarks.step_cases import FULL_SCALE, Geometry
from draftcache.train.batch import batch_bytes, view_batch
from draftcache.train.model.anchors import lay_out_blocks
from draftcache.train.model.attention import DenseAttention
from draftcache.train.model.drafter import FULL, SLIDING, Drafter

if TYPE_CHECKING:
    from draftcache.benchmarks.speculators_peer import PeerSample

pytestmark = [
    pytest.mark.skipif(find_spec("speculators") is None, reason="speculators is not installed"),
    pytest.mark.filterwarnings("ignore"),  # the package's and its dependencies' own
]
CPU = torch.device("cpu")
LENGTHS = (20, 13, 20, 7, 16)


def tiny(layer_type: str = FULL) -> Geometry:
    return Geometry(
        tokens=48,
        anchors=12,
        block_size=4,
        layer_type=layer_type,
        hidden=32,
        inner=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocabulary=97,
        layers=2,
        taps=3,
        document=20,
        stride=24,
    )


def shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("geometry", [tiny(), FULL_SCALE], ids=["tiny", "full"])
def test_it_trains_the_same_parameters(geometry: Geometry) -> None:
    from draftcache.benchmarks.speculators_peer import build_model

    with torch.device("meta"):
        assert shapes(build_model(geometry, "eager")) == shapes(Drafter(geometry.drafter))


@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
def test_its_hidden_states_are_our_drafters(layer_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators.models.dflash import core

    from draftcache.benchmarks.speculators_peer import build_peer

    geometry = tiny(layer_type)  # documents shorter than the window, at whose edge the two differ
    peer = build_peer(geometry, "last", device=CPU)
    drafter = Drafter(geometry.drafter)
    with torch.no_grad():
        for parameter in peer.model.parameters():
            parameter.normal_(0, 0.3)
    drafter.load_state_dict({name: peer.model.get_parameter(name) for name in shapes(peer.model)})

    anchors = torch.tensor([7, 8, 12, 19, 26, 27, 31, 33, 35, 36, 38, 39])
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool)))
    batch = {name: value for name, value in peer.batch.items() if name != "error_records"}
    taps, last = batch["hidden_states"].float(), batch["verifier_last_hidden_states"].float()
    theirs, *_ = peer.model._backbone_forward(
        **batch | {"hidden_states": taps, "verifier_last_hidden_states": last}, max_anchors=geometry.anchors
    )

    flat = view_batch(torch.zeros(batch_bytes(48, 64), dtype=torch.uint8), 48, 64)
    flat.input_ids.copy_(batch["input_ids"][0])
    flat.positions.copy_(batch["position_ids"][0])
    flat.documents.copy_(batch["document_ids"][0])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    blocks = lay_out_blocks(flat, anchors, keep, geometry.block_size, geometry.drafter.mask_token_id)
    embedded = peer.model.embed_tokens(blocks.input_ids.flatten())
    attention = DenseAttention(blocks, 48, geometry.drafter.rules)
    ours = drafter(embedded, blocks.positions.flatten(), drafter.context_keys(taps[0], flat.positions), attention)
    assert ours.std() > 0.1
    torch.testing.assert_close(theirs[0], ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("teacher", ["last", "argmax"])
@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
def test_the_loss_falls(layer_type: str, teacher: str) -> None:
    from draftcache.benchmarks.speculators_peer import build_peer

    peer = build_peer(tiny(layer_type), teacher, device=CPU)
    losses = torch.stack([peer.step() for _ in range(30)])
    assert losses.isfinite().all()
    assert losses[-5:].mean() < 0.92 * losses[:5].mean()


def test_a_batch_holds_the_documents_of_our_own() -> None:
    from draftcache.benchmarks.speculators_peer import random_peer_batch

    batch = random_peer_batch(tiny(), CPU)
    assert batch["document_ids"].tolist() == [[0] * 20 + [1] * 20 + [-1] * 8]
    assert batch["position_ids"].tolist() == [[*range(20), *range(20), *[0] * 8]]
    assert batch["loss_mask"].tolist() == [[*([0] * 6 + [1] * 14) * 2, *[0] * 8]]


def samples() -> "Iterator[PeerSample]":
    from draftcache.benchmarks.speculators_peer import PeerSample

    generator = torch.Generator().manual_seed(0)
    for length in LENGTHS:
        yield PeerSample(
            input_ids=torch.randint(0, 96, (length,), generator=generator),
            loss_mask=(torch.arange(length) >= 3).long(),
            hidden_states=torch.randn(length, 4, 32, generator=generator).bfloat16(),
        )


def documents(batch: dict[str, Tensor], name: str) -> list[Tensor]:
    ids = batch["document_ids"][0]
    return [batch[name][0, ids == number] for number in range(int(ids.max()) + 1)]


def test_states_come_back_and_feed_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftcache.benchmarks.speculators_peer import build_peer, peer_batches, peer_loader, write_peer_dataset

    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # the loader sets them
    write_peer_dataset(tmp_path / "data", samples())
    loader = peer_loader(tmp_path / "data", tiny(), workers=0)
    batches = peer_batches(loader, CPU)
    first_epoch = [next(batches) for _ in range(len(loader))]
    found = {
        tuple(ids.tolist()): torch.cat([taps.unflatten(1, (3, 32)), last[:, None]], dim=1)
        for batch in first_epoch
        for ids, taps, last in zip(
            documents(batch, "input_ids"),
            documents(batch, "hidden_states"),
            documents(batch, "verifier_last_hidden_states"),
            strict=True,
        )
    }
    assert len(found) == len(LENGTHS)
    for sample in samples():
        assert torch.equal(found[tuple(sample.input_ids.tolist())], sample.hidden_states)
    peer = build_peer(tiny(), "last", device=CPU)
    before = peer.model.fc.weight.detach().clone()
    assert peer.step(next(batches)).isfinite()
    assert not torch.equal(peer.model.fc.weight, before)
    (tmp_path / "data" / "hidden_states" / "hs_0.safetensors").unlink()
    with pytest.raises(RuntimeError, match="hidden states"):
        [next(batches) for _ in range(2 * len(loader))]
