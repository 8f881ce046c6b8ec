"""Jobs as tables at a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dovetail.core.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dovetail.jobs.job import Job
    from dovetail.jobs.store import Store

COLUMNS = ("id", "user", "name", "accel.", "where", "host", "status", "attempts", "age", "ran", "$")
CUT = ("user", "name", "accel.", "where", "host")  # in a narrow terminal, the widest first
NUMERIC = ("attempts", "age", "ran", "$")
STYLES = {
    "running": "green", "error": "red", "succeeded": "blue", "failed": "red", "stopped": "yellow", "cancelled": "dim",
}  # fmt: skip
PLAIN_FROM = 200  # rows: laying out a rich table of thousands takes seconds
WATCH_S = 1.0
DETAILS = 10  # reasons for waiting that are shown under a list


def row(job: Job, now: float, handle: str = "") -> tuple[str, ...]:
    """`handle`: the backend's own id of the last attempt. `age` is since creation, `ran` the time of running."""
    from dovetail.jobs.job import where

    accelerator = "cpu" if job.accelerator in ("", "cpu") else job.accelerator
    place = where(job.backend, job.zone, handle), job.host or "-"
    times = duration(now - job.created), duration(job.seconds) if job.seconds else "-"
    dollars = f"{job.dollars:,.2f}" if job.dollars else "-"
    return (job.id, job.user, job.name, accelerator, *place, job.status, str(job.attempts), *times, dollars)


def duration(seconds: float) -> str:
    """`3 m`, `2.5 h`, `4 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def show(store: Store, statuses: Sequence[str], limit: int) -> None:
    """In colours and cut to the terminal's width; whole, for a pipe or where there are many."""
    jobs = store.jobs(statuses, limit)
    if len(jobs) >= PLAIN_FROM or not sys.stdout.isatty():
        sys.stdout.write(plain(jobs, store.handles("slurm")))
    else:
        _console().print(table(jobs, store.handles("slurm")))
    print(footer(store, jobs))


def _console() -> Console:
    """Return a console that prints text as it is: `[x]` and `:x:` in a job's text mean themselves."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def footer(store: Store, jobs: Sequence[Job]) -> str:
    counts = store.counts()
    words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no jobs yet"
    more = f"; {len(jobs)} shown (--all)" if len(jobs) < sum(counts.values()) else ""
    waiting = [f"\n{job.id} {job.name}: {printable(job.detail)}" for job in jobs if job.detail and not job.is_over]
    rest = f"\nand {len(waiting) - DETAILS} more that wait" if len(waiting) > DETAILS else ""
    return "".join([words, more, *waiting[:DETAILS], rest, *_unsupervised(store)])


def _unsupervised(store: Store) -> Iterator[str]:
    """Yield a line for each user with jobs that no supervisor looks after."""
    from dovetail.jobs.presence import holder

    for user in sorted(user for user in store.busy_users() if not holder(store.root, user)):
        whose, who = ("", "start") if user == store.user else (f" of {user}", f"{user} starts")
        yield f"\nno supervisor{whose} runs: {who} one with `dovetail job supervise`"


def table(jobs: Iterable[Job], handles: Mapping[str, str]) -> Table:
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
    now = time.time()
    rows = [COLUMNS, *(row(job, now, handles.get(job.id, "")) for job in jobs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(one, widths, strict=True)) for one in rows]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def watch(store: Store, statuses: Sequence[str], limit: int) -> None:
    """The table, kept up to date until ctrl-C."""
    from rich.console import Group
    from rich.live import Live

    def picture():
        jobs = store.jobs(statuses, limit or PLAIN_FROM)
        return Group(table(jobs, store.handles("slurm")), footer(store, jobs))

    with Live(picture(), console=_console(), refresh_per_second=4) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(picture())


def show_one(store: Store, job: Job) -> None:
    from dovetail.jobs.sensitive import shown

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


def _attempts(store: Store, job: Job) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from dovetail.jobs.job import where

    out = Table(box=box.ROUNDED)
    for column in ("attempt", "where", "hosts", "ran", "outcome", "exit", "what"):
        out.add_column(column)
    for one in store.attempts(job.id):
        ran = duration(one.seconds(time.time())) if one.started or one.ran else "-"
        place = " ".join(filter(None, (one.accelerator, where(job.backend, one.zone, one.handle))))
        hosts = one.hosts if len(one.hosts) < 40 else f"{one.hosts.partition(',')[0]} and {one.hosts.count(',')} more"
        code = "-" if one.exit_code is None else str(one.exit_code)
        cells = (str(one.number), place, hosts or "-", ran, one.outcome or one.state or one.phase, code, one.detail)
        out.add_row(*(Text(printable(cell)) for cell in cells))
    return out


def show_cost(jobs: Sequence[Job], hourly: dict[str, float]) -> None:
    """Those that have cost something, and the sum."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.ROUNDED)
    for column in ("id", "name", "accelerator", "ran", "$ per hour now", "$"):
        out.add_column(column, justify="right" if "$" in column or column == "ran" else "left")
    for job in jobs:
        if job.dollars or hourly.get(job.id):
            now = f"{hourly[job.id]:,.2f}" if job.id in hourly else "-"
            out.add_row(job.id, job.name, job.accelerator, duration(job.seconds), now, f"{job.dollars:,.2f}")
    console = _console()
    if out.row_count:
        console.print(out)
    total, rate = sum(job.dollars for job in jobs), sum(hourly.values())
    ran = duration(sum(job.seconds for job in jobs))
    console.print(f"{len(jobs)} jobs: ${total:,.2f} so far, ${rate:,.2f} per hour now, {ran} of running")
