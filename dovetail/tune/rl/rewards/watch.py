"""Follows the process of a sandboxed program: reads its report, and ends it where it passes a limit.

The report comes through a pipe: what was written before the program started cannot be changed by the program. Whatever
comes afterwards may be the program's own, so it is read as text of a bounded length, and nothing in it may raise.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

START_S = 60.0  # for the interpreter and its restrictions; the program's own time begins afterwards
TICK_S = 0.02  # between two looks at how much was written
LONGEST = 2**24  # bytes of a report


@dataclass(frozen=True)
class Report:
    """What the process wrote, each line checked for its form; see `cage.inside`."""

    isolation: tuple[str, ...] = ()  # its first line, written before the program started
    program: str | None = None  # what the program raised; None where it did not come to its end
    tests: tuple[tuple[str, list[str]], ...] = ()  # of each test what it raised, and its values


@dataclass
class Watch:
    """One process. `stopped` says why it had to be ended."""

    process: subprocess.Popen
    report: int  # the end of the pipe to read from
    seconds: float
    disk: int  # bytes
    stopped: str = ""
    text: bytearray = field(default_factory=bytearray)

    def end(self) -> int | None:
        """Wait for its end, or end it. Return its exit code; None where it was stopped."""
        self._follow()
        # Before its id is free for another: a process that has ended keeps it until it is waited for.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        os.set_blocking(self.report, False)
        while len(self.text) <= LONGEST and self._read():
            pass
        return None if self.stopped else code

    def _follow(self) -> None:
        end, started = time.monotonic() + START_S, False
        with _Events(self.process, self.report) as events:
            while not self.stopped:
                readable, ended = events.wait(min(TICK_S, max(0.0, end - time.monotonic())))
                if readable and not self._read():
                    events.no_report()
                if not started and b"\n" in self.text:
                    end, started = time.monotonic() + self.seconds, True
                if ended:
                    return
                self.stopped = self._passed(end, started)

    def _read(self) -> bool:
        """Whether anything came."""
        try:
            found = os.read(self.report, 65_536)
        except BlockingIOError:
            return False
        self.text += found
        return bool(found)

    def _passed(self, end: float, started: bool) -> str:
        """The limit that it has passed."""
        if len(self.text) > LONGEST:
            return f"it reported more than {LONGEST >> 20} MB"
        if written(self.process.pid) > self.disk:
            return f"it wrote more than {self.disk >> 20} MB"
        if time.monotonic() > end:
            return "it ran out of time" if started else f"it did not start within {START_S:.0f} s"
        return ""


class _Events:
    """Waits for the report and for the end of the process, without taking its exit code where the system can tell."""

    def __init__(self, process: subprocess.Popen, report: int):
        self._process, self._report, self._poll = process, report, select.poll()
        self._pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None

    def __enter__(self) -> _Events:
        for fd in (self._report, self._pidfd):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)

    def no_report(self) -> None:
        """The program has closed it."""
        self._poll.unregister(self._report)

    def wait(self, seconds: float) -> tuple[bool, bool]:
        """Whether there is something to read, and whether the process has ended."""
        found = {fd for fd, _ in self._poll.poll(seconds * 1000)}
        ended = self._pidfd in found if self._pidfd is not None else self._process.poll() is not None
        return self._report in found, ended


def written(pid: int) -> int:
    """Return how many bytes a process has written so far, to whatever files: Linux counts them. Elsewhere 0."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            counts = dict(line.split(b": ") for line in file.read().splitlines())
    except (OSError, ValueError):  # it has ended, or this system does not tell
        return 0
    return max(int(counts[b"wchar"]), int(counts[b"write_bytes"]))


def report_of(text: bytes, word: str) -> Report:
    """Read the lines that have the word and the right form; ignore every other."""
    lines = [parts for line in text.splitlines() if (parts := _parts(line, word)) is not None]
    isolation = next((value for kind, value in lines[:1] if kind == "isolation" and _texts(value)), ())
    program = next((value for kind, value in lines if kind == "program" and isinstance(value, str)), None)
    tests = [(value[0], value[1]) for kind, value in lines if kind == "test" and _is_test(value)]
    return Report(tuple(isolation), program, tuple(tests))


def _parts(line: bytes, word: str) -> tuple[Any, Any] | None:
    try:
        parts = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return (parts[1], parts[2]) if isinstance(parts, list) and len(parts) == 3 and parts[0] == word else None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_test(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _texts(value[1])
