"""What commands print about a run: its estimate, its summary, an evaluation's details."""

import click

from draftcache.train.checkpoint import Run
from draftcache.train.estimate import Estimate
from draftcache.train.run import TrainResult
from draftcache.train.serving.tally import SetReport


def show_estimate(run: Run, figures: Estimate) -> None:
    """What `train --dry-run` prints."""
    click.echo(
        f"{figures.parameters:,} parameters, {run.steps} steps of {run.micro_batches} micro-batches, "
        f"{run.anchors} blocks of {run.drafter.block_size} slots in each"
    )
    for part, size in figures.memory.items():
        if size:
            click.echo(f"  {part:<26}{size / 1e9:8.2f} GB")
    click.echo(f"  {'in all, on the device':<26}{figures.total_memory / 1e9:8.2f} GB")
    click.echo(f"  {'pinned, on the host':<26}{figures.host_memory / 1e9:8.2f} GB")
    click.echo(
        f"about {figures.step_seconds:.3g} s a step on an H200, {figures.reduce_seconds:.3g} s of it in reduction; "
        f"{figures.step_bytes / 1e9:.3g} GB a step, so the disk must give {figures.disk_rate / 1e9:.3g} GB/s"
    )
    if not figures.fits:
        click.echo(
            f"warning: the device has {(figures.device_memory or 0) / 1e9:.4g} GB; "
            "lower --token-budget, --anchors or --num-layers"
        )


def show_training(result: TrainResult) -> None:
    """The summary at a run's end."""
    end, metrics, validation = result.end, result.metrics, result.end.validation
    words = {"finished": "finished", "stopped": "stopped as asked", "patience": "stopped: no better validation"}
    click.echo(f"{words[end.reason]} after step {end.progress.step}, {end.progress.skipped} updates skipped")
    for name, row in (("training", metrics), ("held out", validation)):
        if row and row["loss"] is not None and row["accepted_length"] is not None:
            click.echo(f"  {name}: loss {row['loss']:.4f}, accepted length {row['accepted_length']:.3f}")
    if end.progress.best is not None:
        best = end.progress.best
        click.echo(f"  best validation: accepted length {best.accepted_length:.3f} at step {best.step}")
    click.echo(f"  {result.checkpoint}")
    if end.reason == "stopped":
        click.echo(f"go on with: draftcache train --resume {result.checkpoint.parent}")


def show_details(report: SetReport) -> None:
    """What the table of `evaluate` has no room for."""
    rates = " ".join(f"{rate:.2f}" for rate in report.slot_rates)
    click.echo(f"\n{report.drafter} on {report.name}: blocks that accept at least k drafted tokens: {rates}")
    spans = ", ".join(f"{s.begin}-{s.end - 1}: {s.accepted_length:.3f} ({s.blocks})" for s in report.spans)
    click.echo(f"  accepted length by position, and blocks: {spans}")
    for d in report.differences:
        kind = "a tie" if d.tie else "NOT a tie"
        click.echo(f"  {d.prompt}: differs from plain text at token {d.position}, {kind} (gap {d.gap:.1e})")
