"""The supervisor as a process of its own: started by the first command that needs it, gone when nothing is left to do.

    python -m dovetail.jobs.daemon HOME

presence.py says whether there is one, and starts it.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

from dovetail.jobs.backends.choose import chooser
from dovetail.jobs.presence import only_one
from dovetail.jobs.store import Store
from dovetail.jobs.supervisor import Supervisor

IDLE_S = 60.0


def supervise(root: Path, idle: float | None = IDLE_S) -> bool:
    """Here, until nothing is left to do (idle=None: for ever), ctrl-C or SIGTERM; False where another one does it.
    Jobs go on when it ends."""
    store, stopped = Store(root), []
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    try:
        while True:
            with only_one(root) as mine:
                if not mine:
                    return False
                Supervisor(store, chooser(root, store.owner)).run(idle, lambda: bool(stopped))
            # who created a job just before the lock went saw a supervisor, and started none
            if stopped or not store.active():
                return True
    finally:
        signal.signal(signal.SIGTERM, before)
        store.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    supervise(Path(sys.argv[1]))
