"""A folder or file that one process at a time works on. The lock is the system's: it dies with the process."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def locked(path: Path, busy: Callable[[str], None]) -> Iterator[None]:
    """`busy` is called with the lock's holder ("pid 12 on node3, since ..."); unless it raises, this waits for it.

    The file stays when the lock goes: a process that waits for a removed file would hold a lock that no other sees.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        _take(file, busy)
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        yield


def _take(file: TextIO, busy: Callable[[str], None]) -> None:
    try:
        import fcntl
    except ImportError:  # a system without such locks (Windows): two processes at once go unnoticed
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        busy(file.read().strip() or "a process that has not yet written its pid")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks (some network and FUSE mounts): as on such a system
        return
