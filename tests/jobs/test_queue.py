"""Test the queue: who may claim a task, and that killed workers lose no task and run none twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from refusals import refuses

from dovetail.jobs.queue import QueueWorker, TaskQueue
from dovetail.jobs.store import JobStore

pytestmark = pytest.mark.slow

WORK = "from dovetail.jobs.store import JobStore; from dovetail.jobs.queue import *; "
WORK += "import sys; QueueWorker(TaskQueue(JobStore(Path(sys.argv[1])), 'q'), lease=1.0, grace=5.0).run()"


@pytest.fixture
def tasks(store) -> TaskQueue:
    return TaskQueue(store, "q")


def statuses(tasks: TaskQueue) -> dict[str, str]:
    return {task.name: task.status for task in tasks.all()}


def test_tasks_are_claimed_in_order_and_one_at_a_time(tasks):
    for name in "abc":
        tasks.add(name, "true")
    claimed = [tasks.claim(f"w{i}", 30) for i in range(4)]
    assert [task and task.name for task in claimed] == ["a", "b", "c", None]
    assert tasks.finish(claimed[0], 0) and not tasks.finish(claimed[0], 0)
    assert statuses(tasks) == {"a": "succeeded", "b": "running", "c": "running"}


def test_an_expired_lease_moves_the_task_to_another_worker(tasks):
    tasks.add("a", "true")
    first = tasks.claim("w1", 0.01)
    time.sleep(0.05)
    second = tasks.claim("w2", 30)
    assert second.claim == first.claim + 1 and second.losses == 1
    assert not tasks.heartbeat(first, 30) and not tasks.finish(first, 0) and not tasks.release(first, "")
    assert tasks.heartbeat(second, 30) and tasks.finish(second, 0)


def test_dependencies_and_zones(tasks):
    tasks.add("data", "true", zones=["us", "eu"])
    tasks.add("train", "true", after=["data"])
    assert tasks.claim("w", 30, "asia") is None
    data = tasks.claim("w", 30, "eu")
    assert data.name == "data" and tasks.claim("w", 30, "eu") is None
    tasks.finish(data, 0)
    assert tasks.claim("w", 30).name == "train"
    with refuses("TASK", code="no_task", naming="'nothing'"):
        tasks.add("x", "true", after=["nothing"])
    with refuses("--name", naming="'data'"):
        tasks.add("data", "true")


def test_failures_are_retried_and_fail_the_tasks_that_depend_on_them(tasks):
    tasks.add("bad", "echo 'ValueError: no'; exit 3", retries=1)
    tasks.add("next", "true", after=["bad"])
    assert QueueWorker(tasks).run() == 2
    bad, following = tasks.all()
    assert (bad.status, bad.tries, bad.exit_code, bad.detail) == ("failed", 2, 3, "ValueError: no")
    assert following.status == "failed" and "needs" in following.detail
    assert tasks.retry() == 2 and statuses(tasks) == {"bad": "ready", "next": "ready"}


def test_a_stopped_worker_returns_its_task_after_saving(tasks, tmp_path):
    tasks.add("long", f"trap 'touch {tmp_path}/saved; exit 85' TERM; touch {tmp_path}/up; sleep 60 & wait")
    worker = QueueWorker(tasks)
    thread = threading.Thread(target=worker.run)
    thread.start()
    until = time.monotonic() + 30
    while not (tmp_path / "up").exists() and time.monotonic() < until:
        time.sleep(0.02)
    worker.stop()
    thread.join()
    (task,) = tasks.all()
    assert (tmp_path / "saved").exists() and (task.status, task.tries, task.losses) == ("ready", 0, 1)


def test_a_cancelled_task_is_stopped_and_can_be_retried(tasks, tmp_path):
    tasks.add("long", f"trap 'exit 0' TERM; touch {tmp_path}/up; while :; do sleep 1 & wait; done")
    tasks.add("waits", "true")
    tasks.add("next", "true", after=["long"])
    assert tasks.cancel("waits").status == "ready" and tasks.claim("w", 30).name == "long"
    tasks.release(tasks.all()[0], "")
    worker = QueueWorker(tasks, lease=1.0)
    thread = threading.Thread(target=worker.run)
    thread.start()
    until = time.monotonic() + 30
    while not (tmp_path / "up").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert tasks.cancel("long").status == "running"
    thread.join(30)
    assert not thread.is_alive()  # nothing is left to run, and the shell, which would go on for ever, has ended
    assert statuses(tasks) == {"long": "cancelled", "waits": "cancelled", "next": "failed"}
    assert not (tasks.folder / "1" / "exit").exists()  # a retry does not take its 0 for a success
    with refuses("TASK", code="task_over", naming="cancelled"):
        tasks.cancel("long")
    assert tasks.retry() == 1 and tasks.retry("waits") == 1
    assert statuses(tasks) == {"long": "cancelled", "waits": "ready", "next": "ready"}


def start(root: Path) -> subprocess.Popen:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", WORK, str(root)], env=environ)


def test_eight_workers_killed_at_random_run_fifty_tasks_once_each(home, tmp_path):
    """Each task writes a line when it begins and one when it has done its work; two at once would mix theirs."""
    tasks = TaskQueue(JobStore(home), "q")
    log = tmp_path / "log"
    for i in range(50):
        tasks.add(f"t{i}", f"echo begin >> {log}.$DOVETAIL_TASK; sleep 0.1; echo end >> {log}.$DOVETAIL_TASK")
    chance, kills, until = random.Random(0), 0, time.monotonic() + 120
    workers = [start(home) for _ in range(8)]
    try:
        while not tasks.is_done() and time.monotonic() < until:
            time.sleep(0.3)
            if kills < 12:
                victim = chance.randrange(8)
                workers[victim].send_signal(signal.SIGKILL)
                workers[victim].wait()
                workers[victim], kills = start(home), kills + 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert Counter(task.status for task in tasks.all()) == {"succeeded": 50} and kills
    written = [Path(f"{log}.t{i}").read_text().split() for i in range(50)]
    assert written == [["begin", "end"]] * 50
    assert all(task.tries == 1 for task in tasks.all())
    tasks.store.close()
