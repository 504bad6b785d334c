"""What `extract` prints."""

import click

from draftcache.common.show import show_table
from draftcache.common.store import Store
from draftcache.extract.estimate import BucketEstimate, Estimate


def show_estimate(figures: Estimate, free: int) -> None:
    """What `extract --dry-run` prints."""
    show_table(BucketEstimate, figures.buckets)
    click.echo(f"\n{figures.bytes_per_token} bytes per token, {figures.logical_bytes} logical bytes")
    click.echo(f"{figures.disk_bytes} bytes on disk, {free} bytes free")


def show_store(store: Store) -> None:
    """What was made, and what was left out and why."""
    report = store.manifest.report
    supervised = report.supervised_tokens + report.supervised_tokens_cut
    lost = report.supervised_tokens_cut / supervised
    click.echo(
        f"{store.path}: {report.kept} of {report.read} samples kept, {report.truncated} truncated, which cost "
        f"{lost:.1%} of the supervised tokens"
    )
    for reason, count in report.dropped.items():
        click.echo(f"  {count} dropped: {reason.replace('_', ' ')}")
    for note, count in report.notes.items():
        click.echo(f"  {count} {note.replace('_', ' ')}")
    if store.void_samples:
        click.echo(f"  {store.void_samples} void: states not finite or all zero; nobody trains on them")
