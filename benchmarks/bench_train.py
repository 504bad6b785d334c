"""What a run costs beside its steps, and what more GPUs bring.

    python -m draftcache.benchmarks.bench_train overhead  [--store STORE] [--device cuda] [--steps 2000] [--every 500]
    python -m draftcache.benchmarks.bench_train gpus      [--store STORE] [--processes 2] [--steps 300] [-- FLAG...]

`overhead` trains the same run twice: bare, and with a look at the device every 10 steps, TensorBoard left out, and an
asynchronous checkpoint and a validation every so many steps. `x_bare` is the ratio of the step rates from step 100 on;
the time of the held-out forward passes themselves is not in it, everything around them is. `gpus` starts the run with
torchrun, once with one process and once with many; `x_one_gpu` is the ratio of the tokens per second.

Without --store a tiny one is made, whose steps are so short that everything beside them weighs most.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from draftcache.benchmarks.rows import append_row
from draftcache.tests.stores import tiny_store
from draftcache.train.report import METRICS_NAME, VALIDATION_NAME, Row, read_rows

WARMUP_STEPS = 100
TINY = ("--num-layers", 1, "--block-size", 4, "--token-budget", 256, "--validation-share", 0.2)


def train(out: Path, processes: int, flags: list[object]) -> list[Row]:
    """Run `draftcache train` in processes of its own; returns its rows after the warm-up."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "draftcache", "train", "--out", str(out), *map(str, flags)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = read_rows(out / METRICS_NAME)
    assert all(row["applied"] for row in rows), "an update was skipped: the rates would say nothing"
    return rows[WARMUP_STEPS:]


def seconds_per_step(rows: list[Row]) -> float:
    """Mean over the rows; each holds the mean of the steps since the look before it."""
    return statistics.fmean(row["seconds"] for row in rows)


def overhead(folder: Path, flags: list[object], every: int) -> None:
    """Bare against complete, twice each in turn, so that a drift of the machine shows."""
    bare: list[float] = []
    complete: list[float] = []
    for repeat in range(2):
        quiet = ["--log-every", WARMUP_STEPS, "--validate-every", 10**9]
        bare.append(seconds_per_step(train(folder / f"bare-{repeat}", 1, [*flags, *quiet])))
        busy = ["--log-every", 10, "--validate-every", every, "--save-every", every]
        complete.append(seconds_per_step(train(folder / f"complete-{repeat}", 1, [*flags, *busy])))
    validations = len(read_rows(folder / "complete-0" / VALIDATION_NAME))
    assert validations, "nothing was held out: take a larger store"
    metrics = {
        "x_bare": min(bare) / min(complete),
        "bare_step_s": min(bare),
        "complete_step_s": min(complete),
        "spread": max(max(times) / min(times) for times in (bare, complete)),
        "validations": validations,
        "every": every,
    }
    append_row("bench_train", "overhead", metrics)


def gpus(folder: Path, flags: list[object], processes: int) -> None:
    """Tokens per second of many processes over those of one, at the same work for each."""
    rates = []
    for count in (1, processes):
        rows = train(folder / f"processes-{count}", count, [*flags, "--log-every", 20])
        rates.append(sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows))
    metrics = {"x_one_gpu": rates[1] / rates[0], "tokens_s": rates[1], "one_tokens_s": rates[0], "processes": processes}
    append_row("bench_train", "two-gpus" if processes == 2 else f"gpus-{processes}", metrics)


def main() -> None:
    """Parse and run one benchmark in a temporary folder; what follows -- goes to `draftcache train`."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("case", choices=["overhead", "gpus"])
    parser.add_argument("--store", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--processes", type=int, default=2)
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = () if options.store else TINY
        store = options.store or tiny_store(folder / "made").path
        flags = ["--store", store, "--device", options.device, "--steps", options.steps, *small]
        flags += [word for word in more if word != "--"]
        if options.case == "overhead":
            overhead(folder, flags, options.every)
        else:
            gpus(folder, flags, options.processes)


if __name__ == "__main__":
    main()
