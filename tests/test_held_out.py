"""`replay`: only samples that a drafter never trained on, and figures that agree with decoding them."""

import dataclasses
from pathlib import Path

import pytest

from draftcache.common.errors import MismatchError, UsageError
from draftcache.common.store import Store, open_store
from draftcache.common.target import load_target
from draftcache.extract.run import extract
from draftcache.tests.commands import run
from draftcache.tests.decoding import CPU, GREEDY
from draftcache.tests.runs import small_run
from draftcache.tests.stores import LAYER_IDS, tiny_config, tiny_store, tiny_target, write_jsonl
from draftcache.train.optim import OptimConfig
from draftcache.train.run import train
from draftcache.train.serving.decode import TargetDecoder
from draftcache.train.serving.evaluate import EvaluateConfig, evaluate
from draftcache.train.serving.export import ExportConfig, export
from draftcache.train.serving.held_out import ReplayConfig, replay_held_out
from draftcache.train.setup import split_samples


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    train(small_run(store, out, steps=2, share=0.3))
    return out


def test_only_held_out_samples_of_the_runs_own_store_are_replayed(
    tmp_path: Path, run_folder: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = export(ExportConfig(checkpoint=run_folder, out=tmp_path / "x")).folder
    config = ReplayConfig(store=store.path, checkpoints=(run_folder,), drafters=(exported,), device="cpu")
    held_out = split_samples(open_store(store.path), 0.3)[1]
    a, b = replay_held_out(config)
    assert a.samples == b.samples == sum(len(index.rows) for index in held_out.values()) > 0
    assert 1 <= a.along_path <= 4
    assert 1 <= a.any_anchor <= 4
    assert (a.along_path, a.any_anchor) == pytest.approx((b.along_path, b.any_anchor), rel=0.02)
    outcome = run(capsys, "replay", "--store", store.path, "--checkpoint", run_folder, "--limit", 1, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "along path" in outcome.out


def test_another_store_is_replayed_whole(tmp_path: Path, run_folder: Path, target_folder: Path) -> None:
    other = tiny_store(tmp_path / "other", target=target_folder, count=4, seed=5)
    (report,) = replay_held_out(ReplayConfig(store=other.path, checkpoints=(run_folder,), device="cpu"))
    assert report.samples == 4


def test_what_cannot_be_replayed_is_refused(
    tmp_path: Path, store: Store, run_folder: Path, target_folder: Path
) -> None:
    train(small_run(store, tmp_path / "all", steps=1, share=0.0))
    with pytest.raises(UsageError, match="trained on all"):
        replay_held_out(ReplayConfig(store=store.path, checkpoints=(tmp_path / "all",), device="cpu"))
    other = tiny_store(tmp_path / "other", target=target_folder, count=4, layer_ids=(1, 3, 6))
    with pytest.raises(MismatchError, match=r"1, 3, 5"):
        replay_held_out(ReplayConfig(store=other.path, checkpoints=(run_folder,), device="cpu"))
    stranger = tiny_store(tmp_path / "stranger", target=tiny_target(tmp_path / "target", seed=1), count=4)
    with pytest.raises(MismatchError, match="trained for"):
        replay_held_out(ReplayConfig(store=stranger.path, checkpoints=(run_folder,), device="cpu"))


def test_the_path_through_stored_answers_is_what_decoding_them_gives(tmp_path: Path, target_folder: Path) -> None:
    """A drafter that half knows the target's own greedy answers: decoded, and replayed from a store of them."""
    target = load_target(target_folder, CPU, "float32")
    decoder = TargetDecoder(target, LAYER_IDS)
    prompts = [[70 + i, 10, 65 + 2 * i, 33] for i in range(6)]
    answers = [decoder.plain(prompt, 40, GREEDY).tokens for prompt in prompts]
    decoder.close()
    lines = [
        {"input_ids": prompt + answer, "loss_mask": [0] * 4 + [1] * len(answer)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    data = write_jsonl(tmp_path / "answers.jsonl", lines)
    stores = [
        extract(tiny_config(tmp_path / name, target=target_folder, data=[data], teacher=name, dtype="float32"))
        for name in ("last", "none")
    ]
    config = small_run(stores[0], tmp_path / "run", steps=40, share=0.0, log_every=40, save_every=None)
    train(dataclasses.replace(config, optim=OptimConfig(lr=5e-3)))
    (replayed,) = replay_held_out(ReplayConfig(store=stores[1].path, checkpoints=(tmp_path / "run",), device="cpu"))
    (decoded,) = evaluate(
        EvaluateConfig(
            checkpoints=(tmp_path / "run",),
            target=target_folder,
            data=(data,),
            max_new_tokens=40,
            dtype="float32",
            device="cpu",
        )
    )
    assert decoded.accepted_length > 1.3, "a drafter that knows nothing proves nothing"
    assert replayed.along_path == pytest.approx(decoded.accepted_length, rel=0.05)
