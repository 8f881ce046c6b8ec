"""The process that stands between the supervisor and an attempt's processes on this machine, and outlives the first.

    python -m dovetail.jobs.backends.local_launcher FOLDER FILE

FOLDER (an attempt's) holds `launch.json`, which says what to run. FILE is the number of the open `local.lock`, which
backends/local.py has locked: the lock is the launcher's from before its first instruction, and dies with it. It writes
`end.json` last. It is told to stop by a file (`stop.json`), for a process's number may by then be another's.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dovetail.jobs import modes

LOCK, LAUNCH, STOP, END, CLAIM = "local.lock", "launch.json", "stop.json", "end.json", "claim"
POLL_S = 0.05
FOLLOW_S = 60.0  # how long the other ranks may take to end by themselves after one has failed
TERM_S = 10.0


def main(folder: Path, lock: int) -> None:
    os.set_inheritable(lock, False)
    if not _claim(folder):
        return
    launch = json.loads((folder / LAUNCH).read_text())
    end = Group(folder, launch).wait() if not (folder / STOP).exists() else {"codes": [143], "order": [0]}
    write(folder / END, end)


def _claim(folder: Path) -> bool:
    """Once for ever: an attempt is never run a second time."""
    try:
        os.close(os.open(folder / CLAIM, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def write(path: Path, value: dict[str, Any]) -> None:
    modes.write_text(path, json.dumps(value))


class Group:
    """The processes, one per imitated host, each with a session and a log of its own."""

    def __init__(self, folder: Path, launch: dict[str, Any]) -> None:
        self.folder, self.order = folder, []
        coordinator = f"127.0.0.1:{_free_port()}"
        count = launch["processes"]
        self.children = [self._start(launch, rank, count, coordinator) for rank in range(count)]
        self.codes: list[int | None] = [None] * count
        self.kill_at: float | None = None

    def _start(self, launch: dict[str, Any], rank: int, count: int, coordinator: str) -> subprocess.Popen:
        who = {"DOVETAIL_RANK": str(rank)}
        if count > 1:
            who |= {
                "DOVETAIL_COORDINATOR": coordinator,
                "DOVETAIL_NUM_PROCESSES": str(count),
                "DOVETAIL_PROCESS_ID": str(rank),
            }
        with open(self.folder / f"rank{rank}.log", "ab", opener=modes.opener) as log:
            return subprocess.Popen(
                ["sh", str(self.folder / "script.sh")], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | launch["env"] | who, start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def wait(self) -> dict[str, Any]:
        failed_at = None
        while any(code is None for code in self.codes):
            self._collect()
            if failed_at is None and any(self.codes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + FOLLOW_S:
                self.stop(TERM_S)
            elif (self.folder / STOP).exists():
                self.stop(json.loads((self.folder / STOP).read_text())["grace"])
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.signal(signal.SIGKILL)
            time.sleep(POLL_S)
        self.signal(signal.SIGKILL)  # what a script left behind in its session
        return {"codes": self.codes, "order": self.order, "host": platform.node(), "at": time.time()}

    def _collect(self) -> None:
        for rank, child in enumerate(self.children):
            code = child.poll()
            if code is not None and self.codes[rank] is None:
                self.codes[rank] = code if code >= 0 else 128 - code
                self.order.append(rank)

    def stop(self, grace: float) -> None:
        """SIGTERM once; SIGKILL when the grace is over. A later, shorter grace counts."""
        if self.kill_at is None:
            self.signal(signal.SIGTERM)
        self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + grace)

    def signal(self, number: int) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
