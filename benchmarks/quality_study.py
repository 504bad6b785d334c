"""What recipes cost or bring in accepted length: teacher, store, batching, weighting, block size, and a peer.

    python -m draftcache.benchmarks.quality_study --target DIR --data CONVERSATIONS.jsonl.gz --work DIR
        [--arms default,store-mxfp4] [--seeds 0,1,2] [--steps 2000] [--decode 24] [--minutes 9] [--list]

Every arm is the default recipe with one thing changed, a row of ARMS. One line of the data in HELD_OUT is held out and
never trained on. Stores are extracted where an arm needs one that is not in the work folder yet. Every (arm, seed,
steps) that has its result there is not run again, so a call that ran out of time is simply repeated; with --minutes no
new one is begun after so long. Each result becomes a row of results.jsonl, and all of them the closing table:

    trained      accepted length over training's own anchors, last tenth of the steps
    any anchor   the same over all positions of the held-out answers
    along path   over the blocks that decoding those answers makes: what a server would log
    decoded      by real decoding of held-out prompts, for the first --decode prompts and the arms of DECODED
"""

import argparse
import gc
import gzip
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from draftcache.benchmarks.quality_peer import PeerRun, train_peer
from draftcache.benchmarks.rows import append_row
from draftcache.common.errors import StoreError
from draftcache.common.store import Store, is_store, open_store
from draftcache.common.target import Target, load_parts, load_target, load_tokenizer
from draftcache.extract.plan import ExtractConfig
from draftcache.extract.run import extract
from draftcache.train.checkpoint import load_drafter
from draftcache.train.model.drafter import Drafter
from draftcache.train.model.loss import LossConfig
from draftcache.train.optim import OptimConfig
from draftcache.train.run import train
from draftcache.train.serving.decode import DrafterRunner
from draftcache.train.serving.evaluate import measure
from draftcache.train.serving.prompts import read_prompts
from draftcache.train.serving.replay import Replay, replay_stored
from draftcache.train.serving.verify_block import Sampling
from draftcache.train.settings import GeometryOptions, TrainConfig, ValidationOptions
from draftcache.train.setup import resolve

HELD_OUT = 20
"""One line in so many is held out."""
NEW_TOKENS = 192
CEILINGS = (128, 192, 256, 320, 384, 512, 768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One recipe. The field values are the default recipe."""

    codec: str = "bf16"
    stored: str = "last"  # what the store keeps of the teacher
    teacher: str | None = None  # None: what the store keeps
    batching: str = "bucket"
    weighting: str = "decay"
    gamma: float | None = None
    block_size: int = 16
    peer: tuple[str, str] | None = None  # loss and weighting of the speculators package


ARMS = {
    "default": Arm(),
    "teacher-tokens": Arm(teacher="tokens"),
    "teacher-top": Arm(stored="top"),
    "store-mxfp8": Arm(codec="mxfp8", stored="top"),
    "store-mxfp4": Arm(codec="mxfp4", stored="top"),
    "store-none": Arm(stored="none"),
    "batching-packed": Arm(batching="packed"),
    "weighting-dpace": Arm(weighting="dpace"),
    "gamma-4": Arm(gamma=4.0),
    "gamma-14": Arm(gamma=14.0),
    "block-8": Arm(block_size=8),
    "block-8-packed": Arm(block_size=8, batching="packed"),
    "speculators": Arm(batching="packed", peer=("kl_div", "fixed-exp-decay")),
    "speculators-dpace": Arm(batching="packed", peer=("ce", "dpace")),
}
DECODED = ("default", "store-mxfp8", "store-mxfp4", "block-8", "speculators")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What all arms share."""

    target: Path
    data: Path
    work: Path
    steps: int
    layers: int
    anchors: int
    token_budget: int
    lr: float
    mask_token_id: int | None
    replayed: int  # held-out conversations that are replayed
    decode: int  # held-out prompts that are decoded
    dtype: str | None
    device: str


def split(study: Study) -> tuple[Path, Path]:
    """The training and held-out lines as files of the work folder."""
    files = study.work / "train.jsonl", study.work / "heldout.jsonl"
    if not all(path.exists() for path in files):
        opener = gzip.open if study.data.suffix == ".gz" else open
        with opener(study.data, "rt", encoding="utf-8") as file:
            lines = file.readlines()
        files[1].write_text("".join(lines[::HELD_OUT]))
        files[0].write_text("".join(line for i, line in enumerate(lines) if i % HELD_OUT))
    return files


def store_of(study: Study, data: Path, codec: str, stored: str) -> Store:
    """A store of these lines, extracted if it is not there."""
    path = study.work / f"store-{data.stem}-{codec}-{stored}"
    if is_store(path):
        with suppress(StoreError):  # not finished: go on below
            return open_store(path)
    config = ExtractConfig(
        target=study.target,
        data=(data,),
        store=path,
        ceilings=CEILINGS,
        token_budget=study.token_budget,
        codec=codec,
        teacher=stored,
        dtype=study.dtype,
        device=study.device,
        resume=is_store(path),
    )
    extract(config)
    return open_store(path)


def train_arm(study: Study, arm: Arm, seed: int, out: Path) -> tuple[Drafter, float | None]:
    """The arm's drafter, and its accepted length over the last tenth of training (None for the peer)."""
    store = store_of(study, split(study)[0], arm.codec, arm.stored)
    config = TrainConfig(
        store=store.path,
        out=out,
        geometry=GeometryOptions(num_layers=study.layers, block_size=arm.block_size, mask_token_id=study.mask_token_id),
        loss=LossConfig(teacher=arm.teacher, weighting=arm.weighting, gamma=arm.gamma),
        optim=OptimConfig(lr=study.lr),
        validation=ValidationOptions(validation_share=0.0),  # what is held out never was in the store
        batching=arm.batching,
        token_budget=study.token_budget,
        anchors=study.anchors,
        steps=study.steps,
        seed=seed,
        log_every=min(100, study.steps),
        device=study.device,
    )
    device = torch.device(study.device)
    if arm.peer:
        loss, weighting = arm.peer
        run = resolve(config, store)
        weights = train_peer(store, PeerRun(run=run, loss=loss, weighting=weighting), study.target, device)
        drafter = Drafter(run.drafter).to(device)
        drafter.load_state_dict(weights)
        return drafter, None
    train(config)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["step"] > 0.9 * study.steps and row["blocks"]]
    trained = sum(row["accepted_length"] * row["blocks"] for row in last) / sum(row["blocks"] for row in last)
    return load_drafter(out, device)[1], trained


class HeldOut:
    """The held-out conversations, stored, and the target where something is decoded."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._path = split(study)[1]
        self._device = torch.device(study.device)
        self._store = store_of(study, self._path, "bf16", "none")
        self._parts = load_parts(self._store.path, self._store.manifest, self._device)
        self._target: Target | None = None

    def replayed(self, drafter: Drafter) -> Replay:
        """Sums over the held-out answers."""
        runner = DrafterRunner("arm", drafter, self._parts)
        rows = sorted(
            (number, ceiling, row)
            for ceiling, bucket in self._store.buckets.items()
            for row, number in enumerate(bucket.samples.samples.tolist())
        )
        chosen = [(ceiling, row) for _, ceiling, row in rows[: self._study.replayed]]
        return replay_stored(runner, self._store, tqdm(chosen, desc="replay", disable=None), self._device)

    def decoded(self, drafter: Drafter) -> dict[str, float]:
        """Figures of real decoding."""
        study = self._study
        if self._target is None:
            self._target = load_target(study.target, self._device, study.dtype)
        prompts = {self._path: read_prompts(self._path, load_tokenizer(study.target), study.decode, {})}
        (report,) = measure(self._target, [("arm", drafter)], prompts, NEW_TOKENS, Sampling())
        unexplained = sum(not d.tie for d in report.differences)
        return {
            "decoded": report.accepted_length,
            "decoded_blocks": report.blocks,
            "equal": report.equal or 0,
            "ties": len(report.differences) - unexplained,
            "unexplained": unexplained,
            "speedup": report.speedup,
        }


def run_one(study: Study, name: str, seed: int, held_out: HeldOut, decode: bool) -> None:
    """Train and measure one arm with one seed, and write its result."""
    out = study.work / "run"
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    drafter, trained = train_arm(study, ARMS[name], seed, out)
    seconds = time.perf_counter() - started
    sums = held_out.replayed(drafter)
    metrics = {
        "accepted_length": sums.path_tokens / sums.path_blocks,
        "any_anchor": sums.any_anchor / sums.anchors,
        "steps": study.steps,
        "seed": seed,
        "train_s": seconds,
    }
    if trained is not None:
        metrics["trained_metric"] = trained
    if decode:
        metrics |= held_out.decoded(drafter)
    append_row("quality", name, metrics)
    result_path(study, name, seed).write_text(json.dumps(metrics))
    shutil.rmtree(out, ignore_errors=True)
    del drafter
    gc.collect()
    torch.cuda.empty_cache()


def result_path(study: Study, name: str, seed: int) -> Path:
    """Where one result lies."""
    return study.work / f"result-{name}-seed{seed}-steps{study.steps}.json"


def show_results(work: Path) -> None:
    """One line per arm and number of steps: means over the seeds."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for path in work.glob("result-*.json"):
        metrics = json.loads(path.read_text())
        name = path.name.removeprefix("result-").rpartition("-seed")[0]
        groups[metrics["steps"], name].append(metrics)
    order = list(ARMS)
    rows = []
    for (steps, name), found in sorted(groups.items(), key=lambda item: (item[0][0], order.index(item[0][1]))):
        base = groups.get((steps, "default"))
        paths = [m["accepted_length"] for m in found]
        row: list[Any] = [steps, name, len(found), mean(paths), max(paths) - min(paths)]
        row.append(mean(paths) / mean(m["accepted_length"] for m in base) - 1 if base else None)
        for key in ("any_anchor", "trained_metric", "decoded"):
            values = [m[key] for m in found if key in m]
            row.append(mean(values) if values else None)
        rows.append(row)
    head = ["steps", "arm", "seeds", "along path", "spread", "against default", "any anchor", "trained", "decoded"]
    formats = ("", "", "", ".3f", ".3f", "+.1%", ".3f", ".3f", ".3f")
    print(tabulate(rows, headers=head, floatfmt=formats, missingval="-"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, and run what has no result yet."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the arms and stop")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mask-token-id", type=int, help="SmolLM2's tokenizer uses every row; 5 is <file_sep>")
    parser.add_argument("--replayed", type=int, default=200)
    parser.add_argument("--decode", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = vars(parser.parse_args(arguments))
    arms, seeds = options.pop("arms").split(","), [int(s) for s in options.pop("seeds").split(",")]
    if options.pop("list"):
        print("\n".join(f"{name:20} {arm}" for name, arm in ARMS.items()))
        return
    deadline = time.monotonic() + 60 * options.pop("minutes")
    unknown = set(arms) - set(ARMS)
    if unknown or not all(options[name] for name in ("target", "data", "work")):
        parser.error(f"unknown arms {sorted(unknown)}" if unknown else "--target, --data and --work are needed")
    study = Study(**options)
    study.work.mkdir(parents=True, exist_ok=True)
    held_out = HeldOut(study)
    for seed in seeds:
        for name in arms:
            if not result_path(study, name, seed).exists() and time.monotonic() < deadline:
                run_one(study, name, seed, held_out, decode=name in DECODED and seed == seeds[0] and study.decode > 0)
    show_results(study.work)


if __name__ == "__main__":
    main()
