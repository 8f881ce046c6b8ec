"""Kill a supervisor with SIGKILL at its Nth point, for every N, restart it, and print each end as JSON.

test_kill_supervisor.py runs it in a separate process, which forks for each N.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from scripted import Scripted

from dovetail.jobs.backends.backend import Observed
from dovetail.jobs.spec import make
from dovetail.jobs.store import JobStore
from dovetail.jobs.supervisor import JobSupervisor

WAITING, RUNNING = Observed("waiting"), Observed("running", "", ("h0", "h1"))
SCRIPT = {
    ("train", 1): [WAITING, RUNNING, Observed("preempted", "taken away")],
    ("train", 2): [Observed("unknown", "503"), RUNNING, Observed("failed", "", ("h0",), 89, 1)],
    ("train", 3): [RUNNING, Observed("succeeded", "", ("h0",), 0)],
    ("bug", 1): [RUNNING, Observed("failed", "", ("h0",), 1, 0)],
    ("cancel", 1): [RUNNING],
}


class Points:
    def __init__(self, last: int) -> None:
        self.last, self.count = last, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledStore(JobStore):
    """A point before and after the end of each transaction."""

    point = staticmethod(lambda: None)

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        with self._connection() as connection:  # the process dies, not the machine
            connection.execute("SET synchronous_commit = off" if self.site else "PRAGMA synchronous = OFF")

    @contextlib.contextmanager
    def transaction(self):
        with self._connection() as connection:
            outer = not connection.in_transaction
        with super().transaction() as db:
            yield db
            if outer:
                self.point()
        if outer:
            self.point()


def supervise(root: Path, point) -> None:
    """As the daemon does, but with nothing between two looks."""
    store = KilledStore(root)
    store.point = point
    backend = Scripted(root / "cloud.json", SCRIPT, point)
    backend.lost_answers = {("train", 2)}
    supervisor = JobSupervisor(store, lambda name: backend, looks=0.0)
    for _ in range(300):
        if not supervisor.tick():
            store.close()
            return
        for job in store.active():
            if job.name == "cancel" and job.status == "running":
                store.change(job.id, wanted="stop")
    raise RuntimeError("the jobs never end")


def begin(root: Path) -> None:
    store = KilledStore(root)
    for job in store.jobs():  # of another folder, in the same Postgres
        store.remove(job.id)
    retries = {"backoff": 0.0}
    for id, name in (("aaa", "train"), ("bbb", "bug"), ("ccc", "cancel")):
        store.add(make({"name": name, "command": "true", "retries": retries}), id=id)
    store.close()


def end(root: Path) -> dict:
    store = KilledStore(root)
    cloud = Scripted(root / "cloud.json", SCRIPT).read()
    jobs = {
        job.name: [job.status, job.attempts, job.preemptions, job.faults, job.failures]
        + [row.outcome for row in store.attempts(job.id)]
        for job in store.jobs()
    }
    found = {
        "jobs": jobs, "open": store.open_intents(), "made": {n: one["made"] for n, one in cloud.items()},
        "held": [name for name, one in cloud.items() if not one["deleted"]],
    }  # fmt: skip
    store.close()
    return found


def in_child(root: Path, last: int) -> int:
    """How it ended: a number of points, or -9."""
    child = os.fork()
    if child == 0:
        points = Points(last)
        supervise(root, points)
        (root / "points").write_text(str(points.count))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, stride: int) -> None:
    begin(folder / "whole")
    assert in_child(folder / "whole", 0) == 0
    count = int((folder / "whole" / "points").read_text())
    print(json.dumps({"points": count, "end": end(folder / "whole")}))
    for last in range(1, count + 1, stride):
        root = folder / f"at{last}"
        begin(root)
        killed = in_child(root, last)
        again = in_child(root, 0)
        print(json.dumps({"at": last, "killed": killed, "again": again, "end": end(root)}), flush=True)
        shutil.rmtree(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
