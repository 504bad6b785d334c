"""The command line: parses flags, builds one configuration and calls one function. Imports torch only when it runs."""

import dataclasses
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import click

from draftcache.common.errors import DraftcacheError, UsageError, first_line
from draftcache.common.version import VERSION

USER_ERROR = 2
DAMAGE = 1
FOLDER = click.Path(path_type=Path)


class _IntList(click.ParamType[tuple[int, ...]]):
    """Comma-separated integers."""

    name = "INT,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"found {value!r}; needed: integers separated by commas", param, ctx)


INTS = _IntList()
DTYPES = click.Choice(["bfloat16", "float32"])


CONFIG_HELP = "TOML file of these flags without their dashes in front; flags given here overrule it."
RESUME_HELP = "Go on with RUN, or with --out, where it stopped; no other flag is needed."


def _flags_of_file(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Take a TOML file's values as the command's defaults."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {first_line(error)}", needed="a TOML file", do="check --config") from None
    options = {p.opts[0].lstrip("-"): p.name for p in context.command.params if p is not option}
    wrong = [name for name, value in values.items() if name not in options or isinstance(value, dict | list)]
    if wrong:
        raise UsageError(f"{path} has {wrong}", needed="single values named like flags", do="see --help")
    context.default_map = {options[name]: str(value) for name, value in values.items()}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="draftcache")
def cli() -> None:
    """Trains DFlash drafters offline, in two stages: `extract` once, `train` again and again."""


@cli.command()
@click.option("--target", type=FOLDER, required=True, help="Folder of the target model.")
@click.option("--data", type=FOLDER, required=True, multiple=True, help="JSONL file, plain or gzip; may be repeated.")
@click.option("--store", type=FOLDER, required=True, help="Folder of the store to make.")
@click.option("--layers", "layer_ids", type=INTS, help="Tapped layers, 0-based outputs.  [default: 5, evenly spaced]")
@click.option("--buckets", "ceilings", type=INTS, help="Ceilings in tokens.  [default: 770,1216,1728,2432,3296,8192]")
@click.option("--token-budget", type=int, help="Padded tokens of one forward batch = one shard.  [default: 49152]")
@click.option(
    "--max-length",
    type=int,
    help="Longer samples are cut on the right.  [default: the largest ceiling, at most the target's positions]",
)
@click.option("--min-supervised", type=int, help="Samples with fewer supervised tokens are dropped.  [default: 2]")
@click.option("--limit", type=int, help="Read at most so many lines.")
@click.option("--codec", type=click.Choice(["bf16", "mxfp8", "mxfp4"]), help="Of the taps.  [default: bf16]")
@click.option("--teacher", type=click.Choice(["last", "top", "none"]), help="Kept for the loss.  [default: last]")
@click.option("--chat-template", type=FOLDER, help="Jinja file in place of the target's own template.")
@click.option("--chat-template-kwargs", help='Extra arguments of the template, as JSON: {"enable_thinking": false}.')
@click.option("--max-dropped", type=float, help="Stop if a larger share of the samples is dropped.  [default: 0.9]")
@click.option("--max-void", type=float, help="Stop if a larger share has broken states.  [default: 0.1]")
@click.option("--dtype", type=DTYPES, help="Of the target's forward; float32 suits most CPUs.  [default: its own]")
@click.option("--device", help="Torch device.  [default: cuda if there is one]")
@click.option("--device-map", type=click.Choice(["auto"]), help="auto: spread the target over all GPUs.")
@click.option("--resume", is_flag=True, help="Go on with a store: write what is missing or damaged.")
@click.option("--overwrite", is_flag=True, help="Replace an existing store.")
@click.option("--dry-run", is_flag=True, help="Only say what it would take; needs no weights.")
@click.option("--force", is_flag=True, help="Write although the disk looks too small.")
def extract(**flags: Any) -> None:
    """Run the target once over DATA and write its hidden states into STORE."""
    from draftcache.extract.plan import ExtractConfig
    from draftcache.extract.run import dry_run
    from draftcache.extract.run import extract as run
    from draftcache.extract.show import show_estimate, show_store

    config = ExtractConfig(**_given(flags))
    if config.dry_run:
        show_estimate(*dry_run(config))
        return
    store = run(config)
    if not int(os.environ.get("RANK", "0")):
        show_store(store)


@cli.command()
@click.option("--config", type=FOLDER, is_eager=True, callback=_flags_of_file, expose_value=False, help=CONFIG_HELP)
@click.option("--store", type=FOLDER, help="Store made by `extract`.")
@click.option("--out", type=FOLDER, help="Folder of the run to make.")
@click.option("--resume", is_flag=False, flag_value="", metavar="[RUN]", help=RESUME_HELP)
@click.option("--num-layers", type=int, help="Drafter layers.  [default: 5]")
@click.option("--heads", "num_heads", type=int, help="Query heads.  [default: the target's]")
@click.option("--kv-heads", "num_kv_heads", type=int, help="Key and value heads.  [default: the target's]")
@click.option("--head-dim", type=int, help="Width of a head.  [default: the target's]")
@click.option("--intermediate", "intermediate_size", type=int, help="MLP width.  [default: the target's]")
@click.option("--layer-types", help="full, sliding, sliding-last-full, or a list like sliding,full.  [default: full]")
@click.option("--sliding-window", type=int, help="Window of sliding layers in tokens.  [default: 2048]")
@click.option("--block-size", type=int, help="Slots of a block, the anchor's included.  [default: 16]")
@click.option("--mask-token-id", type=int, help="[default: the first embedding row the tokenizer does not use]")
@click.option("--teacher", type=click.Choice(["tokens", "last", "top"]), help="[default: the best the store holds]")
@click.option("--weighting", type=click.Choice(["decay", "dpace"]), help="Weights of the slots.  [default: decay]")
@click.option("--gamma", type=float, help="Decay of the slots' weights.  [default: 7 for 16 slots, 4 for 8]")
@click.option("--batching", type=click.Choice(["bucket", "packed"]), help="How rows form shapes.  [default: bucket]")
@click.option("--token-budget", type=int, help="Context tokens of a micro-batch.  [default: 49152]")
@click.option("--rows", type=int, help="Rows of a micro-batch, in place of the token budget.")
@click.option("--anchors", type=int, help="Blocks of a micro-batch.  [default: 512]")
@click.option("--accumulate", type=int, help="Micro-batches of a step.  [default: 1]")
@click.option("--steps", type=int, help="Steps to train.  [default: what --epochs comes to]")
@click.option("--epochs", type=int, help="Passes over the store.  [default: 6]")
@click.option("--lr", type=float, help="Peak learning rate.  [default: 6e-4]")
@click.option("--warmup", type=float, help="Share of the steps in which it rises.  [default: 0.04]")
@click.option("--clip", type=float, help="Limit of the gradient's norm.  [default: 1.0]")
@click.option("--weight-decay", type=float, help="[default: 0]")
@click.option("--seed", type=int, help="Of initial weights, order and anchors.  [default: 0]")
@click.option("--init-from", type=FOLDER, help="Released drafter to begin with, as z-lab or `export` writes it.")
@click.option("--validation-share", type=float, help="Share of the samples that is held out.  [default: 0.01]")
@click.option("--validate-every", type=int, help="Steps between validations.  [default: 500, and at the end]")
@click.option("--patience", type=int, help="Stop after so many validations without a better accepted length.")
@click.option("--save-every", type=int, help="Steps between checkpoints.  [default: the best ones and the last]")
@click.option("--keep", type=int, help="Newest checkpoints that stay, beside the best one.  [default: 3]")
@click.option("--log-every", type=int, help="Steps between two looks at the device.  [default: 10]")
@click.option("--tensorboard", is_flag=True, default=None, help="Log there too; needs the extra `tensorboard`.")
@click.option(
    "--matmul", type=click.Choice(["bf16", "fp8"]), help="Products with the head and in the MLPs.  [default: bf16]"
)
@click.option("--reduce-dtype", type=DTYPES, help="Of gradients between processes.  [default: float32]")
@click.option("--deterministic", is_flag=True, default=None, help="Bit-equal runs on CUDA, a little slower.")
@click.option("--graph/--no-graph", default=None, help="Capture the step as CUDA graphs.  [default: on CUDA]")
@click.option("--device", help="Torch device.  [default: cuda if there is one]")
@click.option("--dry-run", is_flag=True, help="Only say what it would take: memory by part, bytes, time.")
def train(resume: str | None, dry_run: bool, **flags: Any) -> None:
    """Train a drafter on STORE and write it to OUT. Many processes: start it with torchrun."""
    from draftcache.train.estimate import estimate
    from draftcache.train.run import resume as go_on
    from draftcache.train.run import train as begin
    from draftcache.train.settings import build_config
    from draftcache.train.show import show_estimate, show_training

    given = _given(flags)
    if dry_run and resume is not None:
        raise UsageError("--dry-run with --resume", needed="one of them", do="leave --resume away, and pass all flags")
    if dry_run:
        show_estimate(*estimate(build_config(given), int(os.environ.get("WORLD_SIZE", "1"))))
        return
    result = begin(build_config(given)) if resume is None else go_on(_run_folder(resume, given), given)
    if result.first:
        show_training(result)
    if result.end.signal is not None:
        sys.exit(128 + result.end.signal)


@cli.command()
@click.option("--store", type=FOLDER, required=True, help="Store made by `extract`.")
@click.option("--samples", type=click.IntRange(min=1), help="Read at most so many samples of a bucket.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--show", type=click.IntRange(min=1), help="Only print so many samples, supervised text in colour.")
def stats(store: Path, samples: int | None, as_json: bool, show: int | None) -> None:
    """Show what STORE holds, from the stored bytes themselves."""
    from draftcache.common.show import show_samples, show_stats
    from draftcache.common.stats import store_stats
    from draftcache.common.store import open_store

    if show is not None:
        show_samples(open_store(store), show)
        return
    figures = store_stats(open_store(store), samples)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(figures)))
        return
    show_stats(figures)


@cli.command()
@click.option("--store", type=FOLDER, required=True, help="Store made by `extract`.")
def verify(store: Path) -> None:
    """Read every byte of STORE and check it. Exits 1 on damage, naming files and samples."""
    from draftcache.common.errors import DamageError
    from draftcache.common.show import show_verified
    from draftcache.common.verify import verify_store

    try:
        report = verify_store(store)
    except DamageError as error:
        click.echo(f"damaged: {error.found}", err=True)
        sys.exit(DAMAGE)
    show_verified(report)
    if report.damage:
        sys.exit(DAMAGE)


@cli.command()
@click.option(
    "--checkpoint", type=FOLDER, required=True, help="A run of `train`: its best checkpoint; or a checkpoint."
)
@click.option("--out", type=FOLDER, required=True, help="Folder to make.")
@click.option("--format", "layout", type=click.Choice(["zlab", "speculators"]), help="[default: zlab]")
@click.option("--store", type=FOLDER, help="The run's store: lists the data in the card, and compares logits on it.")
@click.option("--measured", type=FOLDER, help="File of `evaluate --json`: puts accepted lengths into the card.")
def export(**flags: Any) -> None:
    """Write a run's drafter as the folder that vLLM and SGLang load."""
    from draftcache.train.serving.export import ExportConfig
    from draftcache.train.serving.export import export as run

    result = run(ExportConfig(**_given(flags)))
    click.echo(f"{result.folder}: {result.tensors} tensors, read back bit for bit")
    if result.parity:
        p = result.parity
        click.echo(
            f"{p.slots} slots of {p.samples} stored samples: logits {p.relative_error:.2%} off the trainer's, "
            f"{p.same_token:.1%} propose the same token"
        )


@cli.command()
@click.option(
    "--checkpoint", "checkpoints", type=FOLDER, multiple=True, help="A run, or a checkpoint; may be repeated."
)
@click.option("--drafter", "drafters", type=FOLDER, multiple=True, help="An exported folder; may be repeated.")
@click.option("--target", type=FOLDER, required=True, help="Folder of the target model.")
@click.option("--data", type=FOLDER, required=True, multiple=True, help="Prompts as JSONL; may be repeated.")
@click.option("--max-new-tokens", type=int, help="Tokens decoded per prompt.  [default: 128]")
@click.option("--limit", type=int, help="Use at most so many prompts per file.")
@click.option("--chat-template", type=FOLDER, help="Jinja file in place of the target's own, as in extraction.")
@click.option("--chat-template-kwargs", help="Extra arguments of the template, as JSON, as in extraction.")
@click.option("--temperature", type=float, help="0 is greedy; else the target samples.  [default: 0]")
@click.option("--seed", type=int, help="Of sampling.  [default: 0]")
@click.option("--dtype", type=DTYPES, help="Of the target.  [default: its own]")
@click.option("--device", help="Torch device.  [default: cuda if there is one]")
@click.option("--json", "json_file", type=FOLDER, help="Also write everything to this file.")
def evaluate(json_file: Path | None, **flags: Any) -> None:
    """Decode the prompts of DATA with drafters and without, and compare.

    Exits 1 if greedy speculative text differs from plain text other than by a tie.
    """
    from draftcache.common.files import check_writable
    from draftcache.common.show import show_table
    from draftcache.train.serving.evaluate import EvaluateConfig, write_reports
    from draftcache.train.serving.evaluate import evaluate as run
    from draftcache.train.serving.tally import SetReport
    from draftcache.train.serving.verify_block import Sampling
    from draftcache.train.show import show_details

    given = _given(flags)
    sampling = Sampling(**{name: given.pop(name) for name in ("temperature", "seed") if name in given})
    config = EvaluateConfig(sampling=sampling, **given)
    if json_file is not None:
        check_writable(json_file, "--json")
    reports = run(config)
    show_table(SetReport, reports, leave_out=("slot_rates", "spans", "differences"))
    for report in reports:
        show_details(report)
    if json_file is not None:
        write_reports(json_file, reports, config)
    if any(report.unexplained for report in reports):
        sys.exit(DAMAGE)


@cli.command()
@click.argument("runs", type=FOLDER, nargs=-1, required=True)
@click.option("--out", type=FOLDER, required=True, help="Picture to write: .png or .svg.")
def plot(runs: tuple[Path, ...], out: Path) -> None:
    """Draw the training curves of RUNS over one another. Needs the extra `plot`."""
    from draftcache.train.plot import plot_runs

    plot_runs(runs, out)
    click.echo(out)


@cli.command()
@click.option("--store", type=FOLDER, required=True, help="Store made by `extract`: the run's own, or another.")
@click.option(
    "--checkpoint", "checkpoints", type=FOLDER, multiple=True, help="A run, or a checkpoint; may be repeated."
)
@click.option("--drafter", "drafters", type=FOLDER, multiple=True, help="An exported folder; may be repeated.")
@click.option("--limit", type=int, help="Use at most so many samples.")
@click.option("--device", help="Torch device.  [default: cuda if there is one]")
def replay(**flags: Any) -> None:
    """Accepted length of the samples of STORE that a drafter never trained on, without the target.

    `along path` is what decoding those answers would log, `any anchor` what training measures on them.
    """
    from draftcache.common.show import show_table
    from draftcache.train.serving.held_out import ReplayConfig, ReplayReport, replay_held_out

    show_table(ReplayReport, replay_held_out(ReplayConfig(**_given(flags))))


def main() -> NoReturn:
    """Run the command line; what a user can put right becomes one line on stderr and exit code 2."""
    try:
        cli.main(standalone_mode=False)
    except DraftcacheError as error:
        click.echo(f"draftcache: {error}", err=True)
        sys.exit(USER_ERROR)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"draftcache: {' '.join(error.format_message().split())}; do: see --help", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(DAMAGE)
    except OSError as error:
        what = f"{error.filename or 'the system'}: {error.strerror or first_line(error)}"
        needed = "needed: a path that can be read and written; do: check it and its disk"
        click.echo(f"draftcache: {what}; {needed}", err=True)
        sys.exit(USER_ERROR)
    except MemoryError as error:
        click.echo(f"draftcache: out of memory ({first_line(error)})", err=True)
        sys.exit(USER_ERROR)
    except (click.Abort, KeyboardInterrupt):
        click.echo("draftcache: interrupted", err=True)
        sys.exit(130)
    sys.exit(0)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Only the flags that were given: defaults stand in the configurations, once."""
    return {name: value for name, value in flags.items() if value is not None}


def _run_folder(resume: str, given: dict[str, Any]) -> Path:
    """The run to go on with: `--resume RUN`, or `--resume --out RUN`."""
    out = given.pop("out", None)
    if not resume and out is None:
        raise UsageError("--resume alone", needed="a run", do="pass --resume RUN, or --resume and --out RUN")
    if resume and out is not None and Path(resume).resolve() != out.resolve():
        raise UsageError(f"--resume {resume} with --out {out}", needed="one run", do="leave --out away")
    return Path(resume) if resume else out
