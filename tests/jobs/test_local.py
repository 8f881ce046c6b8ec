"""Test jobs as local processes: several ranks, stopping, killing, and a supervisor that dies."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from jobs.watched import watched
from refusals import refuses

from dovetail.jobs import actions
from dovetail.jobs.backends.backend import read_log
from dovetail.jobs.backends.local import LocalBackend, _leftovers
from dovetail.jobs.logs import Follower
from dovetail.jobs.secrets import inherited
from dovetail.jobs.spec import make

pytestmark = pytest.mark.slow


def create(store, command: str, **given) -> str:
    base = {
        "name": "x",
        "command": command,
        "code": {"path": ""},
        "retries": {"backoff": 0.0},
        "ceiling": {"grace": 5.0},
    }
    return actions.create(store, make(base | given)).id


def until(holds, seconds: float = 30.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.02)
    raise AssertionError(f"it did not come to be in {seconds} s")


def log(store, id: str, rank: int = 0, attempt: int = 1) -> str:
    path = store.home(id) / "attempts" / str(attempt) / f"rank{rank}.log"
    return path.read_text() if path.exists() else ""


def attempt_of(store, id: str):
    return store.attempt(store.job(id), store.last(id))


@pytest.mark.usefixtures("supervised")
def test_several_processes_find_each_other(store):
    id = create(store, 'echo "$DOVETAIL_PROCESS_ID of $DOVETAIL_NUM_PROCESSES at $DOVETAIL_COORDINATOR"', hosts=3)
    until(lambda: store.job(id).is_over)
    logs = [log(store, id, rank).split() for rank in range(3)]
    assert [words[:3] for words in logs] == [[str(rank), "of", "3"] for rank in range(3)]
    assert len({words[4] for words in logs}) == 1 and logs[0][4].startswith("127.0.0.1:")
    assert store.job(id).status == "succeeded" and store.job(id).host == socket.gethostname()


@pytest.mark.usefixtures("supervised")
def test_a_preempted_job_resumes_from_its_checkpoint(store):
    """85, as a training exits, is no failure; and the next attempt finds what was saved."""
    id = create(store, 'f="$DOVETAIL_JOB_DIR/n"; n=$(cat "$f" 2>/dev/null || echo 0); echo $((n+1)) > "$f"; '
                       'echo "start $n"; [ $n -ge 2 ] || exit 85')  # fmt: skip
    until(lambda: store.job(id).is_over)
    assert [row.outcome for row in store.attempts(id)] == ["preemption", "preemption", "success"]
    assert [log(store, id, 0, n) for n in (1, 2, 3)] == ["start 0\n", "start 1\n", "start 2\n"]


@pytest.mark.usefixtures("supervised")
def test_a_cancelled_job_has_time_to_save(store):
    id = create(store, "trap 'sleep 0.2; echo saved; exit 85' TERM; echo up; sleep 60 & wait")
    until(lambda: log(store, id) == "up\n")
    actions.cancel(store, store.job(id))
    until(lambda: store.job(id).is_over)
    assert store.job(id).status == "cancelled" and log(store, id) == "up\nsaved\n"


@pytest.mark.usefixtures("supervised")
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("echo up; sleep 60; echo SECOND", "up\n"),
        ("echo up; sleep 60 && echo SECOND || echo THIRD", "up\n"),
        ("echo up; while :; do sleep 60; done; echo SECOND", "up\n"),
        # a command of the line saves, and ends with 0: the line is not done for that
        ("sh -c 'trap \"echo saved; exit 0\" TERM; echo up; sleep 60 & wait'; echo SECOND", "up\nsaved\n"),
        ("sh -c 'trap \"sleep 0.2; echo saved; exit 1\" TERM; echo up; sleep 60 & wait' & wait; echo SECOND",
         "up\nsaved\n"),
    ],
)  # fmt: skip
def test_cancelled_nothing_further_of_the_line_runs(store, command, says):
    id = create(store, command)
    later = create(store, "echo began", after=[id])
    until(lambda: log(store, id) == "up\n")
    actions.cancel(store, store.job(id))
    until(lambda: store.job(id).is_over and store.job(later).is_over)
    assert store.job(id).status == "cancelled"
    assert log(store, id).removesuffix("Terminated\n") == says  # as some shells say
    assert store.job(later).status == "failed" and store.attempts(later) == []


@pytest.mark.usefixtures("supervised")
def test_a_second_cancel_kills_at_once(store):
    id = create(store, "trap '' TERM; echo $$; while :; do sleep 0.2; done", ceiling={"grace": 3600.0})
    process = int(until(lambda: log(store, id).strip()))
    actions.cancel(store, store.job(id))
    until(lambda: store.last(id).stop_sent)
    assert store.job(id).status == "stopping" and "3600 s to save" in store.job(id).detail
    actions.cancel(store, store.job(id))
    until(lambda: store.job(id).is_over)
    assert store.job(id).status == "cancelled" and not Path(f"/proc/{process}/cwd").exists()


@pytest.mark.usefixtures("supervised")
def test_processes_that_ignore_sigterm_are_killed(store):
    id = create(store, "trap '' TERM; echo $$; while :; do sleep 0.2; done", ceiling={"grace": 0.3})
    process = int(until(lambda: log(store, id).strip()))
    actions.cancel(store, store.job(id))
    until(lambda: store.job(id).is_over)
    assert store.job(id).status == "cancelled" and not Path(f"/proc/{process}/cwd").exists()


def test_a_job_outlives_its_supervisor_and_the_next_one_finds_it(store):
    with watched(store.root, leave=True):
        id = create(store, "echo one; while [ ! -e go ]; do sleep 0.05; done; echo two")
        until(lambda: log(store, id) == "one\n")
    (store.home(id) / "go").touch()
    until(lambda: log(store, id) == "one\ntwo\n")
    with watched(store.root):
        until(lambda: store.job(id).is_over)
    assert [row.outcome for row in store.attempts(id)] == ["success"]


def test_a_repeated_create_runs_once(store):
    id = create(store, "echo once; sleep 0.3")
    store.begin(id, "", "")
    backend, attempt = LocalBackend(store.root), attempt_of(store, id)
    for _ in range(3):
        backend.create(attempt)
    assert backend.observe(attempt).state in ("waiting", "running")
    assert [one.name for one in backend.list()] == [attempt.name]
    until(lambda: backend.observe(attempt).state == "succeeded")
    backend.create(attempt)  # nor again when it is over
    assert backend.observe(attempt).state == "succeeded" and log(store, id) == "once\n" and backend.list() == []
    backend.delete(attempt.resource)
    backend.delete(attempt.resource)
    assert backend.observe(attempt).state == "absent"


def test_a_killed_launcher_is_a_fault_and_its_processes_are_killed(store):
    id = create(store, "echo $$; sleep 60")
    store.begin(id, "", "")
    backend, attempt = LocalBackend(store.root), attempt_of(store, id)
    backend.create(attempt)
    process = int(until(lambda: log(store, id).strip()))
    os.kill(int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    until(lambda: backend.observe(attempt).state == "failed")
    assert backend.observe(attempt).exit_code is None and process in _leftovers(attempt.folder)
    backend.delete(attempt.resource)
    until(lambda: list(_leftovers(attempt.folder)) == [])
    assert backend.observe(attempt).state == "absent"


@pytest.mark.usefixtures("supervised")
def test_the_first_failing_rank_is_named_in_state_and_logs(store):
    id = create(store, 'echo "hello from $DOVETAIL_RANK"; [ $DOVETAIL_RANK = 0 ] || { echo "OSError: disk"; exit 5; }; '
                       'sleep 0.3; exit 89', hosts=2)  # fmt: skip
    until(lambda: store.job(id).is_over)
    (row,) = store.attempts(id)
    assert (row.exit_code, row.failed_rank) == (5, 1) and "rank 1: exit 5: failed: OSError: disk" in row.detail
    lines = list(Follower(LocalBackend(store.root), attempt_of(store, id), (0, 1)).lines())
    assert lines == [(0, "hello from 0"), (1, "hello from 1"), (1, "OSError: disk")]


@pytest.mark.usefixtures("supervised")
def test_secrets_are_read_at_creation_and_deleted_at_the_end(store, monkeypatch):
    """The supervisor's environment has other values: it may be older than the shell that creates the job."""
    monkeypatch.setenv("MY_SECRET", "hunter2hunter2")
    id = create(store, 'echo "${#TOKEN}"; while [ ! -e go ]; do sleep 0.05; done', secrets=["TOKEN=env:MY_SECRET"])
    monkeypatch.delenv("MY_SECRET")
    until(lambda: log(store, id) == "14\n")
    kept = store.home(id) / "secrets.json"
    assert holding(store, b"hunter2hunter2") == [kept] and kept.stat().st_mode & 0o777 == 0o600
    (store.home(id) / "go").touch()
    until(lambda: store.job(id).is_over)
    assert store.job(id).status == "succeeded" and holding(store, b"hunter2hunter2") == []


def holding(store, text: bytes) -> list[Path]:
    return [path for path in store.root.rglob("*") if path.is_file() and text in path.read_bytes()]


@pytest.mark.usefixtures("supervised")
def test_a_resumed_job_reads_its_secrets_again(store, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "one")
    id = create(store, 'echo "$TOKEN"; exit $DOVETAIL_ATTEMPT', secrets=["TOKEN=env:MY_SECRET"])
    until(lambda: store.job(id).is_over)
    monkeypatch.delenv("MY_SECRET")
    with refuses("secrets", naming="$MY_SECRET"):
        actions.resume(store, store.job(id))
    monkeypatch.setenv("MY_SECRET", "two")
    actions.resume(store, store.job(id), ["env=[DB_PASSWORD=hunter2]"])
    until(lambda: store.job(id).is_over)
    assert (log(store, id), log(store, id, attempt=2)) == ("one\n", "two\n")
    assert not any("hunter2" in event.what for event in store.events(id))


@pytest.mark.usefixtures("supervised")
def test_a_job_does_not_see_the_supervisors_secrets(store, monkeypatch):
    """The database's password and variables named like secrets are hidden; the rest is passed on."""
    told = {
        "PGPASSWORD": "s3cret", "HF_TOKEN": "hf", "WANDB_API_KEY": "w", "XLA_FLAGS": "--x", "MAX_TOKENS": "9",
        "JAX_IN_KEY": "1", "ODD": "hf_" + "a" * 34,
    }  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    command = "; ".join(f"echo {name}=${name}" for name in (*told, "GIVEN"))
    id = create(store, command, secrets=["GIVEN=env:HF_TOKEN"])
    until(lambda: store.job(id).is_over)
    seen = dict(line.split("=", 1) for line in log(store, id).splitlines())
    assert {name for name, value in seen.items() if value} == {"XLA_FLAGS", "MAX_TOKENS", "JAX_IN_KEY", "GIVEN"}


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("postgresql://jobs:pass%40word@db:5/jobs?x=1", "postgresql://jobs@db:5/jobs?x=1"),
        ("postgresql://db/jobs?password=p&user=u", "postgresql://db/jobs?user=u"),
        ("postgresql://jobs@db/jobs?user=u&password=p", "postgresql://jobs@db/jobs?user=u"),
        ("/shared/lab:a@b/jobs", "/shared/lab:a@b/jobs"),
    ],
)
def test_a_job_sees_the_stores_url_without_its_password(url, bare):
    assert inherited({"DOVETAIL_JOBS": url}) == {"DOVETAIL_JOBS": bare}


@pytest.mark.usefixtures("supervised")
def test_a_machine_in_quarantine_is_not_used(store):
    store.quarantine("local", socket.gethostname(), "j", "two results")
    id = create(store, "true")
    until(lambda: store.job(id).is_over)
    assert store.job(id).status == "failed" and "is in quarantine" in store.job(id).detail


def test_a_log_is_read_in_whole_characters(tmp_path):
    path = tmp_path / "log"
    path.write_bytes("aé".encode()[:-1])
    first = read_log(path)
    assert (first.text, first.position) == ("a", 1)
    path.write_bytes("aé😀\n".encode())
    assert read_log(path, first.position).text == "é😀\n"
    assert read_log(tmp_path / "none") == read_log(tmp_path / "none", 0)


@pytest.mark.usefixtures("supervised")
def test_a_job_runs_the_code_of_its_creation(store, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "say.sh").write_text("echo first")
    id = create(store, "sh say.sh; sh say.sh", code={"path": str(tmp_path / "code")})
    (tmp_path / "code" / "say.sh").write_text("echo second")
    until(lambda: store.job(id).is_over)
    assert log(store, id) == "first\nfirst\n" and json.loads((store.home(id) / "attempts/1/end.json").read_text())
