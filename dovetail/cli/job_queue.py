"""`dovetail job queue`: many tasks for few machines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from dovetail.core.errors import UserError
from dovetail.core.reporter import printable

if TYPE_CHECKING:
    from dovetail.jobs.queue import TaskQueue

app = typer.Typer(help="Many tasks for few machines: workers claim them, one at a time.", no_args_is_help=True)

QUEUE = typer.Argument(help="The queue's name.")
TASK = typer.Argument(help="The task's name.")
JSON = typer.Option(False, "--json", help="Print JSON.")
FOLLOW_S = 0.3


def _tasks(queue: str) -> TaskQueue:
    from dovetail.jobs.files import jobs_home
    from dovetail.jobs.queue import TaskQueue
    from dovetail.jobs.store import JobStore

    return TaskQueue(JobStore(jobs_home()), queue)


def _print(as_json: bool, value: Any, text: str) -> None:
    import dataclasses
    import json

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    typer.echo(json.dumps(value) if as_json else text)


@app.command()
def add(
    queue: str = QUEUE,
    command: list[str] = typer.Argument(help="A shell line, or words after --."),
    name: str = typer.Option("", help="The task's name; a number if not given."),
    after: list[str] = typer.Option([], help="A task that must have succeeded; may be repeated."),
    zone: list[str] = typer.Option([], help="Only workers of this zone; may be repeated."),
    retries: int = typer.Option(0, min=0, help="How often it is run again after a failure."),
    as_json: bool = JSON,
) -> None:
    """Add a task."""
    import shlex

    tasks = _tasks(queue)
    line = command[0] if len(command) == 1 else shlex.join(command)
    task = tasks.add(name or str(len(tasks.all()) + 1), line, after, zone, retries)
    _print(as_json, task, f"task {task.name} of queue {queue}")


@app.command("list")
def list_tasks(
    queue: str = typer.Argument("", help="The queue's name; all queues if not given."), as_json: bool = JSON
):
    """List queues, or the tasks of one."""
    import dataclasses

    from dovetail.jobs.files import jobs_home
    from dovetail.jobs.queue import counts
    from dovetail.jobs.store import JobStore

    if not queue:
        found = counts(JobStore(jobs_home()))
        lines = [f"{name}: {count} {status}" for name, status, count in found]
        _print(as_json, found, "\n".join(lines) or "no queues yet")
        return
    tasks = _tasks(queue).all()
    if as_json:
        _print(True, [dataclasses.asdict(task) for task in tasks], "")
        return
    for task in tasks:
        code = "" if task.exit_code is None else f" exit {task.exit_code}"
        line = f"{task.name}  {task.status}{code}  {task.worker or '-'}  {task.command}  {task.detail}"
        typer.echo(printable(line).rstrip())


@app.command()
def work(
    queue: str = QUEUE,
    zone: str = typer.Option("", help="The zone of this worker."),
    lease: float = typer.Option(30.0, min=1.0, help="Seconds without a heartbeat after which a worker counts as dead."),
    grace: float = typer.Option(60.0, min=0.0, help="Seconds that a task has to save in when the worker must stop."),
    forever: bool = typer.Option(False, help="Wait for more tasks when the queue is empty."),
    as_json: bool = JSON,
) -> None:
    """Run tasks until none are left. SIGTERM releases the current one."""
    import signal

    from dovetail.jobs.outcome import PREEMPTED
    from dovetail.jobs.queue import QueueWorker

    worker = QueueWorker(_tasks(queue), zone, lease, grace)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: worker.stop())
    ended = worker.run(forever)
    _print(as_json, {"ended": ended, "stopped": worker.stopped}, f"{ended} tasks ended here")
    if worker.stopped:
        raise typer.Exit(PREEMPTED)


@app.command()
def show(queue: str = QUEUE, task: str = TASK, as_json: bool = JSON) -> None:
    """Show one task: its command, its status and the path of its log."""
    import dataclasses

    tasks = _tasks(queue)
    found = tasks.named(task)
    whole = dataclasses.asdict(found) | {"after": tasks.needs(found), "log": str(tasks.log(found))}
    if as_json:
        _print(True, whole, "")
        return
    for key, value in whole.items():
        if key in ("created", "started", "ended") and value:
            value = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
        if key not in ("id", "claim", "lease") and value not in (None, "", []):
            typer.echo(printable(f"{key.replace('_', ' ')}: {', '.join(value) if isinstance(value, list) else value}"))


@app.command()
def logs(
    queue: str = QUEUE,
    task: str = TASK,
    follow: bool = typer.Option(False, "--follow", "-f", help="Follow until the task is over."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per line."),
) -> None:
    """Print the output of a task, of all its tries."""
    for line in _lines(_tasks(queue), task, follow):
        _print(as_json, {"line": line}, printable(line))


def _lines(tasks: TaskQueue, name: str, follow: bool) -> Iterator[str]:
    """Yield whole lines, then the rest without a line break."""
    from dovetail.jobs.backends.backend import read_log
    from dovetail.jobs.queue import OVER

    position, half, found = 0, "", tasks.named(name)
    if not follow and not tasks.log(found).exists():
        by = f", worker {found.worker}: its log is in the folder of jobs of that worker" if found.worker else ""
        raise UserError(f"there is no log of task {name} here: it is {found.status}{by}", param="TASK")
    while True:
        over = not follow or tasks.named(name).status in OVER
        while (part := read_log(tasks.log(found), position)).text:
            position = part.position
            *whole, half = (half + part.text).split("\n")
            yield from whole
        if over:
            break
        time.sleep(FOLLOW_S)
    if half:
        yield half


@app.command()
def cancel(queue: str = QUEUE, task: str = TASK, as_json: bool = JSON) -> None:
    """Cancel a task; one that runs gets SIGTERM, and its worker's --grace to end."""
    tasks = _tasks(queue)
    before = tasks.cancel(task)
    says = f"task {task} of queue {queue} is cancelled"
    says += f"; {before.worker} ends it within seconds" if before.status == "running" else ""
    _print(as_json, tasks.named(task), says)


@app.command()
def retry(
    queue: str = QUEUE,
    task: str = typer.Argument("", help="Only this one, which may also have been cancelled."),
    as_json: bool = JSON,
) -> None:
    """Make the failed tasks ready again."""
    count = _tasks(queue).retry(task)
    _print(as_json, {"ready": count}, f"{count} tasks are ready again")
