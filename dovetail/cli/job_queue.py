"""`dovetail job queue`: many tasks for few machines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from dovetail.core.errors import UserError
from dovetail.core.printable import printable

if TYPE_CHECKING:
    from dovetail.jobs.tasks import Tasks

app = typer.Typer(help="Many tasks for few machines: workers claim them, one at a time.", no_args_is_help=True)

QUEUE = typer.Argument(help="The queue's name.")
TASK = typer.Argument(help="The task's name.")
FOLLOW_S = 0.3
JSON = typer.Option(False, "--json", help="The same as JSON.")


def _tasks(queue: str) -> Tasks:
    from dovetail.jobs.home import jobs_home
    from dovetail.jobs.store import Store
    from dovetail.jobs.tasks import Tasks

    return Tasks(Store(jobs_home()), queue)


@app.command()
def add(
    queue: str = QUEUE,
    command: list[str] = typer.Argument(help="A line of sh, or words after --."),
    name: str = typer.Option("", help="By which others may name it; a number if not given."),
    after: list[str] = typer.Option([], help="A task that must have succeeded; may be given more than once."),
    zone: list[str] = typer.Option([], help="Only workers of this zone; may be given more than once."),
    retries: int = typer.Option(0, min=0, help="How often it may fail by itself and be run again."),
    as_json: bool = JSON,
) -> None:
    """Add a task."""
    import dataclasses
    import json
    import shlex

    tasks = _tasks(queue)
    line = command[0] if len(command) == 1 else shlex.join(command)
    task = tasks.add(name or str(len(tasks.all()) + 1), line, after, zone, retries)
    typer.echo(json.dumps(dataclasses.asdict(task)) if as_json else f"task {task.name} of queue {queue}")


@app.command("list")
def list_tasks(
    queue: str = typer.Argument("", help="The queue's name; all queues if not given."), as_json: bool = JSON
):
    """Queues, or the tasks of one."""
    import dataclasses
    import json

    from dovetail.jobs.home import jobs_home
    from dovetail.jobs.store import Store
    from dovetail.jobs.tasks import queues

    if not queue:
        found = queues(Store(jobs_home()))
        lines = [f"{name}: {count} {status}" for name, status, count in found]
        typer.echo(json.dumps(found) if as_json else "\n".join(lines) or "no queues yet")
        return
    tasks = _tasks(queue).all()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(task) for task in tasks]))
        return
    for task in tasks:
        code = "" if task.exit_code is None else f" exit {task.exit_code}"
        line = f"{task.name}  {task.status}{code}  {task.worker or '-'}  {task.command}  {task.detail}"
        typer.echo(printable(line).rstrip())


@app.command()
def work(
    queue: str = QUEUE,
    zone: str = typer.Option("", help="The zone that this worker is in."),
    lease: float = typer.Option(30.0, min=1.0, help="Seconds of silence after which a worker is taken for dead."),
    grace: float = typer.Option(60.0, min=0.0, help="Seconds that a task has to save in, when the worker must stop."),
    forever: bool = typer.Option(False, help="Wait for more when the queue is empty."),
    as_json: bool = JSON,
) -> None:
    """Run tasks until there are none. SIGTERM gives back the one under way."""
    import json
    import signal

    from dovetail.jobs.outcome import PREEMPTED
    from dovetail.jobs.worker import Worker

    worker = Worker(_tasks(queue), zone, lease, grace)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: worker.stop())
    ended = worker.run(forever)
    typer.echo(json.dumps({"ended": ended, "stopped": worker.stopped}) if as_json else f"{ended} tasks ended here")
    if worker.stopped:
        raise typer.Exit(PREEMPTED)


@app.command()
def show(queue: str = QUEUE, task: str = TASK, as_json: bool = JSON) -> None:
    """Show one task: its command, its status and the path of its log."""
    import dataclasses
    import json

    tasks = _tasks(queue)
    found = tasks.named(task)
    whole = dataclasses.asdict(found) | {"after": tasks.needs(found), "log": str(tasks.log(found))}
    if as_json:
        typer.echo(json.dumps(whole))
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
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on until the task is over."),
    as_json: bool = typer.Option(False, "--json", help="A JSON object per line."),
) -> None:
    """Print the output of a task, over all its tries."""
    import json

    for line in _lines(_tasks(queue), task, follow):
        typer.echo(json.dumps({"line": line}) if as_json else printable(line))


def _lines(tasks: Tasks, name: str, follow: bool) -> Iterator[str]:
    """Whole lines, then what is left without an end."""
    from dovetail.jobs.backends.log_file import read
    from dovetail.jobs.tasks import OVER

    position, half, found = 0, "", tasks.named(name)
    if not follow and not tasks.log(found).exists():
        by = f", worker {found.worker}: its log is in that worker's home of jobs" if found.worker else ""
        raise UserError(f"there is no log of task {name} here: it is {found.status}{by}")
    while True:
        over = not follow or tasks.named(name).status in OVER
        while (part := read(tasks.log(found), position)).text:
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
    """Take a task out of the queue; one that runs gets SIGTERM, and its worker's --grace to end."""
    import dataclasses
    import json

    tasks = _tasks(queue)
    before = tasks.cancel(task)
    says = f"task {task} of queue {queue} is cancelled"
    says += f"; {before.worker} ends it within seconds" if before.status == "running" else ""
    typer.echo(json.dumps(dataclasses.asdict(tasks.named(task))) if as_json else says)


@app.command()
def retry(
    queue: str = QUEUE,
    task: str = typer.Argument("", help="Only this one, which may have been cancelled too."),
    as_json: bool = JSON,
) -> None:
    """Make the tasks that failed ready again."""
    import json

    count = _tasks(queue).retry(task)
    typer.echo(json.dumps({"ready": count}) if as_json else f"{count} tasks are ready again")
