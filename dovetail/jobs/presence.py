"""Whether a supervisor watches over a home of jobs, and how one comes to. Light: every `dovetail job` command asks.

One per home: it holds a lock that dies with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = "supervisor.lock"
LOG = "supervisor.log"


def holder(root: Path) -> str:
    """Who supervises: `pid 12 on node3`; "" for nobody."""
    path = root / LOCK
    if not path.exists():
        return ""
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read().strip() or "a process that has not yet written its pid"
    return ""


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[bool]:
    """Whether this process is to supervise; False where another does."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a+") as file:
        for _ in range(20):  # who only asks (holder) has it for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.02)
        else:
            yield False
            return
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()} on {platform.node()}")
        file.flush()
        yield True


def ensure(root: Path) -> None:
    """Start one in the background, unless there is one. It outlives the terminal."""
    if holder(root):
        return
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    with (root / LOG).open("ab") as log:
        # by way of a shell that ends at once: nobody has to wait for it
        subprocess.run(
            ["sh", "-c", '"$0" "$@" &', sys.executable, "-m", "dovetail.jobs.daemon", str(root)], check=True, cwd=root,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
