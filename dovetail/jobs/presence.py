"""Whether a supervisor watches over a home of jobs, and how one comes to. Light: every `dovetail job` command asks.

One per home and user, for a supervisor can start and signal its own user's processes alone: it holds a lock that dies
with it.
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

from dovetail.core.errors import UserError
from dovetail.jobs import modes

PATIENCE_S = 60.0  # for a supervisor to finish the calls that it is at


def lock_file(root: Path, user: str = "") -> Path:
    """Of this user's supervisor, or another's."""
    return root / f"{_name(root, user)}.lock"


def log_file(root: Path) -> Path:
    return root / f"{_name(root)}.log"


def _name(root: Path, user: str = "") -> str:
    user = user or modes.user_name()
    return "supervisor" if user == modes.owner(root) else f"supervisor.{user}"


def holder(root: Path, user: str = "") -> str:
    """Who supervises the jobs of this user, or another: `pid 12 on node3`; "" for nobody."""
    path = lock_file(root, user)
    if not path.exists():
        return ""
    if not os.access(path, os.R_OK):
        return f"a process of {modes.owner(path)}, or none: {path} cannot be read"
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return file.read().strip() or "a process that has not yet written its pid"
    return ""


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[bool]:
    """Whether this process is to supervise; False where another does."""
    modes.make_folder(root)
    with open(lock_file(root), "a+", opener=modes.opener) as file:
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


def stop(root: Path) -> str:
    """End the supervisor, and wait until it is gone; who it was, "" where none ran. Jobs go on.

    One that does not end when it is told to is killed, which is safe: the next one goes on from the store.
    """
    found = _settled(root)
    if found and modes.owner(lock_file(root)) != modes.user_name():  # which process it names is another user's word
        raise UserError(f"{lock_file(root)} belongs to {modes.owner(lock_file(root))}: remove it")
    until = time.monotonic() + PATIENCE_S
    told = None
    while found and holder(root) == found:
        number = signal.SIGTERM if time.monotonic() < until else signal.SIGKILL
        if told != number:
            _signal(found, number)
            told = number
        time.sleep(0.05)
    return found


def _settled(root: Path) -> str:
    """Return the holder once two looks agree: one that has just taken the lock has not yet written who it is."""
    found = holder(root)
    for _ in range(40):
        time.sleep(0.05)
        before, found = found, holder(root)
        if found == before and (not found or found.startswith("pid ")):
            break
    return found


def started(root: Path) -> str:
    """Start one, unless there is one, and wait until it is there; who it is."""
    ensure(root)
    until = time.monotonic() + PATIENCE_S
    while not (found := holder(root)):
        if time.monotonic() > until:
            raise UserError(f"no supervisor started within {PATIENCE_S:g} s: {log_file(root)} says why")
        time.sleep(0.05)
    return _settled(root) or found


def _signal(found: str, number: int) -> None:
    match = re.fullmatch(r"pid (\d+) on (.*)", found)
    if match is None or match[2] != platform.node():
        raise UserError(f"the supervisor is {found}, and this is {platform.node()}: stop it there")
    try:
        os.kill(int(match[1]), number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise UserError(f"the supervisor, {found}, is another user's: only that user can stop it") from None


def ensure(root: Path) -> None:
    """Start one in the background, unless there is one. It outlives the terminal."""
    if holder(root):
        return
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(log_file(root), "ab", opener=modes.opener) as log:
        # by way of a shell that ends at once: nobody has to wait for it
        subprocess.run(
            ["sh", "-c", '"$0" "$@" &', sys.executable, "-m", "dovetail.jobs.daemon", str(root)], check=True, cwd=root,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
