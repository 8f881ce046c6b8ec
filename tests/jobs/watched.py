"""Run a supervisor over a folder of jobs in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.jobs.backends import chooser
from dovetail.jobs.backends.backend import JobBackend
from dovetail.jobs.presence import only_one
from dovetail.jobs.store import JobStore
from dovetail.jobs.supervisor import JobSupervisor


@contextmanager
def watched(
    root: Path, backends: Callable[[str], JobBackend] | None = None, looks: float = 0.1, leave: bool = False
) -> Iterator[None]:
    """`leave`: jobs that are active at the end keep running."""
    store, over = JobStore(root), threading.Event()
    choose = backends or chooser(root, store.owner)
    thread = threading.Thread(target=lambda: JobSupervisor(store, choose, looks).run(until=over.is_set))
    with only_one(root) as mine:
        assert mine
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            for job in [] if leave else store.active():  # what a failed test left running
                for row in store.attempts(job.id):
                    choose(job.backend).delete(store.attempt(job, row).resource)
            store.close()
