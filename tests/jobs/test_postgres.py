"""Test the store in a real Postgres: SQLite's tests, two sites in one table, an unreachable server."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from jobs.postgres_server import PASSWORD, Unable, server
from jobs.test_kill_supervisor import check
from jobs.test_local import until
from jobs.test_queue import (  # noqa: F401
    start,
    tasks,
    test_an_expired_lease_moves_the_task_to_another_worker,
    test_dependencies_and_zones,
    test_failures_are_retried_and_fail_the_tasks_that_depend_on_them,
    test_tasks_are_claimed_in_order_and_one_at_a_time,
)
from jobs.test_store import (  # noqa: F401
    SPEC,
    test_a_failed_transaction_changes_nothing,
    test_a_job_is_found_by_id_prefix_and_name,
    test_an_attempt_and_the_intent_to_create_it_are_one_change,
    test_clean_keeps_unfinished_jobs_and_shared_snapshots,
    test_many_writers_wait_for_each_other,
)
from jobs.test_supervisor import (  # noqa: F401
    DONE,
    World,
    test_a_cancelled_job_is_signalled_first_and_can_be_resumed,
    test_a_notification_is_sent_at_the_end,
    test_each_kind_of_end_has_its_own_retry_budget,
    test_hosts_with_wrong_results_are_quarantined,
    test_orphaned_resources_are_found_and_released,
    test_the_next_zone_and_then_another_size,
    world,
)
from refusals import refuses

import dovetail as dt
from dovetail.core.errors import NotPermittedError, UserError
from dovetail.jobs import actions, database
from dovetail.jobs.database import DatabaseUnavailableError
from dovetail.jobs.queue import QueueWorker, TaskQueue
from dovetail.jobs.spec import make
from dovetail.jobs.store import JobStore

pytestmark = pytest.mark.slow

pytest.importorskip("psycopg", reason="pip install 'dovetail[postgres]'")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    try:
        with server() as url:
            yield url
    except Unable as why:
        pytest.skip(f"no Postgres here: {why}")


@pytest.fixture
def url(postgres, monkeypatch) -> str:
    """A schema of the test's own, which is as good as a database and is made in a millisecond."""
    import psycopg

    name = f"t{next(_numbers)}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    made = f"{postgres}?options={quote(f'-csearch_path={name}')}"
    monkeypatch.setenv("DOVETAIL_JOBS", made)
    return made


@pytest.fixture
def home(url, tmp_path, monkeypatch) -> Path:
    """As for every test of jobs, but the store is in Postgres."""
    monkeypatch.setenv("DOVETAIL_JOBS_FILES", str(tmp_path / "home"))
    monkeypatch.setattr("dovetail.jobs.presence.ensure", lambda root: None)
    return tmp_path / "home"


def test_a_supervisor_killed_at_some_points_ends_in_the_same_state(home, tmp_path):
    check(tmp_path, 101)


def test_a_remote_function_returns_its_value(home, supervised):
    assert dt.remote(lambda x: x + 1).run(41) == 42


def test_two_sites_list_each_others_jobs_and_supervise_their_own(home, tmp_path):
    here, there = JobStore(home), JobStore(tmp_path / "there")
    mine, theirs = World(here), World(there)
    job = theirs.add("x", DONE)
    assert [one.id for one in here.jobs()] == [job] and here.active() == [] and not here.busy_users()
    mine.run()
    assert here.job(job).status == "queued"
    actions.cancel(here, here.job(job))  # who sees a job may ask for it to stop; its own supervisor does it
    theirs.run()
    assert here.job(job).status == "cancelled"
    with refuses(code="other_site", naming=job):
        actions.delete(here, here.job(job))
    assert here.where(here.job(job)).endswith(f"there/jobs/{job}")
    with refuses(None, NotPermittedError, naming="command=id"):
        actions.resume(here, here.job(job), ["command=id"])
    with here.transaction() as db:  # every user with the password can write the tables
        db.execute("UPDATE specs SET text = replace(text, 'command:', 'notify: id\ncommand:')")
    actions.resume(here, here.job(job))
    theirs.run()
    assert there.job(job).status == "failed" and "differs from the one that" in there.job(job).detail
    assert not (there.home(job) / "notify.log").exists()
    here.quarantine("gke", "bad", job, "two results")
    assert there.quarantined("gke") == ["bad"]
    here.close(), there.close()


def test_a_job_has_the_databases_password_only_as_a_secret(home, store, supervised):
    """The worker of docs/jobs.md asks for it. Other jobs have the address alone: they fail, and use no other store."""
    TaskQueue(store, "q").add("one", "true")
    given = {"name": "x", "code": {"path": ""}}
    plain = actions.create(store, make(given | {"command": 'echo "$DOVETAIL_JOBS"'})).id
    work = {"command": "dovetail job queue work q", "secrets": ["DOVETAIL_JOBS=env:DOVETAIL_JOBS"]}
    worker = actions.create(store, make(given | work)).id
    until(lambda: store.job(plain).is_over and store.job(worker).is_over, 60)
    said = (store.home(plain) / "attempts" / "1" / "rank0.log").read_text()
    assert said.startswith("postgresql://jobs@127.0.0.1:") and PASSWORD not in said
    assert store.job(worker).status == "succeeded" and TaskQueue(store, "q").named("one").status == "succeeded"
    files = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    rows = store.read("SELECT text FROM specs") + store.read("SELECT what FROM events")
    assert not [one for one in files if PASSWORD.encode() in one] and PASSWORD not in str(rows)


def test_a_task_dies_with_its_worker_and_another_site_runs_it(home, tmp_path):
    queue = TaskQueue(JobStore(home), "q")
    queue.add("long", f"echo $$ >> {tmp_path}/began; [ $(wc -l < {tmp_path}/began) -gt 1 ] || sleep 60")
    worker = start(tmp_path / "there")
    until(lambda: (tmp_path / "began").exists() and (tmp_path / "began").read_text())
    process = int((tmp_path / "began").read_text())
    worker.kill()
    worker.wait()
    until(lambda: not Path(f"/proc/{process}/cwd").exists())  # before its lease has run out
    assert queue.named("long").status == "running"
    assert QueueWorker(queue, lease=1.0).run() == 1
    (task,) = queue.all()
    assert (task.status, task.tries, task.losses) == ("succeeded", 1, 1)
    queue.store.close()


def test_a_stopped_worker_lets_its_task_save_beyond_a_short_lease(home, tmp_path):
    queue = TaskQueue(JobStore(home), "q")
    queue.add("long", f"trap 'sleep 3; touch {tmp_path}/saved; exit 85' TERM; touch {tmp_path}/up; sleep 60 & wait")
    worker = QueueWorker(queue, lease=2.0)
    thread = threading.Thread(target=worker.run)
    thread.start()
    until((tmp_path / "up").exists)
    worker.stop()
    time.sleep(2.4)
    assert queue.claim("another", 30) is None  # it is still the first one's
    thread.join()
    (task,) = queue.all()
    assert (tmp_path / "saved").exists() and (task.status, task.losses) == ("ready", 1)
    queue.store.close()


def test_a_worker_without_its_server_ends_its_task_before_the_lease_expires(home, tmp_path, monkeypatch):
    queue = TaskQueue(JobStore(home), "q")
    queue.add("long", f"touch {tmp_path}/up; sleep 60")
    monkeypatch.setattr(queue, "heartbeat", lambda task, lease: (_ for _ in ()).throw(ConnectionError("away")))
    worker = QueueWorker(queue, lease=2.0, grace=30.0)
    task = queue.claim(worker.name, worker.lease)
    worker._beat = began = time.monotonic()
    assert not worker.work(task) and (tmp_path / "up").exists() and time.monotonic() - began < 20
    assert queue.named("long").status == "ready"
    queue.store.close()


def test_tables_of_another_version_are_refused(store, home):
    with store.transaction() as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'version'", (str(database.VERSION + 1),))
    with refuses(code="newer_schema"):
        JobStore(home)


def test_a_broken_connection_is_one_error_and_then_reopened(store):
    import psycopg

    store.change(store.add(SPEC).id, detail="nul \0 in a log")
    with psycopg.connect(store._database._url) as other:
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'dovetail%'")
    with pytest.raises(DatabaseUnavailableError):
        store.jobs()
    assert store.counts() == {"queued": 1}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://me:hunter2@127.0.0.1:1/jobs", "Connection refused"),
        ("postgresql://me:hunter2@127.0.0.1:1/jobs?colour=red", "invalid URI query parameter"),
        ("postgresql://me:hunter2%zz@127.0.0.1:1/jobs", "cannot be used: invalid percent-encoded token"),
        ("postgresql://me:x@hunter2@127.0.0.1:1/jobs", "in a password, @ / ? # and % are written"),
        ("postgresql://me:x/hunter2@127.0.0.1:1/jobs", "in a password, @ / ? # and % are written"),
        ("postgresql:me:hunter2", "must be a folder or postgresql://"),
    ],
)
def test_an_unreachable_url_is_reported_without_its_password(tmp_path, monkeypatch, url, says):
    monkeypatch.setenv("DOVETAIL_JOBS", url)
    with pytest.raises(UserError) as caught:
        JobStore(tmp_path)
    assert says in str(caught.value) and "hunter2" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_password_is_reported_and_not_shown(url, monkeypatch, tmp_path):
    monkeypatch.setenv("DOVETAIL_JOBS", url.replace(PASSWORD, "hunter2"))
    monkeypatch.setenv("DOVETAIL_JOBS_FILES", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", "job", "list"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "password authentication failed for user" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr and done.stderr.count("\n") == 1
