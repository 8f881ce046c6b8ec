"""Jobs at a terminal: tables, logs, and the question before jobs are deleted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from dovetail.core.errors import UserError
from dovetail.core.reporter import printable
from dovetail.core.units import format_decimal_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dovetail.jobs.backends.backend import JobBackend
    from dovetail.jobs.job import Attempt, AttemptRow, Job
    from dovetail.jobs.store import JobStore

COLUMNS = ("id", "user", "name", "accel.", "where", "host", "status", "attempts", "age", "ran", "$")
CUT = ("user", "name", "accel.", "where", "host")  # shortened in a narrow terminal, the widest first
NUMERIC = ("attempts", "age", "ran", "$")
STYLES = {
    "running": "green", "error": "red", "succeeded": "blue", "failed": "red", "stopped": "yellow", "cancelled": "dim",
}  # fmt: skip
PLAIN_FROM = 200  # rows: a rich table of thousands takes seconds
WATCH_S = 1.0
MAX_DETAILS = 10  # reasons for waiting that are shown below a list
CODES = {"succeeded": 0, "failed": 1, "stopped": 3, "cancelled": 4}


# --- tables -----------------------------------------------------------------------------------------------------------


def row(job: Job, now: float, handle: str = "") -> tuple[str, ...]:
    """Return the cells of a job; `handle` is the backend's own id of the last attempt."""
    from dovetail.jobs.job import where

    accelerator = "cpu" if job.accelerator in ("", "cpu") else job.accelerator
    place = where(job.backend, job.zone, handle), job.host or "-"
    times = format_duration(now - job.created), format_duration(job.seconds) if job.seconds else "-"
    dollars = f"{job.dollars:,.2f}" if job.dollars else "-"
    return (job.id, job.user, job.name, accelerator, *place, job.status, str(job.attempts), *times, dollars)


def show(store: JobStore, statuses: Sequence[str], limit: int) -> None:
    """Print a table: coloured and cut to the terminal's width, or plain for a pipe and for many jobs."""
    jobs = store.jobs(statuses, limit)
    if len(jobs) >= PLAIN_FROM or not sys.stdout.isatty():
        sys.stdout.write(plain(jobs, store.handles("slurm")))
    else:
        _console().print(table(jobs, store.handles("slurm")))
    print(footer(store, jobs))


def _console() -> Console:
    """Return a console that prints text as it is: without markup such as `[x]` and `:x:`."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def footer(store: JobStore, jobs: Sequence[Job]) -> str:
    """Return the number of jobs per status, why jobs wait, and missing supervisors."""
    counts = store.counts()
    words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no jobs yet"
    more = f"; {len(jobs)} shown (--all)" if len(jobs) < sum(counts.values()) else ""
    waiting = [f"\n{job.id} {job.name}: {printable(job.detail)}" for job in jobs if job.detail and not job.is_over]
    rest = f"\nand {len(waiting) - MAX_DETAILS} more that wait" if len(waiting) > MAX_DETAILS else ""
    return "".join([words, more, *waiting[:MAX_DETAILS], rest, *_unsupervised(store)])


def _unsupervised(store: JobStore) -> Iterator[str]:
    """Yield a line for each user with jobs and without a supervisor."""
    from dovetail.jobs.presence import holder

    for user in sorted(user for user in store.busy_users() if not holder(store.root, user)):
        whose, who = ("", "start") if user == store.user else (f" of {user}", f"{user} starts")
        yield f"\nno supervisor{whose} runs: {who} one with `dovetail job supervise`"


def table(jobs: Iterable[Job], handles: Mapping[str, str]) -> Table:
    """Return a rich table of jobs."""
    from rich.table import Table
    from rich.text import Text

    out, now = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0)), time.time()  # all columns in 80 characters
    for column in COLUMNS:
        title = Text(column, no_wrap=True, overflow="ellipsis")
        out.add_column(title, justify="right" if column in NUMERIC else "left", no_wrap=column not in CUT)
    for job in jobs:
        cells = [Text(cell, no_wrap=True, overflow="ellipsis") for cell in row(job, now, handles.get(job.id, ""))]
        cells[6].stylize(STYLES.get(job.status, ""))
        out.add_row(*cells)
    return out


def plain(jobs: Sequence[Job], handles: Mapping[str, str]) -> str:
    """Return a table of jobs as text."""
    now = time.time()
    rows = [COLUMNS, *(row(job, now, handles.get(job.id, "")) for job in jobs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(one, widths, strict=True)) for one in rows]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def watch(store: JobStore, statuses: Sequence[str], limit: int) -> None:
    """Show the table and update it until ctrl-C."""
    from rich.console import Group
    from rich.live import Live

    def picture():
        jobs = store.jobs(statuses, limit or PLAIN_FROM)
        return Group(table(jobs, store.handles("slurm")), footer(store, jobs))

    with Live(picture(), console=_console(), refresh_per_second=4) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(picture())


def show_one(store: JobStore, job: Job) -> None:
    """Print a job's row, spec, attempts and history."""
    from dovetail.jobs.secrets import shown

    console = _console()

    def say(text: str, style: str = "") -> None:
        console.print(printable(text), style=style, soft_wrap=True)

    console.print(table([job], store.handles("slurm")))
    if job.detail:
        say(job.detail)
    say(shown(store.spec(job.id)).rstrip(), "dim")
    console.print(_attempts(store, job))
    for event in store.events(job.id):
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(event.at))
        which = f" attempt {event.number}:" if event.number else ""
        say(f"{at}{which} {event.what}")
    say(f"folder: {store.where(job)}")


def _attempts(store: JobStore, job: Job) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from dovetail.jobs.job import where

    out = Table(box=box.ROUNDED)
    for column in ("attempt", "where", "hosts", "ran", "outcome", "exit", "detail"):
        out.add_column(column)
    for one in store.attempts(job.id):
        ran = format_duration(one.seconds(time.time())) if one.started or one.ran else "-"
        place = " ".join(filter(None, (one.accelerator, where(job.backend, one.zone, one.handle))))
        hosts = one.hosts if len(one.hosts) < 40 else f"{one.hosts.partition(',')[0]} and {one.hosts.count(',')} more"
        code = "-" if one.exit_code is None else str(one.exit_code)
        cells = (str(one.number), place, hosts or "-", ran, one.outcome or one.state or one.phase, code, one.detail)
        out.add_row(*(Text(printable(cell)) for cell in cells))
    return out


def show_cost(jobs: Sequence[Job], hourly: dict[str, float]) -> None:
    """Print the jobs that have cost something, and the sum."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.ROUNDED)
    for column in ("id", "name", "accelerator", "ran", "$ per hour now", "$"):
        out.add_column(column, justify="right" if "$" in column or column == "ran" else "left")
    for job in jobs:
        if job.dollars or hourly.get(job.id):
            now = f"{hourly[job.id]:,.2f}" if job.id in hourly else "-"
            out.add_row(job.id, job.name, job.accelerator, format_duration(job.seconds), now, f"{job.dollars:,.2f}")
    console = _console()
    if out.row_count:
        console.print(out)
    total, rate = sum(job.dollars for job in jobs), sum(hourly.values())
    ran = format_duration(sum(job.seconds for job in jobs))
    console.print(f"{len(jobs)} jobs: ${total:,.2f} so far, ${rate:,.2f} per hour now, {ran} running time")


# --- logs -------------------------------------------------------------------------------------------------------------


def attempt_of(store: JobStore, job: Job, row: AttemptRow) -> tuple[Attempt, JobBackend]:
    """Return an attempt with its backend."""
    from dovetail.jobs.backends import chooser

    store.refuse_elsewhere(job, "look at it")
    return store.attempt(job, row), chooser(store.root, store.owner)(job.backend)


def last_attempt(store: JobStore, job: Job) -> tuple[Attempt, JobBackend]:
    """Return the last attempt of a job with its backend."""
    row = store.last(job.id)
    if row is None:
        why = f" ({job.detail})" if job.detail else ""
        raise UserError(f"job {job.id} has not begun yet: it is {job.status}{why}", param="JOB", code="not_begun")
    return attempt_of(store, job, row)


def show_logs(store: JobStore, job: Job, rank: int, number: int, as_json: bool) -> None:
    """Print the logs of one attempt; of the last one if `number` is 0."""
    from dovetail.jobs.logs import Follower

    rows = store.attempts(job.id)
    chosen = [row for row in rows if row.number == number] if number else rows[-1:]
    if not chosen:
        which = f"; there is no {number}" if number else ""
        raise UserError(f"job {job.id} has {len(rows)} attempts{which}", param="--attempt")
    attempt, backend = attempt_of(store, job, chosen[0])
    follower = Follower(backend, attempt, _ranks(attempt, rank))
    _print_lines(follower.lines(), attempt, as_json)
    _print_lines(follower.rest(), attempt, as_json)
    _print_outcome(chosen[0], as_json)


def follow_job(store: JobStore, id: str, rank: int = -1, as_json: bool = False) -> int:
    """Print the logs of all further attempts until the job is over; return the exit code of its status.

    Ctrl-C ends the printing, not the job.
    """
    from dovetail.jobs import logs
    from dovetail.jobs.backends import chooser

    choose, news = chooser(store.root, store.owner), logs.waiting(store, id)

    def poll() -> None:
        if why := news():
            typer.echo(why, err=True)

    lines = logs.follow_job(
        store, choose, id, lambda attempt: _ranks(attempt, rank), lambda row: _print_outcome(row, as_json), poll
    )
    try:
        for attempt, which, line in lines:
            _print_lines([(which, line)], attempt, as_json)
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
        raise UserError(f"`--rank` must be from 0 to {count - 1}, got {rank}", param="--rank")
    return list(range(count)) if rank < 0 else [rank]


def _print_lines(lines: Iterable[tuple[int, str]], attempt: Attempt, as_json: bool) -> None:
    width, several = len(str(attempt.spec.processes - 1)), attempt.spec.processes > 1
    for rank, line in lines:
        if as_json:
            typer.echo(json.dumps({"attempt": attempt.number, "rank": rank, "line": line}))
        else:
            text = printable(line)
            typer.echo(f"{rank:>{width}} | {text}" if several else text)


def _print_outcome(row: AttemptRow, as_json: bool) -> None:
    if row.outcome in ("", "success"):
        return
    if as_json:
        found = {"attempt": row.number, "outcome": row.outcome, "failed_rank": row.failed_rank, "what": row.detail}
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"attempt {row.number}: {row.outcome}: {printable(row.detail)}", err=True)


# --- deleting ---------------------------------------------------------------------------------------------------------


def show_deleted(store: JobStore, jobs: Sequence[Job], kept: Sequence[Job] = (), err: bool = False) -> None:
    """Print a line for each job that would be deleted, and the number of those that are kept."""
    from dovetail.jobs import actions

    sizes = {job.id: actions.size(store, job) for job in (*jobs, *kept)}
    for job in jobs:
        ago = format_duration(time.time() - (job.ended or job.changed))
        size = format_decimal_bytes(sizes[job.id])
        typer.echo(f"{job.id}  {size:>8}  {job.status:<9}  {ago:>6} ago  {job.name}", err=err)
    if len(jobs) > 1:
        typer.echo(f"{len(jobs)} jobs, {format_decimal_bytes(sum(sizes[job.id] for job in jobs))}", err=err)
    if kept:
        whole = format_decimal_bytes(sum(sizes[job.id] for job in kept))
        typer.echo(f"kept: {len(kept)} succeeded jobs with results ({whole}); --runs deletes them too", err=err)


def confirm_delete(question: str, yes: bool) -> None:
    """Ask unless `yes`; exit with 1 for a no, and raise UserError without a terminal."""
    if yes:
        return
    if not is_terminal():
        raise UserError("nothing was deleted: there is no terminal to ask at, so give --yes", param="--yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def is_terminal() -> bool:
    """Return whether a person can answer."""
    return sys.stdin.isatty()
