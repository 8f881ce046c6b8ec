"""The process between the supervisor and an attempt's processes on this machine. It survives the supervisor.

    python -m dovetail.jobs.backends.local_launcher FOLDER FILE

FOLDER (of the attempt) holds `launch.json`, which says what to run. FILE is the descriptor of the open `local.lock`,
which backends/local.py has locked: the launcher holds the lock from its first instruction until it dies. It writes
`end.json` last. It is stopped by a file (`stop.json`), because a process id may be reused.
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

from dovetail.jobs import files

LOCK, LAUNCH, STOP, END, CLAIM = "local.lock", "launch.json", "stop.json", "end.json", "claim"
POLL_S = 0.05
FOLLOW_S = 60.0  # for the other ranks to end by themselves after one has failed
TERM_S = 10.0


def main(folder: Path, lock: int) -> None:
    """Run the processes of an attempt, once, and write their exit codes."""
    os.set_inheritable(lock, False)
    if not _claim(folder):
        return
    launch = json.loads((folder / LAUNCH).read_text())
    end = ProcessGroup(folder, launch).wait() if not (folder / STOP).exists() else {"codes": [143], "order": [0]}
    write(folder / END, end)


def _claim(folder: Path) -> bool:
    """Return True the first time: an attempt is never run twice."""
    try:
        os.close(os.open(folder / CLAIM, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def write(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    files.write_text(path, json.dumps(value))


class ProcessGroup:
    """Run the processes, one per imitated host, each with its own session and log."""

    def __init__(self, folder: Path, launch: dict[str, Any]) -> None:
        self.folder, self.order = folder, []
        coordinator = f"127.0.0.1:{_free_port()}"
        count = launch["processes"]
        self.children = [self._start(launch, rank, count, coordinator) for rank in range(count)]
        self.codes: list[int | None] = [None] * count
        self.kill_at: float | None = None

    def _start(self, launch: dict[str, Any], rank: int, count: int, coordinator: str) -> subprocess.Popen:
        variables = {"DOVETAIL_RANK": str(rank)}
        if count > 1:
            variables |= {
                "DOVETAIL_COORDINATOR": coordinator,
                "DOVETAIL_NUM_PROCESSES": str(count),
                "DOVETAIL_PROCESS_ID": str(rank),
            }
        with open(self.folder / f"rank{rank}.log", "ab", opener=files.opener) as log:
            return subprocess.Popen(
                ["sh", str(self.folder / "script.sh")], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | launch["env"] | variables, start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def wait(self) -> dict[str, Any]:
        """Wait for all processes; return their exit codes and the order in which they ended."""
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
        self.signal(signal.SIGKILL)  # processes that a script left behind in its session
        return {"codes": self.codes, "order": self.order, "host": platform.node(), "at": time.time()}

    def _collect(self) -> None:
        for rank, child in enumerate(self.children):
            code = child.poll()
            if code is not None and self.codes[rank] is None:
                self.codes[rank] = code if code >= 0 else 128 - code
                self.order.append(rank)

    def stop(self, grace: float) -> None:
        """Send SIGTERM once, and SIGKILL after `grace` seconds; a later call may only shorten the grace."""
        if self.kill_at is None:
            self.signal(signal.SIGTERM)
        self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + grace)

    def signal(self, number: int) -> None:
        """Send a signal to all process groups."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
