"""What commands print about a store: tables, figures, samples."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import click
from tabulate import tabulate

from draftcache.common.samples import read_samples
from draftcache.common.stats import LOW_AGREEMENT, BucketStats, PlaneStats, StoreStats
from draftcache.common.store import Store
from draftcache.common.verify import VerifyReport


def show_table(cls: type[Any], rows: Sequence[Any], leave_out: Sequence[str] = ()) -> None:
    """Dataclasses of one kind as a table, a column a field."""
    names = [f.name for f in dataclasses.fields(cls) if f.name not in leave_out]
    head = [name.replace("_", " ") for name in names]
    click.echo(tabulate([[getattr(row, name) for name in names] for row in rows], headers=head, floatfmt=".4g"))


def show_stats(figures: StoreStats) -> None:
    """What `stats` prints."""
    report = figures.report
    click.echo(f"{report.kept} of {report.read} samples kept, {report.truncated} truncated, dropped: {report.dropped}")
    if figures.void:
        click.echo(f"{figures.void} samples are void (states not finite or all zero) and left out of all that follows")
    click.echo(f"{figures.bytes_per_token} bytes per token")
    if figures.label_agreement is not None:
        click.echo(f"{figures.label_agreement:.1%} of the supervised tokens looked at are the target's own choice")
        if figures.label_agreement < LOW_AGREEMENT:
            click.echo("warning: this data was hardly written by the target; let the target answer the prompts itself")
    click.echo()
    show_table(BucketStats, figures.buckets)
    click.echo()
    show_table(PlaneStats, figures.planes)


def show_samples(store: Store, count: int) -> None:
    """What `stats --show` prints: supervised text in green, or between marks where there are no colours."""
    colours = sys.stdout.isatty()
    for sample in read_samples(store, count):
        title = f"sample {sample.number}, bucket {sample.ceiling}, {sample.tokens} tokens"
        click.echo(click.style(title + (", void" if sample.void else ""), bold=True))
        for text, supervised in sample.parts:
            marked = click.style(text, fg="green", bold=True) if colours else f"[[{text}]]"
            click.echo(marked if supervised else text, nl=False)
        click.echo("\n")


def show_verified(report: VerifyReport) -> None:
    """What `verify` prints: damage on stderr, all else on stdout."""
    for stray in report.strays:
        click.echo(f"not part of the store: {stray}")
    for damage in report.damage:
        click.echo(f"damaged: {damage}", err=True)
    if report.damage:
        return
    click.echo(f"{report.shards} shards ({report.bytes_read} bytes) and {report.files} files are as they were written")
    if report.void:
        click.echo(f"{report.samples} samples to train on; {report.void} void: states not finite or all zero")
