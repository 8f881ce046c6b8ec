"""Test the store: intents before calls, transactions, thousands of jobs, and files of other versions."""

import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from refusals import refuses

from dovetail.jobs import actions, database
from dovetail.jobs.files import is_network_folder, jobs_home
from dovetail.jobs.spec import make
from dovetail.jobs.store import JobStore, NoJobError

SPEC = make({"name": "x", "command": "true", "code": {"path": ""}})


def test_an_attempt_and_the_intent_to_create_it_are_one_change(store):
    job = store.add(SPEC)
    row = store.begin(job.id, "us-east5-b", "v6e-8", ["bad1", "bad2"])
    assert (row.number, row.phase, row.zone, row.exclude) == (1, "creating", "us-east5-b", "bad1,bad2")
    assert store.open_intents() == [(job.id, 1, "create")]
    store.intend(job.id, 1, "create")  # the call is made again: it is still one intent
    assert len(store.open_intents()) == 1
    store.settle(job.id, 1, "create", "done")
    assert store.open_intents() == [] and store.job(job.id).attempts == 1


def test_a_failed_transaction_changes_nothing(store):
    job = store.add(SPEC)
    with pytest.raises(RuntimeError), store.transaction():
        store.begin(job.id, "", "")
        raise RuntimeError("killed")
    assert store.attempts(job.id) == [] and store.open_intents() == [] and store.job(job.id).status == "queued"


def test_many_writers_wait_for_each_other(home):
    def write(n):
        own = JobStore(home)
        for _ in range(10):
            own.add(SPEC)
        own.close()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = JobStore(home)
    assert store.counts() == {"queued": 40} and len({job.id for job in store.jobs()}) == 40
    store.close()


def test_a_job_is_found_by_id_prefix_and_name(store):
    one, two = store.add(make({"name": "one", "command": "true"}), id="abcdef"), store.add(SPEC, id="abcxyz")
    assert store.find("abcd").id == store.find("one").id == one.id and store.find("abcxyz") == two
    with refuses("JOB", naming="abcdef, abcxyz"):
        store.find("abc")
    with refuses("JOB", NoJobError, code="no_job", naming="'zzz'"):
        store.find("zzz")


def fill(home, count: int) -> None:
    store = JobStore(home)
    statuses = ("succeeded", "failed", "running", "queued")
    rows = [(f"j{i:06d}", f"job{i}", statuses[i % 4], f"host{i}", i, i) for i in range(count)]
    with store.transaction() as db:
        db.executemany(
            "INSERT INTO jobs (id, name, user, backend, accelerator, status, host, created, changed) "
            "VALUES (?, ?, 'me', 'local', 'cpu', ?, ?, ?, ?)",
            rows,
        )
    store.close()


def test_ten_thousand_jobs_are_listed_quickly(home):
    """Bound the processor time, far above what it takes: another load on the machine must not fail this."""
    fill(home, 10_000)
    store = JobStore(home)
    best = min(_seconds(lambda: store.jobs()) for _ in range(3))
    assert len(store.jobs()) == 10_000 and best < 2
    assert min(_seconds(lambda: (store.jobs(limit=40), store.counts())) for _ in range(3)) < 0.5
    from dovetail.cli.job_output import plain

    jobs = store.jobs()
    assert min(_seconds(lambda: plain(jobs, {})) for _ in range(3)) < 2
    store.close()
    command = [sys.executable, "-X", "importtime", "-m", "dovetail", "job", "list"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2500 failed, 2500 queued, 2500 running, 2500 succeeded; 40 shown" in shown.stdout
    loaded = {line.split()[-1].partition(".")[0] for line in shown.stderr.splitlines()}
    assert "sqlite3" in loaded and not loaded & {"yaml", "rich", "numpy", "jax"}  # most of the time is imports


def _seconds(call) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def test_a_file_of_an_older_version_is_migrated(home):
    """As the first version left it, with a job in it."""
    home.mkdir()
    with sqlite3.connect(home / "jobs.sqlite") as db:
        for statement in database.TABLES.split(";"):
            db.execute(statement)
        for table, column in (("jobs", "site"), ("attempts", "restarts")):
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        db.execute("INSERT INTO meta VALUES ('owner', 'me')")
        db.execute("PRAGMA user_version = 1")
    db.close()
    store = JobStore(home)
    store.begin(store.add(SPEC).id, "", "")
    assert [job.site for job in store.active()] == [""] and store.live()[0].restarts == 0 and store.owner == "me"
    store.close()


def test_a_file_of_a_newer_version_is_refused(home):
    JobStore(home).close()
    with sqlite3.connect(home / "jobs.sqlite") as db:
        db.execute(f"PRAGMA user_version = {database.VERSION + 1}")
    db.close()
    with refuses(code="newer_schema"):
        JobStore(home)


def test_the_folder_of_jobs(monkeypatch, tmp_path):
    monkeypatch.delenv("DOVETAIL_JOBS", raising=False)
    monkeypatch.delenv("DOVETAIL_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert jobs_home() == tmp_path / "dovetail" / "jobs"
    monkeypatch.setenv("DOVETAIL_JOBS", "postgresql://lab/jobs")
    assert jobs_home() == tmp_path / "dovetail" / "jobs"  # the files; the store is in Postgres
    monkeypatch.setenv("DOVETAIL_JOBS_FILES", "/shared/jobs")
    assert jobs_home() == Path("/shared/jobs")


def test_a_shared_folder_is_detected_by_its_file_system(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nlab:/x {tmp_path}/a\\040b nfs4 rw 0 0\n")
    assert is_network_folder(tmp_path / "a b" / "jobs", mounts) and not is_network_folder(tmp_path / "a", mounts)


def test_clean_keeps_unfinished_jobs_and_shared_snapshots(store, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    spec = make({"name": "x", "command": "true", "code": {"path": str(tmp_path / "code")}})
    old, new = actions.create(store, spec), actions.create(store, spec)
    with refuses("JOB", code="job_not_over"):
        actions.delete(store, old)
    store.change(old.id, status="failed", ended=time.time() - 100)
    gone, _ = actions.old(store, 50)
    actions.clean(store, gone)
    assert [job.id for job in gone] == [old.id] and not store.home(old.id).exists()
    assert len(list((store.root / "snapshots").iterdir())) == 1  # the other job's too
    store.change(new.id, status="succeeded", ended=time.time() - 100)
    actions.clean(store, actions.old(store, 50)[0])
    assert list((store.root / "snapshots").iterdir()) == [] and store.jobs() == []
