"""Find, start and stop the supervisor of a folder of jobs. Every `dovetail job` command calls this.

There is one supervisor per folder and user, because it can start and signal only processes of its own user. It holds a
lock that the system releases when it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dovetail.core.errors import NotPermittedError, UserError
from dovetail.jobs import files

PATIENCE_S = 60.0  # for a supervisor to finish its calls


def lock_file(root: Path, user: str = "") -> Path:
    """Return the lock of a user's supervisor; of this user's if not given."""
    return root / f"{_name(root, user)}.lock"


def log_file(root: Path) -> Path:
    """Return the log of this user's supervisor."""
    return root / f"{_name(root)}.log"


def _name(root: Path, user: str = "") -> str:
    user = user or files.user_name()
    return "supervisor" if user == files.owner(root) else f"supervisor.{user}"


def holder(root: Path, user: str = "") -> str:
    """Return the supervisor of a user (this one if not given), such as `pid 12 on node3`; "" if none runs."""
    path = lock_file(root, user)
    if not path.exists():
        return ""
    if not os.access(path, os.R_OK):
        return f"a process of {files.owner(path)}, or none: {path} cannot be read"
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read().strip() or "a process that has not yet written its pid"
    return ""


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[bool]:
    """Hold the lock; yield False if another process does."""
    files.make_folder(root)
    with open(lock_file(root), "a+", opener=files.opener) as file:
        for _ in range(20):  # `holder` takes the lock for a moment
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


def stop(root: Path) -> str:
    """End the supervisor and wait until it has ended; return which one it was, "" if none ran. Jobs keep running.

    One that does not end after SIGTERM is killed, which is safe: the next one continues from the store.
    """
    found = _settled(root)
    if found and files.owner(lock_file(root)) != files.user_name():  # another user wrote the pid in it
        raise NotPermittedError(f"{lock_file(root)} belongs to {files.owner(lock_file(root))}: remove it")
    until = time.monotonic() + PATIENCE_S
    sent = None
    while found and holder(root) == found:
        number = signal.SIGTERM if time.monotonic() < until else signal.SIGKILL
        if sent != number:
            _signal(found, number)
            sent = number
        time.sleep(0.05)
    return found


def _settled(root: Path) -> str:
    """Return the holder once it has written its pid."""
    found = holder(root)
    for _ in range(40):
        time.sleep(0.05)
        before, found = found, holder(root)
        if found == before and (not found or found.startswith("pid ")):
            break
    return found


def started(root: Path) -> str:
    """Start a supervisor, unless one runs, and wait until it does; return which one it is."""
    ensure(root)
    until = time.monotonic() + PATIENCE_S
    while not (found := holder(root)):
        if time.monotonic() > until:
            raise UserError(f"no supervisor started within {PATIENCE_S:g} s: see {log_file(root)}")
        time.sleep(0.05)
    return _settled(root) or found


def _signal(found: str, number: int) -> None:
    match = re.fullmatch(r"pid (\d+) on (.*)", found)
    if match is None or match[2] != platform.node():
        raise UserError(f"the supervisor is {found}, and this machine is {platform.node()}: stop it there")
    try:
        os.kill(int(match[1]), number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise NotPermittedError(f"the supervisor, {found}, is another user's: only that user can stop it") from None


def ensure(root: Path) -> None:
    """Start a supervisor in the background, unless one runs. It keeps running after the terminal is closed."""
    if holder(root):
        return
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(log_file(root), "ab", opener=files.opener) as log:
        # The shell ends at once, so that no process has to wait for the supervisor.
        subprocess.run(
            ["sh", "-c", '"$0" "$@" &', sys.executable, "-m", "dovetail.jobs.supervisor", str(root)], check=True,
            cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
