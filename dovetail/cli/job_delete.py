"""`dovetail job clean` and `delete`: what would be deleted, with sizes, and the question before it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.jobs.job import Job
    from dovetail.jobs.store import Store


def show(store: Store, jobs: Sequence[Job], kept: Sequence[Job] = (), err: bool = False) -> None:
    """Print a line for each job that would be deleted, and what is kept."""
    from dovetail.cli.job_table import duration
    from dovetail.jobs import actions

    sizes = {job.id: actions.size(store, job) for job in (*jobs, *kept)}
    for job in jobs:
        ago = duration(time.time() - (job.ended or job.changed))
        typer.echo(f"{job.id}  {amount(sizes[job.id]):>8}  {job.status:<9}  {ago:>6} ago  {job.name}", err=err)
    if len(jobs) > 1:
        typer.echo(f"{len(jobs)} jobs, {amount(sum(sizes[job.id] for job in jobs))}", err=err)
    if kept:
        whole = amount(sum(sizes[job.id] for job in kept))
        typer.echo(f"kept: {len(kept)} succeeded jobs with results ({whole}); --runs deletes them too", err=err)


def confirm(question: str, yes: bool) -> None:
    """Ask, unless `yes`; exit 1 for a no. Raise ValueError without a terminal."""
    if yes:
        return
    if not is_terminal():
        raise UserError("nothing was deleted: there is no terminal to ask at, so give --yes to delete without asking")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def is_terminal() -> bool:
    return sys.stdin.isatty()


def amount(size: float) -> str:
    """`12 kB`, `3.4 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit in ("B", "kB") or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
