"""`train --dry-run`: the work of a step, its memory and its bytes, without loading anything."""

from pathlib import Path

import pytest
import torch

from draftcache.benchmarks.step_cases import FULL_SCALE, GEOMETRIES
from draftcache.common.errors import UsageError
from draftcache.common.store import Store
from draftcache.tests.commands import run
from draftcache.tests.helpers import tiny_config
from draftcache.train import setup
from draftcache.train.estimate import estimate
from draftcache.train.model.drafter import Drafter
from draftcache.train.model.loss import LossConfig
from draftcache.train.settings import GeometryOptions, TrainConfig
from draftcache.train.work import Product, products

CHUNK = LossConfig().chunk_slots


def tera(found: list[Product], part: str) -> float:
    """TFLOP of the products whose name begins so."""
    return sum(product.operations for product in found if product.name.startswith(part)) / 1e12


def test_a_full_scale_step_is_what_its_shapes_say() -> None:
    found = products(FULL_SCALE.drafter, FULL_SCALE.tokens, FULL_SCALE.anchors, "last", "bf16", CHUNK)
    assert tera(found, "fc") == pytest.approx(2 * 2 * 49_152 * 25_600 * 5120 / 1e12)
    assert tera(found, "gate-up") + tera(found, "down") == pytest.approx(
        3 * 2 * 3 * (4 * 32_768 + 31_744) * 5120 * 17_408 / 1e12  # the last layer goes on without slot 0
    )
    assert tera(found, "head") == pytest.approx(2 * 2 * 31_744 * 5120 * 248_320 / 1e12)
    assert tera(found, "teacher") == pytest.approx(2 * 31_744 * 5120 * 248_320 / 1e12)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_stored_teacher_saves_the_heads_second_product(name: str) -> None:
    g = GEOMETRIES[name]
    last, top = (products(g.drafter, g.tokens, g.anchors, teacher, "bf16", CHUNK) for teacher in ("last", "top"))
    assert tera(last, "teacher forward") == pytest.approx(tera(top, "head forward"))
    assert tera(last, "head") == tera(top, "head")
    assert tera(top, "teacher") == 0


def test_a_teachers_distinct_rows_are_multiplied_once() -> None:
    g = FULL_SCALE
    found = products(g.drafter, g.tokens, g.anchors, "last", "bf16", CHUNK, teacher_rows=2500)
    assert [(p.rows, p.count) for p in found if p.name == "teacher forward"] == [(2500, 8)]


def test_only_heads_and_mlps_are_multiplied_in_8_bits_and_no_weight_gradient() -> None:
    coded = products(FULL_SCALE.drafter, 49_152, 1024, "top", "fp8", CHUNK)
    assert {p.name.split()[0] for p in coded if p.float8} == {"gate-up", "down", "head"}
    assert not any(p.float8 and p.accumulates for p in coded)


def test_one_layer_projects_distinct_inputs_alone() -> None:
    found = products(tiny_config(("full_attention",)), 128, 16, "tokens", "bf16", CHUNK)
    assert [p.rows for p in found if p.name.startswith("query") and p.name.endswith("forward")] == [17]


def settings(store: Store, out: Path) -> TrainConfig:
    """A run of two layers on a tiny store."""
    return TrainConfig(
        store=store.path, out=out, device="cpu", geometry=GeometryOptions(num_layers=2, block_size=4), steps=2
    )


def test_figures_of_a_run_are_its_own(store: Store, tmp_path: Path) -> None:
    resolved, figures = estimate(settings(store, tmp_path / "run"))
    assert figures.parameters == sum(p.numel() for p in Drafter(resolved.drafter).parameters())
    assert figures.memory["moments"] == 8 * figures.parameters
    assert figures.memory["gradients"] == figures.memory["weights, float32"] == 4 * figures.parameters
    assert figures.total_memory == sum(figures.memory.values())
    assert figures.step_bytes > 0
    assert figures.disk_rate == figures.step_bytes / figures.step_seconds
    assert figures.reduce_seconds == 0


def test_processes_share_a_step_and_reduce_its_gradients(store: Store, tmp_path: Path) -> None:
    config = settings(store, tmp_path / "run")
    (alone_run, alone), (both_run, both) = estimate(config), estimate(config, world_size=2)
    assert both_run.micro_batches == 2 * alone_run.micro_batches
    assert both.step_bytes == alone.step_bytes
    assert both.reduce_seconds > 0


def test_a_dry_run_prints_and_writes_nothing(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    result = run(
        capsys, "train", "--store", store.path, "--out", out, "--device", "cpu", "--num-layers", 2, "--dry-run"
    )
    assert result.code == 0, result.err
    for part in ("moments", "gradients", "activations", "in all, on the device", "GB/s"):
        assert part in result.out
    assert not out.exists()


@pytest.mark.parametrize(
    ("capability", "intermediate", "words"),
    [((8, 0), 64, "compute capability (8, 0)"), ((9, 0), 72, "multiples of 16")],
)
def test_8_bits_are_refused_where_they_cannot_run(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    intermediate: int,
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(setup, "check_device", lambda _device: None)
    geometry = GeometryOptions(num_layers=1, block_size=4, head_dim=16, intermediate_size=intermediate)
    config = TrainConfig(store=store.path, out=tmp_path, device="cuda", geometry=geometry, matmul="fp8")
    with pytest.raises(UsageError) as refused:
        setup.resolve(config, store)
    assert words in str(refused.value)
