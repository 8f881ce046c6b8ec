"""`dovetail job`: run commands and recipes on this machine, a Slurm cluster or in the cloud, and supervise them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from dovetail.cli import job_queue
from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.jobs.job import Job
    from dovetail.jobs.store import JobStore

app = typer.Typer(help="Run jobs here, on Slurm, on Cloud TPUs or GKE; they survive preemption.", no_args_is_help=True)
app.add_typer(job_queue.app, name="queue")

JOB = typer.Argument(help="A job's id, the beginning of it, or its name.")
JSON = typer.Option(False, "--json", help="Print JSON.")
YES = typer.Option(False, "--yes", "-y", help="Delete without asking.")
MAX_SHOWN = 40  # jobs of a list, without --all


def open_store() -> JobStore:
    """Open the store of this user's jobs."""
    from dovetail.jobs.files import jobs_home
    from dovetail.jobs.store import JobStore

    return JobStore(jobs_home())


@app.command()
def create(
    spec: list[str] = typer.Argument(
        None, metavar="[SPEC.yaml] [KEY=VALUE]...", help="A job's file, and keys that replace or extend it."
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask before creating a job that costs money."),
    check: bool = typer.Option(True, help="Check zones, ask Slurm, plan a recipe and compile it with libtpu."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be created, and create nothing."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Show its logs until it is over; exit with its status."),
    as_json: bool = JSON,
) -> None:
    """Create a job: dovetail job create name=hello command='echo hello'."""
    from dovetail.cli import job_create
    from dovetail.jobs import actions, cost, preflight, snapshot

    wanted, base = job_create.read_spec(spec or [])
    price = cost.price(wanted)
    cost.check_ceiling(wanted)
    if wanted.after:
        actions.ids_of(open_store(), wanted.after)
    place = preflight.check_place(wanted, preflight.ANYWAY) if check else ""
    notes = [*filter(None, [place]), *cost.bucket_warnings(wanted, cost.locations(wanted))]
    for line in notes:
        typer.echo(f"warning: {line}", err=True)
    if dry_run:
        job_create.dry_run(wanted, base, price, notes, check, as_json)
        return
    remarks = []

    def agree() -> None:
        job_create.confirm(wanted, price, yes)
        folder = snapshot.command_folder(wanted.code, base)
        remarks.append(preflight.check_fit(wanted, folder) if check else "")

    store = open_store()
    job = actions.create(store, wanted, base, confirm=agree)
    _wake(store)
    more = f"; {remarks[0]}" if remarks[0] else ""
    _print(as_json, job._asdict(), f"job {job.id}: {job.name} on {job.backend}, {price.says}{more}")
    if follow:
        from dovetail.cli.job_output import follow_job

        raise typer.Exit(follow_job(store, job.id))


def _wake(store: JobStore) -> None:
    from dovetail.jobs.presence import ensure

    ensure(store.root)


@app.command("list")
def list_jobs(
    status: str = typer.Option("", help="Only these: queued, waiting, running, stopping, succeeded, failed, ..."),
    all_jobs: bool = typer.Option(False, "--all", "-a", help=f"All jobs, not only the newest {MAX_SHOWN}."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Update the table until ctrl-C."),
    as_json: bool = JSON,
) -> None:
    """List jobs, newest first."""
    from dovetail.cli import job_output

    store = open_store()
    statuses = _statuses(status)
    limit = 0 if all_jobs or as_json else MAX_SHOWN
    if as_json:
        handles = store.handles("slurm")
        rows = [job._asdict() | {"handle": handles.get(job.id, "")} for job in store.jobs(statuses, limit)]
        _print(True, rows)
    elif watch:
        job_output.watch(store, statuses, limit)
    else:
        job_output.show(store, statuses, limit)


def _statuses(text: str) -> tuple[str, ...]:
    from dovetail.core.choice import one_of
    from dovetail.jobs.job import ACTIVE, OVER

    wanted = tuple(word for word in text.split(",") if word)
    for word in wanted:
        one_of("--status", word, (*ACTIVE, *OVER))
    return wanted


@app.command()
def show(job: str = JOB, as_json: bool = JSON) -> None:
    """Show one job: its spec, its attempts and its history."""
    import dataclasses

    from dovetail.cli import job_output
    from dovetail.jobs.secrets import shown

    store = open_store()
    found = store.find(job)
    if not as_json:
        job_output.show_one(store, found)
        return
    history = [dataclasses.asdict(event) for event in store.events(found.id)]
    attempts = [dataclasses.asdict(row) for row in store.attempts(found.id)]
    more = {"spec": shown(store.spec(found.id)), "attempts_made": attempts, "events": history}
    _print(True, found._asdict() | more | {"folder": store.where(found)})


@app.command()
def logs(
    job: str = JOB,
    rank: int = typer.Option(-1, help="Only this process."),
    attempt: int = typer.Option(0, min=0, help="This attempt; the last if not given."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Follow until the job is over."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per line."),
) -> None:
    """Print the output of its processes, each line with its rank, and which process failed first."""
    from dovetail.cli.job_output import follow_job, show_logs

    store = open_store()
    found = store.find(job)
    if follow and not attempt:
        follow_job(store, found.id, rank, as_json)
    else:
        show_logs(store, found, rank, attempt, as_json)


@app.command()
def cancel(job: str = JOB, as_json: bool = JSON) -> None:
    """Stop a job with time to save; `resume` continues it. A second cancel kills it at once."""
    from dovetail.jobs import actions

    def says(store: JobStore, after: Job) -> str:
        if after.wanted == "kill":
            return "is killed now, without time to save"
        if not after.attempts:
            return "is cancelled; it had not begun"
        grace = store.spec(after.id).ceiling.grace
        return f"is sent SIGTERM and has {grace:g} s to save and end (ceiling.grace); cancel again to kill it at once"

    _changed(actions.cancel, job, as_json, says)


@app.command()
def resume(
    job: str = JOB,
    changes: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Such as ceiling.dollars=800."),
    as_json: bool = JSON,
) -> None:
    """Start a job again that was cancelled, stopped or failed, with its full budgets."""
    from dovetail.jobs import actions

    resumed = lambda store, found: actions.resume(store, found, changes or ())  # noqa: E731
    _changed(resumed, job, as_json, lambda store, after: "is queued again")


def _changed(
    action: Callable[[JobStore, Job], Job], job: str, as_json: bool, says: Callable[[JobStore, Job], str]
) -> None:
    from dovetail.jobs.presence import holder

    store = open_store()
    after = action(store, store.find(job))
    if after.user == store.user:
        _wake(store)
    _print(as_json, after._asdict(), f"job {after.id} {says(store, after)}")
    elsewhere = after.user != store.user and after.site == store.site
    if not as_json and elsewhere and not holder(store.root, after.user):
        typer.echo(f"no supervisor of {after.user} runs: {after.user} starts one with `dovetail job supervise`")


@app.command()
def delete(job: str = JOB, yes: bool = YES, as_json: bool = JSON) -> None:
    """Delete a job that is over, with its logs, code and results."""
    from dovetail.cli import job_output
    from dovetail.jobs import actions

    store = open_store()
    found = store.find(job)
    actions.check_delete(store, found)
    if not yes:
        job_output.show_deleted(store, [found], err=as_json)
    job_output.confirm_delete("Delete it with its logs, code and results?", yes)
    actions.delete(store, found)
    _print(as_json, {"deleted": [found.id]}, f"job {found.id} is deleted")


@app.command()
def clean(
    days: float = typer.Option(7.0, min=0.0, help="Delete jobs that have been over for this many days."),
    runs: bool = typer.Option(False, "--runs", help="Also succeeded jobs with results, such as a trained run."),
    orphans: bool = typer.Option(True, help="Also delete resources of backends that no job needs."),
    release: str = typer.Option("", metavar="HOST", help="Only release a host from quarantine."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be deleted, and delete nothing."),
    yes: bool = YES,
    as_json: bool = JSON,
) -> None:
    """Delete your own old jobs, unused code, and resources of backends that no job needs."""
    from dovetail.cli import job_output
    from dovetail.jobs import actions, supervisor
    from dovetail.jobs.backends import chooser

    store = open_store()
    if release:
        if not store.release(release):
            raise UserError(f"{release} is not in quarantine", param="--release")
        _print(as_json, {"released": release}, f"{release} is released")
        return
    gone, kept = actions.old(store, days * 86400, runs=runs)
    job_output.show_deleted(store, gone, kept, err=as_json)
    if gone and not dry_run:
        job_output.confirm_delete(f"Delete these {len(gone)} jobs with their logs, code and results?", yes)
    find = supervisor.orphans if dry_run else supervisor.reap
    reaped = [one.resource.name for one in find(store, chooser(store.root, store.owner))] if orphans else []
    if not dry_run:
        actions.clean(store, gone)
    would = "would be " * dry_run
    orphaned = f"resources without a job {would}deleted: {', '.join(reaped)}" if reaped else "no resource without a job"
    ids = {"deleted": [job.id for job in gone], "kept": [job.id for job in kept], "reaped": reaped}
    _print(as_json, ids, f"{len(gone)} jobs {would}deleted; {orphaned}")


@app.command()
def ssh(
    job: str = JOB,
    rank: int = typer.Option(0, min=0, help="Rank of the process."),
    show_only: bool = typer.Option(False, "--print", help="Print the command and do not run it."),
    as_json: bool = JSON,
) -> None:
    """Open a shell where a process of a running job runs."""
    import os
    import shlex

    from dovetail.cli.job_output import last_attempt

    store = open_store()
    attempt, backend = last_attempt(store, store.find(job))
    command = backend.command(attempt, rank)
    if as_json or show_only:
        _print(as_json, {"command": command}, shlex.join(command))
    else:
        os.execvp(command[0], command)


@app.command()
def cost(
    job: str = typer.Argument("", help="A job; all jobs if not given."),
    as_json: bool = JSON,
) -> None:
    """Show what jobs have cost so far, and cost per hour."""
    from dovetail.cli import job_output
    from dovetail.jobs.cost import hourly

    store = open_store()
    jobs = [store.find(job)] if job else store.jobs()
    rates = {one.id: hourly(store.spec(one.id)) for one in jobs if one.status == "running"}
    if as_json:
        rows = [{"id": one.id, "seconds": one.seconds, "dollars": one.dollars} for one in jobs]
        _print(True, {"jobs": rows, "dollars": sum(one.dollars for one in jobs), "per_hour": sum(rates.values())})
    else:
        job_output.show_cost(jobs, rates)


@app.command()
def supervise(
    foreground: bool = typer.Option(True, help="In this process, or in the background."),
    forever: bool = typer.Option(False, help="Keep running when there is nothing to do."),
    stop: bool = typer.Option(False, "--stop", help="End the running supervisor; jobs continue."),
    restart: bool = typer.Option(False, "--restart", help="Replace it by one with this code, in the background."),
    as_json: bool = JSON,
) -> None:
    """Supervise jobs; `create` starts a supervisor in the background by itself."""
    import logging

    from dovetail.jobs import presence, supervisor

    if stop and restart:
        raise UserError("`--stop` and `--restart` exclude each other: give one", param="--stop")
    store = open_store()
    store.close()
    ended = presence.stop(store.root) if stop or restart else ""
    if stop:
        message = f"the supervisor, {ended}, has ended; jobs continue" if ended else "no supervisor runs"
        _print(as_json, {"stopped": ended}, message)
    elif restart or not foreground:
        found = presence.started(store.root)
        _print(as_json, {"supervisor": found, "stopped": ended}, f"the supervisor is {found}")
    else:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
        if not supervisor.supervise(store.root, None if forever else supervisor.IDLE_S):
            raise UserError(f"another supervisor runs already: {presence.holder(store.root)}", code="supervised")


@app.command()
def web(
    port: int = typer.Option(8788, min=0, max=65535, help="Port on 127.0.0.1; 0 chooses a free one."),
    as_json: bool = typer.Option(False, "--json", help="Print the address as JSON."),
) -> None:
    """Serve a page of the jobs until ctrl-C, for browsers that open the printed address."""
    import platform

    from dovetail.jobs.backends import chooser
    from dovetail.jobs.web import Pages, server

    store = open_store()
    with server(Pages(store, chooser(store.root, store.owner)), port) as made:
        tunnel = f"ssh -L {made.server_port}:127.0.0.1:{made.server_port} {platform.node()}"
        text = f"jobs at {made.url}\nfrom another machine: {tunnel}\nctrl-C ends it; jobs continue"
        _print(as_json, {"url": made.url}, text)
        made.serve_forever()


@app.command()
def template(
    kind: str = typer.Argument(help="terraform."),
    spec: list[str] = typer.Argument(metavar="[SPEC.yaml] [KEY=VALUE]...", help="As for create."),
    as_json: bool = JSON,
) -> None:
    """Print the machines of a job as infrastructure code."""
    from dovetail.cli.job_create import read_spec
    from dovetail.core.choice import one_of
    from dovetail.jobs.terraform import terraform

    one_of("KIND", kind, ("terraform",))
    text = terraform(read_spec(spec)[0])
    _print(as_json, {kind: text}, text.rstrip())


def _print(as_json: bool, value: Any, text: str = "") -> None:
    """Print `value` as JSON, or `text`."""
    import json

    typer.echo(json.dumps(value) if as_json else text)
