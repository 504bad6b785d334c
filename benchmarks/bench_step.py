"""The captured training step at full scale: time, share of the hardware's floor, memory, and where the time goes.

The physics: a step is matrix products. Each product's floor is its operations over the rate that this GPU reaches for
that product's own shape, measured here in the same run; the step's floor is their sum. What the step takes beyond it is
memory traffic between products, attention's masks and the update.

    python -m draftcache.benchmarks.bench_step CASE...

CASE is GEOMETRY/TEACHER[/fp8], for example full/last or qwen3-8b/top64/fp8; GEOMETRY/TEACHER/parts for the breakdown;
full/mixed-buckets; GEOMETRY/TEACHER/speculators for the speculators package (speculators_peer.py) with teacher last or
argmax. Data lies on the device, so that the disk plays no part. Medians; needs a CUDA device.
"""

import argparse
import gc
import subprocess
import time

import torch

from draftcache.benchmarks.rows import append_row
from draftcache.benchmarks.step_cases import DEVICE, FULL_SCALE, GEOMETRIES, Built, build, random_batch
from draftcache.benchmarks.step_floor import attention_seconds, products, seconds, total_seconds
from draftcache.benchmarks.step_parts import run_parts
from draftcache.common.layout import DEFAULT_CEILINGS, DEFAULT_TOKEN_BUDGET, round_up, row_stride, rows_per_batch
from draftcache.train.batch import FlatBatch, batch_bytes, view_batch
from draftcache.train.order import CONTEXT_MULTIPLE
from draftcache.train.step import CapturedStep, Stepper, log_row_names

WARM, TIMED = 3, 8
MIXED_STEPS = 200
TEACHERS = {"tokens": "none", "last": "last", "top64": "top"}


def timed_steps(stepper: Stepper, batch: FlatBatch, warm: int = WARM, timed: int = TIMED) -> float:
    """Median seconds of a step."""

    def step() -> None:
        stepper.micro_step(batch)
        stepper.update()

    for _ in range(warm):
        step()
    return seconds(step, repeat=timed, inner=1)


def captured(built: Built, shapes: set[int]) -> CapturedStep:
    """The step as CUDA graphs."""
    return CapturedStep(built.step, built.spec.record_bytes, shapes, DEVICE)


def run_case(name: str, geometry_name: str, teacher: str, matmul: str) -> float:
    """One geometry, captured; small ones eagerly too. Returns seconds per step."""
    g = GEOMETRIES[geometry_name]
    torch.cuda.reset_peak_memory_stats()
    built = build(g, "bf16", TEACHERS[teacher], matmul)
    batch = random_batch(g, built.spec, g.tokens, g.stride)
    metrics: dict[str, float] = {}
    if geometry_name != "full":
        metrics["eager_s"] = timed_steps(built.step, batch)
    started = time.perf_counter()
    stepper = captured(built, {g.tokens})
    print(f"captured in {time.perf_counter() - started:.1f} s")
    before = torch.cuda.memory_stats()
    step_s = timed_steps(stepper, batch)
    after = torch.cuda.memory_stats()
    metrics |= _clock_and_power(stepper, batch)
    metrics |= {
        "step_s": step_s,
        "tokens_s": g.tokens / step_s,
        "blocks_s": g.anchors / step_s,
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
        "device_allocs": after["num_device_alloc"] - before["num_device_alloc"],
        "drift_bytes": after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"],
    }
    losses = built.step.log[: WARM + TIMED, log_row_names(g.block_size).index("loss")].tolist()
    assert all(0 < loss < float("inf") for loss in losses), f"losses {losses}"
    del stepper, built, batch
    torch.cuda.empty_cache()
    floor = total_seconds(products(g, teacher, matmul)) + attention_seconds(g)
    append_row("bench_step", name, metrics | {"floor_s": floor, "floor_share": floor / step_s})
    return step_s


def _clock_and_power(stepper: Stepper, batch: FlatBatch) -> dict[str, float]:
    """The clock and power of the first GPU while steps run."""
    for _ in range(WARM):
        stepper.micro_step(batch)
        stepper.update()
    query = ["nvidia-smi", "--id=0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split(",")
    torch.cuda.synchronize()
    if len(found) != 2:  # some machines do not let their clocks be read
        return {}
    megahertz, watts = found
    return {"sm_mhz": float(megahertz), "watts": float(watts)}


def run_peer(name: str, geometry_name: str, teacher: str, ours: dict[str, float]) -> None:
    """The speculators package's own step, beside those of ours that were timed before it in this run."""
    from draftcache.benchmarks.speculators_peer import build_peer  # not installed by default

    g = GEOMETRIES[geometry_name]
    torch.cuda.reset_peak_memory_stats()
    peer = build_peer(g, teacher, compile_mask=geometry_name != "qwen3-0.6b")
    for _ in range(WARM + 2):
        peer.step()
    step_s = seconds(peer.step, repeat=TIMED, inner=1)
    metrics = {
        "step_s": step_s,
        "tokens_s": g.tokens / step_s,
        "blocks_s": g.anchors / step_s,
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
    }
    for case, seconds_of_ours in ours.items():
        if case.startswith(geometry_name):
            metrics[f"x_ours/{case}"] = step_s / seconds_of_ours
    append_row("bench_step", name, metrics)
    torch.compiler.reset()


def run_mixed(timed: bool) -> None:
    """All six default buckets in random order through one captured step. Not `timed`: only memory counts."""
    g = FULL_SCALE
    torch.cuda.reset_peak_memory_stats()
    built = build(g, "mxfp4", "top", "bf16")
    shapes = {}
    for ceiling in DEFAULT_CEILINGS:
        stride = row_stride(ceiling)
        shapes[round_up(rows_per_batch(DEFAULT_TOKEN_BUDGET, ceiling) * stride, CONTEXT_MULTIPLE)] = stride
    shapes[DEFAULT_TOKEN_BUDGET] = row_stride(1728)
    stepper = captured(built, set(shapes))
    slot = torch.empty(batch_bytes(max(shapes), built.spec.record_bytes), dtype=torch.uint8, device=DEVICE)
    on_host = {}
    for tokens, stride in shapes.items():
        on_host[tokens] = random_batch(g, built.spec, tokens, stride, seed=tokens).block.cpu().pin_memory()
    torch.cuda.empty_cache()

    def batch_of(tokens: int) -> FlatBatch:
        """A bucket's batch, brought to the one slot."""
        batch = view_batch(slot, tokens, built.spec.record_bytes)
        batch.block.copy_(on_host[tokens], non_blocking=True)
        return batch

    at = torch.randint(0, len(shapes), (MIXED_STEPS,), generator=torch.Generator().manual_seed(1)).tolist()
    order = [list(shapes)[i] for i in at]
    for tokens in shapes:
        print(f"T = {tokens}: {timed_steps(stepper, batch_of(tokens), warm=1, timed=3 if timed else 1):.4f} s")
    before = torch.cuda.memory_stats()
    begin = time.perf_counter()
    for tokens in order:
        stepper.micro_step(batch_of(tokens))
        stepper.update()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - begin) / MIXED_STEPS
    after = torch.cuda.memory_stats()
    times = {"step_s": step_s, "tokens_s": sum(order) / MIXED_STEPS / step_s, "blocks_s": g.anchors / step_s}
    memory = {
        "steps": MIXED_STEPS,
        "device_allocs": after["num_device_alloc"] - before["num_device_alloc"],
        "drift_bytes": after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"],
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
    }
    append_row("bench_step", "full/mixed-buckets", (times if timed else {}) | memory)


def main() -> None:
    """Run the cases given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--shared-gpu", action="store_true", help="others use it: full/mixed-buckets keeps no times")
    options = parser.parse_args()
    ours: dict[str, float] = {}
    for case in options.cases:
        print(f"--- {case}")
        if case == "full/mixed-buckets":
            run_mixed(timed=not options.shared_gpu)
        else:
            geometry, teacher, *rest = case.split("/")
            if rest == ["parts"]:
                g = GEOMETRIES[geometry]
                run_parts(case, g, teacher, build(g, "bf16", TEACHERS[teacher], "bf16"))
            elif rest == ["speculators"]:
                run_peer(case, geometry, teacher, ours)
            else:
                ours[case] = run_case(case, geometry, teacher, rest[0] if rest else "bf16")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
