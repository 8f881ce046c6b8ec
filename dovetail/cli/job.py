"""`dovetail job`: run commands and recipes on this machine, a Slurm cluster or in the cloud, and watch over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from dovetail.cli import job_queue
from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.jobs.job import Job
    from dovetail.jobs.store import Store

app = typer.Typer(help="Run jobs here, on Slurm, on Cloud TPUs or GKE; they survive preemption.", no_args_is_help=True)
app.add_typer(job_queue.app, name="queue")

JOB = typer.Argument(help="A job's id, the beginning of it, or its name.")
JSON = typer.Option(False, "--json", help="The same as JSON.")
YES = typer.Option(False, "--yes", "-y", help="Delete without asking.")
SHOWN = 40  # jobs of a list, unless more are asked for


def open_store() -> Store:
    from dovetail.jobs.home import jobs_home
    from dovetail.jobs.store import Store

    return Store(jobs_home())


@app.command()
def create(
    spec: list[str] = typer.Argument(
        None, metavar="[SPEC.yaml] [KEY=VALUE]...", help="A job's file, and keys on top of it or in its place."
    ),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask before what costs money."),
    check: bool = typer.Option(True, help="First check zones, ask Slurm, plan a recipe and compile it with libtpu."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be created, and create nothing."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Show its logs until it is over; exit as it did."),
    as_json: bool = JSON,
) -> None:
    """Create a job: dovetail job create name=hello command='echo hello'."""
    from dataclasses import replace

    from dovetail.cli.job_create import confirm, read_spec, show_only, warnings
    from dovetail.jobs import actions, gate, price, snapshot

    wanted, base = read_spec(spec or [])
    cost = price.price(wanted)
    price.refuse_blind_ceiling(wanted)
    if wanted.after:
        actions.ids_of(open_store(), wanted.after)
    notes = [*filter(None, [gate.check_place(wanted, gate.ANYWAY) if check else ""]), *warnings(wanted)]
    for line in notes:
        typer.echo(f"warning: {line}", err=True)
    if dry_run:
        show_only(replace(wanted, code=snapshot.settled(wanted.code, base)), cost.says, notes, as_json)
        actions.check(wanted, base)
        code = snapshot.command_folder(wanted.code, base)
        if remark := gate.check(wanted, code, compiles=False) if check else "":
            typer.echo(f"note: {remark}", err=True)
        return
    remarks = []

    def agree() -> None:
        confirm(wanted, cost, yes)
        remarks.append(gate.check(wanted, snapshot.command_folder(wanted.code, base)) if check else "")

    store = open_store()
    job = actions.create(store, wanted, base, confirm=agree)
    remark = remarks[0]
    _wake(store)
    if as_json:
        _print_json(_job_dict(job))
    else:
        _say(f"job {job.id}: {job.name} on {job.backend}, {cost.says}" + (f"; {remark}" if remark else ""))
    if follow:
        from dovetail.cli.job_logs import follow_job

        raise typer.Exit(follow_job(store, job.id))


def _wake(store: Store) -> None:
    from dovetail.jobs.presence import ensure

    ensure(store.root)


@app.command("list")
def list_jobs(
    status: str = typer.Option("", help="Only those: queued, waiting, running, stopping, succeeded, failed, ..."),
    all_jobs: bool = typer.Option(False, "--all", "-a", help=f"Every job, and not the newest {SHOWN}."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Keep the table up to date until ctrl-C."),
    as_json: bool = JSON,
) -> None:
    """The table of jobs, the newest first."""
    from dovetail.cli import job_table

    store = open_store()
    statuses = _statuses(status)
    limit = 0 if all_jobs or as_json else SHOWN
    if as_json:
        handles = store.handles("slurm")
        _print_json([_job_dict(job) | {"handle": handles.get(job.id, "")} for job in store.jobs(statuses, limit)])
    elif watch:
        job_table.watch(store, statuses, limit)
    else:
        job_table.show(store, statuses, limit)


def _statuses(text: str) -> tuple[str, ...]:
    from dovetail.core.choice import one_of
    from dovetail.jobs.job import ACTIVE, OVER

    wanted = tuple(word for word in text.split(",") if word)
    for word in wanted:
        one_of("--status", word, (*ACTIVE, *OVER))
    return wanted


@app.command()
def show(job: str = JOB, as_json: bool = JSON) -> None:
    """One job: its spec, its attempts and what happened to it."""
    import dataclasses

    from dovetail.cli import job_table
    from dovetail.jobs.sensitive import shown

    store = open_store()
    found = store.find(job)
    if as_json:
        history = [dataclasses.asdict(event) for event in store.events(found.id)]
        attempts = [dataclasses.asdict(row) for row in store.attempts(found.id)]
        more = {"spec": shown(store.spec(found.id)), "attempts_made": attempts, "events": history}
        _print_json(_job_dict(found) | more | {"folder": store.where(found)})
        return
    job_table.show_one(store, found)


@app.command()
def logs(
    job: str = JOB,
    rank: int = typer.Option(-1, help="Only this process's."),
    attempt: int = typer.Option(0, min=0, help="Of this attempt; the last if not given."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on until the job is over."),
    as_json: bool = typer.Option(False, "--json", help="A JSON object per line."),
) -> None:
    """What its processes wrote, each line with its rank; and which of them failed first."""
    from dovetail.cli.job_logs import follow_job, show_logs

    store = open_store()
    found = store.find(job)
    if follow and not attempt:
        follow_job(store, found.id, rank, as_json)
    else:
        show_logs(store, found, rank, attempt, as_json)


@app.command()
def cancel(job: str = JOB, as_json: bool = JSON) -> None:
    """Let it save and end; `resume` continues from there. A second cancel kills it at once."""
    from dovetail.jobs import actions

    def says(store: Store, after: Job) -> str:
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
    """Start a job that was cancelled, stopped or failed again, with its budgets full."""
    from dovetail.jobs import actions

    resumed = lambda store, found: actions.resume(store, found, changes or ())  # noqa: E731
    _changed(resumed, job, as_json, lambda store, after: "is queued again")


def _changed(action: Callable[[Store, Job], Job], job: str, as_json: bool, says: Callable[[Store, Job], str]) -> None:
    from dovetail.jobs.presence import holder

    store = open_store()
    after = action(store, store.find(job))
    if after.user == store.user:
        _wake(store)
    if as_json:
        _print_json(_job_dict(after))
    else:
        _say(f"job {after.id} {says(store, after)}")
        if after.user != store.user and after.site == store.site and not holder(store.root, after.user):
            _say(f"no supervisor of {after.user} runs: {after.user} starts one with `dovetail job supervise`")


@app.command()
def delete(job: str = JOB, yes: bool = YES, as_json: bool = JSON) -> None:
    """Remove a job that is over, with its logs, code and run."""
    from dovetail.cli import job_delete
    from dovetail.jobs import actions

    store = open_store()
    found = store.find(job)
    actions.refuse_delete(store, found)
    if not yes:
        job_delete.show(store, [found], err=as_json)
    job_delete.confirm("Delete it with its logs, code and results?", yes)
    actions.delete(store, found)
    if as_json:
        _print_json({"deleted": [found.id]})
    else:
        _say(f"job {found.id} is deleted")


@app.command()
def clean(
    days: float = typer.Option(7.0, min=0.0, help="Delete jobs that have been over for longer than so many days."),
    runs: bool = typer.Option(False, "--runs", help="Also succeeded jobs that left results, such as a trained run."),
    orphans: bool = typer.Option(True, help="Also give back what backends hold and no job wants."),
    release: str = typer.Option("", metavar="HOST", help="Only this: take a host out of quarantine."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be deleted and given back, and do neither."),
    yes: bool = YES,
    as_json: bool = JSON,
) -> None:
    """Delete your own old jobs, unused code, and what a backend holds for no job."""
    from dovetail.cli import job_delete
    from dovetail.jobs import actions, reaper
    from dovetail.jobs.backends.choose import chooser

    store = open_store()
    if release:
        if not store.release(release):
            raise UserError(f"{release} is not in quarantine")
        _print_json({"released": release}) if as_json else _say(f"{release} is released")
        return
    gone, kept = actions.old(store, days * 86400, runs=runs)
    job_delete.show(store, gone, kept, err=as_json)
    if gone and not dry_run:
        job_delete.confirm(f"Delete these {len(gone)} jobs with their logs, code and results?", yes)
    find = reaper.orphans if dry_run else reaper.reap
    reaped = find(store, chooser(store.root, store.owner)) if orphans else []
    if not dry_run:
        actions.clean(store, gone)
    if as_json:
        ids = {"deleted": [job.id for job in gone], "kept": [job.id for job in kept]}
        _print_json(ids | {"reaped": [one.resource.name for one in reaped]})
    else:
        names, would = ", ".join(one.resource.name for one in reaped), "to be " * dry_run
        given_back = f"{would}given back: {names}" if names else "nothing is held for no job"
        _say(f"{len(gone)} jobs {would}deleted; {given_back}")


@app.command()
def ssh(
    job: str = JOB,
    rank: int = typer.Option(0, min=0, help="Beside this process."),
    show_only: bool = typer.Option(False, "--print", help="Print the command and do not run it."),
    as_json: bool = JSON,
) -> None:
    """A shell beside a process of a running job."""
    import os
    import shlex

    from dovetail.cli.job_logs import last_attempt

    store = open_store()
    attempt, backend = last_attempt(store, store.find(job))
    command = backend.command(attempt, rank)
    if as_json:
        _print_json({"command": command})
    elif show_only:
        _say(shlex.join(command))
    else:
        os.execvp(command[0], command)


@app.command()
def cost(
    job: str = typer.Argument("", help="A job; all together if not given."),
    as_json: bool = JSON,
) -> None:
    """What jobs have cost so far, and what they cost per hour."""
    from dovetail.cli import job_table
    from dovetail.jobs import price

    store = open_store()
    jobs = [store.find(job)] if job else store.jobs()
    hourly = {one.id: price.hourly(store.spec(one.id)) for one in jobs if one.status == "running"}
    if as_json:
        rows = [{"id": one.id, "seconds": one.seconds, "dollars": one.dollars} for one in jobs]
        _print_json({"jobs": rows, "dollars": sum(one.dollars for one in jobs), "per_hour": sum(hourly.values())})
        return
    job_table.show_cost(jobs, hourly)


@app.command()
def supervise(
    foreground: bool = typer.Option(True, help="Here, or as a process in the background."),
    forever: bool = typer.Option(False, help="Also when there is nothing to do."),
    stop: bool = typer.Option(False, "--stop", help="End the supervisor that runs; jobs go on."),
    restart: bool = typer.Option(False, "--restart", help="Replace it by one with this code, in the background."),
    as_json: bool = JSON,
) -> None:
    """Watch over jobs; `create` starts this in the background by itself."""
    import logging

    from dovetail.jobs import daemon, presence

    if stop and restart:
        raise UserError("give --stop or --restart, not both")
    store = open_store()
    store.close()
    ended = presence.stop(store.root) if stop or restart else ""
    if stop:
        said = f"the supervisor, {ended}, has ended; jobs go on" if ended else "no supervisor runs"
        _print_json({"stopped": ended}) if as_json else _say(said)
        return
    if restart or not foreground:
        found = presence.started(store.root)
        _print_json({"supervisor": found, "stopped": ended}) if as_json else _say(f"the supervisor is {found}")
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    if not daemon.supervise(store.root, None if forever else daemon.IDLE_S):
        raise UserError(f"another supervisor runs already: {presence.holder(store.root)}")


@app.command()
def web(
    port: int = typer.Option(8788, min=0, max=65535, help="On 127.0.0.1; 0 is any that is free."),
    as_json: bool = typer.Option(False, "--json", help="The address as JSON."),
) -> None:
    """A page of the jobs, for who has the printed address, until ctrl-C."""
    import platform

    from dovetail.jobs.backends.choose import chooser
    from dovetail.jobs.web import Pages, server

    store = open_store()
    with server(Pages(store, chooser(store.root, store.owner)), port) as made:
        if as_json:
            _print_json({"url": made.url})
        else:
            tunnel = f"ssh -L {made.server_port}:127.0.0.1:{made.server_port} {platform.node()}"
            _say(f"jobs at {made.url}\nfrom another machine: {tunnel}\nctrl-C ends it; jobs go on")
        made.serve_forever()


@app.command()
def template(
    kind: str = typer.Argument(help="terraform."),
    spec: list[str] = typer.Argument(metavar="[SPEC.yaml] [KEY=VALUE]...", help="As for create."),
    as_json: bool = JSON,
) -> None:
    """The machines of a job as infrastructure code."""
    from dovetail.cli.job_create import read_spec
    from dovetail.core.choice import one_of
    from dovetail.jobs.terraform import terraform

    one_of("KIND", kind, ("terraform",))
    text = terraform(read_spec(spec)[0])
    _print_json({kind: text}) if as_json else _say(text.rstrip())


def _job_dict(job: Job) -> dict[str, Any]:
    return job._asdict()


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value))


def _say(text: str) -> None:
    typer.echo(text)
