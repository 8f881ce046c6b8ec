"""Test the backend on a real two-node Slurm started here; skipped with a reason where slurmd cannot run."""

import os
import shlex
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from jobs.docs_page import console
from jobs.slurm_cluster import preempt, until
from refusals import refuses
from typer.testing import CliRunner

import dovetail as dt
from dovetail.cli.job import app
from dovetail.jobs import actions
from dovetail.jobs.backends import chooser
from dovetail.jobs.logs import waiting
from dovetail.jobs.spec import make
from dovetail.jobs.supervisor import orphans

# Slurm signals one process after another: a sleep that dies first must not end its shell, nor may what is saved be a
# child's work.
FOR_EVER = "while :; do sleep 1 & wait; done"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("slurm_here")]


def job(store, **given):
    base = {"backend": "slurm", "hosts": 2, "code": {"path": ""}, "retries": {"backoff": 0.1}}
    return actions.create(store, make(base | given)).id


def log(store, id: str, rank: int = 0, attempt: int = 1) -> str:
    path = store.home(id) / "attempts" / str(attempt) / f"rank{rank}.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.usefixtures("supervised")
def test_every_process_has_its_rank_and_only_its_own_secrets(store, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    told = "$DOVETAIL_RANK $SLURMD_NODENAME $DOVETAIL_PROCESS_ID $GIVEN $TOKEN [$PGPASSWORD]"
    id = job(store, name="who", command=f'echo "{told}"; exit 0', env=["GIVEN=a b"], secrets=["TOKEN=env:PGPASSWORD"])
    until(lambda: store.job(id).is_over)
    assert store.job(id).status == "succeeded", store.job(id).detail
    assert [log(store, id, rank) for rank in (0, 1)] == ["0 dta 0 a b s3cret []\n", "1 dtb 1 a b s3cret []\n"]
    assert store.attempts(id)[0].hosts == "dta,dtb" and store.job(id).host == "dta"
    shown = CliRunner().invoke(app, ["list"], env={"COLUMNS": "200"}).stdout
    shown += CliRunner().invoke(app, ["show", id], env={"COLUMNS": "200"}).stdout
    assert shown.count(f"slurm {store.last(id).handle} low") == 3  # in the list, and for the job and its attempt


@pytest.mark.usefixtures("supervised")
def test_a_preempted_job_saves_is_requeued_and_completes(store):
    """The job counts its starts to two, and saves the count on a stop signal."""
    command = """
        file="$DOVETAIL_JOB_DIR/saved.$DOVETAIL_RANK"; echo "begins at $(cat "$file" 2>/dev/null || echo 0)"
        if [ -e "$file" ]; then exit 0; fi
        trap 'echo 1 > "$file"; exit 85' TERM
        touch "$DOVETAIL_JOB_DIR/ready.$DOVETAIL_RANK"; """
    id = job(store, name="train", command=command + FOR_EVER, slurm={"partition": "low"})
    until(lambda: all((store.home(id) / f"ready.{rank}").exists() for rank in (0, 1)))
    preempt(2)
    until(lambda: store.job(id).is_over, 120)
    assert store.job(id).status == "succeeded", [event.what for event in store.events(id)]
    assert [log(store, id, rank) for rank in (0, 1)] == ["begins at 0\nbegins at 1\n"] * 2
    assert [row.outcome for row in store.attempts(id)] == ["success"]  # one attempt: Slurm started it twice
    assert (store.job(id).preemptions, store.last(id).restarts) == (1, 1)  # which counts all the same
    whats = [event.what for event in store.events(id)]
    assert whats.index("running on dta") < whats.index("waiting on dta") < len(whats) - 1


@pytest.mark.usefixtures("supervised")
def test_the_first_failing_rank_is_named(store):
    command = 'if [ $DOVETAIL_RANK = 1 ]; then echo "ValueError: wrong shape" >&2; exit 1; fi; sleep 1; exit 89'
    id = job(store, name="bad", command=command)
    until(lambda: store.job(id).is_over)
    (row,) = store.attempts(id)
    assert (store.job(id).status, row.exit_code, row.failed_rank) == ("failed", 1, 1)
    assert "rank 1: exit 1" in row.detail and "wrong shape" in row.detail


@pytest.mark.usefixtures("supervised")
def test_a_cancelled_job_saves_and_leaves_no_processes(store):
    command = f"trap ': > \"$DOVETAIL_JOB_DIR/saved.$DOVETAIL_RANK\"; exit 85' TERM; echo up; {FOR_EVER}"
    id = job(store, name="long", command=command)
    until(lambda: log(store, id, 0) and log(store, id, 1))
    listed = subprocess.run(["squeue", "-h", "-o", "%j"], capture_output=True, text=True, check=True).stdout
    assert listed == f"long-dt-{id}-1\n"
    actions.cancel(store, store.job(id))
    until(lambda: store.job(id).is_over)
    assert store.job(id).status == "cancelled"
    assert all((store.home(id) / f"saved.{rank}").exists() for rank in (0, 1))
    assert subprocess.run(["squeue", "-h", "--name", f"long-dt-{id}-1"], capture_output=True, check=True).stdout == b""


@pytest.mark.usefixtures("supervised")
def test_a_request_that_slurm_cannot_meet_is_reported(store):
    """Created without a check, it waits; its reason is in the list."""
    id = job(store, name="large", command="true", hosts=9)
    until(lambda: "PartitionConfig" in store.job(id).detail)
    news = waiting(store, id)
    assert news().startswith(f"job {id} waits: Slurm: PENDING: PartitionConfig") and news() == ""  # said once
    shown = CliRunner().invoke(app, ["list"]).stdout
    assert f"{id} large: Slurm: PENDING: PartitionConfig: the partition cannot satisfy the request" in shown
    actions.cancel(store, store.job(id))
    until(lambda: store.job(id).is_over)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hosts=9", "cannot satisfy this request (9 nodes): allocation failure: Requested node configuration"),
        ("slurm.partition=none", "in partition none (2 nodes): invalid partition specified"),
        ("zones=[low, none]", "in partition none"),
    ],
)
def test_create_refuses_what_slurm_can_never_meet(store, given, message):
    words = ["create", "name=x", "command=true", "backend=slurm", "hosts=2", "code.path=", given]
    for more in ([], ["--dry-run"]):
        done = CliRunner().invoke(app, [*words, *more])
        assert isinstance(done.exception, ValueError) and message in str(done.exception)
    assert store.jobs() == []


def test_the_command_of_the_docs_page_is_accepted_by_slurm(store):
    create = console("Story 3")[0][1]
    done = CliRunner().invoke(app, [*shlex.split(create)[2:], "code.path=", "--dry-run"])
    assert done.exit_code == 0 and "--partition=low" in done.stdout and "--job-name=tiny-dt-job-1" in done.stdout


def scancel(store, id: str) -> None:
    subprocess.run(["scancel", store.last(id).handle], check=True)


@pytest.mark.usefixtures("supervised")
def test_scancel_by_a_user_cancels_the_job(store):
    """Running, it saves and is not put back; in the queue it is not submitted again."""
    command = f"trap ': > \"$DOVETAIL_JOB_DIR/saved.$DOVETAIL_RANK\"; exit 85' TERM; echo up; {FOR_EVER}"
    id = job(store, name="run", command=command)
    until(lambda: log(store, id, 0) and log(store, id, 1))
    held = job(store, name="held", command="true", slurm={"extra": ["--hold"]})
    until(lambda: store.last(held) and "JobHeldUser" in store.last(held).detail)
    scancel(store, id)
    scancel(store, held)
    until(lambda: store.job(id).is_over and store.job(held).is_over)
    for one in (id, held):
        found = store.job(one)
        assert (found.status, found.detail, found.attempts) == ("cancelled", "cancelled in Slurm (scancel)", 1)
    assert all((store.home(id) / f"saved.{rank}").exists() for rank in (0, 1)) and store.last(id).restarts == 0
    assert (store.home(id) / "attempts/1/cancelled").exists()  # for when squeue has forgotten it


@pytest.mark.usefixtures("supervised")
def test_cancelled_nothing_further_of_the_line_runs_and_a_second_cancel_kills(store):
    first = job(store, name="line", command="echo up; sleep 600; echo SECOND", hosts=1)
    deaf = job(store, name="deaf", command="trap '' TERM; echo up; while :; do sleep 1; done", hosts=1)
    until(lambda: log(store, first) and log(store, deaf))
    for id in (first, deaf):
        actions.cancel(store, store.job(id))
    until(lambda: store.job(first).is_over and store.last(deaf).stop_sent)
    assert store.job(first).status == "cancelled" and "SECOND" not in log(store, first)
    assert store.job(deaf).status == "stopping"
    actions.cancel(store, store.job(deaf))
    until(lambda: store.job(deaf).is_over)
    assert store.job(deaf).status == "cancelled" and store.last(deaf).detail == "cancelled twice: killed"


def test_a_repeated_create_submits_once_and_orphans_are_found(store):
    id = job(store, name="twice", command="sleep 60")
    choose = chooser(store.root, store.owner)
    backend, row = choose("slurm"), store.begin(id, "", "")
    attempt = store.attempt(store.job(id), row)
    attempt.folder.mkdir(parents=True)
    assert backend.create(attempt) == backend.create(attempt)
    assert [one.name for one in backend.list()] == [attempt.name] and orphans(store, choose) == []
    store.remove(id)
    (orphan,) = orphans(store, choose, ["slurm"])
    backend.delete(orphan.resource)
    until(lambda: backend.observe(attempt).state == "absent")


def test_a_refusal_fails_the_job_and_a_timeout_does_not(store, monkeypatch, tmp_path):
    from jobs.watched import watched

    with watched(store.root):
        id = job(store, name="nowhere", command="true", slurm={"partition": "none"})
        until(lambda: store.job(id).is_over)
    assert store.job(id).status == "failed" and "partition" in store.job(id).detail
    away = tmp_path / "away.conf"
    away.write_text(Path(os.environ["SLURM_CONF"]).read_text().replace("SlurmctldPort=", "SlurmctldPort=1#"))
    monkeypatch.setenv("SLURM_CONF", str(away))
    monkeypatch.setattr("dovetail.jobs.backends.slurm.TIMEOUT_S", 2.0)
    attempt_row = store.begin(job(store, name="later", command="true"), "", "")
    choose = chooser(store.root, store.owner)
    waiting = store.job(attempt_row.job)
    attempt = store.attempt(waiting, attempt_row)
    assert choose("slurm").observe(attempt).state == "unknown"
    store.change(waiting.id, status="cancelled")


@pytest.mark.usefixtures("supervised")
def test_a_remote_function_runs_on_slurm(store):
    scale = np.arange(1_000_000, dtype=np.float32)
    where = dt.remote(backend="slurm", hosts=2, name="where")(lambda x: (x * scale, os.environ["SLURMD_NODENAME"]))
    zero = dt.remote(backend="slurm", name="zero")(lambda: 1 // 0)
    with refuses(naming="argument 'x' of <lambda>"):
        where.submit(threading.Lock())
    handles = where.submit(np.float32(5)), zero.submit()
    value, node = handles[0].result(60)
    assert node == "dta" and np.array_equal(value, 5 * scale)
    with pytest.raises(ZeroDivisionError):
        handles[1].result(60)
