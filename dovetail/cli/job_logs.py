"""Logs of a job at a terminal: all ranks, each line with its own, and the rank that failed first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from dovetail.core.errors import UserError
from dovetail.core.printable import printable

if TYPE_CHECKING:
    from dovetail.jobs.attempt import Attempt
    from dovetail.jobs.backends.backend import Backend
    from dovetail.jobs.job import Job, Try
    from dovetail.jobs.store import Store

CODES = {"succeeded": 0, "failed": 1, "stopped": 3, "cancelled": 4}


def attempt_of(store: Store, job: Job, row: Try) -> tuple[Attempt, Backend]:
    from dovetail.jobs.backends.choose import chooser

    store.refuse_elsewhere(job, "look at it")
    choose = chooser(store.root, store.owner)
    return store.attempt(job, row), choose(job.backend)


def last_attempt(store: Store, job: Job) -> tuple[Attempt, Backend]:
    row = store.last(job.id)
    if row is None:
        raise UserError(f"job {job.id} has not begun yet: it is {job.status}{f' ({job.detail})' if job.detail else ''}")
    return attempt_of(store, job, row)


def show_logs(store: Store, job: Job, rank: int, number: int, as_json: bool) -> None:
    """What there is of one attempt."""
    from dovetail.jobs.logs import Follower

    rows = store.attempts(job.id)
    chosen = [row for row in rows if row.number == number] if number else rows[-1:]
    if not chosen:
        raise UserError(f"job {job.id} has {len(rows)} attempts{f'; there is no {number}' if number else ''}")
    attempt, backend = attempt_of(store, job, chosen[0])
    follower = Follower(backend, attempt, _ranks(attempt, rank))
    _print(follower.lines(), attempt, as_json)
    _print(follower.rest(), attempt, as_json)
    _say_failed(chosen[0], as_json)


def follow_job(store: Store, id: str, rank: int = -1, as_json: bool = False) -> int:
    """Print all attempts to come; return 0 if the job succeeded. Ctrl-C ends the printing, and not the job."""
    from dovetail.jobs import logs
    from dovetail.jobs.backends.choose import chooser

    choose, news = chooser(store.root, store.owner), logs.waiting(store, id)

    def poll() -> None:
        if why := news():
            typer.echo(why, err=True)

    lines = logs.follow_job(
        store, choose, id, lambda attempt: _ranks(attempt, rank), lambda row: _say_failed(row, as_json), poll
    )
    try:
        for attempt, which, line in lines:
            _print([(which, line)], attempt, as_json)
    except KeyboardInterrupt:
        typer.echo(f"\n{logs.goes_on(store.job(id))}", err=True)
        raise
    job = store.job(id)
    detail = f": {printable(job.detail)}" if job.detail else ""
    typer.echo(f"job {id} {job.status}{detail}", err=True)
    return CODES[job.status]


def _ranks(attempt: Attempt, rank: int) -> list[int]:
    count = attempt.spec.processes
    if rank >= count:
        raise UserError(f"--rank must be from 0 to {count - 1}; got {rank}")
    return list(range(count)) if rank < 0 else [rank]


def _print(lines: Iterable[tuple[int, str]], attempt: Attempt, as_json: bool) -> None:
    width, several = len(str(attempt.spec.processes - 1)), attempt.spec.processes > 1
    for rank, line in lines:
        if as_json:
            typer.echo(json.dumps({"attempt": attempt.number, "rank": rank, "line": line}))
        else:
            text = printable(line)
            typer.echo(f"{rank:>{width}} | {text}" if several else text)


def _say_failed(row: Try, as_json: bool) -> None:
    if row.outcome in ("", "success"):
        return
    if as_json:
        found = {"attempt": row.number, "outcome": row.outcome, "failed_rank": row.failed_rank, "what": row.detail}
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"attempt {row.number}: {row.outcome}: {printable(row.detail)}", err=True)
